"""Fault plans in an elastic job: wherever a rank fails, every sample of an epoch is counted once."""

from __future__ import annotations

import random
import signal

import pytest
from elastic_job import ElasticJob

from horovodlike.testing import Fault, FaultPlan

LENGTHS = [17, 40, 3, 1, 29, 60]  # of the tasks
EPOCHS = 2


def _train(size: int = 0) -> tuple[list[int], list[int]]:
    """How often samples were counted; and how many ranks there were in each step that this worker took, and at the end.

    With `size` it goes on until there are as many ranks.
    """
    import numpy as np
    from collectives import allreduce
    from elastic_job import tell

    from horovodlike import basics, elastic
    from horovodlike.data import DynamicPartition, Task

    basics.init()
    sizes = []

    @elastic.run
    def loop(state):
        while not state.is_done:
            state.data.set_epoch(state.epoch)
            for batch in state.data:
                counts = np.zeros(sum(LENGTHS) + 1, np.int64)
                for source, index in batch.samples():
                    counts[sum(LENGTHS[:source]) + index] += 1
                counts[-1] = len(batch)
                allreduce("step", counts)
                assert counts[-1] == batch.total
                state.counts += counts[:-1]
                sizes.append(basics.size())
                state.commit()
                tell(state.commits)
            assert set(state.counts) == {state.epoch + 1}
            state.epoch += 1
            state.is_done = state.epoch >= EPOCHS and basics.size() == (size or basics.size())

    tasks = [Task(source, 0, length) for source, length in enumerate(LENGTHS)]
    data = DynamicPartition(tasks, batch_size=2, seed=1)
    state = elastic.ObjectState(epoch=0, is_done=False, counts=np.zeros(sum(LENGTHS), np.int64), data=data)
    loop(state)
    return sorted({int(count) for count in state.counts}), [*sizes, basics.size()]


def check(job: ElasticJob, *lost: int) -> list[list[int]]:
    """All that are left have counted each sample once in each epoch; the sizes that each has seen."""
    values = job.values(*lost)
    assert len({str(counts) for counts, _ in values}) == 1
    for (count,), _ in values:
        assert count >= EPOCHS
    return [sizes for _, sizes in values]


def plan(*faults: Fault) -> dict[str, str]:
    return {"HOROVODLIKE_FAULT_PLAN": FaultPlan(faults).to_json()}


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize(
    ("point", "step"),
    [("rendezvous", 0), ("sync", 0), ("step", 0), ("step", 9), ("negotiation", 9), ("data", 9), ("commit", 9)],
)
@pytest.mark.parametrize("action", ["SIGKILL", "raise"])
def test_a_rank_that_fails_at_a_point(victim, point, step, action):
    with ElasticJob(3, _train, settings=plan(Fault(victim, step, point, action))) as job:
        if point in ("negotiation", "data") and action == "raise":  # its engine fails, and it comes back
            check(job)
            assert job.sizes == [3, 3]
        else:
            for sizes in check(job, victim):
                assert set(sizes[step + 1 :]) == {2}
            assert job.sizes == [3, 2]


def test_one_fails_while_the_others_meet_again():
    faults = [Fault(1, 4, "data", "SIGKILL"), Fault(0, 4, "rendezvous", "SIGKILL", generation=2)]
    with ElasticJob(4, _train, settings=plan(*faults)) as job:
        check(job, 1, 0)
        assert job.sizes == [4, 3, 2]


def test_workers_are_added():
    with ElasticJob(2, _train, 4) as job:
        job.wait_to_hear(0, 5)
        job.add(2)
        for sizes in check(job):
            assert sizes[-1] == 4


@pytest.mark.parametrize("seed", range(4))
def test_two_random_faults(seed):
    chance = random.Random(seed)
    points = ["step", "negotiation", "data", "commit"]
    faults = [
        Fault(chance.randrange(3), chance.randrange(1, 12), chance.choice(points), "SIGKILL"),
        Fault(chance.randrange(2), chance.randrange(12, 20), chance.choice(points), "SIGKILL", generation=2),
    ]
    with ElasticJob(4, _train, settings=plan(*faults)) as job:
        print(f"seed {seed}: {faults}")
        job.wait_for(lambda: all(worker.is_gone for worker in job.workers), "not all workers have ended")
        lost = [worker.number for worker in job.workers if worker.process.returncode == -signal.SIGKILL]
        assert len(lost) == 2
        check(job, *lost)
