"""`python -m benchmarks.readme`: write the four rows of `README.md`, between its marks, from `results/results.json`."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from benchmarks.tables import KIB, MIB, PEERS, human_bytes, human_time

PAGE = Path(__file__).resolve().parents[1] / "README.md"
RESULTS = Path(__file__).parent / "results" / "results.json"
BEGIN, END = "<!-- measured: begin -->\n", "<!-- measured: end -->"
SIZES = (4, 64 * KIB, 64 * MIB)
SHOWN = ("horovodlike", "gloo", "openmpi")


def rows(results: dict[str, Any]) -> str:
    """Return the text between the marks: float32, two ranks; a KeyError if a part was not measured."""
    meta = results["meta"]
    allreduce = {
        (row["nbytes"], row["peer"]): row
        for row in results["allreduce"]
        if (row["np"], row["dtype"]) == (2, "float32") and row["peer"] in SHOWN
    }
    steps = {row["peer"]: row["seconds"] for row in results["training"] if row["model"] == "resnet18"}
    lines = [
        f"Two ranks, {meta['cores']} cores ({meta['cpu']}), float32, medians, all peers in the same run:",
        "",
        f"| | {' | '.join(PEERS[peer] for peer in SHOWN)} |",
        "|---|" + "---|" * len(SHOWN),
    ]
    for size in SIZES:
        cells = " | ".join(_cell(allreduce[size, peer]) for peer in SHOWN)
        lines.append(f"| in-place allreduce of {human_bytes(size)} | {cells} |")
    lines += [
        f"| training step of ResNet-18 | {_time(steps['horovodlike'])} | {_time(steps['gloo'])}, with DDP | |",
        "",
        f"Without communication that step takes {_time(steps['alone'])}. "
        "Gloo has its defaults: its own threads share the cores with the ranks.",
    ]
    return "\n".join(lines) + "\n"


def insert(page: str, text: str) -> str:
    """Return the page with the text between its marks."""
    return re.sub(f"(?<={BEGIN}).*?(?={END})", lambda _: text, page, flags=re.DOTALL)


def _cell(row: dict[str, Any]) -> str:
    """Time for small sizes, where latency counts, else bandwidth."""
    return _time(row["seconds"]) if row["nbytes"] < MIB else f"{row['algbw'] / 1e9:.1f} GB/s"


def _time(seconds: float) -> str:
    return human_time(seconds).replace("us", "µs")


def main() -> None:
    """Write the rows."""
    results = json.loads(Path(sys.argv[1]).read_text() if len(sys.argv) > 1 else RESULTS.read_text())
    PAGE.write_text(insert(PAGE.read_text(), rows(results)))


if __name__ == "__main__":
    main()
