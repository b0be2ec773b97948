"""Suggestions that follow from the numbers of a summary, each with its evidence and where to read on. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from horovodlike.timeline._summary import SMALL_BYTES, Summary

MOST = 3
_WORTH = 0.05  # of the time: less is not worth a change
_ONE = 0.6  # of the waiting, for one rank or host
_IDLE = 0.25  # of the time, without operators and collectives
_FEW_HIDDEN = 0.2  # of the collectives' time
_SMALL_SHARE = 0.5  # of the collectives' time in small batches
_MANY = 4  # small batches in a step
_LARGE_BYTES = 1 << 20


def advice(summary: Summary) -> list[str]:
    """Return what to try, that which may gain most first."""
    found = [*_on_waiting(summary)]
    if summary.has_operators and not summary.on_gpu:
        found += _on_communication(summary)
        # A rank that waits for input holds up the others, too: that is one reason.
        found += [] if _culprit(summary) else _on_input(summary)
    found.sort(key=lambda each: -each[0])
    return [text for _, text in found[:MOST]]


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _culprit(summary: Summary) -> tuple[str, float] | None:
    """Return for what the ranks wait most of the time that they wait, and for how much of it: a rank or a host."""
    waits = Counter({rank: sum(late.waits.values()) for rank, late in summary.late.items()})
    if summary.share("waiting") < _WORTH or not (everything := waits.total()):
        return None
    by_host: Counter[str] = Counter()
    for rank, time in waits.items():
        by_host[summary.hosts[rank]] += time
    [(rank, of_rank)], [(host, of_host)] = waits.most_common(1), by_host.most_common(1)
    if of_rank >= _ONE * everything:
        return f"Rank {rank} holds", of_rank / everything
    if of_host >= _ONE * everything and len({*summary.hosts.values()}) > 1:
        return f"The ranks of host {host} hold", of_host / everything
    return None


def _on_waiting(summary: Summary) -> Iterator[tuple[float, str]]:
    share = summary.share("waiting")
    if share < _WORTH or not any(late.waits for late in summary.late.values()):
        return
    time = f"{'' if summary.has_operators else 'at most '}{_percent(share)} of the time"
    if culprit := _culprit(summary):
        who, part = culprit
        text = f"{who} up the others: ranks wait for others {time}, and {_percent(part)} of that for "
        text += "it. See whether its data, its processor or its share of the work is the reason: "
        yield share, text + "docs/users/monitor.md, Slow ranks."
    else:
        text = f"Ranks wait for each other in turn, {time}: their batches take different time. "
        yield share, text + "Give them the same work in each step: docs/users/uneven_batches.md."


def _on_communication(summary: Summary) -> Iterator[tuple[float, str]]:
    share = summary.share("exposed")
    time = summary.reduction_time
    if share < _WORTH or not time:
        return
    seen = f"In {_percent(share)} of the time ranks are in collectives and compute nothing"
    hidden = summary.share("hidden")
    if hidden / (hidden + share) < _FEW_HIDDEN:
        text = f"{seen}, and {_percent(hidden / (hidden + share))} of the time in collectives is hidden. If the ranks "
        yield share, text + "leave cores unused, try HOROVODLIKE_OVERLAP=always: docs/users/settings.md."
    small = [(batch, duration) for batch, duration in summary.batches if batch.num_bytes < SMALL_BYTES]
    of_small = sum(duration for _, duration in small) / time
    per_step = len(small) / max(1, summary.num_steps)
    if of_small >= _SMALL_SHARE and per_step >= _MANY:
        text = f"{seen}. {per_step:.0f} batches a step are smaller than {SMALL_BYTES >> 10} KiB and take "
        text += f"{_percent(of_small)} of the time in collectives. Have tensors wait for each other: "
        text += "HOROVODLIKE_CYCLE_TIME=1 (ms), or find values with hvdrun --autotune: docs/users/autotune.md."
        yield share * of_small, text
        return
    of_large = sum(duration for batch, duration in summary.batches if batch.num_bytes >= _LARGE_BYTES) / time
    if of_large < _SMALL_SHARE:
        return
    text = f"{seen}; {_percent(of_large)} of the time in collectives is for batches of 1 MiB and more. "
    if len({*summary.hosts.values()}) > 1:
        text += "Send less: docs/users/compression.md; and see whether the network gives what it can: hvdrun "
        yield share * of_large, text + "--selftest and docs/users/hosts.md, When the network is the limit."
    else:
        text += "Reduce less often: larger batches, or gradients of several batches at once, with "
        yield share * of_large, text + "backward_passes_per_step: docs/users/quickstart.md."


def _on_input(summary: Summary) -> Iterator[tuple[float, str]]:
    share = summary.share("other")
    if share < _IDLE:
        return
    text = f"In {_percent(share)} of the time no operator and no collective runs: ranks wait for input, or run Python "
    text += "between operators. See whether the data loader has workers enough, and what else the loop does: hvdrun "
    yield share, text + "--attach PID stacks shows where it is (docs/users/profiling.md)."
