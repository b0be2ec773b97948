"""The summary of a profile or of timelines, in words."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from horovodlike.timeline._advice import advice
from horovodlike.timeline._batches import Event, batches_of, checked_timeline, load
from horovodlike.timeline._clocks import corrections
from horovodlike.timeline._merging import files_of_job, read_timeline
from horovodlike.timeline._profile import RankProfile, read_merged, read_profile
from horovodlike.timeline._summary import SMALL_BYTES, Late, RankTimes, Summary, TensorCost, summary_of

_WIDTH = 100
_MOST_ROWS = 8
_MOST_RANKS = 32
_LONGEST_NAME = 44


def summarize(path: Path) -> str:
    """Tell what took the time, and what to try.

    Args:
        path: The folder of a profile, the trace that was made of one, or a timeline: the file of rank 0, beside which
            those of the other ranks are looked for, or a merged one.

    Returns:
        Some tables with aligned columns, in lines of about a hundred characters. The table of ranks is the first.

    Raises:
        OSError: A file cannot be read.
        ValueError: It is none of these, or damaged, or has nothing in it; the message names the file.
    """
    profiles = read_profile(path) if path.is_dir() else _read_file(path)
    summary = summary_of(profiles) if profiles else None
    if summary is None or not any(begin < end for begin, end in (each.window for each in summary.ranks)):
        raise ValueError(f"{path} has no steps, no collectives and no operators: there is nothing to tell")
    return "\n".join(_lines(summary))


def _read_file(path: Path) -> list[RankProfile]:
    content = load(path)
    try:
        if isinstance(content, dict):
            return read_merged(content)
        events = checked_timeline(content)
    except ValueError as problem:
        raise ValueError(f"{path}: {problem}") from problem
    others = [each for each in files_of_job(path) if each != path]
    return _of_timelines([events, *map(read_timeline, others)])


def _of_timelines(timelines: Sequence[list[Event]]) -> list[RankProfile]:
    batches = {rank: found for events in timelines for rank, found in batches_of(events).items()}
    shifts = corrections(batches, {rank: rank for rank in batches})
    size = max([len(timelines), *(rank + 1 for rank in batches)])
    profiles = []
    for rank in sorted(batches):
        for batch in batches[rank]:
            batch.shift(shifts[rank])
        profiles.append(RankProfile(rank, size, "", 0, batches=batches[rank], correction=shifts[rank]))
    return profiles


def _lines(summary: Summary) -> list[str]:
    lines = [_head(summary), "", *_ranks(summary)]
    tips = advice(summary)
    lines += ["", "What to try" if tips else "Nothing to try follows from these numbers."]
    for number, tip in enumerate(tips, 1):
        lines += textwrap.wrap(tip, _WIDTH, initial_indent=f"{number}. ", subsequent_indent="   ")
    for part in (_late(summary), _batches(summary), _tensors(summary), _operators(summary)):
        if part:
            lines += ["", *part]
    return lines


def _head(summary: Summary) -> str:
    profiles = [each.profile for each in summary.ranks]
    first, size = profiles[0], profiles[0].size
    text = f"{len(profiles)} of {size} ranks" if len(profiles) < size else f"{size} rank{'s' * (size > 1)}"
    if summary.hosts > 1:
        text += f" on {summary.hosts} hosts"
    if first.framework:
        text += f", {first.framework}"
    if summary.num_steps and first.first_step is not None:
        text += f", steps {first.first_step} to {first.first_step + summary.num_steps - 1}"
    else:
        text += f", {max(each.duration for each in summary.ranks) / 1e9:.3f} s; no steps are marked"
    corrected = {each.host or f"rank {each.rank}": each.correction for each in profiles if each.correction}
    clocks = [f"{name} {correction / 1e6:+.3f} ms" for name, correction in corrected.items()]
    return text + (f"\nclocks corrected: {', '.join(clocks[:_MOST_ROWS])}" if clocks else "")


def _ranks(summary: Summary) -> list[str]:
    has_steps = summary.num_steps > 0
    steps = ["step ms", "min", "max"] if has_steps else ["ms"]
    rows = [["rank", "host", *steps, "computing", "hidden", "exposed", "waiting", "other"]]
    rows += [_rank(each, has_steps) for each in summary.ranks[:_MOST_RANKS]]
    lines = _table(rows, left=(1,))
    if len(summary.ranks) > _MOST_RANKS:
        lines.append(f"... and {len(summary.ranks) - _MOST_RANKS} more ranks")
    if all(each.hidden is not None for each in summary.ranks):
        lines.append(
            "hidden: in collectives while operators compute (a part of computing); exposed: in collectives only;"
        )
        lines.append("waiting: for a rank that was late, with nothing to compute; other: Python, input, idle")
    else:
        lines.append(
            "exposed: in collectives; waiting: for a rank that was late; computing: the rest. No operators were"
        )
        lines.append("recorded, so what of the collectives they hide is not known.")
    if not summary.is_complete:
        lines.append(
            "Not all ranks have a timeline: waiting includes all of the negotiation, and who was last is unknown."
        )
    return lines


def _rank(times: RankTimes, has_steps: bool) -> list[str]:
    def share(part: int | None) -> str:
        return "-" if part is None else f"{100 * part / times.duration:.0f} %"

    if not has_steps:
        steps = [f"{times.duration / 1e6:.1f}"]
    elif times.steps:
        steps = [f"{each / 1e6:.1f}" for each in (mean(times.steps), min(times.steps), max(times.steps))]
    else:
        steps = ["-"] * 3
    parts = (times.computing, times.hidden, times.exposed, times.waiting, times.other)
    return [str(times.profile.rank), times.profile.host or "-", *steps, *map(share, parts)]


def _late(summary: Summary) -> list[str]:
    def lost(late: Late) -> int:
        return sum(late.waits.values())

    found = sorted(summary.late.items(), key=lambda each: (-lost(each[1]), -each[1].batches, each[0]))
    rows = [["late rank", "batches", f"others wait, ms{_a_step(summary)}", "longest wait"]]
    for rank, late in found[:_MOST_ROWS]:
        if not late.batches:
            continue
        others = max(1, len(summary.ranks) - 1)
        longest = max(late.waits, key=lambda each: late.waits[each], default=None)
        waits = "-" if longest is None else f"{summary.per_step(late.waits[longest]):.2f} ms by rank {longest}"
        count = f"{late.batches} of {summary.num_matched}"
        rows.append([str(rank), count, f"{summary.per_step(lost(late) / others):.2f}", waits])
    return _table(rows, left=(3,)) if len(rows) > 1 else []


def _batches(summary: Summary) -> list[str]:
    count = len(summary.batches)
    if not count:
        return []
    tensors = sum(len(batch.requests) for batch, _ in summary.batches)
    small = sum(batch.num_bytes < SMALL_BYTES for batch, _ in summary.batches)
    text = (
        f"Batches: {count / max(1, summary.num_steps):.1f}{_a_step(summary)}, of {tensors / count:.1f} tensors each; "
    )
    text += (
        f"median size {_size(round(summary.typical_bytes))}, {100 * small / count:.0f} % below {SMALL_BYTES >> 10} KiB"
    )
    return [text]


def _tensors(summary: Summary) -> list[str]:
    costs = sorted(summary.tensors.items(), key=lambda each: -each[1].time)
    rows = [["tensor", "bytes", "batches", f"ms{_a_step(summary)}", "GB/s of its batches"]]
    for name, cost in costs[:_MOST_ROWS]:
        size = "-" if cost.num_bytes is None else _size(cost.num_bytes)
        rows.append([_name(name), size, str(cost.count), f"{summary.per_step(cost.time):.3f}", _rate(cost)])
    return _table(rows, left=(0,)) if len(rows) > 1 else []


def _rate(cost: TensorCost) -> str:
    return f"{cost.rate_bytes / cost.rate_time:.2f}" if cost.rate_time and cost.rate_bytes else "-"


def _operators(summary: Summary) -> list[str]:
    ranks = len(summary.ranks)
    rows = [["self time of", f"ms{_a_step(summary)}", "of the time"]]
    everything = sum(each.duration for each in summary.ranks)
    for name, time in summary.self_times.most_common(_MOST_ROWS):
        rows.append([_name(name), f"{summary.per_step(time / ranks):.3f}", f"{100 * time / everything:.1f} %"])
    return _table(rows, left=(0,)) if len(rows) > 1 else []


def _a_step(summary: Summary) -> str:
    return " a step" if summary.num_steps else ""


def _name(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else f"...{name[3 - _LONGEST_NAME :]}"


def _size(num_bytes: int) -> str:
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if num_bytes >= 1 << shift:
            return f"{num_bytes / (1 << shift):.1f} {unit}"
    return f"{num_bytes} B"


def _table(rows: Sequence[Sequence[str]], left: tuple[int, ...]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines
