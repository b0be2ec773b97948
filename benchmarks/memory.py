"""Memory of the engine, and the cost of `import horovodlike`."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import driver

RANK_SCRIPT = Path(__file__).parent / "memory_rank.py"

# The peak of this address space. The ru_maxrss of a child would not do: it starts from its parent's size at the fork.
READ_PEAK = "print(next(l.split()[1] for l in open('/proc/self/status') if l.startswith('VmHWM')))"


def engine(size: int, nbytes: int) -> dict[str, Any]:
    """Return the largest figures of any rank, in bytes, for a job of `size` ranks that reduces `nbytes`."""
    reports = driver.reports(RANK_SCRIPT, size, nbytes)
    row: dict[str, Any] = {"np": size, "nbytes": nbytes}
    for key in reports[0].keys() - {"rank", "nbytes"}:
        row[key] = max(report[key] for report in reports)
    return row


def importing(runs: int) -> dict[str, float]:
    """Return the cost of `import horovodlike` in a bare interpreter: medians of alternating runs."""
    programs = {"bare": READ_PEAK, "import": f"import horovodlike\n{READ_PEAK}"}
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    peaks: dict[str, list[int]] = {name: [] for name in programs}
    with tempfile.TemporaryDirectory() as elsewhere:
        for number in range(-1, runs):
            for name, program in programs.items():
                start = time.perf_counter()
                done = subprocess.run(
                    [sys.executable, "-c", program], cwd=elsewhere, check=True, capture_output=True, text=True
                )
                # The first pair only brings the files into the page cache.
                if number >= 0:
                    seconds[name].append(time.perf_counter() - start)
                    peaks[name].append(int(done.stdout) * 1024)
    return {
        "seconds": statistics.median(seconds["import"]) - statistics.median(seconds["bare"]),
        "bytes": statistics.median(peaks["import"]) - statistics.median(peaks["bare"]),
        "bare_seconds": statistics.median(seconds["bare"]),
        "bare_bytes": statistics.median(peaks["bare"]),
    }


def measure(sizes: Sequence[int], nbytes: Sequence[int], runs: int) -> dict[str, Any]:
    """Return the "memory" part of the results."""
    return {
        "engine": [engine(size, count) for size in sizes for count in nbytes],
        "import": importing(runs),
    }
