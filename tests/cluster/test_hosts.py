"""The hosts themselves: names, addresses, links that are slow, lossy or cut."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cluster import iperf
from cluster.namespaces import PREFIX, CommandError, wait_until

pytestmark = pytest.mark.cluster("ping")

# Sends as many bytes as the second argument says, on standard input's word.
SERVER = """
import socket, sys
server = socket.create_server(("", 7000))
print("listening", flush=True)
connection, _ = server.accept()
received = 0
while data := connection.recv(1 << 20):
    received += len(data)
print(received)
"""
CLIENT = """
import socket, sys
with socket.create_connection((sys.argv[1], 7000)) as connection:
    connection.sendall(bytes(int(sys.argv[2])))
"""


def answers_so_far(host):
    """How many answers to pings have come to a host, also after the ping that they were for has ended."""
    names, values = (
        line.split() for line in host.run(["cat", "/proc/net/snmp"]).stdout.splitlines() if "Icmp:" in line
    )
    return int(values[names.index("InEchoReps")])


def reaches(host, name, *options):
    return host.run(["ping", "-c", "1", "-W", "1", *options, name], check=False).returncode == 0


@pytest.mark.parametrize("family", ["-4", "-6"])
def test_every_host_reaches_every_other_by_name(cluster, family):
    hosts = cluster(2)
    for host in hosts.machines:
        for other in hosts.machines:
            assert reaches(host, other.name, family)


def test_a_host_has_a_name_and_a_dev_shm_of_its_own(cluster):
    first, second = cluster(2).hosts
    assert [host.run(["hostname"]).stdout.strip() for host in (first, second)] == ["h0", "h1"]
    first.run(["touch", "/dev/shm/mine"])
    assert (first.shm_entries(), second.shm_entries()) == ({"mine"}, set())
    first.run(["rm", "/dev/shm/mine"])
    assert os.uname().nodename not in ("h0", "h1")


def test_a_name_that_nobody_has_is_unknown(cluster):
    done = cluster(2).hosts[0].run(["ping", "-c", "1", "nobody"], check=False)
    assert "Name or service not known" in done.stderr


def test_names_of_one_family(fresh_cluster):
    hosts = fresh_cluster(1, ipv4=False)
    assert hosts.launcher.run(["getent", "ahosts", "h0"]).stdout.split()[0] == "fd77::1"
    assert hosts.launcher.run(["getent", "ahostsv4", "h0"], check=False).stdout == ""


def test_the_process_id_is_that_of_the_program(cluster):
    host = cluster(2).hosts[1]
    process = host.popen(["sh", "-c", "echo $$; exec cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert int(process.stdout.readline()) == process.pid
    assert list(host.processes()) == [process.pid]
    process.communicate(timeout=10)


def test_a_command_that_fails_says_what_it_wrote(cluster):
    host = cluster(2).hosts[0]
    with pytest.raises(CommandError, match=r"h0: .* ended with 3: one\ntwo"):
        host.run(["sh", "-c", "echo one; echo two >&2; exit 3"])
    with pytest.raises(CommandError, match="took more than 0.5 s: one"):
        host.run(["sh", "-c", "echo one; exec sleep 1000"], timeout=0.5)
    assert host.processes() == {}


def test_counters_count_the_bytes_that_were_sent(cluster):
    first, second = cluster(2).hosts
    size = 10_000_000
    server = second.popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    assert server.stdout.readline() == "listening\n"
    before = first.counters(), second.counters()
    first.run([sys.executable, "-c", CLIENT, "h1", str(size)])
    assert int(server.communicate(timeout=30)[0]) == size
    sent, received = first.counters() - before[0], second.counters() - before[1]
    assert size < sent.sent_bytes < 1.06 * size
    assert size < received.received_bytes < 1.06 * size
    assert 0 < sent.received_bytes < 0.06 * size


@pytest.mark.thorough
@pytest.mark.cluster("iperf3")
@pytest.mark.parametrize("direct", [False, True])
def test_a_rate_is_kept_in_both_directions(cluster, direct):
    hosts = cluster(2, direct=direct)
    first, second = hosts.hosts
    hosts.shape(first, rate=1e9)
    rates = iperf.measure(first, second, bidirectional=True)
    hosts.shape(first)
    # Ethernet, IP and TCP need 66 bytes of each 1514. On a busy machine less than the rest comes through.
    assert 0.5e9 < rates.slower <= max(rates.forward, rates.backward) < 0.97e9
    assert iperf.measure(first, second, seconds=1).forward > 1.1e9


@pytest.mark.thorough
@pytest.mark.cluster("loss")
def test_loss_in_both_directions(cluster):
    hosts = cluster(2)
    first, second = hosts.hosts

    lose_half(first, second, lambda: hosts.shape(first, loss=0.5))
    hosts.shape(first)
    before = answers_so_far(first)
    first.run(["ping", "-q", "-c", "100", "-i", "0.002", second.ipv4])
    assert answers_so_far(first) - before == 100


def lose_half(first, second, shape):
    """A quarter of all pings is answered when half of all packets get lost in each direction, whenever that is."""
    assert reaches(
        first, second.ipv4
    )  # now they know each other's hardware addresses, questions for which get lost too
    shape()
    before = answers_so_far(first)
    first.run(["ping", "-q", "-c", "400", "-i", "0.002", second.ipv4], check=False)
    wait_until(lambda: answers_so_far(first) - before > 40, "a quarter of all answers")
    assert answers_so_far(first) - before < 160  # 60 are seven standard deviations


def round_trip_ms(host, name):
    done = host.run(["ping", "-q", "-c", "5", "-i", "0.05", name])
    return float(done.stdout.rpartition("= ")[2].split("/")[0])  # the shortest


@pytest.mark.thorough
@pytest.mark.cluster("iperf3")
def test_delay_is_that_of_one_way_and_goes_with_a_rate(cluster):
    hosts = cluster(2)
    first, second = hosts.hosts
    assert round_trip_ms(first, "h1") < 5
    hosts.shape(first, delay=0.01)
    assert 20 <= round_trip_ms(first, "h1") < 30
    hosts.shape(second, delay=0.005)
    assert 30 <= round_trip_ms(first, "h1") < 45
    hosts.shape(second)
    hosts.shape(first, delay=0.001, rate=1e8)
    assert 0.7e8 < iperf.measure(first, second, seconds=2).forward < 0.97e8
    hosts.shape(first)
    assert round_trip_ms(first, "h1") < 5


@pytest.mark.thorough
@pytest.mark.cluster("loss")
def test_delay_goes_with_loss_and_a_pulled_cable(fresh_cluster):
    hosts = fresh_cluster(2)
    first, second = hosts.hosts
    lose_half(first, second, lambda: hosts.shape(first, delay=0.005, loss=0.5))
    hosts.shape(first, delay=0.005)
    hosts.link_down(first)
    assert not reaches(first, second.ipv4)
    hosts.link_up(first)
    wait_until(lambda: reaches(first, second.ipv4), "the way over the link")
    assert 10 <= round_trip_ms(first, second.ipv4) < 20


def test_a_cable_that_is_pulled_and_put_back(cluster):
    hosts = cluster(2)
    first, second = hosts.hosts
    hosts.link_down(first)
    assert not reaches(first, second.ipv4)
    assert not reaches(second, first.ipv4)
    assert first.run(["cat", "/sys/class/net/eth0/carrier"]).stdout == "0\n"
    assert first.ipv6 in first.run(["ip", "address"]).stdout
    hosts.link_up(first)
    # Questions for addresses that were asked in vain end with an error of their own.
    wait_until(lambda: reaches(first, second.ipv4), "the way over the link")


def test_interfaces_are_networks_of_their_own(fresh_cluster):
    hosts = fresh_cluster(2, interfaces=2)
    first, second = hosts.hosts
    assert reaches(first, "h1-eth1")
    before = first.counters("eth1")
    assert reaches(first, second.addresses["eth1"][1])
    assert (first.counters("eth1") - before).sent_packets > 0
    hosts.link_down(first, "eth1")
    assert not reaches(first, "h1-eth1")
    assert reaches(first, "h1")


def test_the_machines_own_network_is_not_touched(fresh_cluster):
    def state():
        links = subprocess.run(["ip", "-br", "address"], capture_output=True, text=True, check=True).stdout
        mounts = Path("/proc/self/mounts").read_text().splitlines()
        return links, Path("/etc/hosts").read_text(), [mount for mount in mounts if PREFIX not in mount]

    fresh_cluster(1).close()  # the first one ever makes /run/netns a mount
    before = state()
    hosts = fresh_cluster(1)
    assert reaches(hosts.hosts[0], "launcher")
    assert state() == before
