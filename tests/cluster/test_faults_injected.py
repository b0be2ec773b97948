"""Faults within an allreduce over several hosts: no rank has the result, and all name who failed."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.hosts import Cluster
from cluster.jobs import SETTLE_S, Job
from horovodlike.testing import Fault, FaultPlan

pytestmark = pytest.mark.cluster("sshd", "ssh")

STEP = 3
NOTICE_S = 1.0
LAYOUT = [1, 2, 1]
SMALL, BIG = 10, 3_000_017


def start(hosts: Cluster, folder: Path, fault: Fault, length: int) -> Job:
    plan = {"HOROVODLIKE_FAULT_PLAN": FaultPlan((fault,)).to_json()}
    return Job(hosts, folder, LAYOUT, "reduce", length, **plan)


@pytest.mark.parametrize("length", [SMALL, BIG])
@pytest.mark.parametrize("point", ["data", "negotiation"])
@pytest.mark.parametrize("victim", [0, pytest.param(2, marks=pytest.mark.thorough), 3])
def test_a_rank_that_is_killed(
    cluster: Callable[..., Cluster], tmp_path: Path, victim: int, point: str, length: int
) -> None:
    job = start(cluster(3, ssh=True), tmp_path, Fault(victim, STEP, point, "SIGKILL"), length)
    assert job.finish(SETTLE_S) == 128 + signal.SIGKILL
    last = max(job.events(rank, "reduced")[-1]["at"] for rank in range(job.size))
    for rank in set(range(job.size)) - {victim}:
        failure = job.failure(rank)
        assert (failure.kind, failure.named) == ("JobBrokenError", {victim}), failure
        # Who has the result of the step before may be gone before another one has got all of it.
        assert len(job.events(rank, "reduced")) in (STEP - 1, STEP)
        assert failure.at - last < NOTICE_S
    job.check_gone()


@pytest.mark.parametrize("length", [SMALL, BIG])
@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.thorough), 3])
def test_a_rank_whose_connections_are_cut(
    cluster: Callable[..., Cluster], tmp_path: Path, victim: int, length: int
) -> None:
    """It lives, and its own host cannot know better than it does."""
    job = start(cluster(3, ssh=True), tmp_path, Fault(victim, STEP, "data", "close"), length)
    assert job.finish(SETTLE_S) == 1
    for rank in range(job.size):
        failure = job.failure(rank)
        assert failure.kind == "JobBrokenError"
        assert job.host(rank) == job.host(victim) or victim in failure.named, failure
        # A host whose ranks have all it takes may have the result of that step, but no other one.
        assert len(job.events(rank, "reduced")) in (STEP, STEP + 1)
    job.check_gone()


def test_a_slow_rank_is_waited_for(cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    job = start(cluster(3, ssh=True), tmp_path, Fault(1, STEP, "data", "slow", 1.5), SMALL)
    job.wait_for("reduced", times=STEP + 2)
    for rank in range(job.size):
        times = [event["at"] for event in job.events(rank, "reduced")]
        assert times[STEP] - times[STEP - 1] > 1.0
    job.kill(0)
    job.finish(SETTLE_S)
    job.check_gone()
