"""The timeline: what each rank did when, for Chrome's ``about:tracing`` or https://ui.perfetto.dev.

Every rank writes a file of its own, which is whole at any time; ``python -m horovodlike.timeline`` lays those of all
ranks over each other. A row is a tensor and, within it, a rank. ``NEGOTIATE_ALLREDUCE`` lasts from when the rank had
the tensor ready until all ranks had and it was its turn, ``ALLREDUCE`` until its batch was done.
"""

from __future__ import annotations

import os

from horovodlike import basics
from horovodlike._bootstrap.environment import path_of_rank
from horovodlike._engine import ops
from horovodlike._engine.native import lib

__all__ = ["path_of_rank", "start_timeline", "stop_timeline"]


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Begin to write a timeline of this rank. Call it on all ranks, or on those that are of interest.

    One that is being written already is ended first. ``HOROVODLIKE_TIMELINE`` does the same in ``init()``.

    Args:
        file_path: For all ranks; see :func:`path_of_rank` for what is made of it. An existing file is overwritten.
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
