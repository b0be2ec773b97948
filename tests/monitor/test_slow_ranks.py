"""Verdicts on slow ranks, from simulated jobs: pure, with seeds."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from monitors import LIMIT_S, Reporter, report, running, wait_for

from horovodlike._engine import reporter
from horovodlike.monitor import callbacks
from horovodlike.monitor.slow_ranks import FEWEST, WINDOW, Sample, SlowRanks, Verdict, as_json

COMPUTE_S, INPUT_S, NETWORK_S = 0.06, 0.002, 0.01


@dataclass
class Rank:
    """The sums of a rank, and what makes its steps long.

    Attributes:
        work: Its processor time in a step, as a multiple of the others'.
        supply: The part of the time for which it gets a processor when it could run.
        reads: Seconds in which it waits for input in a step.
    """

    work: float = 1.0
    supply: float = 1.0
    reads: float = INPUT_S
    frequency: float | None = 2.6e9
    has_gpu: bool = False
    knows_delay: bool = True
    stolen: float = 0.0
    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("blocked", "cpu", "delay", "stolen"), 0.0))

    def sample(self, now: float, steps: int) -> Sample:
        sums = self.sums
        delay = sums["delay"] if self.knows_delay else None
        more = {"stolen": sums["stolen"], "frequency": self.frequency, "has_gpu": self.has_gpu}
        return Sample(now, steps, blocked=sums["blocked"], cpu=sums["cpu"], delay=delay, **more)


class Job:
    """Ranks that take their steps together. `noise`: by how much the time of each step varies."""

    def __init__(self, ranks: list[Rank], seed: int = 0, noise: float = 0.15, hosts: int = 1) -> None:
        self.ranks, self.chance, self.noise = ranks, random.Random(seed), noise
        self.now, self.steps, self.marks = 1e6, 0, True
        self.slow, self.rates = SlowRanks(), {}
        self.hosts = {rank: f"h{rank % hosts}" for rank in range(len(ranks))}
        self.sent: dict[tuple[int, int], list[float]] = {}

    def step(self) -> None:
        times = []
        for each in self.ranks:
            cpu = COMPUTE_S * each.work * self.chance.uniform(1 - self.noise, 1 + self.noise)
            disturbed = self.chance.random() < self.noise / 2  # another process runs for a moment
            delay = cpu * (1 / each.supply - 1) + (self.chance.uniform(0.0, 0.05) if disturbed else 0.0)
            each.sums["cpu"] += cpu
            each.sums["delay"] += delay
            times.append(cpu + delay + each.reads * self.chance.uniform(0.8, 1.2))
        network = NETWORK_S
        for pair, rate in self.rates.items():
            sums = self.sent.setdefault(pair, [0.0, 0.0])
            sums[0] += 4e6
            sums[1] += 4e6 / (rate * self.chance.uniform(0.6, 1.4))
            network = max(network, 4e6 / rate)
        most = max(times) + network
        for each, seconds in zip(self.ranks, times, strict=True):
            each.sums["blocked"] += most - seconds
            each.sums["stolen"] += each.stolen * most
        self.now += most
        self.steps += 1

    def second(self) -> list[str]:
        end = self.now + 1.0
        while self.now < end:
            self.step()
        sent: dict[int, dict[tuple[str, str], tuple[float, float]]] = {rank: {} for rank in self.hosts}
        for (here, there), (size, seconds) in self.sent.items():
            sent[here][f"10.0.0.{here}", f"10.0.0.{there}"] = size, seconds
        steps = self.steps if self.marks else 0
        samples = {rank: each.sample(self.now, steps) for rank, each in enumerate(self.ranks)}
        return self.slow.take(samples, self.hosts, sent)

    def seconds(self, count: int) -> list[str]:
        return [text for _ in range(count) for text in self.second()]

    def found(self) -> list[tuple[tuple[int, ...], str]]:
        return [(tuple(each.ranks), each.kind) for each in self.slow.verdicts.values()]


def slow_compute(rank: Rank, seed: int) -> None:
    rank.supply = 0.75 - 0.05 * (seed % 4)


def more_work(rank: Rank, seed: int) -> None:
    rank.work = 1.3 + 0.1 * (seed % 4)


def slow_input(rank: Rank, seed: int) -> None:
    rank.reads = 0.02 + 0.01 * (seed % 4)


@pytest.mark.parametrize("size", [2, 3, 4, 9])
@pytest.mark.parametrize(
    ("make_slow", "kind"), [(slow_compute, "compute"), (more_work, "compute"), (slow_input, "input")]
)
def test_the_reason_is_found(size: int, make_slow: Callable[[Rank, int], None], kind: str) -> None:
    for seed in range(10):
        job = Job([Rank() for _ in range(size)], seed)
        assert job.seconds(20) == [], seed
        slow = seed % size
        make_slow(job.ranks[slow], seed)
        begun = job.steps
        [text] = job.seconds(30)
        assert job.found() == [((slow,), kind)], (seed, text)
        [verdict] = job.slow.verdicts.values()
        assert f"rank {slow} is " in text and f" slower in {kind} since step " in text
        assert abs(verdict.since_step - begun) < 60, (seed, text)
        job.ranks[slow] = Rank(sums=job.ranks[slow].sums)
        assert job.seconds(30) == [f"rank {slow} is not slower than the others any more"]
        assert job.found() == []


@pytest.mark.parametrize("size", [2, 3, 4, 16])
def test_nothing_is_found_in_a_job_that_is_only_disturbed(size: int) -> None:
    for seed in range(20):
        job = Job([Rank() for _ in range(size)], seed, noise=0.4)
        assert job.seconds(60) == [], seed


def test_a_short_disturbance_is_no_verdict() -> None:
    job = Job([Rank(), Rank()])
    job.seconds(WINDOW)
    job.ranks[1].supply = 0.4
    assert job.seconds(3) == []
    job.ranks[1].supply = 1.0
    assert job.seconds(WINDOW) == []


def test_ranks_that_take_turns_on_too_few_processors_are_not_blamed_for_shorter_turns() -> None:
    job = Job([Rank(supply=0.71), Rank(supply=0.71), Rank(supply=0.6)], noise=0.05)
    assert job.seconds(2 * WINDOW) == []
    job.ranks[2].supply = 0.4
    [text] = job.seconds(2 * WINDOW)
    assert text.startswith("rank 2 is ") and "when it could run, it had a processor for" in text


@pytest.mark.parametrize(
    ("slow", "reason"),
    [
        (Rank(supply=0.71, reads=0.025), "input"),
        (Rank(supply=0.71, work=1.25), "its steps take 2"),
    ],
    ids=["input", "work"],
)
def test_too_few_processors_hide_no_other_reason(slow: Rank, reason: str) -> None:
    for seed in range(10):
        slow.sums = Rank().sums
        job = Job([Rank(supply=0.71), Rank(supply=0.71), slow], seed, noise=0.05)
        [text] = job.seconds(2 * WINDOW)
        assert text.startswith("rank 2 is ") and reason in text, text


def test_turns_are_compared_with_those_of_the_same_host() -> None:
    job = Job([Rank(supply=0.71), Rank(supply=0.6), Rank(supply=0.71), Rank(supply=0.99)], noise=0.05, hosts=2)
    [text] = job.seconds(2 * WINDOW)
    assert text.startswith("rank 1 is ")


def test_a_rank_at_the_threshold_does_not_come_and_go() -> None:
    job = Job([Rank(), Rank(), Rank(supply=0.88)], noise=0.1)
    assert len(job.seconds(200)) == 1


def test_the_evidence_is_in_the_text() -> None:
    job = Job([Rank(), Rank(), Rank(), Rank(supply=0.61)], noise=0.05)
    [text] = job.seconds(WINDOW + 5)
    assert "when it could run, it had a processor for 6" in text and "of the time, the others for " in text
    job = Job([Rank(), Rank(work=1.4, frequency=1.9e9, stolen=0.4)], noise=0.05)
    [text] = job.seconds(WINDOW + 5)
    assert "its steps take 4" in text and "more processor time than those of the others" in text
    assert text.endswith(
        "; its processors run at 1.9 GHz, those of the others at 2.6; the hypervisor takes 0.4 processors from its host"
    )
    job = Job([Rank(), Rank(reads=0.06)], noise=0.05)
    [text] = job.seconds(WINDOW + 5)
    assert "of the time it neither computed nor was in a collective; the others for " in text
    verdict = as_json(job.slow.verdicts[1])
    assert verdict.pop("text")[:10] == text[:10]
    assert verdict == {"ranks": [1], "kind": "input", "slower": pytest.approx(1.0, abs=0.1), "since_step": 8}


@pytest.mark.parametrize("more", [{"has_gpu": True}, {"knows_delay": False}])
def test_idle_time_has_no_reason_where_there_may_be_others(more: dict[str, Any]) -> None:
    job = Job([Rank(**more), Rank(reads=0.06, **more)])
    [text] = job.seconds(WINDOW + 5)
    assert job.found() == [((1,), "unknown")]
    assert "waited for a GPU, for input or for something else" in text


def test_another_reason_is_told() -> None:
    job = Job([Rank(), Rank(reads=0.06)])
    job.seconds(WINDOW + 5)
    job.ranks[1].reads, job.ranks[1].supply = INPUT_S, 0.5
    [text] = job.seconds(2 * WINDOW)
    assert "in compute" in text
    assert job.found() == [((1,), "compute")]


def test_jobs_that_mark_no_steps() -> None:
    job = Job([Rank(), Rank(supply=0.5)])
    job.marks = False
    [text] = job.seconds(WINDOW + 5)
    assert "rank 1 is " in text and "step" not in text


def test_a_point_has_several_steps() -> None:
    job = Job([Rank(work=50), Rank(work=50, supply=0.5)])
    assert job.seconds(3 * FEWEST - 3) == []
    assert len(job.seconds(12)) == 1


def network(seed: int, slow: int | None, factor: float, hosts: int = 3) -> Job:
    job = Job([Rank() for _ in range(hosts)], seed, hosts=hosts)
    for here in range(hosts):
        for there in range(hosts):
            if here != there:
                job.rates[here, there] = 2e8 / (factor if slow in (here, there) else 1.0)
    return job


@pytest.mark.parametrize("hosts", [3, 5])
def test_a_slow_network_is_found(hosts: int) -> None:
    for seed in range(10):
        slow = seed % hosts
        job = network(seed, slow, 4.0, hosts)
        [text] = job.seconds(WINDOW + 5)
        assert job.found() == [((slow,), "network")]
        assert f"host h{slow} (rank {slow}) has a slow network since step " in text
        assert f"h{slow}" in job.slow.rates()[0]["hosts"]
        assert job.slow.rates()[0]["bytes_per_second"] == pytest.approx(5e7, rel=0.2)
        job.rates = network(seed, None, 1.0, hosts).rates
        assert job.seconds(2 * WINDOW) == [
            f"the network of host h{slow} is not slower than that of the others any more"
        ]


def test_networks_that_are_alike_are_not_blamed() -> None:
    for seed in range(10):
        for slow, factor, hosts in ((None, 1.0, 3), (0, 1.7, 4), (0, 9.0, 2)):
            assert network(seed, slow, factor, hosts).seconds(30) == []


def test_many_ranks_and_hosts() -> None:
    size, job = 1024, SlowRanks()
    hosts = {rank: f"h{rank // 8}" for rank in range(size)}
    for second in range(WINDOW + 1):
        samples = {rank: Sample(second, second * 4, second * 0.2, second * 0.7, 0.0) for rank in range(size)}
        sent = {
            rank: {
                (f"10.0.0.{rank // 8}", f"10.0.0.{(rank // 8 + other) % 128}"): (second * 5e6, second / 50)
                for other in range(1, 17)
            }
            for rank in range(size)
        }
        assert job.take(samples, hosts, sent) == []
    assert len(job.rates()) == 64


def test_ranks_that_come_and_go_begin_anew() -> None:
    job = Job([Rank(), Rank(supply=0.5), Rank()])
    job.seconds(FEWEST - 1)
    samples = {rank: each.sample(job.now, job.steps) for rank, each in enumerate(job.ranks[:2])}
    assert job.slow.take(samples, job.hosts, {}) == []
    assert job.slow.slower(1) is None
    assert job.slow.take({}, {}, {}) == []


def test_rank_0_is_told_and_gives_it_to_on_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as monitor:
        reporters = [Reporter(monitor, rank, 3) for rank in range(2)]
        for rank, each in enumerate(reporters):
            each.send(report(rank, 3, 1.0))
        assert monitor.url is not None
        wait_for(monitor.url, lambda found: len(found["ranks"]) == 2)
        received = []
        for verdicts in ({1: Verdict([1], "input", 0.5, 7, "rank 1 is slow")}, {}):
            monitor.board._slow.verdicts = verdicts
            for each in reporters:
                each.send({"sent": 2.0, "idle": 0.0})
            received.append(json.loads(reporters[0].channel.receive(time.monotonic() + LIMIT_S))["slow"])
        assert received[0] == [as_json(Verdict([1], "input", 0.5, 7, "rank 1 is slow"))]
        assert received[1] == []
        with pytest.raises(TimeoutError):
            reporters[1].channel.receive(time.monotonic() + 0.1)
        for each in reporters:
            each.channel.close()
    monkeypatch.setattr(reporter, "slow_ranks", lambda: received[0])
    assert callbacks._Callback(lambda numbers: None, 10.0)._measure()["slow_input_rank"] == 1
