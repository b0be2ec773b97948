"""`hvdrun --nnodes`, started by itself on each host, as Kubernetes' Indexed Jobs start pods: there is no ssh."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.hosts import Cluster, Host, environment
from cluster.namespaces import wait_until

pytestmark = pytest.mark.cluster

HVDRUN = (sys.executable, "-m", "horovodlike.launcher")
PORT = 29400
GRACE_S = 5.0
SETTLE_S = 2.0
SLACK_S = 20.0
FOREVER = "import signal\nprint('ready', flush=True)\nwhile True:\n    signal.pause()\n"


@pytest.fixture
def key(tmp_path: Path) -> Path:
    file = tmp_path / "key"
    file.touch(mode=0o600)
    file.write_text("c0ffee00" * 8)
    return file


def start(host: Host, count: object, key: Path, *words: object, **settings: str) -> subprocess.Popen[str]:
    flags = ("--nnodes", count, "--rendezvous", f"h0:{PORT}", "--secret-key-file", key)
    return host.popen(
        [*HVDRUN, *map(str, (*flags, *words))],
        cwd=key.parent,
        env=environment(OMP_NUM_THREADS="1", JOB_COMPLETION_INDEX=str(host.number), **settings),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("family", [{"ipv6": False}, {"ipv4": False}, {}])
def test_each_node_is_a_host(fresh_cluster: Callable[..., Cluster], key: Path, family: dict[str, bool]) -> None:
    cluster = fresh_cluster(3, **family)
    show = (
        "echo $HOROVODLIKE_NODE_ID $HOROVODLIKE_RANK $HOROVODLIKE_SIZE $HOROVODLIKE_CROSS_RANK $HOROVODLIKE_CROSS_SIZE"
    )
    jobs = [
        start(host, 3, key, "-np", number, "sh", "-c", show)
        for host, number in zip(cluster.hosts, (2, 1, 1), strict=True)
    ]
    found = []
    for job in jobs:
        out, err = job.communicate(timeout=60)
        assert job.returncode == 0, err
        found.append(sorted(out.splitlines()))
    assert found == [
        ["[0]<stdout>: h0 0 4 0 3", "[1]<stdout>: h0 1 4 0 1"],
        ["[2]<stdout>: h1 2 4 1 3"],
        ["[3]<stdout>: h2 3 4 2 3"],
    ]
    assert cluster.processes() == {}


@pytest.mark.parametrize("nnodes", [3, "3:3"], ids=["fixed", "elastic"])
def test_a_name_that_is_loopback_on_its_own_host(
    fresh_cluster: Callable[..., Cluster], key: Path, nnodes: int | str
) -> None:
    """As Debian and Ubuntu write /etc/hosts."""
    cluster = fresh_cluster(3)
    for host in cluster.hosts:
        names = [f"{'127.0.1.1' if each is host else each.addresses['eth0'][0]} {each.name}" for each in cluster.hosts]
        cluster.write_etc(host, "hosts", "\n".join(["127.0.0.1 localhost", *names, ""]))
    program = key.with_name("train.py")
    program.write_text(
        "import numpy as np\nimport horovodlike as hvd\nhvd.init()\n"
        "print('total', hvd.allreduce(np.ones(3), op=hvd.Sum)[0], flush=True)\nhvd.shutdown()\n"
    )
    jobs = [start(host, nnodes, key, "-np", 1, sys.executable, program) for host in cluster.hosts]
    for job in jobs:
        out, err = job.communicate(timeout=60)
        assert job.returncode == 0, err
        assert "total 3.0" in out, err


@pytest.mark.slow
@pytest.mark.parametrize("cut", [0, 1])
def test_a_pulled_cable_ends_all_nodes(fresh_cluster: Callable[..., Cluster], key: Path, cut: int) -> None:
    cluster = fresh_cluster(3)
    program = key.with_name("train.py")
    program.write_text(FOREVER)
    jobs = [start(host, 3, key, "-np", 1, program, HOROVODLIKE_NETWORK_TIMEOUT="3") for host in cluster.hosts]
    for job in jobs:
        assert job.stdout is not None
        assert "ready" in job.stdout.readline()
    cluster.link_down(cluster.hosts[cut])
    for number, job in enumerate(jobs):
        _, err = job.communicate(timeout=3 + SETTLE_S + GRACE_S + SLACK_S)
        assert job.returncode == 1
        assert re.search(r"^hvdrun: .*(silent|gone)", err, re.M), (number, err)
    assert "hvdrun: h1 has been silent for" in err or cut == 0
    wait_until(lambda: cluster.processes() == {}, "the end of everything")
