"""The state that the monitor makes of reports: pure, with a clock of the test."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from monitors import about

from horovodlike.monitor import board as module
from horovodlike.monitor.board import HISTORY, RANK_HISTORY, SILENT_S, Board
from horovodlike.monitor.collector import _read_about, read_report
from horovodlike.monitor.delays import OFFSET_S, Delays
from horovodlike.monitor.prometheus import render
from horovodlike.monitor.slow_ranks import WINDOW


class Job:
    """A board with ranks that report each second."""

    def __init__(self, size: int) -> None:
        self.now = 1e6
        self.size = size
        self.set_by = 0.0  # how far the clock of the launcher has been set forward
        self.suspended: dict[int, float] = {}  # by host: for how long, in total
        self.board = Board("job", "1.0", clock=lambda: self.now + self.set_by, monotonic=lambda: self.now)
        self.number = 0
        self.waited = [0.0] * size
        for rank in range(size):
            self.board.take_hello(about(rank, size))

    def second(
        self,
        late: dict[int, float],
        hosts: int = 1,
        steps: int = 4,
        silent: set[int] = frozenset(),
        process: Callable[[int], dict[str, float]] = lambda rank: {},
        **more: Any,
    ) -> None:
        """Let a second pass, in which ranks are late for each collective by these seconds; `more` counters."""
        self.now += 1.0
        numbers = range(self.number + 1, self.number + steps + 1)
        self.number += steps
        most = max([0.0, *late.values()])
        for rank in set(range(self.size)) - silent:
            self.waited[rank] += steps * (most - late.get(rank, 0.0))
            skew = 3600.0 * (rank % hosts) + self.suspended.get(rank % hosts, 0.0)
            collectives = [
                [number, "allreduce", f"layer{number % 3}", 400, self.now - 0.9 + i / 10 + late.get(rank, 0.0) - skew]
                for i, number in enumerate(numbers)
            ]
            sent = self.now - 0.0002 - skew
            counters = {"bytes": self.number * 400, "requests": self.number}
            counters |= dict.fromkeys(("waiting_seconds", "blocked_seconds"), self.waited[rank])
            if self.board._ranks[rank].about["host"] != f"node-{rank % hosts}":
                self.board._ranks[rank].about["host"] = f"node-{rank % hosts}"
            more_of_rank = {"collectives": collectives, "process": process(rank)}
            self.report(rank, sent, idle=0.0, counters=counters | more, **more_of_rank)
        self.board.tick()

    def report(self, rank: int, sent: float, **message: Any) -> None:
        self.board.take_report(rank, self.board._ranks[rank].about, read_report({"sent": sent, **message}))


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


@pytest.mark.parametrize("delay", [0.5, 2.0, 5.0, 30.0])
def test_a_straggler_is_found_however_late_it_is(delay: float) -> None:
    """The punctual rank reports before the late one, and time passes in between."""
    delays = Delays()
    for number in range(1, 5):
        now = 100.0 * number
        for moment, late in ((now, 0.0), (now + 0.5, delay)):
            rank = int(late > 0)
            delays.take(rank, "node-1", moment, moment, [[number, "allreduce", "x", 4, now - delay + late]])
            delays.evaluate(moment, 2)
    assert delays.by_rank == pytest.approx({0: 0.0, 1: delay})
    found = delays.verdict(0.5)
    assert found is not None and (found["rank"], found["share"]) == (1, 1.0)


def check_verdicts(job: Job, late: dict[int, float]) -> None:
    """Check that rank 2 is blamed if it is late, and else none."""
    found = job.board.snapshot()
    assert [each["ranks"] for each in found["slow"]] == ([[2]] if late else [])
    assert (found["straggler"] or {"rank": None})["rank"] == (2 if late else None)
    assert max(each["late"] for each in found["ranks"]) == pytest.approx(max(late.values(), default=0.0), abs=1e-3)
    assert {each["state"] for each in found["ranks"]} == {"running"}
    assert found["ranks"][1]["rates"]["requests"] == pytest.approx(4.0)


@pytest.mark.parametrize("by", [-3600.0, 3600.0])
@pytest.mark.parametrize("late", [{}, {2: 0.05}])
def test_the_clock_of_the_launcher_may_be_set(by: float, late: dict[int, float]) -> None:
    job = Job(4)
    for second in range(1, 3 * WINDOW):
        job.set_by = by if second >= WINDOW + 2 else 0.0
        job.second(late, hosts=3, process=lambda rank: {"cpu_seconds": job.now / 2})
        found = job.board.snapshot()
        assert found["seconds"] == second
        assert found["time"] == found["history"][-1]["time"] == job.now + job.set_by
        if second > WINDOW:
            check_verdicts(job, late)


@pytest.mark.parametrize("connects_again", [False, True])
@pytest.mark.parametrize("late", [{}, {2: 0.05}])
def test_a_host_that_was_suspended_is_right_after_a_minute(late: dict[int, float], connects_again: bool) -> None:
    """Its clock, by which ranks 1 and 3 report, has stopped meanwhile."""
    job, wrong = Job(4), 0
    for second in range(int(2 * OFFSET_S) + 3 * WINDOW):
        if second == WINDOW:
            job.suspended = {1: 7.0}
            for rank in (1, 3) if connects_again else ():
                job.board.lose(rank, job.board._ranks[rank].about)
                assert job.board.take_hello(about(rank, 4, host="node-1"))
        job.second(late, hosts=2, process=lambda rank: {"cpu_seconds": job.now / 2})
        wrong += job.board.snapshot()["ranks"][0]["late"] > 1.0
        if second > WINDOW + 2 * OFFSET_S:
            assert job.board.snapshot()["ranks"][0]["late"] < 1e-3
    check_verdicts(job, late)
    assert 0 < wrong <= 2 * OFFSET_S


def test_hosts_that_have_the_same_name_have_different_clocks() -> None:
    board = Board(monotonic=lambda: 1e4)
    places = [about(rank, 2, host="localhost", boot=f"{rank}") for rank in range(2)]
    for rank, place in enumerate(places):
        board.take_hello(place)
        sent = 5e3 * rank + 100.0
        collectives = [[number, "allreduce", "x", 4, sent - 0.5] for number in range(1, 4)]
        board.take_report(rank, place, read_report({"sent": sent, "idle": 0.0, "collectives": collectives}))
    board.tick()
    assert [each["late"] for each in board.snapshot()["ranks"]] == [0.0, 0.0]


def test_a_straggler_is_found_in_steps_of_ten_seconds() -> None:
    job = Job(2)
    for second in range(60):
        is_step = second % 10 == 9
        job.waited[0] += 0.3
        job.second({1: 3.0} if is_step else {}, steps=int(is_step))
        if second >= 30:
            verdict = job.board.snapshot()["straggler"]
            assert verdict is not None and verdict["rank"] == 1
            assert verdict["window_seconds"] > 20


def test_no_rank_is_the_straggler_without_a_reason() -> None:
    for seed in range(10):
        chance, job = random.Random(seed), Job(4)
        for _ in range(10):
            job.second({rank: 0.05 * (chance.randrange(4) == rank) for rank in range(4)}, steps=1)
            job.second({}, steps=3)
        assert job.board.snapshot()["straggler"] is None
        quiet = Job(4)
        for _ in range(10):
            quiet.second({rank: chance.random() * 2e-4 for rank in range(4)})
        assert quiet.board.snapshot()["straggler"] is None


@pytest.mark.parametrize("end", ["rank", "job"])
def test_nothing_is_said_of_a_slow_rank_that_has_gone(end: str) -> None:
    job, heard = Job(3), []
    job.board.announce = heard.append
    for _ in range(WINDOW + 2):
        job.second({1: 0.06}, process=lambda rank: {"cpu_seconds": job.now / 2, "run_delay_seconds": 7.0})
    assert [each["ranks"] for each in job.board.snapshot()["slow"]] == [[1]]
    if end == "job":
        job.board.end("it has ended")
    else:
        for _ in range(int(SILENT_S) + 1):
            job.second({}, silent={1})
    assert job.board.snapshot()["slow"] == []
    assert 'horovodlike_slow_rank{rank="1",kind="input"} 0' in render(job.board.snapshot())
    assert len(heard) == 1


def test_a_slow_rank_is_announced_when_it_begins_and_when_it_ends() -> None:
    job, heard = Job(3), []
    job.board.announce = heard.append
    for _ in range(WINDOW + 2):
        job.second({1: 0.06}, process=lambda rank: {"cpu_seconds": job.now / 2, "run_delay_seconds": 7.0})
    [slow] = job.board.snapshot()["slow"]
    assert (slow["ranks"], slow["kind"]) == ([1], "input")
    assert [each["slower"] > 0.2 for each in job.board.snapshot()["ranks"]] == [False, True, False]
    text = render(job.board.snapshot())
    assert 'horovodlike_slow_rank{rank="1",kind="input"} 1' in text
    assert text.count("horovodlike_slow_rank{") == 12 and text.count("} 1\n") < text.count("} 0\n")
    for _ in range(WINDOW):
        job.second({}, process=lambda rank: {"cpu_seconds": job.now / 2, "run_delay_seconds": 7.0})
    assert job.board.snapshot()["slow"] == []
    begin, end = heard
    assert begin.startswith("rank 1 is ") and end == "rank 1 is not slower than the others any more"
    assert [each["text"] for each in job.board.snapshot()["events"] if each["kind"] == "slow"] == heard
    assert job.board.take_hello(about(0, 2, generation=2))
    assert job.board.snapshot()["slow"] == []


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
        in_flight = {"in_flight": int(stack == "in synchronize")}
        job.report(rank, sent=job.now, idle=4.0, stack=stack, counters=in_flight)
    stall = job.board.snapshot()["stall"]
    assert stall["seconds"] == 4.0
    assert stall["stacks"] == [
        {"ranks": [1], "stack": "in load"},
        {"ranks": [0, 2], "stack": "in synchronize"},
    ]
    job.report(0, sent=job.now + 1, idle=0.0, stack=None)
    assert job.board.snapshot()["stall"] is None


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("requests", "state"), [(0, "starting"), (7, "idle")])
def test_no_rank_waits_while_each_reads_or_validates(size: int, requests: int, state: str) -> None:
    job = Job(size)

    def states(waiting: set[int]) -> set[str]:
        for rank in range(size):
            counters = {"requests": requests, "in_flight": int(rank in waiting)}
            job.report(rank, sent=job.now, idle=9.0, stack="in load", counters=counters)
        found = job.board.snapshot()
        assert bool(found["stall"]) == bool(waiting)
        return {each["state"] for each in found["ranks"]}

    assert states(set()) == {state}
    assert f'horovodlike_ranks_in_state{{state="{state}"}} {size}' in render(job.board.snapshot())
    assert states({size - 1}) == {"stalled"}
    assert states(set()) == {state}
    job.report(0, sent=job.now + 1, idle=0.0, stack=None, counters={"requests": requests + 1})
    assert job.board.snapshot()["ranks"][0]["state"] == "running"


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
    job.report(0, sent=job.now, idle=0.0, end=True)
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
    assert board.output(0).endswith(b"no part of it\n")
    assert board.output(7) == b""
    assert "output" not in state


def test_reports_on_a_connection_that_another_one_has_followed_are_dropped() -> None:
    job = Job(2)
    old = job.board._ranks[1].about
    job.board.take_hello(about(1, 3, generation=2))
    job.board.take_report(1, old, read_report({"sent": job.now, "idle": 9.0, "end": True}))
    [rank] = job.board.snapshot()["ranks"]
    assert (rank["state"], rank["idle"]) == ("starting", 0.0)
    job.report(1, sent=job.now, idle=1.0)
    assert job.board.snapshot()["ranks"][0]["idle"] == 1.0


def test_only_rank_0_says_which_ranks_are_late_and_only_of_ranks_of_the_job() -> None:
    job = Job(2)
    job.report(1, sent=job.now, idle=0.0, late=[[0, 7, 1.0]])
    job.report(0, sent=job.now, idle=0.0, late=[[1, 5, 0.5], *([rank, 5, 0.5] for rank in range(2, 100))])
    assert [each["times_late"] for each in job.board.snapshot()["ranks"]] == [0, 5]
    assert len(job.board._stragglers) == 1


def test_nothing_grows_with_names_of_hosts_or_workers_that_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_TAILS", 8)
    job = Job(2)
    for number in range(100):
        job.board.take_hello(about(1, 2, host=f"node-{number}"))
        job.report(1, sent=job.now, idle=0.0)
        job.report(0, sent=job.now, idle=0.0)
        job.board.tick()
        job.board.take_output(number, b"horovodlike warning: mind this\nunfinished", is_error=True)
    board = job.board
    assert len(board._delays._offsets) == 2 and "node-1 1" in board._delays._offsets
    assert len(board._tails) == len(board._open_lines) == 8
    assert len(board._open_events) <= 8


@pytest.mark.parametrize("number", [2**63 - 1025, float(2**63 - 1025), 5e-324, 1e-300])
def test_numbers_at_their_limits_harm_nothing(number: float) -> None:
    job = Job(2)
    names = ("bytes", "requests", "batches", "waiting_seconds", "communicating_seconds")
    for sent in (0.0, number, number):
        for rank in range(2):
            collectives = [[1 + rank, "allreduce", "x", 4, number], [9, "allreduce", "x", 4, number * rank]]
            counters = dict.fromkeys(names, number if sent else 0.0)
            more = {"counters": counters, "collectives": collectives, "late": [[1, 2**63 - 1, number]]}
            job.report(rank, sent=sent, idle=number, process={"cpu_seconds": number}, **more)
        job.board.tick()
        job.now += 3.0
    state = job.board.snapshot(with_history=True)
    json.dumps(state, allow_nan=False)
    assert "inf" not in render(state).lower().replace("_info", "")


def test_text_that_is_no_text_harms_nothing() -> None:
    board = Board()
    found = _read_about(about(0, 1, host="node\ud800"), 0)
    assert found["host"] == "node?"
    assert board.take_hello(found)
    assert 'host="node?"' in render(board.snapshot())
    assert read_report({"sent": 1, "idle": 4, "stack": "\udc80x"})["stack"] == "?x"


def test_late_reports_do_not_open_collectives_again() -> None:
    delays = Delays()
    for rank in range(2):
        delays.take(rank, "node-1", 10.0, 10.0, [[1, "allreduce", "x", 4, 9.0 + 0.1 * rank]])
    delays.evaluate(10.0, 3)
    late = delays.evaluate(20.0, 3)
    delays.take(2, "node-1", 20.0, 20.0, [[1, "allreduce", "x", 4, 19.0]])
    delays.take(0, "node-1", 20.0, 20.0, [[2, "allreduce", "x", 4, 19.0]])
    assert list(delays._waiting) == [2]
    assert delays.evaluate(30.0, 3) == late


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


@pytest.mark.parametrize("message", [[], None, 5, {}, {"sent": 1}, {"idle": 0}])
def test_what_is_not_a_report(message: Any) -> None:
    with pytest.raises((ValueError, TypeError, KeyError, AttributeError)):
        read_report(message)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"sent": "x"}, {"sent": True}, {"sent": 1e999}, {"sent": 1e308}, {"idle": -1}),
        {"counters": {"bytes": "1"}},
        {"late": [[1, 2]]},
        {"collectives": [[1, "a", "b", 4, None]]},
        {"stack": 5},
        {"late": [[2**70, 2, 1.0]]},
        {"collectives": [[1, "a", "b", 4, 1e308]]},
    ],
)
def test_a_report_that_makes_no_sense(wrong: dict[str, Any]) -> None:
    right = {"sent": 1, "idle": 0}
    read_report(right)
    with pytest.raises((ValueError, TypeError)):
        read_report(right | wrong)


def test_an_event_names_the_rank_that_a_worker_has() -> None:
    board = Board()
    board.take_hello(about(0, 1, worker=3))
    for worker in (3, 0):
        board.take_output(worker, b"horovodlike warning: mind this\n", is_error=True)
    assert [(each["rank"], each["worker"]) for each in board.snapshot()["events"]] == [(0, 3), (None, 0)]


def test_an_event_that_the_launcher_also_prints_counts_once() -> None:
    board = Board()
    board.add_event("elastic", "worker 1 has been lost")
    board.add_event("launcher", "hvdrun: worker 1 has been lost")
    board.add_event("launcher", "hvdrun: another line")
    assert [each["kind"] for each in board.snapshot()["events"]] == ["elastic", "launcher"]


def test_a_silent_rank_is_idle_for_prometheus() -> None:
    """A rank that is stopped or killed says nothing of a stall; alerts hear of it all the same."""
    job = Job(2)
    job.second({})
    job.report(0, sent=job.now, idle=0.0, end=True)
    job.now += 130
    lines = [line for line in render(job.board.snapshot()).splitlines() if line.startswith("horovodlike_idle_seconds")]
    assert lines == ['horovodlike_idle_seconds{rank="1"} 130.0']
