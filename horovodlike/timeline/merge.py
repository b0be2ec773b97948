"""Timelines of several ranks made into one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from horovodlike.timeline import path_of_rank

__all__ = ["files_of_job", "merge", "merge_files"]

Event = dict[str, Any]

_START = "start_time_since_epoch_in_micros"


def files_of_job(file_path: Path) -> list[Path]:
    """Return the files that ranks have made of one ``file_path``, by rank."""
    pattern = re.compile(rf"{re.escape(file_path.stem)}\.rank(\d+){re.escape(file_path.suffix)}")
    found = (pattern.fullmatch(other.name) for other in file_path.parent.iterdir())
    ranks = sorted(int(match[1]) for match in found if match)
    return [path for path in (file_path, *(path_of_rank(file_path, rank) for rank in ranks)) if path.exists()]


def merge(timelines: Iterable[Sequence[Event]]) -> list[Event]:
    """Lay the timelines of ranks over each other: by the tensors' names, and by the clock.

    Args:
        timelines: The events of each rank.

    Returns:
        One timeline: a process for each tensor, and in it a thread for each rank.

    Raises:
        ValueError: One of them does not say when it began: it is no timeline of this package.
    """
    ranks = [_read(events) for events in timelines]
    began = min((start for start, _ in ranks), default=0)
    rows: dict[str, int] = {}
    merged: list[Event] = [_named("process_name", 0, name="all ranks", **{_START: began})]
    for start, events in ranks:
        names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
        for event in events:
            if event["ph"] == "M":
                continue
            row = 0
            if event["pid"] != 0:
                name = names.get(event["pid"], "?")
                row = rows.setdefault(name, len(rows) + 1)
            merged.append({**event, "pid": row, "ts": round(event["ts"] + start - began, 3)})
    for name, row in rows.items():
        merged += [_named("process_name", row, name=name), _named("process_sort_index", row, sort_index=row)]
    for row, rank in sorted({(event["pid"], event["tid"]) for event in merged if event["ph"] != "M"}):
        merged.append({**_named("thread_name", row, name=f"rank {rank}"), "tid": rank})
    return merged


def _read(events: Sequence[Event]) -> tuple[int, Sequence[Event]]:
    for event in events:
        if event["ph"] == "M" and _START in event["args"]:
            return int(event["args"][_START]), events
    raise ValueError("it does not say when it began: it is no timeline of horovodlike")


def _named(what: str, row: int, **arguments: Any) -> Event:  # noqa: ANN401 - any JSON value
    return {"ph": "M", "name": what, "pid": row, "args": arguments}


def merge_files(paths: Sequence[Path], output: Path) -> int:
    """Merge files into one; return how many events it has."""
    events = merge(json.loads(path.read_text(encoding="utf-8")) for path in paths)
    lines = ",\n".join(json.dumps(event) for event in events)
    output.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    return len(events)
