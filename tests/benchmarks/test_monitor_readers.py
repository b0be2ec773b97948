"""The cost of readers of the monitor: the evaluation, and the readers themselves."""

from __future__ import annotations

import math
import random
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2]))

from benchmarks import driver, monitor, tables, targets


def row(readers: str, *pairs: tuple[float, float]) -> dict[str, Any]:
    return monitor.row(readers, 2, "tiny", [monitor.Pair(*pair, 0.001) for pair in pairs])


def test_a_ratio_is_of_adjacent_windows() -> None:
    rows = [row("scraped", (1.0, 1.0), (2.0, 2.002), (4.0, 4.0)), row("crowded", (1.0, 1.1), (2.0, 2.2), (4.0, 4.4))]
    verdicts = [each for each in targets.check({"monitor": rows}) if "--monitor" in each.what]
    assert [(each.measured, each.passed) for each in verdicts] == [
        ("1 (1.0000 to 1.0010)", True),
        ("1.1 (1.1000 to 1.1000)", False),
    ]
    noisy = {"monitor": [row("scraped", (1.0, 1.0), (1.0, 1.01))]}
    assert [(each.measured, each.passed) for each in targets.check(noisy) if each.measured and "step" in each.what] == [
        ("1.005 (1.0000 to 1.0100: the machine is too busy)", None)
    ]
    assert "| one scrape a second        | 2 s          | 2 s               | 1.0000    |" in tables.monitor(rows)
    shares = [(each.measured, each.passed) for each in targets.check({"monitor": rows}) if "processor" in each.what]
    assert shares == [("0.1 %", True), ("0.1 %", True)]
    assert [each.passed for each in targets.check({}) if "onitor" in each.what] == [None] * 4
    with pytest.raises(driver.BenchmarkError, match="make them longer"):
        row("scraped")


def test_the_steps_in_a_window() -> None:
    ends = [0.0, 1.0, 2.0, 4.0, 5.0]
    assert monitor.step_seconds(ends, monitor.Window(0.5, 4.5, 0.0)) == 1.5  # from 1 to 4
    assert monitor.step_seconds(ends, monitor.Window(1.0, 2.0, 0.0)) == 1.0
    assert monitor.step_seconds(ends, monitor.Window(1.1, 1.9, 0.0)) is None  # no step lies in it
    assert (
        monitor.step_seconds(ends, monitor.Window(-1.0, 3.0, 0.0)) is None
    )  # the steps begin after it, or end before it does
    assert monitor.step_seconds(ends, monitor.Window(3.0, 6.0, 0.0)) is None  # they end before it does


def test_the_interval_contains_the_median_as_often_as_it_says() -> None:
    chance = random.Random(0)
    for count, least in ((1, 0.0), (5, 0.9), (6, 0.95), (28, 0.95), (29, 0.95)):
        intervals = [monitor.median_interval([chance.expovariate(1) for _ in range(count)]) for _ in range(4000)]
        held = sum(low <= math.log(2) <= high for low, high in intervals) / len(intervals)
        assert least - 0.01 <= held <= least + 0.05
    assert monitor.median_interval([3.0, 1.0, 2.0]) == (1.0, 3.0)


@pytest.mark.thorough
def test_readers_come_and_go() -> None:
    rows = monitor.measure(2, rounds=1, seconds=1.0, model="tiny")
    assert [each["readers"] for each in rows] == ["scraped", "crowded"]
    for each in rows:
        assert len(each["pairs"]) >= monitor.PAIRS - 1  # a busy machine may lose one
        assert each["without"] > 0
        assert 0 < each["more_processor"] < 1
