"""Train the digits example in each of its modes, with one slow rank: `python -m benchmarks.asynchronous`.

Prints a table of the times in which the modes have reached the loss, and writes docs/users/asynchronous.png: the losses
over time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt  # noqa: E402

from benchmarks.driver import BenchmarkError  # noqa: E402
from benchmarks.launch import beside  # noqa: E402

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "parameter_server" / "digits.py"
PICTURE = ROOT / "docs" / "users" / "asynchronous.png"
MODES = {"sync": "synchronous", "downpour": "Downpour", "ssp": "Downpour, bounded staleness", "easgd": "EASGD"}
COLOURS = {"sync": "#d1495b", "downpour": "#00798c", "ssp": "#2e4057", "easgd": "#edae49"}
PATIENCE_S = 300.0

Report = dict[str, Any]


def run(mode: str, ranks: int, slowdown: float, report: Path) -> Report:
    """Run the example once; return its report."""
    hvdrun = beside(sys.executable, "hvdrun")
    if hvdrun is None:
        raise BenchmarkError("hvdrun is not installed: run `make dev` first")
    command = [hvdrun, "-np", str(ranks), sys.executable, str(EXAMPLE)]
    command += ["--mode", mode, "--slowdown", str(slowdown), "--report", str(report)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False, cwd=report.parent
    )
    if done.returncode:
        raise BenchmarkError(f"{mode}: the example has ended with {done.returncode}: {done.stdout}{done.stderr}")
    result: Report = json.loads(report.read_text())
    return result


def document(reports: Mapping[str, Sequence[Report]]) -> str:
    """Return the table."""
    lines = ["| mode | time to the loss, median | of synchronous | steps of the ranks |", "|---|---|---|---|"]
    times = {mode: statistics.median(each["seconds"] for each in of_mode) for mode, of_mode in reports.items()}
    for mode, of_mode in reports.items():
        steps = ", ".join(map(str, of_mode[0]["steps"]))
        lines.append(f"| {MODES[mode]} | {times[mode]:.1f} s | {times[mode] / times['sync']:.2f} | {steps} |")
    return "\n".join(lines)


def draw(reports: Mapping[str, Sequence[Report]], path: Path) -> None:
    """Write a PNG: the loss over time of each run."""
    figure, axis = plt.subplots(figsize=(10.4, 4.2), layout="constrained")
    for mode, of_mode in reports.items():
        for number, each in enumerate(of_mode):
            times, losses = zip(*each["points"], strict=True)
            label = MODES[mode] if number == 0 else None
            axis.plot(times, losses, color=COLOURS[mode], linewidth=1.2, label=label)
            axis.plot(times[-1], losses[-1], "o", color=COLOURS[mode], markersize=4)
    axis.set_yscale("log")
    axis.set_ylabel("training loss")
    axis.set_xlabel("time, s")
    axis.set_xlim(left=0)
    axis.grid(alpha=0.3, which="both")
    axis.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    """Measure, print and draw."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.asynchronous", description=__doc__)
    parser.add_argument("--np", type=int, default=4, help="ranks")
    parser.add_argument("--slowdown", type=float, default=5.0, help="of the last rank")
    parser.add_argument("--runs", type=int, default=3, help="of each mode")
    parser.add_argument("--picture", type=Path, default=PICTURE)
    args = parser.parse_args()
    reports: dict[str, list[Report]] = {mode: [] for mode in MODES}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(args.runs):
            for mode, of_mode in reports.items():
                of_mode.append(run(mode, args.np, args.slowdown, Path(folder) / "report.json"))
                print(f"{mode}: {of_mode[-1]['seconds']:.1f} s", file=sys.stderr, flush=True)
    print(document(reports))
    draw(reports, args.picture)


if __name__ == "__main__":
    main()
