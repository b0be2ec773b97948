"""A profile: the folder that ``hvdrun --attach PID profile`` writes, or the trace that was made of one."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from horovodlike.timeline._batches import (
    Event,
    Number,
    RankBatch,
    TensorRequest,
    batches_of,
    checked,
    load,
    nanoseconds,
)
from horovodlike.timeline._clocks import corrections
from horovodlike.timeline._merging import read_timeline

VERSION = 1
KEY = "horovodlike"
"""Of the trace of a profile: what its events do not tell."""
COLLECTIVE, NEGOTIATION, STEP = OWN_CATEGORIES = ("collective", "negotiation", "step")

_FILE = re.compile(r"rank(\d+)\.json")


@dataclass
class RankProfile:
    """The steps of one rank. Times are ns since the epoch, by the clock of the first rank.

    Attributes:
        rank: The rank.
        size: The number of ranks of the job, of which not all need have a profile.
        host: Its name.
        pid: Of its process there.
        framework: What recorded the events: ``torch``, ``tensorflow`` or ``stacks``; empty: there are none.
        first_step: The number of the first step; None: steps are not marked.
        marks: When each step began, and the last one ended; or less than two.
        batches: The engine's; None: there is no timeline.
        correction: What was added to the times of its host.
    """

    rank: int
    size: int
    host: str
    pid: int
    framework: str = ""
    first_step: int | None = None
    marks: list[int] = field(default_factory=list)
    batches: list[RankBatch] | None = None
    correction: int = 0
    events_of_framework: Callable[[], tuple[list[Event], int]] | None = None
    """Read the framework's events, and what to add to their times (``ts`` in ns) to get those of this class."""


def read_profile(folder: Path) -> list[RankProfile]:
    """Return what the folder of a profile has, in the order of the ranks, with the clocks of the hosts aligned.

    Raises:
        OSError: A file cannot be read.
        ValueError: The folder is no profile, or a file in it is damaged; the message names the file.
    """
    found = sorted((int(match[1]), path) for path in folder.iterdir() if (match := _FILE.fullmatch(path.name)))
    if not found:
        raise ValueError(f"{folder} has no rank0.json or the like: it is no profile of hvdrun --attach")
    ranks = [_read_rank(path, rank) for rank, path in found]
    if len({each.size for each in ranks}) > 1:
        raise ValueError(f"{folder} has files of several jobs: their sizes are {[each.size for each in ranks]}")
    batches = {each.rank: each.batches for each in ranks if each.batches}
    shifts = corrections(batches, {each.rank: each.host for each in ranks})
    by_host = {each.host: shifts[each.rank] for each in ranks if each.rank in shifts}
    for each in ranks:
        each.correction = by_host.get(each.host, 0)
        each.marks = [mark + each.correction for mark in each.marks]
        for batch in each.batches or ():
            batch.shift(each.correction)
    return ranks


def _read_rank(path: Path, rank: int) -> RankProfile:
    content = load(path)
    try:
        profile = _checked_rank(content)
    except ValueError as problem:
        raise ValueError(f"{path}: {problem}") from problem
    if profile.rank != rank:
        raise ValueError(f"{path} is of rank {profile.rank}, so it has another rank's name")
    timeline = path.with_name(f"rank{rank}.timeline.json")
    if timeline.exists():
        profile.batches = batches_of(read_timeline(timeline)).get(rank, [])
    trace = path.with_name(f"rank{rank}.trace.json")
    if trace.exists():
        profile.events_of_framework = lambda: _read_trace(trace, profile.correction)
    else:
        profile.framework = ""
    return profile


def _checked_rank(content: Any) -> RankProfile:  # noqa: ANN401 - any JSON value
    if not isinstance(content, dict):
        raise ValueError("it is no profile of a rank")
    kinds = {"rank": int, "size": int, "host": str, "pid": int, "framework": str, "marks": list}
    for key, kind in kinds.items():
        value = content.get(key)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ValueError(f"its {key!r} is {value!r}, so it is no profile, or one of another version of horovodlike")
    marks = content["marks"]
    are_times = all(isinstance(mark, Number) and not isinstance(mark, bool) for mark in marks)
    if not are_times or marks != sorted(marks):
        raise ValueError("its 'marks' are not the times of steps, in seconds, in their order")
    first = content.get("first_step")
    return RankProfile(
        rank=content["rank"],
        size=content["size"],
        host=content["host"],
        pid=content["pid"],
        framework=content["framework"],
        first_step=first if isinstance(first, int) else None,
        marks=[round(mark * 1e9) for mark in marks],
    )


def _read_trace(path: Path, correction: int) -> tuple[list[Event], int]:
    content = load(path)
    try:
        if not isinstance(content, dict):
            raise ValueError("it is no trace of a profile")
        if not isinstance(epoch := content.get("epoch_us"), Number):
            raise ValueError("it has no 'epoch_us', so nothing says when it began")
        return checked(content.get("traceEvents")), nanoseconds(epoch) + correction
    except ValueError as problem:
        raise ValueError(f"{path}: {problem}") from problem


def read_merged(content: dict[str, Any]) -> list[RankProfile]:
    """Return the profile of which a trace was made.

    Raises:
        ValueError: It was not made of one, or by another version.
    """
    about = content.get(KEY)
    if not isinstance(about, dict) or about.get("version") != VERSION:
        raise ValueError("it was not made of a profile by this version of horovodlike")
    events = checked(content.get("traceEvents"))
    own: dict[int, list[Event]] = {}
    others: dict[int, list[Event]] = {}
    for event in events:
        kept = own if event.get("cat") in OWN_CATEGORIES else others
        kept.setdefault(event.get("pid", -1), []).append(event)
    try:
        return [_restored(dict(each), own, others, about["origin_ns"]) for each in about["ranks"]]
    except (KeyError, TypeError) as problem:
        raise ValueError(f"its part {KEY!r} lacks something: {problem!r}") from problem


def _restored(
    about: dict[str, Any], own: dict[int, list[Event]], others: dict[int, list[Event]], origin: int
) -> RankProfile:
    processes, has_timeline = about.pop("processes"), about.pop("has_timeline")
    profile = RankProfile(**about)
    events = own.get(processes[0], [])
    steps = [event for event in events if event["cat"] == STEP]
    times = [nanoseconds(event["ts"]) + origin for event in steps]
    profile.marks = times + [times[-1] + nanoseconds(steps[-1]["dur"])] if steps else []
    if has_timeline:
        profile.batches = [_restored_batch(event, origin) for event in events if event["cat"] == COLLECTIVE]
    if profile.framework:
        left = [event for process in processes for event in others.get(process, ())]
        profile.events_of_framework = lambda: (left, origin)
    return profile


def _restored_batch(event: Event, origin: int) -> RankBatch:
    arguments = event["args"]
    begun = nanoseconds(event["ts"]) + origin
    kind = event["name"].partition(" ")[0]
    batch = RankBatch(arguments["collective"], kind, begun, begun + nanoseconds(event["dur"]))
    batch.on_gpu, batch.clipped = arguments.get("device") == "gpu", arguments.get("clipped", False)
    for name, each in arguments["tensors"].items():
        batch.requests.append(
            TensorRequest(name, begun - nanoseconds(each["waited_us"]), each.get("bytes"), None, event)
        )
    return batch
