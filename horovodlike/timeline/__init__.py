"""The timeline: a trace of each rank's collectives, for Chrome's ``about:tracing`` or https://ui.perfetto.dev.

Every rank writes a file of its own, which is complete JSON at any time; ``python -m horovodlike.timeline`` merges the
files of all ranks. Each tensor is a process of the trace, and each rank a thread in it. ``NEGOTIATE_ALLREDUCE`` lasts
from the rank's request until the tensor's batch begins, and ``ALLREDUCE`` from then until the batch is done. An arrow
leads from the request that came last, and late, to the collective on the other ranks, which waited for it.

A profile (``hvdrun --attach``) has such a timeline of some steps, and the framework's activity in them, for each rank.
:func:`merge_profile` makes one trace of it, and :func:`summarize` says where the time went.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from horovodlike import basics
from horovodlike._bootstrap.environment import path_of_rank
from horovodlike._engine import ops
from horovodlike._engine.native import lib

if TYPE_CHECKING:
    from horovodlike.timeline._merging import files_of_job as files_of_job
    from horovodlike.timeline._merging import merge as merge
    from horovodlike.timeline._merging import merge_files as merge_files
    from horovodlike.timeline._profile_trace import merge_profile as merge_profile
    from horovodlike.timeline._report import summarize as summarize

# Imported on first use: a job that writes a timeline needs none of it.
_NAMES = {
    "_merging": ("files_of_job", "merge", "merge_files"),
    "_profile_trace": ("merge_profile",),
    "_report": ("summarize",),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = ["path_of_rank", "start_timeline", "stop_timeline", *_HOMES]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    return value


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Begin to write a timeline of this rank. Call it on all ranks, or on those that are of interest.

    A timeline in progress is ended first. ``init()`` starts a timeline if ``HOROVODLIKE_TIMELINE`` is set.

    Args:
        file_path: The same on all ranks; :func:`path_of_rank` derives each rank's file, which is overwritten.
        mark_cycles: Also mark where batches begin.

    Raises:
        ValueError: Not initialised, or the file cannot be written.
    """
    path = path_of_rank(file_path, basics.rank())
    ops.check(lib.hvl_start_timeline(os.fsencode(path), mark_cycles))


def stop_timeline() -> None:
    """End the timeline of this rank; its file is complete afterwards. Does nothing if there is none.

    Raises:
        ValueError: Not initialised.
    """
    basics.rank()
    lib.hvl_stop_timeline()
