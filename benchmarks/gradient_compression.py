"""Compression of gradients: the bytes sent, the effect on training, and the time of a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks import driver

RANK_SCRIPT = Path(__file__).parent / "gradient_compression_rank.py"


def measure(size: int, *, epochs: int) -> list[dict[str, Any]]:
    """Return the rows of the results, one for each method: values equal on all ranks, and the slowest rank's time."""
    reports = driver.reports(RANK_SCRIPT, size, epochs)
    rows_by_method = zip(*(report["rows"] for report in reports), strict=True)
    return [{**rows[0], "np": size, "seconds": max(row["seconds"] for row in rows)} for rows in rows_by_method]
