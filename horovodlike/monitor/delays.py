"""By how much each rank is late for collectives, from the times at which ranks have enqueued the same ones. Pure.

All times are by monotonic clocks, which cannot be set. The clocks of hosts differ. A report says when it was sent, by
the clock of its host, and it arrives some time later. The least difference of these times over the last reports of a
host is the offset of its clock, plus the least time in the network. So delay between hosts is right to about a
millisecond where the network takes no longer than that. Older reports do not count: clocks drift, and stop while a host
is suspended.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

EVALUATED_S = 2.5
"""After this time from its first report, a collective counts even if some ranks have not reported it: they take no
part."""
LATE_S = 0.001
WAITING_SHARE = 0.05
"""The share of its time that some rank must wait before any rank counts as a straggler."""
STRAGGLER_SHARE = 0.6
"""The share of all delay that one rank must have to be the straggler."""
WINDOW = 8
"""The number of points for the verdict: one for each second in which collectives have been evaluated."""
OFFSET_S = 30.0
"""The offset of a host's clock is the least one of this time to twice this time."""
_FEWEST = 3
_MOST_COLLECTIVES = 512
_MOST_TENSORS = 200
_SHOWN_TENSORS = 20


class _Collective:
    __slots__ = ("kind", "name", "num_bytes", "received", "times")

    def __init__(self, kind: str, name: str, num_bytes: int, received: float) -> None:
        self.kind, self.name, self.num_bytes = kind, name, num_bytes
        self.received = received  # its first report
        self.times: dict[int, float] = {}


class _Offset:
    """How far the clock of a host is behind the monitor's clock: the minimum over the last reports."""

    def __init__(self, now: float) -> None:
        self._begun = now
        self._least = self._least_before = math.inf  # since then, and in the time before

    def take(self, offset: float, now: float) -> float:
        """Take a report's offset; return the minimum."""
        age = now - self._begun
        if age >= OFFSET_S:
            self._least_before = self._least if age < 2 * OFFSET_S else math.inf
            self._begun, self._least = now, math.inf
        self._least = min(self._least, offset)
        return min(self._least, self._least_before)


class Delays:
    """The delay of ranks in one generation.

    Attributes:
        by_rank: The mean delay of each rank over the last collectives, in seconds.
        window: The seconds over which the verdict looks back: more if few of them had collectives.
    """

    def __init__(self) -> None:
        """Start without any collective."""
        self.by_rank: dict[int, float] = {}
        self.window = WINDOW
        self._offsets: OrderedDict[str, _Offset] = OrderedDict()  # by clock; the clock of the last report comes last
        self._waiting: OrderedDict[int, _Collective] = OrderedDict()
        self._evaluated = 0  # numbers up to this one are not waited for any more
        self._tensors: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._points: list[dict[int, tuple[int, float]]] = []  # rank -> how often it was last, and the sum of seconds
        self._times: list[float] = []  # the times of the points

    def take(self, rank: int, clock: str, sent: float, received: float, collectives: Iterable[list[Any]]) -> None:
        """Take the collectives of a report, each with number, kind, name, bytes and the time of its enqueue.

        Args:
            rank: The rank.
            clock: The monotonic clock of its host.
            sent: The time when the report was sent, by that clock.
            received: The time when it arrived, by the monotonic clock of the monitor.
            collectives: The collectives.
        """
        offset = self._offsets.setdefault(clock, _Offset(received)).take(received - sent, received)
        self._offsets.move_to_end(clock)
        for number, kind, name, num_bytes, enqueued in collectives:
            if number <= self._evaluated:
                continue
            collective = self._waiting.get(number)
            if collective is None:
                collective = self._waiting[number] = _Collective(kind, name, num_bytes, received)
            collective.times[rank] = enqueued + offset
        while len(self._waiting) > _MOST_COLLECTIVES:
            self._waiting.popitem(last=False)

    def evaluate(self, now: float, size: int) -> dict[int, float]:
        """Close the collectives that all ranks have reported, or that are old; return the delay of each rank."""
        done = [
            number
            for number, each in self._waiting.items()
            if len(each.times) >= size or now - each.received > EVALUATED_S
        ]
        point: dict[int, tuple[int, float]] = {}
        sums: dict[int, list[float]] = {}
        for number in done:
            each = self._waiting.pop(number)
            if len(each.times) < 2:
                continue
            self._evaluate(each, point, sums)
        first = min(self._waiting, default=math.inf)
        self._evaluated = max([self._evaluated, *(number for number in done if number < first)])
        while len(self._offsets) > size:  # a rank has one host
            self._offsets.popitem(last=False)
        if sums:
            self._points, self._times = [*self._points, point][-WINDOW:], [*self._times, now][-WINDOW:]
            self.by_rank = {rank: sum(found) / len(found) for rank, found in sums.items()}
        self.window = max(WINDOW, math.ceil(now - self._times[0])) if self._times else WINDOW
        return self.by_rank

    def _evaluate(self, each: _Collective, point: dict[int, tuple[int, float]], sums: dict[int, list[float]]) -> None:
        first = min(each.times.values())
        last, at = max(each.times.items(), key=lambda item: item[1])
        for rank, when in each.times.items():
            sums.setdefault(rank, []).append(when - first)
        seconds = at - first
        if seconds < LATE_S:
            return
        times, total = point.get(last, (0, 0.0))
        point[last] = times + 1, total + seconds
        tensor = self._tensors.pop(each.name, None)
        if tensor is None:
            tensor = {"name": each.name, "kind": each.kind, "bytes": each.num_bytes, "times": 0, "seconds": 0.0}
        self._tensors[each.name] = tensor
        tensor["times"] += 1
        tensor["seconds"] = round(tensor["seconds"] + seconds, 6)
        tensor["last_rank"], tensor["last_seconds"] = last, round(seconds, 6)
        while len(self._tensors) > _MOST_TENSORS:
            self._tensors.popitem(last=False)

    def tensors(self) -> list[dict[str, Any]]:
        """Return the tensors for which ranks were waited for longest: name, how often, seconds, and the last rank."""
        worst = sorted(self._tensors.values(), key=lambda tensor: -tensor["seconds"])
        return [dict(tensor) for tensor in worst[:_SHOWN_TENSORS]]

    def verdict(self, waiting: float) -> dict[str, Any] | None:
        """Return the rank that has held up the others in the last seconds, and the evidence; None if there is none.

        Args:
            waiting: The share of :attr:`window` that the rank that waits most has waited.
        """
        totals: dict[int, list[float]] = {}
        for point in self._points:
            for rank, (times, seconds) in point.items():
                total = totals.setdefault(rank, [0, 0.0])
                total[0] += times
                total[1] += seconds
        if not totals or waiting < WAITING_SHARE:
            return None
        rank, (count, sum_of_seconds) = max(totals.items(), key=lambda item: item[1][1])
        share = sum_of_seconds / sum(seconds for _, seconds in totals.values())
        if count < _FEWEST or share < STRAGGLER_SHARE:
            return None
        return {
            "rank": rank,
            "share": round(share, 3),
            "waiting": round(waiting, 3),
            "seconds_each": round(sum_of_seconds / count, 6),
            "window_seconds": self.window,
        }
