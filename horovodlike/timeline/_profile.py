"""A profile: the folder that ``hvdrun --attach PID profile`` writes."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from horovodlike.timeline._batches import RankBatch, check_one_job, timeline_of
from horovodlike.timeline._clocks import corrections
from horovodlike.timeline._events import Event, checked, is_time, read, to_ns

_FILE = re.compile(r"rank(\d+)\.json")


@dataclass
class RankProfile:
    """The steps of one rank. Times are ns since the epoch, by the clock of the first rank.

    Attributes:
        rank: The rank.
        size: Number of ranks of the job, of which not all need have a profile.
        host: Name of its host.
        pid: Id of its process there; 0: not known.
        framework: Source of the events: ``torch`` or ``stacks``; empty: there are none.
        first_step: Number of the first step; None: steps are not marked.
        marks: Times at which each step began, and the last one ended; or fewer than two.
        batches: The engine's; None: there is no timeline.
        correction: What was added to the times of its host; None: by how much its clock differs is not known.
        events_of_framework: Reads the framework's events, and what to add to their times (``ts`` in ns) to get times of
            this class; None: there are none.
    """

    rank: int
    size: int
    host: str
    pid: int = 0
    framework: str = ""
    first_step: int | None = None
    marks: list[int] = field(default_factory=list)
    batches: list[RankBatch] | None = None
    correction: int | None = 0
    events_of_framework: Callable[[], tuple[list[Event], int]] | None = None


def read_profile(folder: Path) -> list[RankProfile]:
    """Return what the folder of a profile has, in the order of the ranks, with the clocks of the hosts aligned.

    Raises:
        OSError: A file cannot be read.
        ValueError: The folder is not a profile, or a file in it is damaged; the message names the file.
    """
    found = sorted((int(match[1]), path) for path in folder.iterdir() if (match := _FILE.fullmatch(path.name)))
    if not found:
        raise ValueError(f"{folder} has no rank0.json or the like, so it is not a profile of hvdrun --attach")
    ranks = [_read_rank(path, rank) for rank, path in found]
    try:
        align(ranks)
    except ValueError as problem:
        raise ValueError(f"{folder}: {problem}") from problem
    return ranks


def align(ranks: list[RankProfile]) -> None:
    """Correct the clocks of hosts as far as collectives prove that they differ.

    Raises:
        ValueError: The ranks are not of one job.
    """
    check_one_job((each.rank, each.size) for each in ranks)
    shifts = corrections((each.host, each.batches or ()) for each in ranks)
    for each in ranks:
        each.correction = shifts[each.host]
        shift = each.correction or 0
        each.marks = [mark + shift for mark in each.marks]
        for batch in each.batches or ():
            batch.shift(shift)


def _read_rank(path: Path, rank: int) -> RankProfile:
    profile = read(path, _checked_rank)
    if profile.rank != rank:
        raise ValueError(f"{path} is of rank {profile.rank}, so it has another rank's name")
    timeline = path.with_name(f"rank{rank}.timeline.json")
    if timeline.exists():
        found = read(timeline, timeline_of)
        if (found.rank, found.size) != (rank, profile.size):
            raise ValueError(f"{timeline} is of rank {found.rank} of {found.size}, which {path.name} is not")
        profile.batches = found.batches
    trace = path.with_name(f"rank{rank}.trace.json")
    if trace.exists():

        def events() -> tuple[list[Event], int]:
            found, epoch = read(trace, _checked_trace)
            return found, epoch + (profile.correction or 0)

        profile.events_of_framework = events
    else:
        profile.framework = ""
    return profile


def _checked_rank(content: Any) -> RankProfile:  # noqa: ANN401 - any JSON value
    if not isinstance(content, dict):
        raise ValueError("it is not the profile of a rank")
    kinds = {"rank": int, "size": int, "host": str, "pid": int, "framework": str, "marks": list}
    for key, kind in kinds.items():
        value = content.get(key)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ValueError(
                f"its {key!r} is {value!r}, so it is not a profile, or one of another version of horovodlike"
            )
    marks = content["marks"]
    if not all(map(is_time, marks)) or marks != sorted(marks):
        raise ValueError("its 'marks' are not the times of steps, in seconds, in their order")
    first = content.get("first_step")
    return RankProfile(
        **{key: content[key] for key in kinds if key != "marks"},
        first_step=first if isinstance(first, int) else None,
        marks=[round(mark * 1e9) for mark in marks],
    )


def _checked_trace(content: Any) -> tuple[list[Event], int]:  # noqa: ANN401 - any JSON value
    if not isinstance(content, dict):
        raise ValueError("it is not the trace of a profile")
    if not is_time(content.get("epoch_us")):
        raise ValueError("it has no valid 'epoch_us', so nothing says when it began")
    return checked(content.get("traceEvents")), to_ns(content["epoch_us"])
