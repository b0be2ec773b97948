"""`--gpus-per-rank` in elastic jobs: GPUs belong to slots, of which no two workers that live have the same."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from test_elastic_hosts import Hosts, hosts, path
from test_elastic_jobs import ElasticLaunch, elastic

__all__ = ["elastic", "hosts"]  # fixtures

VISIBLE = "CUDA_VISIBLE_DEVICES"
SHOW = f"print('gpus', os.environ['{VISIBLE}'], flush=True)"


def gpus_of(job: ElasticLaunch, workers: int) -> dict[int, str]:
    out = job.expect("gpus ", workers)
    return {int(worker): gpus for worker, gpus in re.findall(r"\[(\d+)\]<stdout>: gpus (\S+)", out)}


def test_whoever_takes_a_place_takes_the_gpus(elastic: Callable[..., ElasticLaunch]) -> None:
    job = elastic("-np", 3, "--min-np", 2, "--gpus-per-rank", 2, program=SHOW, env={VISIBLE: "0,1,2,3,4,5,6"}, held=3)
    job.at(1, 3)
    assert gpus_of(job, 3) == {0: "0,1", 1: "2,3", 2: "4,5"}
    job.kill(1)
    job.at(2, 2)
    job.admit()
    job.at(3, 3)
    assert gpus_of(job, 4)[3] == "2,3"
    job.kill(0, 3)
    job.expect(" of 3\n", 9)  # after two generations of three; one of two comes before if the newcomers do one by one
    found = gpus_of(job, 6)
    assert {found[4], found[5]} == {"0,1", "2,3"}
    assert job.finish().code == 0


def test_a_host_with_too_few_is_left_out(elastic: Callable[..., ElasticLaunch], hosts: Hosts, ssh: Path) -> None:
    hosts.are("node1:1", "node2:2")
    job = elastic(
        *("-np", 1, "--min-np", 1, "--host-discovery-script", hosts.script, "--gpus-per-rank", 1),
        program=SHOW,
        env={**path(ssh), VISIBLE: "3"},
    )
    job.at(1, 1)
    assert gpus_of(job, 1) == {0: "3"}
    ended = job.finish()
    assert ended.code == 0
    assert re.search(
        r"^hvdrun: node2 cannot be used: --gpus-per-rank 1: 2 ranks need 2 GPUs, but this host has 1 \(",
        ended.err,
        re.M,
    )
