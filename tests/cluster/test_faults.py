"""Ranks on several hosts that die, stop or leave: the others get the right error in time, and nothing is left."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from cluster.hosts import Cluster
from cluster.jobs import SETTLE_S, Job

pytestmark = pytest.mark.cluster("sshd", "ssh")

BIG = 8 << 20  # elements: while it is reduced again and again, most of the time goes into sending it
NOTICE_S = 1.0  # from a rank's death to the error on all others
STALL_S = 3.0  # what the limit of a stall may be exceeded by: ranks are asked where they are, and have 2 s to answer
CHAIN = [1, 2, 1]  # ranks of h0, h1 and h2; with a fan-out of 1, h1 is between the others
CHAINED = {"HOROVODLIKE_FAN_OUT": "1"}


def check_survivors(job: Job, victim: int, since: float, bound: float = NOTICE_S) -> None:
    """Check that all other ranks have raised within the bound, and name only the victim."""
    for rank in set(range(job.size)) - {victim}:
        failure = job.failure(rank)
        assert failure.kind == "JobBrokenError"
        assert failure.named == {victim}, failure
        if job.host(rank) != job.host(victim):
            assert f"rank {victim} on host {job.host(victim)}" in failure.error or f"(pid {job.pid(victim)})" in (
                failure.error
            )
        assert failure.at - since < bound, (rank, failure.at - since, failure)


def others(job: Job, victim: int) -> Iterable[int]:
    return sorted(set(range(job.size)) - {victim})


@pytest.mark.parametrize("victim", [0, 1, 2, 3], ids=["root", "inner-leader", "no-leader", "last-leader"])
@pytest.mark.parametrize("action", [("reduce", BIG), ("wait",), ("idle",)], ids=lambda action: action[0])
def test_sigkill(cluster: Callable[..., Cluster], tmp_path: Path, action: tuple[object, ...], victim: int) -> None:
    job = Job(cluster(3, ssh=True), tmp_path, CHAIN, *action, *([victim] if action == ("wait",) else []), **CHAINED)
    job.wait_for("reduced" if action[0] == "reduce" else "up")
    killed = job.kill(victim)
    if action == ("idle",):
        job.go()
    assert job.finish(SETTLE_S) == 128 + signal.SIGKILL
    check_survivors(job, victim, killed)
    who = f"hvdrun: rank {victim} (pid {job.pid(victim)} on {job.host(victim)})"
    assert f"{who} was killed by signal 9 (SIGKILL)" in job.err
    job.check_gone()


def test_sigkill_in_a_star(cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    """With the default fan-out, hosts that have no control connection to each other."""
    job = Job(cluster(3, ssh=True), tmp_path, [1, 1, 1], "reduce", BIG)
    job.wait_for("reduced")
    killed = job.kill(2)
    assert job.finish(SETTLE_S) == 128 + signal.SIGKILL
    check_survivors(job, 2, killed)
    job.check_gone()


@pytest.mark.parametrize("parent", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_a_child_that_outlives_its_rank(cluster: Callable[..., Cluster], tmp_path: Path, parent: int) -> None:
    """A forked child has copies of all descriptors, but must not keep connections open."""
    job = Job(cluster(3, ssh=True), tmp_path, [1, 1], "idle_with_child", parent)
    job.wait_for("up")
    job.wait_for("child", [parent])
    child = int(job.events(parent, "child")[0]["pid"])
    killed = job.kill(parent)
    assert (Path("/proc") / str(child)).exists()
    job.go()
    assert job.finish(SETTLE_S) == 128 + signal.SIGKILL
    check_survivors(job, parent, killed)
    job.check_gone()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "length"),
    [
        (0, 100),
        (1, BIG),
        *(pytest.param(*which, marks=pytest.mark.thorough) for which in ((2, BIG), (2, 100), (3, BIG))),
    ],
    ids=["root", "inner-leader", "no-leader", "no-leader-of-a-small-one", "last-leader"],
)
def test_sigstop_until_the_stall_limit(
    cluster: Callable[..., Cluster], tmp_path: Path, victim: int, length: int
) -> None:
    limit = 5.0  # more than ranks on a busy machine begin apart
    settings = {"HOROVODLIKE_STALL_SHUTDOWN_TIME_SECONDS": str(limit), **CHAINED}
    job = Job(cluster(3, ssh=True), tmp_path, CHAIN, "reduce", length, **settings)
    job.wait_for("reduced")
    stopped = job.kill(victim, signal.SIGSTOP)
    assert job.finish(STALL_S + SETTLE_S) == 1
    failures = {rank: job.failure(rank) for rank in others(job, victim) if job.events(rank, "failed")}
    # Those that are reached through the stopped rank only may be ended by hvdrun before they have seen enough, or see
    # that hvdrun has ended the stopped rank. Others may lose one that has seen it a moment before, and has left.
    behind = {2, 3} if victim == 1 else set()
    assert failures.keys() >= set(others(job, victim)) - behind
    have_seen = {rank for rank, failure in failures.items() if "stalled" in failure.error}
    assert have_seen, failures
    for rank, failure in failures.items():
        if rank in behind and "has ended or was killed" in failure.error:
            assert victim in failure.named, failure
            continue
        if rank not in have_seen:
            assert any(f"the connection to rank {other} " in failure.error for other in have_seen), failures
            continue
        assert victim in failure.named or f"missing on ranks [{victim}]" in failure.error, failure
        assert limit - 0.5 < failure.at - stopped < limit + STALL_S, failure.at - stopped
    job.check_gone()


@pytest.mark.thorough
def test_a_long_sigstop_without_a_stall_limit(cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    """The host of a stopped rank still answers, though it has no room for more: that is no silence of the network."""
    network_timeout = 1.0
    settings = {"HOROVODLIKE_NETWORK_TIMEOUT": str(network_timeout)}
    job = Job(cluster(3, ssh=True), tmp_path, [1, 1, 1], "broadcast", BIG, **settings)
    job.wait_for("received")
    job.kill(1, signal.SIGSTOP)
    before = [len(job.events(rank, "received")) for rank in range(3)]
    time.sleep(6 * network_timeout)
    assert job.process.poll() is None, job.err
    job.kill(1, signal.SIGCONT)
    for rank in range(3):
        job.wait_for("received", [rank], times=before[rank] + 2)
    job.process.send_signal(signal.SIGINT)
    assert job.finish(SETTLE_S) == 128 + signal.SIGINT
    job.check_gone()


@pytest.mark.parametrize(
    ("how", "code", "kind", "said"),
    [
        ("raise", 1, "ShutDownError", "exited with code 1; its last lines:"),
        ("return", 1, "ShutDownError", ""),
        ("3", 3, "JobBrokenError", "exited with code 3"),
    ],
)
@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_leaves(
    cluster: Callable[..., Cluster], tmp_path: Path, victim: int, how: str, code: int, kind: str, said: str
) -> None:
    job = Job(cluster(3, ssh=True), tmp_path, [1, 2], "leave", victim, how)
    job.wait_for("failed", others(job, victim))
    assert job.finish(SETTLE_S) == code
    for rank in others(job, victim):
        failure = job.failure(rank)
        assert (failure.kind, failure.named) == (kind, {victim}), failure
    who = f"hvdrun: rank {victim} (pid {job.pid(victim)} on {job.host(victim)})"
    if said:
        assert f"{who} {said}" in job.err
    assert ("ValueError: a mistake in the script" in job.err) == (how == "raise")
    job.check_gone()


def test_a_killed_process_group(cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    """All ranks of a host at once, as when its memory is full."""
    job = Job(cluster(3, ssh=True), tmp_path, CHAIN, "reduce", BIG, **CHAINED)
    job.wait_for("reduced")
    killed = time.monotonic()
    for rank in (1, 2):
        os.kill(job.pid(rank), signal.SIGKILL)
    assert job.finish(SETTLE_S) == 128 + signal.SIGKILL
    for rank in (0, 3):
        failure = job.failure(rank)
        assert failure.named
        assert failure.named <= {1, 2}, failure
        assert failure.at - killed < NOTICE_S
    job.check_gone()
