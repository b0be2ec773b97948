"""horovodlike for Keras 3 (backends TensorFlow and torch) and tf_keras: ``import horovodlike.keras as hvd``.

Example::

    hvd.init()
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.001 * hvd.size())), loss=...)
    model.fit(
        dataset,
        callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()],
        verbose="auto" if hvd.rank() == 0 else 0,
    )

The modules behind this façade:

* :mod:`horovodlike.keras.optimizer`: `DistributedOptimizer`
* :mod:`horovodlike.keras.callbacks`: callbacks for `fit(callbacks=...)`
* :mod:`horovodlike.keras.elastic`: training that continues when ranks are added or lost
* :mod:`horovodlike.keras.functions`: collectives on values, and broadcasts of variables
* :mod:`horovodlike.keras.saving`: `load_model`
* :mod:`horovodlike.keras.layers`: layers that are split among ranks, for Keras 3
"""

from importlib import import_module
from typing import Any

from horovodlike.arrays.consistency import check_consistency
from horovodlike.arrays.functions import barrier, broadcast_object
from horovodlike.availability import collective_availability
from horovodlike.basics import *  # the names that all bindings share
from horovodlike.errors import HorovodInternalError
from horovodlike.keras import callbacks, elastic
from horovodlike.keras.functions import (
    allgather,
    allreduce,
    broadcast,
    broadcast_global_variables,
    join,
    reducescatter,
    set_batch_weight,
)
from horovodlike.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer
from horovodlike.keras.saving import load_model
from horovodlike.process_set import ProcessSet, add_process_set, global_process_set, remove_process_set
from horovodlike.timeline import start_timeline, stop_timeline
from horovodlike.weighting import batch_weight

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allreduce",
    "barrier",
    "batch_weight",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "callbacks",
    "ccl_built",
    "check_consistency",
    "collective_availability",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_initialized",
    "join",
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "set_batch_weight",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]


def __getattr__(name: str) -> Any:
    """Return `Compression` or `layers`, which depend on Keras's backend and are imported on first use.

    A star import leaves out `layers`, which legacy Keras does not have.
    """
    if name == "layers":
        return import_module("horovodlike.keras.layers")
    if name == "Compression":
        from horovodlike.keras import _backend

        return _backend.current().Compression
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
