"""``hvdrun-records``: makes shards of a folder of labelled images."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

from horovodlike.data import convert_images
from horovodlike.data.records.source import library
from horovodlike.errors import DamagedRecordsError
from horovodlike.launcher.errors import counted

_USAGE_ERROR = 2
_TERMINATED = 128 + signal.SIGTERM


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="hvdrun-records",
        description="Write the images of a folder, which has a folder for each label, to Parquet files with checksums. "
        "The output appears when all is written.",
    )
    parser.add_argument("images", help="the folder; the names of its folders are the labels")
    parser.add_argument("output", help="the folder to be made, which must be new or empty")
    parser.add_argument("--records-per-shard", type=int, default=4096, metavar="N", help="images of a file (4096)")
    parser.add_argument("--shuffle", action="store_true", help="write the images in a random order")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="the seed of that order (0)")
    return parser.parse_args(argv)


def _convert(arguments: argparse.Namespace) -> str:
    """Convert with a progress bar, if standard error is a terminal; return a summary."""
    rich = library("rich.progress", "hvdrun-records")
    console = library("rich.console", "hvdrun-records").Console(stderr=True)
    columns = ("{task.description}", rich.BarColumn(), rich.MofNCompleteColumn(), rich.TimeRemainingColumn())
    with rich.Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("images", total=None)
        files = convert_images(
            arguments.images,
            arguments.output,
            arguments.records_per_shard,
            arguments.shuffle,
            arguments.seed,
            on_progress=lambda done, total: progress.update(bar, completed=done, total=total),
        )
    return f"{counted(len(files), 'shard')} in {arguments.output}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``hvdrun-records``; return its exit code: 2 if the arguments cannot be used, 1 after another error."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(_TERMINATED))  # so that nothing is left behind
    try:
        print(_convert(_arguments(argv)))
    except ValueError as error:
        print(f"hvdrun-records: {error}", file=sys.stderr)
        return _USAGE_ERROR
    except (DamagedRecordsError, ImportError, OSError, RuntimeError) as error:
        print(f"hvdrun-records: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
