"""Fault plans in an elastic job: wherever a rank fails, every sample of an epoch is counted once."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import sampling
from elastic_job import ElasticJob

from horovodlike.testing import Fault, FaultPlan

LIMIT_S = 120


def _train(size: int = 0) -> object:
    import sampling
    from elastic_job import tell

    return sampling.train(size, tell)


def plan(*faults: Fault) -> dict[str, str]:
    return {"HOROVODLIKE_FAULT_PLAN": FaultPlan(faults).to_json()}


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize(
    ("point", "step"),
    [("rendezvous", 0), ("sync", 0), ("step", 0), ("step", 9), ("negotiation", 9), ("data", 9), ("commit", 9)],
)
@pytest.mark.parametrize("action", ["SIGKILL", "raise"])
def test_a_rank_that_fails_at_a_point(victim, point, step, action):
    with ElasticJob(3, _train, **plan(Fault(victim, step, point, action))) as job:
        if point in ("negotiation", "data") and action == "raise":  # its engine fails, and it comes back
            sampling.check(job.values(), 3)
            assert job.sizes == [3, 3]
        else:
            values = job.values(victim)
            sampling.check(values, 2)
            assert all(set(sizes[step + 1 :]) == {2} for _, sizes, _ in values)
            assert job.sizes == [3, 2]


def test_a_rank_that_is_told_to_leave_in_the_middle_of_a_step():
    with ElasticJob(3, _train, **plan(Fault(1, 9, "step", "SIGTERM"))) as job:
        values = job.finish()
        assert [worker.process.returncode for worker in values] == [0, 0, 0]
        left = [worker.value for worker in values if worker.number != 1]
        sampling.check(left, 2)
        assert all(sizes[:11] == [3] * 10 + [2] for _, sizes, _ in left)  # nothing was rolled back


def test_one_fails_while_the_others_meet_again():
    faults = [Fault(1, 4, "data", "SIGKILL"), Fault(0, 4, "rendezvous", "SIGKILL", generation=2)]
    with ElasticJob(4, _train, **plan(*faults)) as job:
        sampling.check(job.values(1, 0), 2)
        assert job.sizes == [4, 3, 2]


def test_workers_are_added():
    with ElasticJob(2, _train, 4) as job:
        job.wait_to_hear(0, 5)
        job.add(2)
        sampling.check(job.values(), 4)


@pytest.mark.parametrize("seed", range(4))
def test_two_random_faults(seed):
    chance = random.Random(seed)
    points = ["step", "negotiation", "data", "commit"]
    faults = [
        Fault(chance.randrange(3), chance.randrange(1, 12), chance.choice(points), "SIGKILL"),
        Fault(chance.randrange(2), chance.randrange(12, 20), chance.choice(points), "SIGKILL", generation=2),
    ]
    with ElasticJob(4, _train, **plan(*faults)) as job:
        print(f"seed {seed}: {faults}")
        job.wait_for(lambda: all(worker.is_gone for worker in job.workers), "not all workers have ended")
        lost = [worker.number for worker in job.workers if worker.process.returncode == -signal.SIGKILL]
        assert len(lost) == 2
        sampling.check(job.values(*lost), 2)


CHAOS = {
    "rank 0 in the middle of the data": [Fault(0, 7, "data", "SIGKILL")],
    "two at once": [Fault(0, 7, "data", "SIGKILL"), Fault(2, 7, "step", "SIGKILL")],
    "one after the other": [Fault(1, 3, "commit", "SIGKILL"), Fault(0, 9, "data", "SIGKILL", generation=2)],
    "one while the others meet again": [
        Fault(1, 3, "negotiation", "SIGKILL"),
        Fault(1, 3, "rendezvous", "SIGKILL", generation=2),
    ],
    "one that stops": [Fault(3, 5, "step", "SIGSTOP")],
    "one that raises": [Fault(1, 5, "commit", "raise")],
    "one that is told to leave": [Fault(0, 5, "step", "SIGTERM")],
    "one that is slow": [Fault(2, 5, "data", "slow", 0.5)],
}


@pytest.mark.slow
@pytest.mark.parametrize("faults", CHAOS.values(), ids=CHAOS)
def test_a_job_of_hvdruns(tmp_path, faults):
    (tmp_path / "plan.yaml").write_text(FaultPlan(tuple(faults)).to_json())  # which is YAML, too
    options = ["-np", "4", "--min-np", "2", "--max-np", "4", "--heartbeat-timeout", "1", "--chaos", "plan.yaml"]
    command = [sys.executable, "-P", "-m", "horovodlike.launcher", *options]
    program = [sys.executable, str(Path(sampling.__file__)), str(tmp_path)]
    done = subprocess.run(
        [*command, *program], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    values = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    sampling.check(values, values[0][1][-1])
    assert len(values) >= 2
    lost = {"SIGKILL": "killed by signal 9", "SIGSTOP": "killed", "raise": "InjectedFault"}
    for fault in faults:
        assert lost.get(fault.action, "") in done.stderr
