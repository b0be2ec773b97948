"""Arrows in a trace: from the request that came last to the collective on the ranks that waited for it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from horovodlike.timeline._batches import Event, microseconds

CATEGORY = "release"


class Slice:
    """A slice of the trace.

    Attributes:
        pid: Its process.
        tid: Its thread.
        begin: In ns, as the trace counts.
        end: Likewise.
    """

    __slots__ = ("begin", "end", "pid", "tid")

    def __init__(self, pid: int, tid: int, begin: int, end: int) -> None:
        """Take them."""
        self.pid, self.tid, self.begin, self.end = pid, tid, begin, end


def arrow(numbers: count[int], name: str, source: Slice, at: int, target: Slice) -> Iterator[Event]:
    """Make an arrow from the moment ``at`` in a slice to the begin of another one, each a slice in which it fits.

    A viewer binds the ends of an arrow to the slices that enclose them, and drops one that ends before it begins.
    """
    arrival = max(target.begin, at)
    if not (source.begin <= at < source.end and arrival < target.end):
        return
    both = {"cat": CATEGORY, "name": name, "id": next(numbers)}
    yield {"ph": "s", **both, "pid": source.pid, "tid": source.tid, "ts": microseconds(at)}
    yield {"ph": "f", "bp": "e", **both, "pid": target.pid, "tid": target.tid, "ts": microseconds(arrival)}
