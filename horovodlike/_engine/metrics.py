"""Numbers about this rank's work: counters, stragglers, and the last collectives.

All functions may be called from any thread, also while a collective hangs and after the job was broken, until
``shutdown()``. Reading takes microseconds; counting reads the clock twice for each batch.
"""

from __future__ import annotations

import json
from typing import Any, TypedDict

from horovodlike._engine.native import ffi, lib
from horovodlike._engine.ops import counters, text_of
from horovodlike._engine.steps import counted

__all__ = ["CollectiveRecord", "Metrics", "Straggler", "flight_recorder", "metrics"]

_NANOSECONDS = 1e9

failed_writes = 0  # counted by State.commit() of elastic training


class Straggler(TypedDict):
    """The time that the other ranks have waited for one rank."""

    times_late: int
    """The number of times that this rank had a tensor ready last, a millisecond or more after the first rank."""
    seconds_waited_for: float
    """The time from the first ready rank to this one, over all tensors for which this one was the last. Time in which
    several tensors are waited for counts once."""


class Metrics(TypedDict):
    """The result of :func:`metrics`. Times are sums, in seconds."""

    bytes: int
    """The number of bytes of the tensors of all complete requests."""
    requests: int
    """The number of complete requests, including those that failed."""
    executed: int
    """The number of requests that were part of a batch."""
    batches: int
    """The number of batches in which these requests were executed; one batch can hold many allreduces."""
    negotiated_in_full: int
    """The number of requests that were described in full, because the ranks had not agreed on them before."""
    negotiation_seconds: float
    """The time of all executed requests from enqueue to the start of the batch: until all ranks were ready, and the
    batches before were done."""
    execution_seconds: float
    """The time of all batches from start to end."""
    waiting_seconds: float
    """The time in which a request waited, for other ranks or to be negotiated, and no batch was executed, up to now."""
    communicating_seconds: float
    """The time in which a batch was executed, up to now. The time in neither counter is the rank's own."""
    peer_wait_seconds: float
    """The part of ``execution_seconds`` in which this rank waited for other ranks."""
    blocked_seconds: float
    """The time in which threads of this rank were blocked until their requests were complete: waiting for other ranks,
    and for communication that was not overlapped. In a graph of TensorFlow no thread waits: all the time counts in
    which its requests were in flight."""
    in_flight: int
    """The number of requests that are enqueued and not complete now; at least the number of threads that wait
    for a result, such as a message."""
    bytes_by_shared_memory: int
    """The number of bytes of the tensors in completed batches whose ranks are on one host. Batches of a single rank
    are in none of these counters."""
    bytes_by_tcp: int
    """Likewise, of batches whose ranks are on several hosts (ranks of the same host also use shared memory)."""
    bytes_by_external: int
    """Likewise, of batches that another library carried, such as MPI."""
    bytes_by_nccl: int
    """Likewise, of batches on GPUs that NCCL carried."""
    bytes_by_staging: int
    """Likewise, of batches on GPUs of which all or a part went through the memory of the host."""
    steps: int
    """The number of steps that `step()`, an optimizer or a callback has marked."""
    step_seconds: float
    """The time from the mark of the first step to the mark of the last."""
    samples: float
    """The samples of these steps that were passed to `step()`."""
    failed_writes: int
    """The number of commits of elastic training that could not be written to disk, since the process started."""
    shared_memory_bytes: int
    """The number of bytes of shared memory of this host, divided by the number of its ranks."""
    stragglers: list[Straggler]
    """The straggler statistics by rank: measured on the first host only, for its own ranks; all others are zeros."""


class CollectiveRecord(TypedDict):
    """One collective that this rank took part in. Times are in seconds since the epoch."""

    number: int
    """The number of this collective in the job; the same on all ranks, so that their records can be compared."""
    kind: str
    name: str
    """The name of the first request, cut to 67 bytes."""
    requests: int
    bytes: int
    process_set: int
    enqueued: float
    """The time at which the first of the requests was enqueued on this rank."""
    begun: float
    ended: float | None
    """None if the collective has not ended."""


def metrics() -> Metrics:
    """Return the counters of this rank's engine since ``init()``; zeros if it does not run.

    Example:
        ``negotiation_seconds`` includes the time that this rank's tensors waited for the slowest rank. The slowest rank
        is ``max(range(hvd.size()), key=lambda r: metrics()["stragglers"][r]["seconds_waited_for"])``.
    """
    count = counters()
    steps, samples, step_seconds = counted()
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
        "waiting_seconds": count["waiting_ns"] / _NANOSECONDS,
        "communicating_seconds": count["communicating_ns"] / _NANOSECONDS,
        "peer_wait_seconds": count["peer_wait_ns"] / _NANOSECONDS,
        "blocked_seconds": count["blocked_ns"] / _NANOSECONDS,
        "in_flight": count["in_flight"],
        "bytes_by_shared_memory": count["bytes_by_shared_memory"],
        "bytes_by_tcp": count["bytes_by_tcp"],
        "bytes_by_external": count["bytes_by_external"],
        "bytes_by_nccl": count["bytes_by_nccl"],
        "bytes_by_staging": count["bytes_by_staging"],
        "steps": steps,
        "step_seconds": step_seconds,
        "samples": samples,
        "failed_writes": failed_writes,
        "shared_memory_bytes": count["segment_bytes"],
        "stragglers": [
            {"times_late": each.times, "seconds_waited_for": each.waited_ns / _NANOSECONDS} for each in stats
        ],
    }


def flight_recorder() -> list[CollectiveRecord]:
    """Return the last collectives of this rank, the oldest first; ``HOROVODLIKE_FLIGHT_RECORDER_SIZE`` at most.

    A collective that still runs has no end. Requests that wait for other ranks have not started and are not included;
    the file that is written when the job breaks (``HOROVODLIKE_FLIGHT_RECORDER``) lists them.
    """
    return _records(lib.hvl_get_collective_records())


def sample_collectives(after: int, most: int) -> tuple[list[CollectiveRecord], int]:
    """Return some of the last collectives with greater numbers than a given one, and the number of the last of all.

    Ranks choose alike, so that the times of their records can be compared: those before which none was executed for a
    millisecond, and few others. The oldest comes first; the end may be missing. Times are by `time.monotonic()`.

    Args:
        after: The number.
        most: The most collectives to return.
    """
    number = ffi.new("uint64_t *", after)
    return _records(lib.hvl_sample_collectives(number, most)), number[0]


def _records(native: Any) -> list[CollectiveRecord]:
    if native == ffi.NULL:
        return []
    records: list[CollectiveRecord] = json.loads(text_of(ffi.gc(native, lib.hvl_free)))
    return records
