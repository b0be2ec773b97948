"""A process that starts or supervises a job on several hosts is killed, cannot start, or waits without success."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster import sshd
from cluster.hosts import Cluster, Host, environment
from cluster.jobs import GRACE_S, HVDRUN, PROGRAM, SETTLE_S, SLACK_S, Diaries, Job
from cluster.namespaces import wait_until

BIG = 32 << 20  # elements
NOTICE_S = 1.0  # from the death of what holds a host's ranks to the error on all others
NETWORK_TIMEOUT_S = 3.0


def agents(host: Host) -> list[int]:
    """The guard of a host, and the agent, which is its child."""
    found = {pid for pid, words in host.processes().items() if "start_agent.py" in words}
    parents = {pid: int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1]) for pid in found}
    return sorted(found, key=lambda pid: parents[pid] in found)


def client(hosts: Cluster, name: str) -> int:
    """The client of ssh that holds the connection to a host."""
    processes = hosts.launcher.processes().items()
    [pid] = [pid for pid, words in processes if words.startswith("ssh ") and f" {name} " in words]
    return pid


VICTIMS: dict[str, Callable[[Cluster], list[int]]] = {
    "guard": lambda hosts: agents(hosts.hosts[1])[:1],
    "agent": lambda hosts: agents(hosts.hosts[1])[1:],
    "guard-and-agent": lambda hosts: agents(hosts.hosts[1]),
    "ssh-client": lambda hosts: [client(hosts, "h1")],
    "ssh-session": lambda hosts: sshd.sessions(hosts.hosts[1]),
}


@pytest.mark.slow
@pytest.mark.cluster("sshd", "ssh")
@pytest.mark.parametrize(
    "victim", [pytest.param(name, marks=[pytest.mark.thorough] if "-" in name else []) for name in VICTIMS]
)
def test_what_holds_a_host_is_killed(cluster: Callable[..., Cluster], tmp_path: Path, victim: str) -> None:
    hosts = cluster(2, ssh=True)
    job = Job(hosts, tmp_path, [1, 2], "reduce", BIG)
    job.wait_for("reduced")
    pids = VICTIMS[victim](hosts)
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    assert job.finish(SETTLE_S + GRACE_S) == 1
    assert re.search(r"^hvdrun: (the agent on h1 ended with|h1: the agent or its guard was killed)", job.err, re.M)
    failure = job.failure(0)
    assert failure.kind == "JobBrokenError"
    assert failure.named and failure.named <= {1, 2}, failure
    assert failure.at - killed < NOTICE_S
    job.check_gone()


@pytest.mark.slow
@pytest.mark.cluster("sshd", "ssh")
def test_hvdrun_is_killed(cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    job = Job(cluster(2, ssh=True), tmp_path, [1, 2], "reduce", BIG)
    job.wait_for("reduced")
    job.process.kill()
    job.check_gone()


@pytest.mark.cluster("sshd", "ssh")
@pytest.mark.parametrize("action", [("reduce", BIG), ("idle",)], ids=lambda action: action[0])
def test_ctrl_c(cluster: Callable[..., Cluster], tmp_path: Path, action: tuple[object, ...]) -> None:
    job = Job(cluster(2, ssh=True), tmp_path, [1, 2], *action)
    job.wait_for("reduced" if action[0] == "reduce" else "up")
    job.process.send_signal(signal.SIGINT)
    assert job.finish(GRACE_S) == 128 + signal.SIGINT
    assert job.err.startswith("hvdrun: SIGINT: ending 3 ranks within ")
    assert job.err.count("KeyboardInterrupt") >= 1
    job.check_gone()


PORT = 29400


@pytest.fixture
def key(tmp_path: Path) -> Path:
    file = tmp_path / "key"
    file.touch(mode=0o600)
    file.write_text("c0ffee00" * 8)
    return file


def start_node(host: Host, count: int, key: Path, *words: object) -> subprocess.Popen[str]:
    flags = ("--nnodes", count, "--rendezvous", f"h0:{PORT}", "--secret-key-file", key)
    return host.popen(
        [*HVDRUN, *map(str, (*flags, *words))],
        cwd=key.parent,
        env=environment(
            OMP_NUM_THREADS="1",
            JOB_COMPLETION_INDEX=str(host.number),
            HOROVODLIKE_NETWORK_TIMEOUT=str(NETWORK_TIMEOUT_S),
        ),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.cluster
def test_a_node_that_never_comes(cluster: Callable[..., Cluster], key: Path) -> None:
    hosts = cluster(3)
    began = time.monotonic()
    words = ("-np", 1, "--start-timeout", 2, PROGRAM, key.parent, "idle")
    nodes = [start_node(host, 3, key, *words) for host in hosts.hosts[:2]]
    for node in nodes:
        _, err = node.communicate(timeout=2 + SLACK_S)
        assert node.returncode == 1
        assert "after 2 s 1 of 3 nodes had not come: --node-rank 2; does hvdrun run there" in err
    assert 2 <= time.monotonic() - began < 2 + SLACK_S
    assert hosts.processes() == {}


LISTEN = """
import signal, socket, sys
server = socket.create_server(("", int(sys.argv[1])))
print("listening", flush=True)
signal.pause()
"""


@pytest.mark.cluster
def test_a_port_that_is_taken(cluster: Callable[..., Cluster], key: Path) -> None:
    """By something that accepts connections and says nothing."""
    hosts = cluster(3)
    other = hosts.hosts[0].popen([sys.executable, "-c", LISTEN, PORT], stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    assert other.stdout.readline() == "listening\n"
    words = ("-np", 1, "--start-timeout", 2, PROGRAM, key.parent, "idle")
    first, second = (start_node(host, 2, key, *words) for host in hosts.hosts[:2])
    _, err = first.communicate(timeout=SLACK_S)
    assert first.returncode == 1
    assert re.search(rf"node 0 cannot listen on \S+ port {PORT}: Address already in use; choose another", err), err
    _, err = second.communicate(timeout=2 + SLACK_S)
    assert second.returncode == 1
    assert f"node 0 at h0 port {PORT} cannot be reached" in err
    other.kill()
    other.wait()
    assert hosts.processes() == {}


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_rank_of_a_node(cluster: Callable[..., Cluster], key: Path, victim: int) -> None:
    """All nodes say the same about it, and end with the same code."""
    hosts = cluster(3)
    nodes = [start_node(host, 3, key, "-np", 1, PROGRAM, key.parent, "reduce", BIG) for host in hosts.hosts]
    diaries = Diaries(key.parent, 3)
    wait_until(lambda: all(diaries.events(rank, "reduced") for rank in range(3)), "a reduction")
    killed = diaries.kill(victim)
    said = f"hvdrun: rank {victim} (pid {diaries.pid(victim)} on h{victim}) was killed by signal 9 (SIGKILL)"
    for number, node in enumerate(nodes):
        _, err = node.communicate(timeout=SETTLE_S + SLACK_S)
        assert node.returncode == 128 + signal.SIGKILL
        assert said.replace(" on h0", "") in err.replace(" on h0", ""), (number, err)
    for rank in {0, 1, 2} - {victim}:
        failure = diaries.failure(rank)
        assert failure.named == {victim}
        assert failure.at - killed < NOTICE_S
    assert hosts.processes() == {}
