"""Distributed training, and collectives on arrays of any library: ``import horovodlike as hvd``.

Example::

    hvd.init()
    total = hvd.allreduce(numpy_array, op=hvd.Sum)

A script imports the module of its framework, such as ``import horovodlike.torch as hvd``; ``hvdrun`` starts the script.
This package has the parts that do not depend on a framework. It imports their modules on first use, so that importing
the package costs little: until then, neither NumPy nor the code that joins a job is imported.

* :mod:`horovodlike.arrays.functions`: the collectives; :mod:`horovodlike.basics`: ``init``, ``rank`` and so on
* :mod:`horovodlike.process_set`: collectives of some ranks; :mod:`horovodlike.errors`: every exception
* :mod:`horovodlike.config`: every setting; :mod:`horovodlike._bootstrap.bootstrap`: how ranks find each other
* :func:`metrics`, :func:`flight_recorder`: this rank's counters and last collectives, from `_engine.metrics`
* :func:`step`: marks the end of a step, from `_engine.steps`
* :func:`run`: runs a function in several processes, without ``hvdrun``
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

try:
    from horovodlike._engine.native import ffi, lib
except ModuleNotFoundError as missing:
    raise ImportError(
        "horovodlike is not built here: this is its source folder, and it hides an installed package. Start Python in "
        "another folder, or with -P, or install with 'pip install .'"
    ) from missing

from horovodlike._engine.metrics import flight_recorder as flight_recorder
from horovodlike._engine.metrics import metrics as metrics
from horovodlike._engine.steps import step as step

if TYPE_CHECKING:
    from horovodlike.arrays.functions import *
    from horovodlike.arrays.hierarchy import *
    from horovodlike.arrays.messages import *
    from horovodlike.arrays.rooted import *
    from horovodlike.availability import collective_availability as collective_availability
    from horovodlike.basics import *
    from horovodlike.errors import *
    from horovodlike.launcher.run import run as run
    from horovodlike.monitor.callbacks import on_metrics as on_metrics
    from horovodlike.process_set import ProcessSet as ProcessSet
    from horovodlike.process_set import add_process_set as add_process_set
    from horovodlike.process_set import global_process_set as global_process_set
    from horovodlike.process_set import remove_process_set as remove_process_set
    from horovodlike.progress import report_progress as report_progress
    from horovodlike.timeline import start_timeline as start_timeline
    from horovodlike.timeline import stop_timeline as stop_timeline

__version__: str = ffi.string(lib.hvl_version()).decode()

# The names that each module provides; __getattr__() imports the module on first use.
_NAMES = {
    "horovodlike.arrays.functions": (
        *("allreduce", "allreduce_", "allreduce_async", "allreduce_async_"),
        *("grouped_allreduce", "grouped_allreduce_", "grouped_allreduce_async", "grouped_allreduce_async_"),
        *("broadcast", "broadcast_", "broadcast_async", "broadcast_async_"),
        *("grouped_broadcast", "grouped_broadcast_", "grouped_broadcast_async", "grouped_broadcast_async_"),
        *("allgather", "allgather_async", "grouped_allgather", "grouped_allgather_async"),
        *("reducescatter", "reducescatter_async", "grouped_reducescatter", "grouped_reducescatter_async"),
        *("alltoall", "alltoall_async", "grouped_alltoall", "grouped_alltoall_async"),
        *("barrier", "join", "poll", "synchronize", "allgather_object", "broadcast_object"),
    ),
    "horovodlike.arrays.hierarchy": ("Hierarchy", "Level"),
    "horovodlike.arrays.messages": ("ANY_SOURCE", "irecv", "isend", "recv", "send", "sendrecv"),
    "horovodlike.arrays.rooted": (
        *("gather", "gather_async", "scatter", "scatter_async"),
        *("reduce", "reduce_", "reduce_async", "reduce_async_"),
    ),
    "horovodlike.availability": ("collective_availability",),
    "horovodlike.basics": (
        *("init", "shutdown", "is_initialized", "rank", "size", "local_rank", "local_size", "cross_rank", "cross_size"),
        *("is_homogeneous", "Average", "Sum", "Adasum", "Min", "Max", "Product"),
        *("mpi_built", "mpi_enabled", "mpi_threads_supported", "gloo_built", "gloo_enabled", "nccl_built"),
        *("cuda_built", "rocm_built", "ddl_built", "ccl_built"),
    ),
    "horovodlike.errors": (
        *("HorovodInternalError", "MismatchError", "UnsupportedReductionError", "IntegrityError", "JobBrokenError"),
        *("ShutDownError", "HostsUpdatedInterrupt", "RendezvousError", "StateFileError", "NotInitializedError"),
        *("ConfigError", "DamagedRecordsError", "HorovodVersionMismatchError"),
    ),
    "horovodlike.launcher.run": ("run",),
    "horovodlike.monitor.callbacks": ("on_metrics",),
    "horovodlike.process_set": ("ProcessSet", "add_process_set", "global_process_set", "remove_process_set"),
    "horovodlike.progress": ("report_progress",),
    "horovodlike.timeline": ("start_timeline", "stop_timeline"),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = ["__version__", "flight_recorder", "metrics", "step", *_HOMES]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
