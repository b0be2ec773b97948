"""The summary of a profile or of timelines, in words."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median

from horovodlike.timeline._batches import timeline_of
from horovodlike.timeline._events import read
from horovodlike.timeline._merging import files_of_job
from horovodlike.timeline._profile import RankProfile, align, read_profile
from horovodlike.timeline._summary import Late, RankTimes, Summary, summary_of

_WIDTH = 100
_MOST_ROWS = 8
_MOST_RANKS = 32
_LONGEST_NAME = 44
_SMALL_BYTES = 64 << 10
"""A batch that is smaller takes about as long as an empty one."""


def summarize(path: Path) -> str:
    """Tell what took the time.

    Args:
        path: The folder of a profile, or a timeline: the file of rank 0, beside which the other ranks' files are
            looked for.

    Returns:
        Some tables with aligned columns, in lines of about a hundred characters. The table of ranks is the first.

    Raises:
        OSError: A file cannot be read.
        ValueError: It is neither, or damaged, or has nothing in it; the message names the file.
    """
    summary = summary_of(read_profile(path) if path.is_dir() else _read_timelines(path))
    if not any(begin < end for begin, end in (each.window for each in summary.ranks)):
        raise ValueError(f"{path} has neither steps nor collectives: there is nothing to tell")
    return "\n".join(_lines(summary))


def _read_timelines(path: Path) -> list[RankProfile]:
    others = [each for each in files_of_job(path) if each != path]
    timelines = [read(each, timeline_of) for each in (path, *others)]
    profiles = [RankProfile(each.rank, each.size, each.host, batches=each.batches) for each in timelines]
    try:
        align(profiles)
    except ValueError as problem:
        raise ValueError(f"{path}: {problem}") from problem
    return sorted(profiles, key=lambda each: each.rank)


def _lines(summary: Summary) -> list[str]:
    lines = [_head(summary), "", *_ranks(summary)]
    for part in (_late(summary), _batches(summary), _tensors(summary), _operators(summary)):
        if part:
            lines += ["", *part]
    return lines


def _head(summary: Summary) -> str:
    profiles = [each.profile for each in summary.ranks]
    first, size = profiles[0], profiles[0].size
    text = f"{len(profiles)} of {size} ranks" if len(profiles) < size else f"{size} rank{'s' * (size > 1)}"
    if (num_hosts := len({each.host for each in profiles})) > 1:
        text += f" on {num_hosts} hosts"
    if first.framework:
        text += f", {first.framework}"
    if summary.num_steps and first.first_step is not None:
        text += f", steps {first.first_step} to {first.first_step + summary.num_steps - 1}"
    else:
        text += f", {max(each.duration for each in summary.ranks) / 1e9:.3f} s; no steps are marked"
    clocks = {each.host: each.correction for each in profiles}
    known = [f"{host} {clock / 1e6:+.3f} ms" for host, clock in clocks.items() if clock]
    unknown = [host for host, clock in clocks.items() if clock is None]
    if known:
        text += f"\nclocks corrected: {_few(known)}"
    if unknown:
        text += f"\nnot known: by how much the clocks of {_few(unknown)} differ, so nor who waited for whom there"
    return text


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:_MOST_ROWS]) + (", ..." if len(names) > _MOST_ROWS else "")


def _ranks(summary: Summary) -> list[str]:
    has_steps = summary.num_steps > 0
    steps = ["step ms", "min", "max"] if has_steps else ["ms"]
    rows = [["rank", "host", *steps, "computing", "hidden", "exposed", "waiting", "other"]]
    rows += [_rank(each, has_steps) for each in summary.ranks[:_MOST_RANKS]]
    lines = _table(rows, left=(1,))
    if len(summary.ranks) > _MOST_RANKS:
        lines.append(f"... and {len(summary.ranks) - _MOST_RANKS} more ranks")
    if summary.has_operators:
        notes = [
            "hidden: in collectives while operators compute (a part of computing); exposed: in collectives only; "
            "waiting: for a rank that was late, with nothing to compute; other: Python, input, idle"
        ]
    else:
        notes = [
            "No operators were recorded, so what ranks compute during collectives is not known. exposed: in "
            "collectives; waiting: for a rank that was late, at most; computing: the rest"
        ]
    if missing := len(summary.batches) - summary.num_matched:
        notes.append(
            f"Of {missing} of {len(summary.batches)} batches a rank was not recorded, or not in whole: waiting has "
            "all of their negotiation, and who was last is not known."
        )
    if summary.on_gpu:
        notes.append(
            "On GPUs it is not known when a collective is done: hidden and exposed are too small, other too large, and "
            "nothing is said of the speed of collectives."
        )
    return lines + [line for note in notes for line in textwrap.wrap(note, _WIDTH)]


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
    return [str(times.profile.rank), times.profile.host, *steps, *map(share, parts)]


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
    sizes = [batch.num_bytes for batch, _ in summary.batches]
    small = sum(size < _SMALL_BYTES for size in sizes)
    lines = [
        f"Batches: {count / max(1, summary.num_steps):.1f}{_a_step(summary)}, of {tensors / count:.1f} tensors each; "
        f"median size {_size(round(median(sizes)))}, {100 * small / count:.0f} % below {_SMALL_BYTES >> 10} KiB"
    ]
    if summary.num_bytes and summary.reduction_time and not summary.on_gpu:
        lines[0] += f"; {summary.num_bytes / summary.reduction_time:.2f} GB/s"
    return lines


def _tensors(summary: Summary) -> list[str]:
    if summary.on_gpu:
        return []
    costs = sorted(summary.tensors.items(), key=lambda each: -each[1].time)
    rows = [["tensor", "bytes", "batches", f"ms{_a_step(summary)}"]]
    for name, cost in costs[:_MOST_ROWS]:
        rows.append([_name(name), _size(cost.num_bytes), str(cost.count), f"{summary.per_step(cost.time):.3f}"])
    return _table(rows, left=(0,)) if len(rows) > 1 else []


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
