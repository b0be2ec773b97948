"""Measure the cost of negotiation by the number of ranks, in simulated jobs: `python -m benchmarks.negotiation`.

Runs tests/native/negotiation_cost.cc, which `make bench` builds, and writes docs/developers/negotiation.png and the
table in docs/developers/negotiation.md. Configurations take turns; the median of the rounds is reported.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt  # noqa: E402

from benchmarks.tables import human_time, table  # noqa: E402

ROOT = Path(__file__).parents[1]
RANKS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
DIRECTLY = 0  # as a fan-out: every rank talks to the coordinator
FAN_OUTS = (DIRECTLY, 4, 16, 64)
SHOWN = 16  # in the table, beside the one without a tree
COLOURS = {DIRECTLY: "#8d96a3", 4: "#66a182", 16: "#d1495b", 64: "#00798c"}
BEGIN, END = "<!-- written by python -m benchmarks.negotiation -->\n", "<!-- end -->\n"

Row = dict[str, Any]


def built_program() -> Path:
    """Return the program, which is built with the package if its tests are."""
    built = ROOT / "build" / "release" / "tests" / "negotiation_cost"
    if not built.exists():
        sys.exit(f"{built} is not there: `make bench` and `make test` build it")
    return built


def measure(program: Path, *, rounds: int) -> list[Row]:
    """Return one row for each number of ranks and fan-out."""
    runs: dict[tuple[int, int], list[Row]] = {}
    for _ in range(rounds):
        for ranks in RANKS:
            for fan_out in FAN_OUTS:
                done = subprocess.run([program, str(ranks), str(fan_out)], check=True, capture_output=True, text=True)
                runs.setdefault((ranks, fan_out), []).append(json.loads(done.stdout))
    return [_median(rows) for rows in runs.values()]


def _median(rows: Sequence[Row]) -> Row:
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]}


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write a PNG: the coordinator's time and the busiest process's messages over the number of ranks."""
    figure, (times, messages) = plt.subplots(1, 2, figsize=(10.4, 4.2), layout="constrained")
    for fan_out in FAN_OUTS:
        points = sorted(
            (row["ranks"], row["coordinator_ns"] / 1e3, row["messages"]) for row in rows if row["fan_out"] == fan_out
        )
        ranks, microseconds, counts = zip(*points, strict=True)
        title = "without a tree" if fan_out == DIRECTLY else f"fan-out {fan_out}"
        style: dict[str, Any] = {"label": title, "color": COLOURS[fan_out], "marker": "o", "markersize": 4}
        times.plot(ranks, microseconds, **style)
        messages.plot(ranks, counts, **style)
    times.set_ylabel("coordinator's time for a known tensor, µs")
    messages.set_ylabel("messages of the busiest process for a tensor")
    for axis in (times, messages):
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(RANKS, [str(ranks) for ranks in RANKS], rotation=45)
        axis.set_xlabel("ranks, 8 on each host")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def document(rows: Sequence[Row]) -> str:
    """Return the table: one line for each number of ranks."""
    by_place = {(row["ranks"], row["fan_out"]): row for row in rows}
    head = [
        "ranks",
        "hosts",
        "coordinator, without a tree",
        "messages",
        f"coordinator, fan-out {SHOWN}",
        "busiest aggregator",
        "most messages of a process",
    ]
    lines = []
    for ranks in RANKS:
        without, tree = by_place[ranks, DIRECTLY], by_place[ranks, SHOWN]
        aggregator = human_time(tree["aggregator_ns"] / 1e9) if tree["hosts"] > 1 else ""
        times = [human_time(row["coordinator_ns"] / 1e9) for row in (without, tree)]
        counts = [f"{row['messages']:.0f}" for row in (without, tree)]
        lines.append([str(ranks), f"{tree['hosts']:.0f}", times[0], counts[0], times[1], aggregator, counts[1]])
    return table(head, lines) + "\n"


def main() -> None:
    """Measures, and writes picture and table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.negotiation", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rows = measure(built_program(), rounds=parser.parse_args().rounds)
    draw(rows, ROOT / "docs" / "developers" / "negotiation.png")
    page = ROOT / "docs" / "developers" / "negotiation.md"
    before, rest = page.read_text().split(BEGIN)
    page.write_text(before + BEGIN + document(rows) + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
