"""``python -m horovodlike.timeline timeline.json``: the timelines of all ranks in one file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from horovodlike.timeline.merge import files_of_job, merge_files


def main() -> int:
    """Merge what the command line names."""
    parser = argparse.ArgumentParser(prog="python -m horovodlike.timeline", description=__doc__)
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
