"""Suggestions that follow from the numbers of a summary, each with its evidence and where to read on. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from horovodlike.timeline._summary import SMALL_BYTES, Summary

MOST = 3
_WORTH = 0.05  # of the time: less is not worth a change
_ONE_RANK = 0.6  # of the waiting, for one rank
_IDLE = 0.25  # of the time, without operators and collectives
_FEW_HIDDEN = 0.2  # of the collectives' time
_SMALL_SHARE = 0.5  # of the collectives' time in small batches
_MANY = 4  # small batches in a step
_LARGE_BYTES = 1 << 20
_UNEVEN = 2.0  # the longest step, as a multiple of the median


def advice(summary: Summary) -> list[str]:
    """Return what to try, that which may gain most first."""
    found = [*_on_waiting(summary), *_on_communication(summary), *_on_input(summary), *_on_steps(summary)]
    found.sort(key=lambda each: -each[0])
    return [text for _, text in found[:MOST]]


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _on_waiting(summary: Summary) -> Iterator[tuple[float, str]]:
    share = summary.share("waiting")
    waits = {rank: sum(late.waits.values()) for rank, late in summary.late.items()}
    if share < _WORTH or not waits:
        return
    worst = max(waits, key=lambda rank: waits[rank])
    of_worst = waits[worst] / sum(waits.values())
    if of_worst >= _ONE_RANK:
        text = (
            f"Rank {worst} holds up the others: of the {_percent(share)} of the time in which ranks wait for others, "
        )
        text += f"{_percent(of_worst)} is for it. See whether its data, its processor or its share of the work is the "
        yield share, text + "reason: docs/users/monitor.md, Slow ranks."
    else:
        text = f"Ranks wait for each other in turn, {_percent(share)} of the time: their batches take different time. "
        yield share, text + "Give them the same work in each step: docs/users/uneven_batches.md."


def _on_communication(summary: Summary) -> Iterator[tuple[float, str]]:
    share = summary.share("exposed")
    time = sum(duration for _, duration in summary.batches)
    if share < _WORTH or not time:
        return
    seen = f"In {_percent(share)} of the time ranks are in collectives and compute nothing"
    hidden = summary.share("hidden")
    if all(each.hidden is not None for each in summary.ranks) and hidden / (hidden + share) < _FEW_HIDDEN:
        text = (
            f"{seen}, and {_percent(hidden / (hidden + share))} of the collectives' time is hidden. If the ranks leave "
        )
        yield share, text + "cores unused, try HOROVODLIKE_OVERLAP=always: docs/users/settings.md."
    small = [(batch, duration) for batch, duration in summary.batches if batch.num_bytes < SMALL_BYTES]
    of_small = sum(duration for _, duration in small) / time
    per_step = len(small) / max(1, summary.num_steps)
    if of_small >= _SMALL_SHARE and per_step >= _MANY:
        text = f"{seen}. {per_step:.0f} batches a step are smaller than {SMALL_BYTES >> 10} KiB and take "
        text += (
            f"{_percent(of_small)} of that. Have tensors wait for each other: HOROVODLIKE_CYCLE_TIME=1 (ms), or find "
        )
        yield share * of_small, text + "values with hvdrun --autotune: docs/users/autotune.md."
        return
    of_large = sum(duration for batch, duration in summary.batches if batch.num_bytes >= _LARGE_BYTES) / time
    if of_large < _SMALL_SHARE:
        return
    text = f"{seen}; {_percent(of_large)} of that is for batches of 1 MiB and more. "
    if summary.hosts > 1:
        text += "Send less: docs/users/compression.md; and see whether the network gives what it can: hvdrun "
        yield share * of_large, text + "--selftest and docs/users/hosts.md, When the network is the limit."
    else:
        text += "Reduce less often: larger batches, or gradients of several batches at once, with "
        yield share * of_large, text + "backward_passes_per_step: docs/users/quickstart.md."


def _on_input(summary: Summary) -> Iterator[tuple[float, str]]:
    share = summary.share("other")
    if share < _IDLE or any(each.other is None for each in summary.ranks):
        return
    text = f"In {_percent(share)} of the time no operator and no collective runs: ranks wait for input, or run Python "
    text += "between operators. See whether the data loader has workers enough, and what else the loop does: hvdrun "
    yield share, text + "--attach PID stacks shows where it is (docs/users/profiling.md)."


def _on_steps(summary: Summary) -> Iterator[tuple[float, str]]:
    longest = [(max(each.steps), median(each.steps), each) for each in summary.ranks if len(each.steps) > 2]
    if not longest or min(most / usual for most, usual, _ in longest) < _UNEVEN:
        return
    most, usual, rank = max(longest, key=lambda each: each[0] / each[1])
    first = rank.profile.first_step or 0
    number = first + rank.steps.index(most)
    text = (
        f"Step {number} took {most / 1e6:.1f} ms, others {usual / 1e6:.1f} ms (median), on all ranks: see in the trace "
    )
    text += "what runs in that step only, such as a checkpoint, and record more steps before you judge the others."
    yield (most - usual) / rank.duration, text
