"""Numbers about this rank's work: counters, stragglers, and the last collectives.

All functions may be called from any thread, also while a collective hangs and after the job was broken, until
``shutdown()``. To read costs microseconds; to count costs two looks at the clock for each batch.
"""

from __future__ import annotations

import json
from typing import Any, TypedDict

from horovodlike._engine.native import ffi, lib
from horovodlike._engine.ops import counters, text_of

__all__ = ["CollectiveRecord", "Metrics", "Straggler", "flight_recorder", "metrics"]

_NANOSECONDS = 1e9


class Straggler(TypedDict):
    """The waits of the other ranks for one."""

    times_late: int
    """That it was ready with a tensor a millisecond or more after the first rank, and was the last one."""
    seconds_waited_for: float
    """From when the first rank was ready to when this one was, wherever it was the last one; tensors that are waited
    for at the same time count once."""


class Metrics(TypedDict):
    """The result of :func:`metrics`; times are sums."""

    bytes: int
    """Of the tensors of all requests that are complete."""
    requests: int
    """That are complete, also with an error."""
    executed: int
    """Requests that were part of a batch."""
    batches: int
    """What they were executed as; one batch can hold many allreduces."""
    negotiated_in_full: int
    """Requests that were described in full, as the ranks had not agreed on them before."""
    negotiation_seconds: float
    """From enqueue to the begin of the batch, of all executed requests: until all ranks were ready, and the batches
    before were done."""
    execution_seconds: float
    """Of all batches."""
    peer_wait_seconds: float
    """Of that, waiting for other ranks to get on."""
    shared_memory_bytes: int
    """Of this host, divided by its ranks."""
    stragglers: list[Straggler]
    """By rank, the same on all ranks."""


class CollectiveRecord(TypedDict):
    """One collective that this rank took part in. Times are in seconds since the epoch."""

    number: int
    """Counts the job's collectives: the same on all ranks, so that their records can be laid side by side."""
    kind: str
    name: str
    """Of the first request, cut to 67 bytes."""
    requests: int
    bytes: int
    process_set: int
    enqueued: float
    """The first of the requests on this rank."""
    begun: float
    ended: float | None
    """None: it has not ended."""


def metrics() -> Metrics:
    """Return what this rank's engine has done since ``init()``; zeros if it does not run.

    Example:
        The share of the time that this rank's tensors waited for the slowest rank is in ``negotiation_seconds``; which
        rank that is shows ``max(range(hvd.size()), key=lambda r: metrics()["stragglers"][r]["seconds_waited_for"])``.
    """
    count = counters()
    num_ranks = count["ranks"]
    stats = ffi.new("hvl_straggler_stats[]", num_ranks)
    lib.hvl_get_straggler_stats(stats, num_ranks)
    return {
        "bytes": count["bytes"],
        "requests": count["requests"],
        "executed": count["executed"],
        "batches": count["batches"],
        "negotiated_in_full": count["negotiated_in_full"],
        "negotiation_seconds": count["negotiation_ns"] / _NANOSECONDS,
        "execution_seconds": count["execution_ns"] / _NANOSECONDS,
        "peer_wait_seconds": count["peer_wait_ns"] / _NANOSECONDS,
        "shared_memory_bytes": count["segment_bytes"],
        "stragglers": [
            {"times_late": each.times, "seconds_waited_for": each.waited_ns / _NANOSECONDS} for each in stats
        ],
    }


def flight_recorder() -> list[CollectiveRecord]:
    """Return the last collectives of this rank, the oldest first; ``HOROVODLIKE_FLIGHT_RECORDER_SIZE`` at most.

    The one that is under way has no end. What waits for other ranks has not begun, and is not here: the file that is
    written when the job breaks (``HOROVODLIKE_FLIGHT_RECORDER``) has it.
    """
    native: Any = lib.hvl_get_collective_records()
    if native == ffi.NULL:
        return []
    records: list[CollectiveRecord] = json.loads(text_of(ffi.gc(native, lib.hvl_free)))
    return records
