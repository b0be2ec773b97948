"""``python -m horovodlike.timeline``: merge timelines or a profile, or tell what took the time."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from horovodlike.timeline import files_of_job, merge_files, merge_profile, summarize

_SUMMARY = "summary"
_VIEWER = "open it at https://ui.perfetto.dev"


def main(arguments: list[str]) -> int:
    """Do what the command line says."""
    try:
        print(_summary(arguments[1:]) if arguments[:1] == [_SUMMARY] else _merge(arguments))
    except (OSError, ValueError) as problem:
        print(f"horovodlike.timeline: {problem}", file=sys.stderr)
        return 1
    return 0


def _merge(arguments: list[str]) -> str:
    what = "Lay the timelines of all ranks over each other, in one file."
    more = "python -m horovodlike.timeline summary PATH tells what took the time."
    parser = argparse.ArgumentParser(prog="python -m horovodlike.timeline", description=what, epilog=more)
    timeline = "what HOROVODLIKE_TIMELINE or start_timeline() was given, or the folder of a profile"
    parser.add_argument("timeline", type=Path, help=timeline)
    output = "default: timeline.merged.json for timeline.json; trace.json in the folder of a profile"
    parser.add_argument("-o", "--output", type=Path, help=output)
    options = parser.parse_args(arguments)
    path: Path = options.timeline
    if path.is_dir():
        if options.output is not None:
            parser.error("the trace of a profile is trace.json in its folder: leave --output out")
        return f"{merge_profile(path)}: {_VIEWER}"
    to: Path = options.output or path.with_name(f"{path.stem}.merged{path.suffix}")
    paths = files_of_job(path)
    if not paths:
        raise FileNotFoundError(f"there is no {path}")
    count = merge_files(paths, to)
    return f"{to}: {count} events of {len(paths)} files; {_VIEWER}"


def _summary(arguments: list[str]) -> str:
    what = "Tell what took the time."
    parser = argparse.ArgumentParser(prog=f"python -m horovodlike.timeline {_SUMMARY}", description=what)
    parser.add_argument("path", type=Path, help="the folder of a profile, or a timeline's file")
    path: Path = parser.parse_args(arguments).path
    return summarize(path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
