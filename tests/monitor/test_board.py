"""The state that the monitor makes of reports: pure, with a clock of the test."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from monitors import about

from horovodlike.monitor.board import HISTORY, RANK_HISTORY, Board
from horovodlike.monitor.collector import read_report


class Job:
    """A board with ranks that report each second."""

    def __init__(self, size: int) -> None:
        self.now = 1e6
        self.size = size
        self.board = Board("job", "1.0", clock=lambda: self.now)
        self.number = 0
        self.waited = [0.0] * size
        for rank in range(size):
            self.board.take_hello(about(rank, size))

    def second(self, late: dict[int, float], hosts: int = 1, steps: int = 4, silent: set[int] = frozenset()) -> None:
        """Let a second pass, in which ranks are late for each collective by these seconds."""
        self.now += 1.0
        numbers = range(self.number + 1, self.number + steps + 1)
        self.number += steps
        most = max([0.0, *late.values()])
        for rank in set(range(self.size)) - silent:
            self.waited[rank] += steps * (most - late.get(rank, 0.0))
            skew = 3600.0 * (rank % hosts)
            collectives = [
                [number, "allreduce", f"layer{number % 3}", 400, self.now - 0.9 + i / 10 + late.get(rank, 0.0) - skew]
                for i, number in enumerate(numbers)
            ]
            sent = self.now - 0.0002 - skew
            counters = {"bytes": self.number * 400, "requests": self.number, "waiting_seconds": self.waited[rank]}
            more = {"counters": counters, "collectives": collectives}
            state = read_report({"sent": sent, "idle": 0.0, **more})
            if self.board._ranks[rank].about["host"] != f"node-{rank % hosts}":
                self.board._ranks[rank].about["host"] = f"node-{rank % hosts}"
            self.board.take_report(rank, state)
        self.board.tick()


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("size", [2, 3])
def test_a_straggler_is_found(size: int, hosts: int) -> None:
    job = Job(size)
    for _ in range(4):
        job.second({size - 1: 0.05}, hosts)
    state = job.board.snapshot()
    verdict = state["straggler"]
    assert verdict["rank"] == size - 1
    assert verdict["share"] == 1.0
    assert verdict["seconds_each"] == pytest.approx(0.05, abs=1e-3)
    assert [round(each["late"], 3) for each in state["ranks"]] == [0.0] * (size - 1) + [0.05]
    assert {tensor["name"] for tensor in state["tensors"]} == {"layer0", "layer1", "layer2"}
    assert all(tensor["last_rank"] == size - 1 for tensor in state["tensors"])


def test_no_rank_is_blamed_without_a_reason() -> None:
    for seed in range(10):
        chance, job = random.Random(seed), Job(4)
        for _ in range(10):
            job.second({rank: 0.05 * (chance.randrange(4) == rank) for rank in range(4)}, steps=1)
            job.second({}, steps=3)
        assert job.board.snapshot()["straggler"] is None or len(set(job.waited)) > 1
        quiet = Job(4)
        for _ in range(10):
            quiet.second({rank: chance.random() * 2e-4 for rank in range(4)})
        assert quiet.board.snapshot()["straggler"] is None


def test_collectives_of_some_ranks_count_after_a_while() -> None:
    job = Job(3)
    for _ in range(8):
        job.second({1: 0.02}, silent={2})
    state = job.board.snapshot()
    assert state["straggler"]["rank"] == 1
    assert state["ranks"][2]["state"] == "silent"


def test_a_stall_shows_stacks_by_groups_of_ranks() -> None:
    job = Job(3)
    job.second({})
    assert job.board.snapshot()["stall"] is None
    for rank, stack in enumerate(["in synchronize", "in load", "in synchronize"]):
        job.board.take_report(rank, read_report({"sent": job.now, "idle": 4.0, "stack": stack}))
    stall = job.board.snapshot()["stall"]
    assert stall["seconds"] == 4.0
    assert stall["stacks"] == [
        {"ranks": [1], "stack": "in load"},
        {"ranks": [0, 2], "stack": "in synchronize"},
    ]
    job.board.take_report(0, read_report({"sent": job.now + 1, "idle": 0.0, "stack": None}))
    assert job.board.snapshot()["stall"] is None


def test_a_new_generation_forgets_the_ranks() -> None:
    job = Job(3)
    job.second({})
    assert job.board.take_hello(about(0, 2, generation=2))
    assert not job.board.take_hello(about(2, 3, generation=1))
    state = job.board.snapshot()
    assert (state["generation"], state["size"], len(state["ranks"])) == (2, 2, 1)
    assert state["events"][-1]["text"] == "generation 2: 2 ranks"


def test_a_lost_connection_makes_a_rank_silent_at_once_and_the_last_report_does_not() -> None:
    job = Job(2)
    job.second({})
    job.board.lose(1, job.board._ranks[1].about)
    job.board.take_report(0, read_report({"sent": job.now, "idle": 0.0, "end": True}))
    job.board.lose(0, job.board._ranks[0].about)
    assert [each["state"] for each in job.board.snapshot()["ranks"]] == ["ended", "silent"]


def test_warnings_are_found_in_the_output() -> None:
    board = Board()
    text = (
        b"noise\nhorovodlike warning: stalled: some ranks wait\n  allreduce of 'x'\nWhere the missing ranks are\n   th"
    )
    board.take_output(0, text, is_error=True)
    board.take_output(0, b"read\nnoise\n  no part of it\n", is_error=True)
    board.take_output(1, b"horovodlike warning: not on standard error\n", is_error=False)
    board.take_output(1, b"horovodlike warning: mind this\n", is_error=True)
    state = board.snapshot()
    assert [(each["kind"], each["rank"], each["text"].count("\n")) for each in state["events"]] == [
        ("stall", 0, 3),
        ("warning", 1, 0),
    ]
    assert state["events"][0]["text"].endswith("   thread")
    assert state["output"]["0"].endswith("no part of it\n")


def test_everything_is_bounded() -> None:
    job = Job(2)
    for second in range(HISTORY + 50):
        job.second({1: 0.01})
        job.board.add_event("warning", f"{second}" * 10000)
        job.board.take_output(second, b"horovodlike error: " + b"x" * 100000, is_error=True)
        job.board.take_output(0, b"y" * 10000 + b"\n ", is_error=True)
    state = job.board.snapshot(with_history=True)
    assert len(state["history"]) == HISTORY
    assert {len(points) for points in state["ranks"][0]["history"].values()} == {RANK_HISTORY}
    assert len(json.dumps(state)) < 4_000_000
    assert len(state["tensors"]) <= 20


def test_a_snapshot_of_1024_ranks() -> None:
    job = Job(1024)
    for _ in range(4):
        job.second({1000: 0.05}, hosts=8, steps=2)
    state = job.board.snapshot(with_history=True)
    assert state["straggler"]["rank"] == 1000
    assert len(json.dumps(state)) < 2_000_000


@pytest.mark.parametrize(
    "message",
    [
        *([], None, 5, {}, {"sent": "x", "idle": 0}, {"sent": True, "idle": 0}, {"sent": 1, "idle": -1}),
        {"sent": 1, "idle": 0, "counters": {"bytes": "1"}},
        {"sent": 1, "idle": 0, "late": [[1, 2]]},
        {"sent": 1, "idle": 0, "collectives": [[1, "a", "b", 4, None]]},
        {"sent": 1e999, "idle": 0},
        {"sent": 1, "idle": 0, "stack": 5},
        {"sent": 1, "idle": 0, "late": [[2**70, 2, 1.0]]},
    ],
)
def test_a_report_that_makes_no_sense(message: Any) -> None:
    with pytest.raises((ValueError, TypeError, KeyError, AttributeError)):
        read_report(message)
