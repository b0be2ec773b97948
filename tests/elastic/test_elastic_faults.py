"""Workers that are killed while they train: the others go on, and nothing that was committed is lost."""

from __future__ import annotations

import random

import pytest
from counting import oracle
from elastic_job import ElasticJob

STEPS = 40


def train(faults: list[tuple[int, int, str]], steps: int) -> dict[str, object]:
    """Trains; `faults` says which worker kills itself at which step, and where in it."""
    import os
    import signal
    import threading

    from counting import take_step
    from elastic_job import tell

    from horovodlike import basics, elastic
    from horovodlike.elastic import _worker

    basics.init()
    number = _worker.current().number
    mine = {(step, point) for worker, step, point in faults if worker == number}
    committed = begun = 0

    def fail(step: int, point: str) -> None:
        if (step, point) in mine:
            os.kill(os.getpid(), signal.SIGKILL)

    def fail_during(step: int) -> None:
        for fault_step, point in mine:
            if fault_step == step and point.startswith("after "):
                delay = float(point.removeprefix("after "))
                threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()

    @elastic.run
    def loop(state):
        nonlocal committed, begun
        begun += 1
        assert state.step >= committed, f"{committed} steps were committed, and only {state.step} are left"
        assert state.commits == state.step
        while state.step < steps:
            step = state.step
            fail_during(step)
            fail(step, "begin")
            take_step(state)
            fail(step, "commit")
            state.commit()
            committed = state.step
            fail(step, "end")
            tell(step)

    state = elastic.ObjectState(step=0, total=0, sums=[])
    loop(state)
    return {"total": state.total, "sums": state.sums, "size": basics.size(), "begun": begun}


def check(values: list[dict[str, object]], steps: int, size: int) -> None:
    total, sums = oracle(steps)
    assert len(values) == size
    for value in values:
        assert (value["total"], value["sums"], value["size"]) == (total, sums, size)


def test_without_faults_all_come_to_what_the_oracle_says():
    with ElasticJob(3, train, [], 10) as job:
        check(job.values(), 10, 3)
        assert job.generation == 1
        assert all(worker.has_finished for worker in job.workers)


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("point", ["begin", "commit", "end"])
def test_a_killed_worker_is_gone_and_the_others_go_on_from_the_last_commit(victim, point):
    with ElasticJob(3, train, [(victim, 7, point)], 15) as job:
        check(job.values(victim), 15, 2)
        assert job.sizes == [3, 2]
        for worker in job.workers:
            if worker.number != victim:
                (_, _), (why, reason) = worker.whys
                assert why == "broken"
                assert f"rank {victim}" in reason


def test_two_at_once_and_rank_0_among_them():
    with ElasticJob(4, train, [(0, 5, "commit"), (2, 5, "commit")], 12) as job:
        check(job.values(0, 2), 12, 2)


def test_one_after_the_other_until_one_is_left():
    with ElasticJob(4, train, [(1, 3, "begin"), (0, 6, "commit"), (3, 9, "end")], 12) as job:
        check(job.values(0, 1, 3), 12, 1)
        assert job.sizes == [4, 3, 2, 1]


@pytest.mark.parametrize("seed", range(6))
def test_killed_at_random_times(seed):
    chance = random.Random(seed)
    victims = chance.sample(range(4), 2)
    faults = [(victim, chance.randrange(STEPS - 10), f"after {chance.uniform(0, 0.01):.6f}") for victim in victims]
    with ElasticJob(4, train, faults, STEPS) as job:
        print(f"seed {seed}: {faults}")
        check(job.values(*victims), STEPS, 2)
