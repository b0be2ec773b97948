"""By how much the clocks of hosts differ, as far as collectives prove it. Pure; times are ns.

A batch begins on no rank before all ranks have requested it, and an allreduce ends on no rank before it has begun on
the last one. So the times of the same batches on two hosts bound the difference of their clocks from both sides, as the
two directions of a message do in the Network Time Protocol (D. L. Mills, RFC 5905), whose estimate is the middle, too.
A difference within the bounds may be none: only where zero is out of them the clocks are known to differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from horovodlike.timeline._batches import RankBatch

_CERTAIN_NS = 100_000  # the time that reading a clock may take while the host is busy
_NEVER = 1 << 62

# For each batch, and for its start and its end: the last time on any rank that is before all of it, and the first one
# that is behind.
_Times = dict[tuple[object, bool], tuple[int, int]]


def corrections(ranks: Iterable[tuple[str, Sequence[RankBatch]]]) -> dict[str, int | None]:
    """Return the correction to add to the times of each host, so that they are by the clock of the first one.

    None: the batches contradict each other, as they do if a clock was set meanwhile, so it is not known. Each clock is
    compared with all before it, so the result contradicts no pair of them, and the time is linear.

    Args:
        ranks: The host of each rank, whose clock it reads, and its batches.
    """
    by_host: dict[str, _Times] = {}
    for host, batches in ranks:
        _add(by_host.setdefault(host, {}), _times(batches), 0)
    found: dict[str, int | None] = {}
    aligned: _Times = {}
    for host, times in by_host.items():
        found[host] = correction = _correction(aligned, times)
        if correction is not None:
            _add(aligned, times, correction)
    return found


def _add(all_times: _Times, times: _Times, shift: int) -> None:
    for key, (before, behind) in times.items():
        last, first = all_times.get(key, (-_NEVER, _NEVER))
        all_times[key] = max(last, before + shift), min(first, behind + shift)


def _times(batches: Sequence[RankBatch]) -> _Times:
    found: _Times = {}
    for batch in batches:
        if batch.clipped:
            continue
        found[batch.key, False] = batch.ready, batch.begun
        # The last one may have been cut off by the end of the timeline.
        if batch.kind == "ALLREDUCE" and batch.num_bytes > 0 and not batch.on_gpu and batch is not batches[-1]:
            found[batch.key, True] = batch.begun, batch.ended
    return found


def _correction(aligned: _Times, times: _Times) -> int | None:
    least, most = -_NEVER, _NEVER
    for key, (before, behind) in times.items():
        if key in aligned:
            last, first = aligned[key]
            least, most = max(least, last - behind), min(most, first - before)
    if least > most + _CERTAIN_NS:
        return None
    if least <= _CERTAIN_NS and most >= -_CERTAIN_NS:
        return 0
    return (least + most) // 2
