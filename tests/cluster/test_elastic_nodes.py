"""`hvdrun --nnodes MIN:MAX` on several hosts, as pods come, go, and come back with other addresses: there is no ssh."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster.hosts import Cluster, Host
from cluster.namespaces import wait_until
from cluster.pods import ELASTIC, SLACK_S, Pods

pytestmark = pytest.mark.cluster

HVDRUN = (sys.executable, "-P", "-m", "horovodlike.launcher")
PORT = 29400
HEARTBEAT_S = 2.0


class Nodes(Pods):
    """Launchers of one elastic job."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, ELASTIC)
        key = folder / "key"
        key.touch(mode=0o600)
        key.write_text("c0ffee00" * 8)

    def start(self, host: Host, number: int | None, *words: object) -> subprocess.Popen[bytes]:
        flags = ("--nnodes", "1:4", "--rendezvous", f"h0:{PORT}", "--secret-key-file", self.folder / "key", "-np", 1)
        index = {} if number is None else {"JOB_COMPLETION_INDEX": str(number)}
        shown = map(str, (*flags, "--heartbeat-timeout", HEARTBEAT_S, *words))
        return self.popen(host, [*HVDRUN, *shown, sys.executable, "train.py"], **index)


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("family", [{"ipv6": False}, pytest.param({"ipv4": False}, marks=pytest.mark.slow)])
def test_a_pod_that_comes_back_with_another_address(
    fresh_cluster: Callable[..., Cluster], pods: Nodes, family: dict[str, bool]
) -> None:
    cluster = fresh_cluster(4, **family)
    first, lost, other, again = cluster.hosts
    leader = pods.start(first, 0)
    pods.wait(leader, "size 1 at step 0 on h0")
    gone, named = pods.start(lost, 1), pods.start(other, None)
    pods.wait(leader, r"size 3 at step [1-9]\d* on h0")
    pods.wait(leader, r"hvdrun: node 1, h1 at \S+ has called in with 1 slot")
    pods.wait(leader, r"hvdrun: h2 at \S+ has called in with 1 slot")
    cluster.link_down(lost)  # its connection does not break
    replacement = pods.start(again, 1)
    pods.wait(leader, "hvdrun: h1 cannot be used: it has been silent for")
    pods.wait(replacement, r"size 3 at step [1-9]\d* on h3")
    assert gone.wait(HEARTBEAT_S + SLACK_S) == 1
    assert "hvdrun: node 0 has been silent for too long" in pods.text(gone)
    pods.finish(leader, named, replacement)
    wait_until(lambda: cluster.processes() == {}, "the end of everything")


@pytest.mark.slow
def test_node_0_is_cut_off(fresh_cluster: Callable[..., Cluster], pods: Nodes) -> None:
    cluster = fresh_cluster(3)
    jobs = [pods.start(host, host.number) for host in cluster.hosts]
    pods.wait(jobs[2], "size 3 at")
    cluster.link_down(cluster.hosts[0])
    for job in jobs[1:]:
        assert job.wait(HEARTBEAT_S + SLACK_S) == 1
        assert "hvdrun: node 0 has been silent for too long" in pods.text(job)
    pods.finish(jobs[0])  # it goes on alone
    wait_until(lambda: cluster.processes() == {}, "the end of everything")


@pytest.mark.slow
def test_pods_scale_up_and_down(fresh_cluster: Callable[..., Cluster], pods: Nodes) -> None:
    cluster = fresh_cluster(4)
    leader, *others = [pods.start(host, host.number) for host in cluster.hosts[:2]]
    pods.wait(leader, "size 2 at")
    others += [pods.start(host, host.number) for host in cluster.hosts[2:]]
    pods.wait(leader, "size 4 at")
    for number, pod in enumerate(others):
        pod.send_signal(signal.SIGTERM)
        assert pod.wait(SLACK_S) == 143
        pods.wait(leader, rf"hvdrun: h{number + 1} leaves: ")
    pods.wait(leader, r"size 1 at step [1-9]\d* on h0")
    text = pods.text(leader)
    assert "cannot be used" not in text
    assert "exited with" not in text
    pods.finish(leader)
    wait_until(lambda: cluster.processes() == {}, "the end of everything")
