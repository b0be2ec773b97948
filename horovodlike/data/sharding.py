"""The ranges that each rank reads in each step: a pure function of the samples left, the ranks and the batch size."""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Iterable, Iterator

__all__ = ["RangeAssigner", "Ranges", "Step"]

Range = tuple[int, int]
"""A range of positions in an epoch's stream: the first one, and the one after the last."""

Step = list[list[Range]]
"""The ranges that each rank reads in a step, by rank."""


class Ranges:
    """A set of positions, stored as ascending ranges that neither overlap nor touch."""

    def __init__(self, ranges: Iterable[Range] = ()) -> None:
        """Start with the set of these ranges."""
        self.ranges: list[Range] = []
        for begin, end in ranges:
            self.add(begin, end)

    def add(self, begin: int, end: int) -> None:
        """Add a range that does not overlap the set."""
        at = bisect.bisect_left(self.ranges, (begin, end))
        first = at
        if at > 0 and self.ranges[at - 1][1] == begin:
            first, begin = at - 1, self.ranges[at - 1][0]
        if at < len(self.ranges) and self.ranges[at][0] == end:
            at, end = at + 1, self.ranges[at][1]
        self.ranges[first:at] = [(begin, end)]

    def gaps(self, length: int) -> Iterator[Range]:
        """Yield the ranges of 0 to ``length - 1`` that are not in the set."""
        before = 0
        for begin, end in [*self.ranges, (length, length)]:
            if before < begin:
                yield before, begin
            before = end

    def __len__(self) -> int:
        """Return the number of positions."""
        return sum(end - begin for begin, end in self.ranges)


class RangeAssigner:
    """The assignment of the samples left in an epoch to ranks that step together.

    Each rank has a lease: a range that it reads from start to end. After that, the rank takes the next range of the
    queue, or half of the longest lease if the queue is empty. So every rank has a full batch in each step but the last,
    in which the ranks' numbers of samples differ by one at most: no other assignment takes fewer steps.

    Args:
        queue: Ranges to assign; one rank reads the whole range, unless it is split once the queue is empty.
        size: The number of ranks.
        batch_size: Samples of one rank's batch.
    """

    def __init__(self, queue: Iterable[Range], size: int, batch_size: int) -> None:
        """Start without leases."""
        self._queue = deque(queue)
        self._leases: list[Range] = [(0, 0)] * size
        self._batch_size = batch_size
        self._left = sum(end - begin for begin, end in self._queue)

    @property
    def steps_left(self) -> int:
        """The number of steps that :meth:`next_step` has still to return."""
        return math.ceil(self._left / (self._batch_size * len(self._leases)))

    def next_step(self) -> Step | None:
        """Return the ranges that each rank reads next, or None if no samples are left."""
        if self._left == 0:
            return None
        size = len(self._leases)
        share, more = divmod(min(self._left, self._batch_size * size), size)
        step = [self._take(rank, share + (1 if rank < more else 0)) for rank in range(size)]
        self._left -= share * size + more
        return step

    def _take(self, rank: int, count: int) -> list[Range]:
        taken: list[Range] = []
        while count > 0:
            begin, end = self._leases[rank]
            if begin == end:
                begin, end = self._queue.popleft() if self._queue else self._split_longest()
            until = min(end, begin + count)
            taken.append((begin, until))
            self._leases[rank] = (until, end)
            count -= until - begin
        return taken

    def _split_longest(self) -> Range:
        begin, end = max(self._leases, key=lambda lease: lease[1] - lease[0])
        middle = begin + (end - begin) // 2
        self._leases[self._leases.index((begin, end))] = (begin, middle)
        return middle, end
