"""Run the digits example with 2 ranks and with 1, and compare: `make demo`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

SCRIPT = Path(__file__).parent / "torch" / "digits.py"


def hvdrun() -> str:
    """Returns the launcher that belongs to this interpreter."""
    beside = Path(sys.executable).parent / "hvdrun"
    found = str(beside) if beside.exists() else shutil.which("hvdrun")
    if found is None:
        sys.exit("hvdrun is not installed: run `make demo`, or `pip install .` first")
    return found


def run(ranks: int, report: Path, console: Console) -> dict[str, Any]:
    """Runs the example and returns what it reports; ends the program with its exit code if it fails."""
    command = [hvdrun(), "-np", str(ranks), sys.executable, str(SCRIPT)]
    console.print(f"\n[bold]$ hvdrun -np {ranks} python examples/torch/digits.py[/bold]")
    # One thread per rank, also where there is only one: what is compared is the number of ranks.
    environment = {"OMP_NUM_THREADS": "1"} | os.environ
    code = subprocess.run([*command, "--report", str(report)], env=environment, check=False).returncode
    if code != 0:
        sys.exit(code)
    result: dict[str, Any] = json.loads(report.read_text())
    return result


def main() -> None:
    """Prints the table."""
    console = Console(highlight=False)
    with tempfile.TemporaryDirectory() as folder:
        results = [run(ranks, Path(folder) / f"{ranks}.json", console) for ranks in (2, 1)]
    table = Table("ranks", "training time", "images per second", "test accuracy", "same parameters")
    for column in table.columns[:-1]:
        column.justify = "right"
    for result in results:
        same = "yes" if len(set(result["hashes"])) == 1 else "NO"
        table.add_row(
            str(result["size"]),
            f"{result['seconds']:.2f} s",
            f"{result['images_per_second']:,.0f}",
            f"{result['accuracy']:.2%}",
            same if result["size"] > 1 else "",
        )
    console.print()
    console.print(table)


if __name__ == "__main__":
    main()
