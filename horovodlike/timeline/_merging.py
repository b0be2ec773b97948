"""The timelines of all ranks made into one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from pathlib import Path

from horovodlike._bootstrap.environment import path_of_rank
from horovodlike.timeline._batches import START, Match, TensorRequest, Timeline, check_one_job, matched, timeline_of
from horovodlike.timeline._clocks import corrections
from horovodlike.timeline._events import Event, Slice, arrow, encoded, first_free, named, read, replaced, to_ns, to_us


def files_of_job(file_path: Path) -> list[Path]:
    """Return the existing files of the ranks' timelines for one ``file_path``, in the order of the ranks."""
    pattern = re.compile(rf"{re.escape(file_path.stem)}\.rank(\d+){re.escape(file_path.suffix)}")
    found = (pattern.fullmatch(other.name) for other in file_path.parent.iterdir())
    ranks = sorted(int(match[1]) for match in found if match)
    return [path for path in (file_path, *(path_of_rank(file_path, rank) for rank in ranks)) if path.exists()]


def merge_files(paths: Sequence[Path], output: Path) -> int:
    """Merge timeline files into one, which replaces one that exists; return the number of its events."""
    timelines = [read(path, timeline_of) for path in paths]
    with replaced(output) as file:
        number = 0
        for number, event in enumerate(_merged(timelines), 1):
            file.write(("[\n" if number == 1 else ",\n") + encoded(event))
        file.write("\n]\n")
    return number


def merge(timelines: Iterable[Sequence[Event]]) -> list[Event]:
    """Merge the timelines of ranks: tensors are matched by name, and times are aligned by the clocks.

    Where collectives prove that the clocks of hosts differ, they are corrected. An arrow leads from the last request of
    a rank that came last, and late, to the collective on each other rank.

    Args:
        timelines: The events of each rank.

    Returns:
        One timeline: a process for each tensor, and in it a thread for each rank.

    Raises:
        ValueError: One is not the timeline of a rank, or was written by another version, or by another job.
    """
    return [*_merged([timeline_of([*events]) for events in timelines])]


def _merged(timelines: Sequence[Timeline]) -> Iterator[Event]:
    check_one_job((each.rank, each.size) for each in timelines)
    shifts = corrections((each.host, each.batches) for each in timelines)
    starts = [each.start + (shifts[each.host] or 0) for each in timelines]
    for each in timelines:
        for batch in each.batches:
            batch.shift(shifts[each.host] or 0)
    origin = min(starts, default=0) // 1000 * 1000
    yield named("process_name", 0, name="all ranks", **{START: origin // 1000})
    rows: dict[str, int] = {}
    threads: dict[tuple[int, int], str] = {}
    places: dict[int, Slice] = {}  # by the ids of the events
    for start, timeline in zip(starts, timelines, strict=True):
        yield from _moved(timeline, start - origin, rows, threads, places)
    numbers = count(1)
    for match in matched({each.rank: each.batches for each in timelines if shifts[each.host] is not None}):
        if match.is_late:
            yield from _arrows(match, places, numbers)
    for name, row in rows.items():
        yield named("process_name", row, name=name)
        yield named("process_sort_index", row, sort_index=row)
    for (row, thread), name in sorted(threads.items()):
        yield {**named("thread_name", row, name=name), "tid": thread}


def _moved(
    timeline: Timeline, start: int, rows: dict[str, int], threads: dict[tuple[int, int], str], places: dict[int, Slice]
) -> Iterator[Event]:
    """Yield the events of a rank as they are in the merged timeline.

    A request that was made while the tensor was still being reduced is put on another thread: slices of a thread must
    nest.
    """
    ends: dict[int, list[int]] = {}
    for event in timeline.events:
        if event["ph"] == "M":
            continue
        row = rows.setdefault(timeline.names.get(event["pid"], "?"), len(rows) + 1) if event["pid"] != 0 else 0
        begin, number = start + to_ns(event["ts"]), 0
        end = begin + to_ns(event.get("dur", 0))
        if event["ph"] == "X":
            number = first_free(ends.setdefault(row, []), begin, end)
        thread = timeline.rank + number * timeline.size
        threads[row, thread] = f"rank {timeline.rank}" + (f" ({number + 1})" if number else "")
        places[id(event)] = Slice(row, thread, begin, end)
        yield {**event, "pid": row, "tid": thread, "ts": to_us(begin)}


def _arrows(match: Match, places: dict[int, Slice], numbers: count[int]) -> Iterator[Event]:
    last: TensorRequest = max(match.members[match.last].requests, key=lambda request: request.at)
    source = places[id(last.negotiation)]
    for rank, batch in match.members.items():
        if rank != match.last:
            target = next((each for each in batch.requests if each.name == last.name), batch.requests[0])
            yield from arrow(numbers, f"rank {match.last} was last", source, source.begin, places[id(target.reduction)])
