"""Elastic jobs from end to end: the result is that of an undisturbed job, whatever worker is lost, added or leaves."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from histories import HistoryJob

SAMPLES = 600
PROGRAM = ["--samples", str(SAMPLES), "--batch-size", "4", "--pace", "0.02"]
FOUR = ["-np", "4", "--min-np", "2", "--max-np", "4"]
BIG = ["--padding", str(4 << 20)]  # float32: 16 MiB


def fault(rank: int, step: int, point: str, action: str, generation: int = 1) -> str:
    return f"- {{rank: {rank}, step: {step}, point: {point}, action: {action}, generation: {generation}}}\n"


def check(job: HistoryJob, *, failed: int = 0) -> None:
    """Check the end, and that so many workers have failed on the way."""
    assert job.finish() == 0, job.said
    job.check(SAMPLES)
    job.check_nothing_left()
    assert job.said.count(" has failed: ") == failed, job.said


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("point", ["negotiation", "data", "commit", "step"])
def test_sigkill(tmp_path: Path, point: str, victim: int) -> None:
    padding = BIG if point == "data" else []
    with HistoryJob(tmp_path, *FOUR, program=[*PROGRAM, *padding], plan=fault(victim, 5, point, "SIGKILL")) as job:
        check(job, failed=1)
    assert len(job.entries("start")) > 4  # it was replaced


@pytest.mark.slow
@pytest.mark.parametrize("point", ["rendezvous", "sync"])
def test_sigkill_while_a_generation_begins(tmp_path: Path, point: str) -> None:
    plan = fault(1, 5, "step", "SIGKILL") + fault(1, 5, point, "SIGKILL", generation=2)
    with HistoryJob(tmp_path, *FOUR, program=PROGRAM, plan=plan) as job:
        check(job, failed=2)


def test_two_kills_at_once(tmp_path: Path) -> None:
    plan = fault(0, 5, "step", "SIGKILL") + fault(3, 5, "step", "SIGKILL")
    with HistoryJob(tmp_path, *FOUR, program=PROGRAM, plan=plan) as job:
        check(job, failed=2)


def test_all_but_the_fewest_are_killed(tmp_path: Path) -> None:
    with HistoryJob(tmp_path, *FOUR, program=PROGRAM) as job:
        job.wait_for("some steps", lambda: min(job.steps_of(worker) for worker in range(4)) > 4)
        for worker in (0, 1):
            os.kill(job.pid(worker), signal.SIGKILL)
        check(job, failed=2)


def test_a_rank_that_is_stopped(tmp_path: Path) -> None:
    plan = fault(2, 5, "step", "SIGSTOP")
    with HistoryJob(tmp_path, *FOUR, "--heartbeat-timeout", "1", program=PROGRAM, plan=plan) as job:
        check(job, failed=1)


def test_an_exception(tmp_path: Path) -> None:
    with HistoryJob(tmp_path, *FOUR, program=PROGRAM, plan=fault(2, 5, "step", "raise")) as job:
        check(job, failed=1)


def test_the_second_training_of_a_script(tmp_path: Path) -> None:
    program = [*PROGRAM, "--trainings", "2"]
    commits = SAMPLES // 16 // 2 + 5  # some more than those of the first one
    with HistoryJob(tmp_path, *FOUR, program=program, plan=fault(1, commits, "step", "SIGKILL")) as job:
        check(job, failed=1)
    assert len(job.entries("start")) == 5


def test_a_rank_that_leaves(tmp_path: Path) -> None:
    """SIGTERM: nothing is rolled back, so that no step is done twice."""
    with HistoryJob(tmp_path, *FOUR, program=PROGRAM) as job:
        job.wait_for("some steps", lambda: min(job.steps_of(worker) for worker in range(4)) > 4)
        os.kill(job.pid(0), signal.SIGTERM)
        check(job)
    steps = [(entry.generation, entry.step) for entry in job.entries("step") if entry.rank == 0]
    assert len({step for _, step in steps}) == len(steps)


@pytest.mark.parametrize("change", ["added", "removed"])
def test_hosts_that_come_and_go(tmp_path: Path, change: str) -> None:
    fewer, more = "localhost:2", "localhost:4"
    script, hosts = tmp_path / "hosts.sh", tmp_path / "hosts"
    hosts.write_text(f"{fewer if change == 'added' else more}\n")
    script.write_text(f"#!/bin/sh\ncat {hosts}\n")
    script.chmod(0o700)
    begin = 2 if change == "added" else 4
    options = ["-np", str(begin), "--min-np", "2", "--max-np", "4", "--host-discovery-script", str(script)]
    end = 4 if change == "added" else 2
    with HistoryJob(tmp_path, *options, program=[*PROGRAM, "--until-size", str(end)]) as job:
        job.wait_for("some steps", lambda: min(job.steps_of(worker) for worker in range(begin)) > 2)
        new = tmp_path / "new"
        new.write_text(f"{more if change == 'added' else fewer}\n")
        new.rename(hosts)
        check(job)
    assert {begin, end} <= {entry.size for entry in job.entries("begin")}


def test_fewer_than_the_fewest(tmp_path: Path) -> None:
    """No worker trains until there is a replacement."""
    options = ["-np", "2", "--min-np", "2", "--max-np", "2"]
    with HistoryJob(tmp_path, *options, program=PROGRAM, plan=fault(0, 5, "step", "SIGKILL")) as job:
        check(job, failed=1)
    assert {entry.size for entry in job.entries("begin")} == {2}


def test_all_are_killed(tmp_path: Path) -> None:
    """Without a commit on disk the job begins anew."""
    with HistoryJob(tmp_path, "-np", "2", "--min-np", "1", "--max-np", "2", program=PROGRAM) as job:
        job.wait_for("some steps", lambda: min(job.steps_of(worker) for worker in range(2)) > 4)
        for worker in (0, 1):
            os.kill(job.pid(worker), signal.SIGKILL)
        assert job.finish() == 0, job.said
        job.check_nothing_left()
    first = max(entry.generation for entry in job.entries("step")) - 1
    ends = job.entries("end")
    assert len(ends) == 2 and first >= 1 and len({end.model for end in ends}) == 1
