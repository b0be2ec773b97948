"""The reports of a rank, with an engine and a clock of the test."""

from __future__ import annotations

from typing import Any

import pytest

from horovodlike._bootstrap.environment import RankInfo
from horovodlike._engine import reporter
from horovodlike._engine.metrics import Metrics
from horovodlike.monitor.collector import _NUMBERS


class Engine:
    """Counts requests, and reports each second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1e6
        self.requests = 1
        self.snapshots = reporter._Snapshots(RankInfo(0, 1), 1)
        monkeypatch.setattr(reporter, "metrics", lambda: {"requests": self.requests, "stragglers": []})
        monkeypatch.setattr(reporter, "sample_collectives", lambda after, most: ([], after))
        monkeypatch.setattr(reporter, "describe_threads", lambda most: b"in load")

    def seconds(self, number: int) -> list[Any]:
        """Let seconds pass without progress; return what was reported as the stack."""
        found = []
        for _ in range(number):
            self.now += 1.0
            found.append(self.snapshots.take(self.now).get("stack", "unchanged"))
        return found

    def step(self, seconds: int) -> list[Any]:
        found = self.seconds(seconds - 1)
        self.requests += 1
        return found + self.seconds(1)


def test_a_stall_is_reported_after_three_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch)
    for _ in range(5):
        assert set(engine.step(1)) == {"unchanged"}
    assert engine.seconds(5) == ["unchanged", "unchanged", "in load", "unchanged", "unchanged"]
    engine.requests += 1
    assert engine.seconds(1) == [None]


def test_long_steps_are_no_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch)
    engine.step(10)
    for _ in range(20):
        assert set(engine.step(10)) == {"unchanged"}
    assert engine.seconds(60).count("in load") == 1


def test_a_pause_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch)
    engine.step(60)
    for _ in range(300):
        engine.step(1)
    assert "in load" in engine.seconds(4)


@pytest.mark.parametrize(("now", "pause"), [(12.0, 1.0), (12.25, 0.75), (12.95, 1.05)])
def test_all_ranks_report_at_the_same_moments(monkeypatch: pytest.MonkeyPatch, now: float, pause: float) -> None:
    monkeypatch.setattr(reporter.time, "time", lambda: now)
    assert reporter._until_next() == pytest.approx(pause)


def test_the_collector_takes_all_counters() -> None:
    assert set(_NUMBERS["counters"]) == set(Metrics.__annotations__) - {"stragglers"} | {"progress"}
