"""A training job over hosts loses one of them: what its ranks get, what `hvdrun` says, and that nothing is left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster import sshd
from cluster.hosts import Cluster, Host, environment
from cluster.namespaces import wait_until

pytestmark = pytest.mark.cluster("sshd", "ssh")

NETWORK_TIMEOUT_S = 4
GRACE_S = 5.0
SETTLE_S = 2.0
SLACK_S = 20.0
TRAIN = f"""
import sys
sys.path.append({str(Path(__file__).resolve().parents[1])!r})
import numpy as np
from support.collectives import allreduce
from horovodlike import basics
from horovodlike.errors import HorovodInternalError
from horovodlike._engine.ops import ReduceOp

basics.init()
data = np.ones(1 << 20, np.float32)
for step in range(10**9):
    try:
        allreduce("data", data, ReduceOp.MAX)
    except HorovodInternalError as error:
        print("lost:", error, flush=True)
        raise
    if step == 3:
        print("ready", flush=True)
"""


class Training:
    """A job of a rank on each host, in the middle of its allreduces."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster = cluster
        (folder / "train.py").write_text(TRAIN)
        slots = ",".join(f"{host.name}:1" for host in cluster.hosts)
        self.process = cluster.launcher.popen(
            [sys.executable, "-m", "horovodlike.launcher", "-H", slots, "train.py"],
            cwd=folder,
            env=environment(OMP_NUM_THREADS="1", HOROVODLIKE_NETWORK_TIMEOUT=str(NETWORK_TIMEOUT_S)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        for _ in cluster.hosts:
            line = self.process.stdout.readline()
            assert "ready" in line, (line, self.process.communicate())

    def finish(self, seconds: float) -> tuple[str, str]:
        """Wait for the end, which is a failure; return output and errors."""
        out, err = self.process.communicate(timeout=seconds + SETTLE_S + GRACE_S + SLACK_S)
        assert self.process.returncode != 0
        return out, err

    def lost(self, out: str) -> set[int]:
        """The ranks that were told that the job is broken."""
        return {int(rank) for rank in re.findall(r"^\[(\d)\]<stdout>: lost:", out, re.M)}


@pytest.fixture
def training(fresh_cluster: Callable[..., Cluster], tmp_path: Path) -> Training:
    return Training(fresh_cluster(3, ssh=True), tmp_path)


def nothing_left(hosts: list[Host]) -> None:
    def left() -> list[str]:
        lines = [line for host in hosts for line in host.processes().values()]
        return [line for line in lines if "train.py" in line or "start_agent.py" in line]

    wait_until(lambda: not left(), "the end of agents and ranks")
    assert not [entry for host in hosts for entry in host.shm_entries()]


def test_a_pulled_cable(training: Training) -> None:
    hosts = training.cluster
    hosts.link_down(hosts.hosts[1])
    out, err = training.finish(NETWORK_TIMEOUT_S)
    assert re.search(r"^hvdrun: h1 has been silent for \d+ s", err, re.M), err
    assert training.lost(out) == {0, 2}
    nothing_left(hosts.machines)


def test_a_killed_rank(training: Training) -> None:
    [pid] = [pid for pid, line in training.cluster.hosts[2].processes().items() if line.endswith(" train.py")]
    os.kill(pid, signal.SIGKILL)
    out, err = training.finish(0)
    assert training.process.returncode == 128 + signal.SIGKILL
    assert f"hvdrun: rank 2 (pid {pid} on h2) was killed by signal 9 (SIGKILL); it wrote nothing to stderr\n" in err
    assert training.lost(out) == {0, 1}
    nothing_left(training.cluster.machines)


def test_a_killed_agent(training: Training) -> None:
    host = training.cluster.hosts[1]
    for pid in [pid for pid, line in host.processes().items() if "start_agent.py" in line]:
        os.kill(pid, signal.SIGKILL)
    out, err = training.finish(0)
    assert re.search(r"^hvdrun: .*h1.*(killed|ended)", err, re.M), err
    assert training.lost(out) == {0, 2}
    nothing_left(training.cluster.machines)


def test_a_dropped_ssh_session(training: Training) -> None:
    for pid in sshd.sessions(training.cluster.hosts[0]):
        os.kill(pid, signal.SIGKILL)
    out, err = training.finish(0)
    assert re.search(r"^hvdrun: the agent on h0 ended with code 255 .*; rank 0 was ended$", err, re.M), err
    assert training.lost(out) == {1, 2}
    nothing_left(training.cluster.machines)
