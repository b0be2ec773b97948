"""By how much the clocks of hosts differ, as far as collectives prove it. Pure; times are ns.

A batch begins on no rank before all ranks have requested it, and an allreduce ends on no rank before it has begun on
the last one. So what two hosts know of the same batches bounds the difference of their clocks from both sides, as the
two directions of a message do in the Network Time Protocol (D. L. Mills, RFC 5905), whose estimate is the middle, too.
A difference within the bounds may be none: only where zero is out of them the clocks are known to differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from horovodlike.timeline._batches import RankBatch

_CERTAIN_NS = 100_000  # what reading a clock may cost while the host is busy
_NEVER = 1 << 62

Key = tuple[int, str, str]


class _Times(NamedTuple):
    """Of one batch on some ranks; the last two only where the end on one rank tells something of the others."""

    last_request: int
    first_begun: int
    last_begun: int
    first_ended: int

    def merged(self, other: _Times) -> _Times:
        return _Times(
            max(self.last_request, other.last_request),
            min(self.first_begun, other.first_begun),
            max(self.last_begun, other.last_begun),
            min(self.first_ended, other.first_ended),
        )

    def shifted(self, by: int) -> _Times:
        return _Times(self.last_request + by, self.first_begun + by, self.last_begun + by, self.first_ended + by)


def corrections(ranks: Mapping[int, Sequence[RankBatch]], clocks: Mapping[int, object]) -> dict[int, int]:
    """Return what to add to the times of each rank, so that they are by the clock of the first one.

    Each clock is compared with all before it, so the result contradicts no pair of them, and the time is linear.

    Args:
        ranks: The batches of each rank.
        clocks: The clock of each rank; ranks of one host have the same.
    """
    by_clock: dict[object, dict[Key, _Times]] = {}
    for rank, batches in ranks.items():
        _add(by_clock.setdefault(clocks[rank], {}), _times(batches))
    found: dict[object, int] = {}
    aligned: dict[Key, _Times] = {}
    for clock, times in by_clock.items():
        found[clock] = correction = _correction(aligned, times)
        _add(aligned, {key: each.shifted(correction) for key, each in times.items()})
    return {rank: found[clocks[rank]] for rank in ranks}


def _add(all_times: dict[Key, _Times], times: Mapping[Key, _Times]) -> None:
    for key, each in times.items():
        before = all_times.get(key)
        all_times[key] = each if before is None else before.merged(each)


def _times(batches: Sequence[RankBatch]) -> dict[Key, _Times]:
    found = {}
    for batch in batches:
        if batch.clipped:
            continue
        # The last one may have been cut off by the end of the timeline.
        is_reduced = batch.kind == "ALLREDUCE" and batch.num_bytes > 0 and not batch.on_gpu
        begun, ended = (batch.begun, batch.ended) if is_reduced and batch is not batches[-1] else (-_NEVER, _NEVER)
        found[batch.key] = _Times(batch.ready, batch.begun, begun, ended)
    return found


def _correction(aligned: Mapping[Key, _Times], times: Mapping[Key, _Times]) -> int:
    least, most = -_NEVER, _NEVER
    for key, here in times.items():
        there = aligned.get(key)
        if there is not None:
            least = max(least, there.last_request - here.first_begun, there.last_begun - here.first_ended)
            most = min(most, there.first_begun - here.last_request, there.first_ended - here.last_begun)
    contradict = least > most + _CERTAIN_NS
    if contradict or (least <= _CERTAIN_NS and most >= -_CERTAIN_NS):
        return 0
    return (least + most) // 2
