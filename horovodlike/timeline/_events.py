"""Events of a trace in Chrome's format: reading and checking them, and making new ones."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

Event = dict[str, Any]
T = TypeVar("T")

encoded = json.JSONEncoder(ensure_ascii=False).encode
"""An event as it is written. Perfetto reads no escapes of characters in all places."""

_GREATEST = 1e18  # in µs or s: greater times are none


class Slice(NamedTuple):
    """A slice of a trace: its process, its thread, and its start and end in ns, by one clock."""

    pid: int
    tid: int
    begin: int
    end: int


def read(path: Path, check: Callable[[Any], T]) -> T:
    """Return the result of ``check`` on the content of a JSON file, with None for numbers that JSON cannot express.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is damaged, or ``check`` has raised ValueError; the message names the file.
    """
    try:
        content = json.loads(path.read_bytes(), parse_constant=lambda _: None)
    except (ValueError, RecursionError) as problem:
        raise ValueError(f"{path} is damaged, or was not written to its end: {problem}") from problem
    try:
        return check(content)
    except ValueError as problem:
        raise ValueError(f"{path}: {problem}") from problem


@contextmanager
def replaced(path: Path) -> Iterator[IO[str]]:
    """Open a file to write, which takes the place of ``path`` when it is complete."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    with part.open("x", encoding="utf-8", errors="replace") as file:
        try:
            yield file
            file.close()
            part.replace(path)
        except BaseException:
            part.unlink()
            raise


def to_ns(us: float) -> int:
    """Convert the times of events."""
    return round(us * 1000)


def to_us(ns: int) -> float:
    """Convert to the times of events, which are exact to the nanosecond for some weeks from zero on."""
    return ns / 1000


def is_time(value: object) -> bool:
    """Return whether a value of JSON is a number that can be a time."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _GREATEST


def checked(events: object) -> list[Event]:
    """Return the events of a trace.

    Raises:
        ValueError: It is not a trace, or an event is not valid.
    """
    if not isinstance(events, list):
        raise ValueError("it has no list of events, so it is not a trace")
    for number, event in enumerate(events):
        if not isinstance(event, dict) or not isinstance(event.get("ph"), str):
            raise ValueError(f"event {number} has no phase (ph), so it is not a trace")
        for key in ("ts", "dur") if event["ph"] == "X" else () if event["ph"] == "M" else ("ts",):
            if not is_time(event.get(key)):
                raise ValueError(f"event {number} has no valid time as its {key}")
        is_valid = isinstance(event.get("pid", 0), int | str) and isinstance(event.get("tid", 0), int | str)
        texts = (event.get("name", ""), event.get("cat", ""))
        if not is_valid or not isinstance(event.get("args", {}), dict) or not all(isinstance(t, str) for t in texts):
            raise ValueError(f"event {number} is not a valid event")
    return events


def named(what: str, pid: int, **arguments: Any) -> Event:  # noqa: ANN401 - any JSON value
    """Make an event that names a process or a thread, or says where it is."""
    return {"ph": "M", "name": what, "pid": pid, "args": arguments}


def arrow(numbers: count[int], name: str, source: Slice, at: int, target: Slice, origin: int = 0) -> Iterator[Event]:
    """Make an arrow from the time ``at`` in one slice to the start of another, if both slices enclose its ends.

    Times are ns; the trace counts from ``origin`` on.
    A viewer binds the ends of an arrow to the slices that enclose them, and drops one that ends before it begins.
    """
    arrival = max(target.begin, at)
    if not (source.begin <= at < source.end and arrival < target.end):
        return
    both = {"cat": "release", "name": name, "id": next(numbers)}
    yield {"ph": "s", **both, "pid": source.pid, "tid": source.tid, "ts": to_us(at - origin)}
    yield {"ph": "f", "bp": "e", **both, "pid": target.pid, "tid": target.tid, "ts": to_us(arrival - origin)}


def first_free(ends: list[int], begin: int, end: int) -> int:
    """Return the first row whose last slice has ended at ``begin``, and put a slice until ``end`` into it.

    Args:
        ends: The end of the last slice in each row; a new row is added if all are taken.
        begin: The start of the slice, not before the start of any earlier slice.
        end: The end of the slice.
    """
    row = next((row for row, last in enumerate(ends) if last <= begin), len(ends))
    ends[row : row + 1] = [end]
    return row
