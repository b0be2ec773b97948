"""`hvdrun` on platforms that start it once on each host: names that come late, and SageMaker's own toolkit."""

from __future__ import annotations

import json
import os
import re
import secrets
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from cluster.hosts import Cluster, Host, environment
from cluster.namespaces import wait_until

pytestmark = pytest.mark.cluster

HVDRUN = (sys.executable, "-m", "horovodlike.launcher")
NAME = "train-0.train"
NOBODY = "10.77.0.99"
SLACK_S = 20.0


class Output:
    """The output of a program, read from a pipe until it has what a test waits for."""

    def __init__(self, pipe: Any) -> None:
        self._descriptor = pipe.fileno()
        self.text = ""

    def expect(self, pattern: str) -> None:
        deadline = time.monotonic() + SLACK_S
        while not re.search(pattern, self.text):
            ready, _, _ = select.select([self._descriptor], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"{pattern!r} did not come: {self.text}"
            data = os.read(self._descriptor, 65536)
            assert data, f"the output ended without {pattern!r}: {self.text}"
            self.text += data.decode()


def pod(host: Host, *words: object, count: int, key: str, index: int | None = None) -> subprocess.Popen[str]:
    number = str(host.number if index is None else index)
    variables = {"PET_NNODES": str(count), "PET_NODE_RANK": number, "PET_NPROC_PER_NODE": "1"}
    variables |= {"PET_MASTER_ADDR": NAME, "PET_MASTER_PORT": "29500", "HOROVODLIKE_SECRET_KEY": key}
    return host.popen(
        [*HVDRUN, *map(str, words)],
        env=environment(OMP_NUM_THREADS="1", **variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd="/",
    )


def resolve(cluster: Cluster, host: Host, addresses: Iterable[str]) -> None:
    """Let a host resolve the name of node 0 to these addresses from now on."""
    lines = [f"{address} {NAME}\n" for address in addresses]
    cluster.write_etc(host, "hosts", "".join(["127.0.0.1 localhost\n", *lines]))


@pytest.mark.slow
def test_names_that_come_late_and_twice_and_with_an_old_address(fresh_cluster: Callable[..., Cluster]) -> None:
    cluster = fresh_cluster(3)
    first, second, third = cluster.hosts
    key = secrets.token_hex(32)
    for host in cluster.hosts:
        resolve(cluster, host, [])
    jobs = [pod(host, "sh", "-c", "echo $HOROVODLIKE_RANK", count=3, key=key) for host in cluster.hosts]
    errors = [Output(job.stderr) for job in jobs]
    hint = r" \(this is Kubeflow Trainer \(.*\): .*; --no-detect ignores that\)\n"
    errors[0].expect(rf"hvdrun: waiting: the name of node 0, {NAME}, cannot be resolved yet{hint}")
    for each in errors[1:]:
        each.expect(rf"hvdrun: waiting: node 0 at {NAME} port 29500 cannot be reached yet \([^)]*[Nn]ame[^)]*\){hint}")
    resolve(cluster, first, [NOBODY])  # that of a pod that has gone
    errors[0].expect(rf"the name of node 0, {NAME}, is {NOBODY}, and not yet an address of this host\n")
    resolve(cluster, first, [first.ipv4, NOBODY])  # the old one beside the new one
    errors[0].expect(rf"the name of node 0, {NAME}, is {NOBODY} as well, which is not this host")
    resolve(cluster, second, [NOBODY, first.ipv4])
    errors[0].expect(rf"hvdrun: waiting for node 2 of 3(\n|{hint})")
    resolve(cluster, third, [NOBODY])
    errors[2].expect(r"cannot be reached yet \((No route to host|timed out|Connection timed out)\)\n")
    resolve(cluster, third, [first.ipv4])
    for number, (job, error) in enumerate(zip(jobs, errors, strict=True)):
        out, err = job.communicate(timeout=60)
        assert job.returncode == 0, error.text + err
        assert out == f"[{number}]<stdout>: {number}\n"
    assert cluster.processes() == {}


@pytest.mark.slow
def test_two_pods_with_one_index(fresh_cluster: Callable[..., Cluster]) -> None:
    cluster = fresh_cluster(3)
    first, second, third = cluster.hosts
    for host in cluster.hosts:
        resolve(cluster, host, [first.ipv4])
    key = secrets.token_hex(32)
    leader = pod(first, "true", count=3, key=key)
    claimants = [pod(host, "true", count=3, key=key, index=1) for host in (second, third)]
    wait_until(lambda: any(job.poll() is not None for job in claimants), "the end of one of them")
    [refused] = [job for job in claimants if job.poll() is not None]
    [right] = [job for job in claimants if job is not refused]
    assert refused.returncode == 1
    assert "node 0 says: two nodes claim to be --node-rank 1; give each its own" in refused.communicate()[1]
    last = pod(third, "true", count=3, key=key, index=2)
    for job in (right, last):
        assert job.wait(60) == 0
    _, err = leader.communicate(timeout=60)
    assert leader.returncode == 0
    assert re.search(
        r"^hvdrun: a launcher on h[12]: two nodes claim to be --node-rank 1; give each its own$", err, re.M
    )


TRAIN = """
import os, sys
import horovodlike

horovodlike.init()
total = int(horovodlike.allreduce(float(horovodlike.rank()), op=horovodlike.Sum))
print("rank", horovodlike.rank(), "of", horovodlike.size(), "total", total, flush=True)
if os.environ["SM_HP_FAIL"] == str(horovodlike.rank()):
    sys.exit("this is the cause")
"""


def container(folder: Path, host: str, hosts: list[str], **hyperparameters: object) -> Path:
    """Make the folder /opt/ml of a SageMaker container."""
    base = folder / host
    for name in ("input/config", "input/data", "output", "code", "model"):
        (base / name).mkdir(parents=True)
    config = base / "input/config"
    resources = {"current_host": host, "hosts": hosts, "network_interface_name": "eth0"}
    (config / "resourceconfig.json").write_text(json.dumps(resources))
    (config / "inputdataconfig.json").write_text("{}")
    values = {"sagemaker_program": "train.sh", **hyperparameters}
    (config / "hyperparameters.json").write_text(
        json.dumps({name: json.dumps(value) for name, value in values.items()})
    )
    (base / "code/train.sh").write_text(f"#!/bin/sh\nexec {' '.join(HVDRUN)} --verbose {sys.executable} train.py\n")
    (base / "code/train.py").write_text(TRAIN)
    return base


@pytest.mark.slow
@pytest.mark.parametrize("fails", [None, pytest.param(1, marks=pytest.mark.thorough)])
def test_the_toolkit_of_sagemaker(fresh_cluster: Callable[..., Cluster], tmp_path: Path, fails: int | None) -> None:
    cluster = fresh_cluster(2)
    names = ["algo-10", "algo-2"]  # node 0 is algo-2, though a sort by letters begins with algo-10
    key = secrets.token_hex(32)
    lines = "".join(f"{host.ipv4} {name}\n" for host, name in zip(cluster.hosts, names, strict=True))
    jobs = []
    for host, name in zip(cluster.hosts, names, strict=True):
        cluster.write_etc(host, "hosts", f"127.0.0.1 localhost\n{lines}")
        base = container(tmp_path, name, names, fail="none" if fails is None else fails)
        variables = {"SAGEMAKER_BASE_DIR": str(base), "HOROVODLIKE_SECRET_KEY": key, "CUDA_VISIBLE_DEVICES": ""}
        jobs.append(
            host.popen(
                [sys.executable, "-m", "sagemaker_training.cli.train"],
                env=environment(OMP_NUM_THREADS="1", **variables),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=base,
            )
        )
    outputs = [job.communicate(timeout=120)[0] for job in jobs]
    if fails is None:
        assert [job.returncode for job in jobs] == [0, 0], outputs
        assert "rank 1 of 2 total 1" in outputs[0]
        assert "rank 0 of 2 total 1" in outputs[1]
        assert re.search(
            r"SageMaker \(SM_HOSTS=.*SM_CURRENT_HOST=algo-10\): nodes 2, this is node 1, node 0 algo-2:7777", outputs[0]
        )
        assert not list(tmp_path.glob("*/output/failure"))
    else:
        assert all(job.returncode for job in jobs)
        for name in names:
            reason = (tmp_path / name / "output/failure").read_text()
            assert re.match(
                r"hvdrun: rank 1 \(pid \d+.*\) exited with code 1; its last lines:\n    this is the cause", reason
            )
    assert cluster.processes() == {}
