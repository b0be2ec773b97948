"""Workers that are killed while they train: the others go on, and nothing that was committed is lost."""

from __future__ import annotations

import random

import pytest
from counting import check, oracle, train
from elastic_job import ElasticJob

STEPS = 40


def test_without_faults_all_come_to_what_the_oracle_says():
    with ElasticJob(3, train, [], 10) as job:
        check(job.values(), 3)
        assert job.generation == 1
        assert all(worker.has_finished for worker in job.workers)


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("point", ["begin", "commit", "end"])
def test_a_killed_worker_is_gone_and_the_others_go_on_from_the_last_commit(victim, point):
    with ElasticJob(3, train, [(victim, 7, point)], 15) as job:
        check(job.values(victim), 2)
        assert job.sizes == [3, 2]
        for worker in job.workers:
            if worker.number != victim:
                (_, _), (why, reason) = worker.whys
                assert why == "broken"
                assert f"rank {victim}" in reason


@pytest.mark.parametrize("point", ["begin", "commit", "end"])
def test_a_worker_is_killed_in_the_last_step(point):
    with ElasticJob(3, train, [(1, 9, point)], 10) as job:
        for value in job.values(1):
            assert value["step"] == 10
            assert (value["total"], value["sums"]) == oracle(10)
        # Who has returned is not needed by those that have not, who may or may not have noticed.
        assert job.sizes in ([[3], [3, 1], [3, 2]] if point == "end" else [[3, 2]])


def test_two_at_once_and_rank_0_among_them():
    with ElasticJob(4, train, [(0, 5, "commit"), (2, 5, "commit")], 12) as job:
        check(job.values(0, 2), 2)


def test_one_after_the_other_until_one_is_left():
    with ElasticJob(4, train, [(1, 3, "begin"), (0, 6, "commit"), (3, 9, "end")], 12) as job:
        check(job.values(0, 1, 3), 1)
        assert job.sizes == [4, 3, 2, 1]


@pytest.mark.parametrize("victim", [0, 3])
def test_a_worker_of_several_hosts_is_killed(victim):
    with ElasticJob(4, train, [(victim, 7, "after 0.001")], 40, nodes=2) as job:
        check(job.values(victim), 3)
        assert job.sizes == [4, 3]


def test_all_workers_of_a_host_are_killed():
    with ElasticJob(4, train, [(0, 7, "commit"), (2, 7, "commit")], 15, nodes=2) as job:
        check(job.values(0, 2), 2)


@pytest.mark.parametrize("seed", range(6))
def test_killed_at_random_times(seed):
    chance = random.Random(seed)
    victims = chance.sample(range(4), 2)
    faults = [(victim, chance.randrange(STEPS - 10), f"after {chance.uniform(0, 0.01):.6f}") for victim in victims]
    with ElasticJob(4, train, faults, STEPS) as job:
        print(f"seed {seed}: {faults}")
        check(job.values(*victims), 2)
