"""By how much the clocks of hosts differ, as far as collectives prove it. Pure; times are ns.

A batch begins on no rank before all ranks have requested it, and an allreduce ends on no rank before it has begun on
the last one. So what two hosts know of the same batches bounds the difference of their clocks from both sides, as the
two directions of a message do in the Network Time Protocol (D. L. Mills, RFC 5905), whose estimate is the middle, too.
A difference within the bounds may be none: only where zero is out of them the clocks are known to differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from horovodlike.timeline._batches import RankBatch

_CERTAIN_NS = 100_000  # what reading a clock may cost while the host is busy
_NEVER = 1 << 62

Key = tuple[int, str, str, int]


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


def corrections(ranks: Iterable[tuple[str, Sequence[RankBatch]]]) -> dict[str, int | None]:
    """Return what to add to the times of each host, so that they are by the clock of the first one.

    None: the batches contradict each other, as they do if a clock was set meanwhile, so it is not known. Each clock is
    compared with all before it, so the result contradicts no pair of them, and the time is linear.

    Args:
        ranks: The host of each rank, whose clock it reads, and its batches.
    """
    by_host: dict[str, dict[Key, _Times]] = {}
    for host, batches in ranks:
        _add(by_host.setdefault(host, {}), _times(batches))
    found: dict[str, int | None] = {}
    aligned: dict[Key, _Times] = {}
    for host, times in by_host.items():
        found[host] = correction = _correction(aligned, times)
        if correction is not None:
            _add(aligned, {key: each.shifted(correction) for key, each in times.items()})
    return found


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


def _correction(aligned: Mapping[Key, _Times], times: Mapping[Key, _Times]) -> int | None:
    least, most = -_NEVER, _NEVER
    for key, here in times.items():
        there = aligned.get(key)
        if there is not None:
            least = max(least, there.last_request - here.first_begun, there.last_begun - here.first_ended)
            most = min(most, there.first_begun - here.last_request, there.first_ended - here.last_begun)
    if least > most + _CERTAIN_NS:
        return None
    if least <= _CERTAIN_NS and most >= -_CERTAIN_NS:
        return 0
    return (least + most) // 2
