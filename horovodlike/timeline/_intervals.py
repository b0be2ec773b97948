"""Sets of points in time: sorted lists of disjoint intervals ``(begin, end)``, in any unit. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

Interval = tuple[int, int]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the set that the intervals, in any order, cover together."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if end <= begin:
            continue
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def common(some: list[Interval], others: list[Interval]) -> list[Interval]:
    """Return the time that is in both sets; the cost is O(len(some) * log(len(others)))."""
    found = []
    for begin, end in some:
        index = max(0, bisect_right(others, (begin, begin)) - 1)
        while index < len(others) and others[index][0] < end:
            first, last = max(begin, others[index][0]), min(end, others[index][1])
            if first < last:
                found.append((first, last))
            index += 1
    return found


def total(intervals: Iterable[Interval]) -> int:
    """Return for how long the set lasts."""
    return sum(end - begin for begin, end in intervals)
