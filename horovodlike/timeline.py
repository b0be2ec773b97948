"""The timeline: a trace of each rank's collectives, for Chrome's ``about:tracing`` or https://ui.perfetto.dev.

Every rank writes a file of its own, which is complete JSON at any time; ``python -m horovodlike.timeline`` merges the
files of all ranks. Each tensor is a process of the trace, and each rank a thread in it. ``NEGOTIATE_ALLREDUCE`` lasts
from the rank's request until the tensor's batch begins, and ``ALLREDUCE`` from then until the batch is done.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from horovodlike import basics
from horovodlike._bootstrap.environment import path_of_rank
from horovodlike._engine import ops
from horovodlike._engine.native import lib

__all__ = ["files_of_job", "merge", "merge_files", "path_of_rank", "start_timeline", "stop_timeline"]

Event = dict[str, Any]

_START = "start_time_since_epoch_in_micros"


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Begin to write a timeline of this rank. Call it on all ranks, or on those that are of interest.

    A timeline in progress is ended first. ``init()`` starts a timeline if ``HOROVODLIKE_TIMELINE`` is set.

    Args:
        file_path: The same on all ranks; :func:`path_of_rank` derives each rank's file, which is overwritten.
        mark_cycles: Also mark where batches begin.

    Raises:
        ValueError: Not initialised, or the file cannot be written.
    """
    path = path_of_rank(file_path, basics.rank())
    ops.check(lib.hvl_start_timeline(os.fsencode(path), mark_cycles))


def stop_timeline() -> None:
    """End the timeline of this rank; its file is complete afterwards. Does nothing if there is none.

    Raises:
        ValueError: Not initialised.
    """
    basics.rank()
    lib.hvl_stop_timeline()


def files_of_job(file_path: Path) -> list[Path]:
    """Return the existing files of the ranks' timelines for one ``file_path``, in the order of the ranks."""
    pattern = re.compile(rf"{re.escape(file_path.stem)}\.rank(\d+){re.escape(file_path.suffix)}")
    found = (pattern.fullmatch(other.name) for other in file_path.parent.iterdir())
    ranks = sorted(int(match[1]) for match in found if match)
    return [path for path in (file_path, *(path_of_rank(file_path, rank) for rank in ranks)) if path.exists()]


def merge(timelines: Iterable[Sequence[Event]]) -> list[Event]:
    """Merge the timelines of ranks: tensors are matched by name, and times are aligned by the clocks.

    Args:
        timelines: The events of each rank.

    Returns:
        One timeline: a process for each tensor, and in it a thread for each rank.

    Raises:
        ValueError: A timeline has no start time, so this package has not written it.
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
    """Merge timeline files into one; return the number of its events."""
    events = merge(json.loads(path.read_text(encoding="utf-8")) for path in paths)
    lines = ",\n".join(json.dumps(event) for event in events)
    output.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    return len(events)


def main() -> int:
    """Merge the timelines that the command line names."""
    import argparse

    what = "Lay the timelines of all ranks over each other, in one file."
    parser = argparse.ArgumentParser(prog="python -m horovodlike.timeline", description=what)
    parser.add_argument("timeline", type=Path, help="what HOROVODLIKE_TIMELINE or start_timeline() was given")
    parser.add_argument("-o", "--output", type=Path, help="default: timeline.merged.json for timeline.json")
    options = parser.parse_args()
    path: Path = options.timeline
    output: Path = options.output or path.with_name(f"{path.stem}.merged{path.suffix}")
    try:
        paths = files_of_job(path)
        if not paths:
            raise FileNotFoundError(f"there is no {path}")
        count = merge_files(paths, output)
    except (OSError, ValueError) as problem:
        print(f"horovodlike.timeline: {problem}", file=sys.stderr)
        return 1
    print(f"{output}: {count} events of {len(paths)} files; open it at https://ui.perfetto.dev")
    return 0


if __name__ == "__main__":
    sys.exit(main())
