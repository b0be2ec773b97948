"""The cost of readers of the monitor: the evaluation, and the readers themselves."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2]))

from benchmarks import monitor, tables, targets


def row(readers: str, *samples: float) -> dict[str, Any]:
    return {"readers": readers, "np": 2, "model": "tiny", "seconds": samples[0], "samples": list(samples)}


def test_a_ratio_is_of_neighbouring_turns() -> None:
    rows = [row("unread", 1.0, 2.0, 4.0), row("scraped", 1.0, 2.002, 4.0), row("crowded", 1.1, 2.2, 4.0)]
    verdicts = [each for each in targets.check({"monitor": rows}) if "--monitor" in each.what]
    assert [(each.measured, each.passed) for each in verdicts] == [("1", True), ("1.1", False)]
    assert "| one scrape a second        | 1 s   | 1.0000 |" in tables.monitor(rows)
    assert [each.passed for each in targets.check({}) if "--monitor" in each.what] == [None, None]


@pytest.mark.thorough
def test_readers_come_and_go() -> None:
    rows = monitor.measure(2, rounds=1, budget=0.05, model="tiny")
    assert sorted(each["readers"] for each in rows) == ["crowded", "scraped", "unread", "unwatched"]
    assert all(each["seconds"] > 0 for each in rows)
