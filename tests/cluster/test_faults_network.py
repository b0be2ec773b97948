"""Links that are cut, lossy or slow, clocks that differ, and port scanners, under jobs on several hosts."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.hosts import Cluster, Host
from cluster.jobs import GRACE_S, SETTLE_S, SLACK_S, Job
from cluster.namespaces import wait_until

pytestmark = pytest.mark.cluster("sshd", "ssh")

# Keepalive: a probe after a third of the network's time-out, the last one answered in vain at its end; TCP_USER_TIMEOUT
# is all of it. Later come the 0.3 s for a neighbour's better reason, and what a busy machine adds.
NOTICE_S = 0.3 + 1.0
BIG = 32 << 20  # elements


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "fan_out", "network_timeout"),
    [pytest.param(0, 1, 3, marks=pytest.mark.thorough), (1, 1, 3), pytest.param(2, 16, 9, marks=pytest.mark.thorough)],
    ids=["root-of-a-chain", "inner-host", "leaf-and-a-longer-time"],
)
def test_a_pulled_cable(
    fresh_cluster: Callable[..., Cluster], tmp_path: Path, number: int, fan_out: int, network_timeout: float
) -> None:
    hosts = fresh_cluster(3, ssh=True)
    cut = hosts.hosts[number]
    settings = {"HOROVODLIKE_FAN_OUT": str(fan_out), "HOROVODLIKE_NETWORK_TIMEOUT": str(network_timeout)}
    job = Job(hosts, tmp_path, [1, 2, 1], "reduce", BIG, **settings)
    job.wait_for("reduced")
    hosts.link_down(cut)
    since = time.monotonic()
    assert job.finish(network_timeout + SETTLE_S + GRACE_S) == 1
    assert re.search(rf"^hvdrun: {cut.name} has been silent for \d s; is it up, and reachable\?$", job.err, re.M)
    lost = {rank for rank in range(job.size) if job.host(rank) == cut.name}
    for rank in set(range(job.size)) - lost:
        failure = job.failure(rank)
        assert failure.kind == "JobBrokenError"
        assert f" on host {cut.name}" in failure.error
        assert failure.named and failure.named <= lost, failure
        assert failure.at - since < network_timeout + NOTICE_S, failure.at - since
    # On the host that is cut off, ranks notice by themselves, or the agent does and ends them.
    job.wait_for_end(lost, since + network_timeout + GRACE_S + SLACK_S - time.monotonic())
    for rank in lost:
        for event in job.events(rank, "failed"):
            assert not lost & {int(each) for each in re.findall(r"rank (\d+) on host", event["error"])}, event
    job.check_gone([host for host in hosts.machines if host is not cut])
    hosts.link_up(cut)
    job.check_gone()


@pytest.mark.slow
@pytest.mark.cluster("loss")
def test_one_end_of_a_chain_notices_first(fresh_cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    """The last host loses the one between before the first host does, which hears from it directly."""
    network_timeout = 3
    hosts = fresh_cluster(3, ssh=True)
    _, between, last = hosts.hosts
    settings = {"HOROVODLIKE_FAN_OUT": "1", "HOROVODLIKE_NETWORK_TIMEOUT": str(network_timeout)}
    job = Job(hosts, tmp_path, [2, 1, 1], "reduce", BIG, **settings)
    job.wait_for("reduced")
    hosts.part(between, last)
    since = time.monotonic()
    time.sleep(network_timeout / 2)
    hosts.link_down(between)
    assert job.finish(1.5 * network_timeout + SETTLE_S + GRACE_S) == 1
    for rank in (0, 1, 3):
        failure = job.failure(rank)
        assert "rank 2 on host h1" in failure.error and failure.named == {2}, failure
        assert failure.at - since < network_timeout + NOTICE_S
    job.check_gone([host for host in hosts.machines if host is not between])
    hosts.link_up(between)
    job.check_gone()


@pytest.mark.slow
@pytest.mark.cluster("loss")
def test_two_hosts_that_do_not_reach_each_other(fresh_cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    """Only these two can notice: there is no control connection between them."""
    network_timeout = 1.0
    hosts = fresh_cluster(3, ssh=True)
    job = Job(hosts, tmp_path, [1, 1, 1], "reduce", BIG, HOROVODLIKE_NETWORK_TIMEOUT=str(network_timeout))
    job.wait_for("reduced")
    hosts.part(hosts.hosts[1], hosts.hosts[2])
    since = time.monotonic()
    bound = 4 * 2 * network_timeout + NOTICE_S  # four keepalive times, each of two seconds at least
    assert job.finish(bound + SETTLE_S) == 1
    for rank in range(3):
        failure = job.failure(rank)
        assert failure.named and failure.named <= {1, 2}, failure
        assert failure.at - since < bound
    # By the watch of the engine, or by keepalive where all that was sent had been acknowledged when they were parted.
    texts = [job.failure(rank).error for rank in (1, 2)]
    assert any("has acknowledged nothing for" in text or "Connection timed out" in text for text in texts), texts
    job.check_gone()


@pytest.mark.slow
@pytest.mark.cluster("loss")
def test_lost_packets(fresh_cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    hosts = fresh_cluster(2, ssh=True)
    hosts.shape(hosts.hosts[1], loss=0.05)
    job = Job(hosts, tmp_path, [1, 1], "check", 100_000, 8, HOROVODLIKE_NETWORK_TIMEOUT="5")
    assert job.finish(14.0) == 0, job.err
    assert [len(job.events(rank, "right")) for rank in range(2)] == [1, 1]
    assert job.events(0, "right")[0]["rounds"] > 1
    job.check_gone()


@pytest.mark.thorough
def test_a_slow_link(fresh_cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    """A collective takes longer than the network may be silent, and the queue before the link two seconds each way."""
    network_timeout = 8
    hosts = fresh_cluster(2, ssh=True)
    hosts.shape(hosts.hosts[1], rate=1e6, delay=0.1)
    length = 300_000  # floats: 9.6 s in each direction
    job = Job(hosts, tmp_path, [1, 1], "check", length, 0, HOROVODLIKE_NETWORK_TIMEOUT=str(network_timeout))
    assert job.finish(25.0) == 0, job.err
    assert [job.events(rank, "right")[0]["rounds"] for rank in range(2)] == [1, 1]
    assert "hvdrun:" not in job.err
    job.check_gone()


OTHER_CLOCK = """#!/bin/sh
[ "$(hostname)" = h1 ] && exec unshare --time --monotonic 100000 -- {python} "$@"
exec {python} "$@"
"""


def test_clocks_that_differ(cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    """A host that has been up for a day longer: CLOCK_MONOTONIC is another one on each host."""
    script = tmp_path / "python"
    script.write_text(OTHER_CLOCK.format(python=sys.executable))
    script.chmod(0o700)
    job = Job(
        cluster(2, ssh=True),
        tmp_path,
        [1, 2],
        "check",
        1000,
        2,
        python=[script],
        HOROVODLIKE_STALL_CHECK_TIME_SECONDS="30",
        HOROVODLIKE_STALL_SHUTDOWN_TIME_SECONDS="60",
    )
    assert job.finish(10.0) == 0, job.err
    ups = [job.events(rank, "up")[0]["at"] for rank in range(3)]
    assert ups[1] - ups[0] > 90_000  # they do differ
    assert abs(ups[2] - ups[1]) < 60
    assert "stalled" not in job.err
    for rank in range(3):
        assert all(0 <= each < 10 for each in job.events(rank, "right")[0]["waited_for"])
    job.check_gone()


PORT_SCANNER = Path(__file__).with_name("port_scanner.py")
START_S = 60.0
SSH_PORT = 22  # ssh's server rejects all clients while too many others connect


def listening(host: Host) -> set[int]:
    """Return the listening ports of a host."""
    lines = host.run(["ss", "--tcp", "--listening", "--no-header", "--numeric"]).stdout.splitlines()
    return {int(line.split()[3].rpartition(":")[2]) for line in lines}


@pytest.mark.slow
@pytest.mark.cluster("loss")
def test_port_scanners(fresh_cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    """They connect while the job starts and while it runs, and no port stays open for longer than the start takes."""
    hosts = fresh_cluster(2, ssh=True)
    first, second = hosts.hosts
    met = {host.name: tmp_path / f"met-{host.name}" for host in hosts.machines}
    scanners = []
    for host in hosts.machines:
        with met[host.name].open("w") as output:
            scanners.append(host.popen([sys.executable, PORT_SCANNER, SSH_PORT], stdout=output))

    def ports(host: Host) -> int:
        return len(met[host.name].read_text().splitlines()) - 1  # "ready" comes first

    for host in hosts.machines:
        wait_until(lambda host=host: ports(host) == 0, f"scanners on {host.name}")
    hosts.part(first, second)  # ranks listen until they have found each other
    job = Job(hosts, tmp_path, [1, 2], "check", 100_000, 2)
    wait_until(lambda: (ports(first), ports(second)) == (1, 2), "scanners at each rank's port", START_S)
    hosts.unite(first, second)
    job.wait_for("up", seconds=START_S)
    assert [listening(host) for host in hosts.hosts] == [{SSH_PORT}] * 2
    assert job.finish(10.0) == 0, job.err
    for scanner in scanners:
        scanner.kill()
    assert [ports(host) for host in (first, second, hosts.launcher)] == [1, 2, 1]  # and at the rendezvous server's
    assert [len(job.events(rank, "right")) for rank in range(3)] == [1, 1, 1]
    job.check_gone()
