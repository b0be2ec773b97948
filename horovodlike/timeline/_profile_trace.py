"""The trace of a profile: the frameworks' and the engine's activity on all ranks, in one file for Perfetto."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import IO

from horovodlike.timeline._batches import NEGOTIATE, Match, RankBatch, matched
from horovodlike.timeline._events import Event, Slice, arrow, encoded, first_free, named, replaced, to_ns, to_us
from horovodlike.timeline._intervals import Interval
from horovodlike.timeline._profile import RankProfile, read_profile

_BEFORE_NS = 60_000_000_000  # the trace's zero is this long before the first step, so that earlier events have a time
_ROUNDING_NS = 1000  # a slice may exceed its enclosing slice by this; it is cut
_MOST_ROWS = 32  # rows for slices of one thread that do not nest; slices beyond are cut
_PSEUDO_PROCESSES = ("Spans", "Traces", "")  # PyTorch shows the whole profile as a slice of these


def merge_profile(folder: Path) -> Path:
    """Make one trace of the profile in a folder: ``trace.json``, which https://ui.perfetto.dev opens.

    Each rank is a process, with a row for its steps, a row for the batches of collectives, rows for their negotiation,
    and the rows of its framework. Clocks of hosts are aligned where collectives prove that they differ. An arrow leads
    from the rank that requested a batch last, and late, to the batch on each other rank. A trace that exists is
    replaced once the new one is complete.

    Args:
        folder: The output of ``hvdrun --attach PID profile``. A rank may lack its timeline or its trace.

    Returns:
        The path of the trace.

    Raises:
        OSError: A file cannot be read or written.
        ValueError: The folder is not a profile, or a file in it is damaged; the message names the file.
    """
    ranks = read_profile(folder)
    output = folder / "trace.json"
    with replaced(output) as file:
        _Writer(file, ranks).write()
    return output


class _Writer:
    """Writes the trace rank by rank, since the events of all ranks together may be too much for the memory."""

    def __init__(self, file: IO[str], ranks: list[RankProfile]) -> None:
        self._file = file
        self._ranks = ranks
        self._numbers = count(1)  # of processes, threads and flows: none is used twice
        known = [*(mark for each in ranks for mark in each.marks[:1])]
        known += [batch.first_request for each in ranks for batch in (each.batches or ())[:1]]
        self._origin = min(known, default=0) - _BEFORE_NS
        self._collectives: dict[tuple[int, int], Slice] = {}  # by rank and number of the collective
        self._negotiations: dict[tuple[int, int], Slice] = {}
        self._is_first = True

    def write(self) -> None:
        self._file.write('{"displayTimeUnit": "ms", "traceEvents": [')
        for each in self._ranks:
            self._add(self._events_of(each))
        known = {each.rank: each.batches or () for each in self._ranks if each.correction is not None}
        for match in matched(known):
            if match.is_late:
                self._add(self._arrows(match))
        self._file.write("\n]}\n")

    def _add(self, events: Iterable[Event]) -> None:
        for event in events:
            self._file.write(("\n" if self._is_first else ",\n") + encoded(event))
            self._is_first = False

    def _events_of(self, profile: RankProfile) -> Iterator[Event]:
        process = next(self._numbers)
        name = f"rank {profile.rank} \u00b7 {profile.host} \u00b7 {profile.pid}"
        yield named("process_name", process, name=name)
        yield named("process_sort_index", process, sort_index=profile.rank)
        if len(profile.marks) > 1:
            yield from self._steps(profile, process)
        if profile.batches:
            yield from self._communication(profile, process)
        if profile.events_of_framework is not None:
            events, offset = profile.events_of_framework()
            yield from self._framework(profile, events, offset - self._origin, process)

    def _thread(self, process: int, name: str) -> tuple[int, Iterator[Event]]:
        thread = next(self._numbers)
        names = (named("thread_name", process, name=name), named("thread_sort_index", process, sort_index=thread))
        return thread, ({**each, "tid": thread} for each in names)

    def _slice(self, name: str, category: str, row: tuple[int, int], interval: Interval, **arguments: object) -> Event:
        begin, end = interval[0] - self._origin, interval[1] - self._origin
        times = {"ts": to_us(begin), "dur": to_us(end - begin)}
        return {"ph": "X", "name": name, "cat": category, "pid": row[0], "tid": row[1], **times, "args": arguments}

    def _steps(self, profile: RankProfile, process: int) -> Iterator[Event]:
        thread, names = self._thread(process, "steps")
        yield from names
        marks = profile.marks
        for number, interval in enumerate(zip(marks, marks[1:], strict=False)):
            title = "recorded" if profile.first_step is None else f"step {profile.first_step + number}"
            yield self._slice(title, "step", (process, thread), interval)

    def _communication(self, profile: RankProfile, process: int) -> Iterator[Event]:
        thread, names = self._thread(process, "collectives")
        yield from names
        batches = profile.batches or []
        for batch in batches:
            arguments: dict[str, object] = {"collective": batch.number, "bytes": batch.num_bytes}
            if batch.on_gpu:
                arguments["device"] = "gpu"
            arguments["tensors"] = {
                request.name: {"bytes": request.num_bytes, "waited_us": to_us(batch.begun - request.at)}
                for request in batch.requests
            }
            interval = batch.begun, batch.ended
            title = f"{batch.kind} {batch.title}"
            yield self._slice(title, "collective", (process, thread), interval, **arguments)
            self._collectives[profile.rank, batch.number] = Slice(process, thread, *interval)
        yield from self._negotiation(
            profile.rank, [each for each in batches if each.first_request < each.begun], process
        )

    def _negotiation(self, rank: int, batches: list[RankBatch], process: int) -> Iterator[Event]:
        """Yield a slice from the first request of each batch to the batch's start, in as few rows as possible."""
        ends: list[int] = []
        threads: list[int] = []
        for batch in sorted(batches, key=lambda batch: batch.first_request):
            interval = batch.first_request, batch.begun
            row = first_free(ends, *interval)
            if row == len(threads):
                thread, names = self._thread(process, "negotiation" + (f" {row + 1}" if row else ""))
                threads.append(thread)
                yield from names
            title, place = f"{NEGOTIATE}{batch.kind} {batch.title}", (process, threads[row])
            yield self._slice(title, "negotiation", place, interval, collective=batch.number)
            self._negotiations[rank, batch.number] = Slice(*place, *interval)

    def _arrows(self, match: Match) -> Iterator[Event]:
        batch = match.members[match.last]
        source = self._negotiations.get((match.last, batch.number))
        if source is None:
            return
        for rank in match.members:
            if rank != match.last:
                name, target = f"rank {match.last} was last", self._collectives[rank, batch.number]
                yield from arrow(self._numbers, name, source, batch.ready, target, self._origin)

    def _framework(self, profile: RankProfile, events: list[Event], shift: int, process: int) -> Iterator[Event]:
        """Yield the framework's events with processes, threads and flows of their own numbers."""
        titles: dict[object, str] = {}
        names: dict[tuple[object, object], str] = {}
        for event in (each for each in events if each["ph"] == "M"):
            about = event.get("args", {})
            if event.get("name") == "thread_name":
                names[event.get("pid"), event.get("tid")] = str(about.get("name"))
            elif title := about.get("labels") or event.get("name") == "process_name" and about.get("name"):
                titles[event.get("pid")] = str(title)
        shown = (each.get("pid") for each in events if each["ph"] != "M")
        used = Counter(pid for pid in shown if pid not in _PSEUDO_PROCESSES)
        main = profile.pid if profile.pid in used else max(used, key=lambda pid: used[pid], default=None)
        numbers = {main: process}
        for pid in used:
            if pid not in numbers:
                numbers[pid] = next(self._numbers)
                title = f"rank {profile.rank} \u00b7 {titles.get(pid, pid)}"
                yield named("process_name", numbers[pid], name=title)
                yield named("process_sort_index", numbers[pid], sort_index=profile.rank)
        ids: dict[tuple[object, object], int] = {}
        rows: dict[tuple[object, object], list[Event]] = {}
        for event in events:
            if event["ph"] != "M" and event.get("pid") in used:
                rows.setdefault((event.get("pid"), event.get("tid")), []).append(event)
        for (pid, tid), of_row in rows.items():
            name = names.get((pid, tid), f"thread {tid}")
            yield from self._framework_row(of_row, name, numbers[pid], shift, ids)

    def _framework_row(
        self, events: list[Event], name: str, process: int, shift: int, ids: dict[tuple[object, object], int]
    ) -> Iterator[Event]:
        threads: list[int] = []
        slices = [each for each in events if each["ph"] == "X"]
        for row, event, interval in nested(slices, shift):
            if row == len(threads):
                thread, names = self._thread(process, name if row == 0 else f"{name} ({row + 1})")
                yield from names
                threads.append(thread)
            begin, end = interval
            times = {"ts": to_us(begin), "dur": to_us(end - begin)}
            yield self._with_ids({**event, "pid": process, "tid": threads[row], **times}, ids)
        if not threads:
            thread, names = self._thread(process, name)
            yield from names
            threads.append(thread)
        for event in events:
            if event["ph"] != "X":
                time = {"ts": to_us(to_ns(event["ts"]) + shift)}
                yield self._with_ids({**event, "pid": process, "tid": threads[0], **time}, ids)

    def _with_ids(self, event: Event, ids: dict[tuple[object, object], int]) -> Event:
        for key in ("id", "bind_id"):
            if key in event:
                known = (event.get("cat") if key == "id" else key, str(event[key]))
                if known not in ids:
                    ids[known] = next(self._numbers)
                event[key] = ids[known]
        return event


def nested(slices: list[Event], shift: int) -> Iterator[tuple[int, Event, Interval]]:
    """Yield the row of each slice of a thread, the slice, and from when to when it lasts in ns, so that rows nest.

    A row nests if any two slices in it are apart, or one is within the other: a viewer drops others. Nearly all are in
    row 0; one that overlaps others there is put into a row behind it. If there are too many rows, slices are shortened.
    """
    timed = []
    for each in slices:
        begin = to_ns(each["ts"]) + shift
        timed.append((begin, -max(0, to_ns(each["dur"])), each))
    timed.sort(key=lambda each: each[:2])
    rows: list[list[int]] = [[]]  # the ends of the slices that have begun
    for begin, negative, event in timed:
        end = begin - negative
        for row, ends in enumerate(rows):
            while ends and ends[-1] <= begin:
                ends.pop()
            if not ends or end <= ends[-1] + _ROUNDING_NS or row + 1 == _MOST_ROWS:
                break
        else:
            row, ends = len(rows), []
            rows.append(ends)
        if ends:
            end = min(end, ends[-1])
        ends.append(end)
        yield row, event, (begin, end)
