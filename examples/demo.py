"""Run the digits examples of a framework and compare: `make demo`, `make demo-tf`."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

EXAMPLES = Path(__file__).parent


@dataclass(frozen=True)
class Job:
    """One run of an example."""

    script: str
    ranks: int
    environment: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return the command that a user would type."""
        settings = [f"{name}={shlex.quote(value)} " for name, value in self.environment.items()]
        return f"{''.join(settings)}hvdrun -np {self.ranks} python examples/{self.script}"


JOBS = {
    "torch": [Job("torch/digits.py", 2), Job("torch/digits.py", 1)],
    "tensorflow": [
        Job("tensorflow/digits_tape.py", 2),
        Job("keras/digits_fit.py", 2, {"KERAS_BACKEND": "tensorflow"}),
        Job("keras/digits_fit.py", 2, {"KERAS_BACKEND": "torch"}),
    ],
}


def hvdrun() -> str:
    """Return the launcher that belongs to this interpreter."""
    beside = Path(sys.executable).parent / "hvdrun"
    found = str(beside) if beside.exists() else shutil.which("hvdrun")
    if found is None:
        sys.exit("hvdrun is not installed: run `make demo`, or `pip install .` first")
    return found


def run(job: Job, report: Path, console: Console) -> dict[str, Any]:
    """Run the example and return its report; end the program with its exit code if it fails."""
    command = [hvdrun(), "-np", str(job.ranks), sys.executable, str(EXAMPLES / job.script)]
    console.print(f"\n[bold]$ {job}[/bold]")
    # One thread per rank, also where there is only one: what is compared is the number of ranks.
    environment = {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2"} | os.environ | job.environment
    code = subprocess.run([*command, "--report", str(report)], env=environment, check=False).returncode
    if code != 0:
        sys.exit(code)
    result: dict[str, Any] = json.loads(report.read_text())
    return result


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("framework", nargs="?", choices=JOBS, default="torch")
    jobs = JOBS[parser.parse_args().framework]
    console = Console(highlight=False)
    with tempfile.TemporaryDirectory() as folder:
        results = [run(job, Path(folder) / f"{number}.json", console) for number, job in enumerate(jobs)]
    table = Table("example", "ranks", "training time", "images per second", "test accuracy", "same parameters")
    for column in table.columns[1:-1]:
        column.justify = "right"
    for job, result in zip(jobs, results, strict=True):
        same = "yes" if len(set(result["hashes"])) == 1 else "NO"
        table.add_row(
            " ".join([job.script, *job.environment.values()]),
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
