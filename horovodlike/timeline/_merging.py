"""The timelines of all ranks made into one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from horovodlike._bootstrap.environment import path_of_rank
from horovodlike.timeline._arrows import Slice, arrow
from horovodlike.timeline._batches import (
    CLIPPED,
    NEGOTIATE,
    START,
    Event,
    RankBatch,
    batches_of,
    checked_timeline,
    encoded,
    load,
    matched,
    microseconds,
    names_of,
    nanoseconds,
    start_of,
)
from horovodlike.timeline._clocks import corrections

_ROW = 1 << 20  # between the threads of one rank


def files_of_job(file_path: Path) -> list[Path]:
    """Return the existing files of the ranks' timelines for one ``file_path``, in the order of the ranks."""
    pattern = re.compile(rf"{re.escape(file_path.stem)}\.rank(\d+){re.escape(file_path.suffix)}")
    found = (pattern.fullmatch(other.name) for other in file_path.parent.iterdir())
    ranks = sorted(int(match[1]) for match in found if match)
    return [path for path in (file_path, *(path_of_rank(file_path, rank) for rank in ranks)) if path.exists()]


def merge_files(paths: Sequence[Path], output: Path) -> int:
    """Merge timeline files into one; return the number of its events."""
    events = merge(read_timeline(path) for path in paths)
    lines = ",\n".join(encoded(event) for event in events)
    output.write_text(f"[\n{lines}\n]\n", encoding="utf-8", errors="replace")
    return len(events)


def read_timeline(path: Path) -> list[Event]:
    """Return the events of a timeline's file.

    Raises:
        OSError: It cannot be read.
        ValueError: It is none.
    """
    try:
        return checked_timeline(load(path))
    except ValueError as problem:
        raise problem if str(path) in str(problem) else ValueError(f"{path}: {problem}") from problem


def merge(timelines: Iterable[Sequence[Event]]) -> list[Event]:
    """Merge the timelines of ranks: tensors are matched by name, and times are aligned by the clocks.

    Where collectives prove that clocks differ, as they do between hosts, they are corrected. An arrow leads from the
    request of a tensor that came last to the collective on each other rank.

    Args:
        timelines: The events of each rank.

    Returns:
        One timeline: a process for each tensor, and in it a thread for each rank.

    Raises:
        ValueError: A timeline has no start time, so this package has not written it.
    """
    ranks = [checked_timeline([*events]) for events in timelines]
    batches: dict[int, list[RankBatch]] = {}
    for each in ranks:
        batches |= batches_of(each)
    shifts = corrections(batches, {rank: rank for rank in batches})
    for rank, of_rank in batches.items():
        for batch in of_rank:
            batch.shift(shifts[rank])
    starts = [start_of(each) * 1000 + _shift(each, shifts) for each in ranks]
    began = min(starts, default=0)
    rows: dict[str, int] = {}
    moved: dict[int, Event] = {}
    merged: list[Event] = [named("process_name", 0, name="all ranks", **{START: began // 1000})]
    for start, each in zip(starts, ranks, strict=True):
        merged += _moved(each, start - began // 1000 * 1000, rows, moved)
    threads = sorted({(event["pid"], event["tid"]) for event in merged if event["ph"] != "M"})
    merged += _arrows(matched(batches, len(ranks)), moved)
    for name, row in rows.items():
        merged += [named("process_name", row, name=name), named("process_sort_index", row, sort_index=row)]
    for row, thread in threads:
        number, rank = divmod(thread, _ROW)
        name = f"rank {rank}" + (f" ({number + 1})" if number else "")
        merged.append({**named("thread_name", row, name=name, rank=rank), "tid": thread})
    return merged


def _shift(events: Sequence[Event], shifts: Mapping[int, int]) -> int:
    return next((shifts[event["tid"]] for event in events if event.get("tid") in shifts), 0)


def _moved(events: Sequence[Event], start: int, rows: dict[str, int], moved: dict[int, Event]) -> Iterator[Event]:
    """Yield the events of a rank as they are in the merged timeline, and put them into ``moved`` by their old ids.

    A request that was made while the tensor was still being reduced gets another row: slices of a row must nest.
    """
    names = names_of(events)
    ends: dict[tuple[int, int], list[int]] = {}
    for event in events:
        if event["ph"] == "M":
            continue
        row = 0
        if event["pid"] != 0:
            row = rows.setdefault(names.get(event["pid"], "?"), len(rows) + 1)
        begin = start + nanoseconds(event["ts"])
        new = {**event, "pid": row, "ts": microseconds(begin)}
        if event["ph"] == "X":
            used = ends.setdefault((row, event["tid"]), [])
            number = next((number for number, end in enumerate(used) if end <= begin), len(used))
            used[number : number + 1] = [begin + nanoseconds(event["dur"])]
            new["tid"] += number * _ROW
            if event["name"].startswith(NEGOTIATE) and event["ts"] <= 0:
                new["args"] = {CLIPPED: True}
        moved[id(event)] = new
        yield new


def _arrows(batches: Iterable[Mapping[int, RankBatch]], moved: Mapping[int, Event]) -> Iterator[Event]:
    numbers = count(1)
    for members in batches:
        requests: dict[str, dict[int, tuple[Event, Event]]] = {}
        for rank, batch in members.items():
            for request in batch.requests:
                if request.negotiation is not None:
                    pair = moved[id(request.negotiation)], moved[id(request.reduction)]
                    requests.setdefault(request.name, {})[rank] = pair
        for of_tensor in requests.values():
            last = max(of_tensor, key=lambda rank: of_tensor[rank][0]["ts"])
            source = _place(of_tensor[last][0])
            for rank, (_, reduction) in of_tensor.items():
                if rank != last:
                    yield from arrow(numbers, f"rank {last} was last", source, source.begin, _place(reduction))


def _place(event: Event) -> Slice:
    begin = nanoseconds(event["ts"])
    return Slice(event["pid"], event["tid"], begin, begin + nanoseconds(event["dur"]))


def named(what: str, pid: int, **arguments: Any) -> Event:  # noqa: ANN401 - any JSON value
    """Make an event that names a process or a thread, or says where it is."""
    return {"ph": "M", "name": what, "pid": pid, "args": arguments}
