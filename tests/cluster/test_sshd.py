"""ssh from host to host, as users have it."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from cluster import sshd
from cluster.namespaces import wait_until

pytestmark = pytest.mark.cluster("sshd", "ssh")


@pytest.mark.slow
def test_plain_ssh_from_any_host_to_any_other(cluster):
    hosts = cluster(2, ssh=True)
    for host in hosts.machines:
        for other in hosts.machines:
            done = host.run(["ssh", other.name, "hostname"])
            assert (done.stdout, done.stderr) == (f"{other.name}\n", "")


@pytest.mark.parametrize("which", [0, 1])
def test_ssh_to_an_address_of_either_family(cluster, which):
    hosts = cluster(2, ssh=True)
    assert hosts.launcher.run(["ssh", hosts.hosts[1].addresses["eth0"][which], "hostname"]).stdout == "h1\n"


def test_a_session_has_nothing_of_the_clients_environment(cluster):
    environ = {**os.environ, "HOROVODLIKE_SECRET_KEY": "secret", "PATH": f"/nowhere:{os.environ['PATH']}"}
    done = cluster(2, ssh=True).launcher.run(["ssh", "h0", "env"], env=environ)
    assert "SSH_CONNECTION=" in done.stdout
    assert "HOROVODLIKE" not in done.stdout
    assert "/nowhere" not in done.stdout


def test_a_session_is_on_its_host(cluster):
    hosts = cluster(2, ssh=True)
    first, second = hosts.hosts
    hosts.launcher.run(["ssh", "h0", "touch /dev/shm/mine"])
    assert (first.shm_entries(), second.shm_entries()) == ({"mine"}, set())
    assert first.ipv4 in hosts.launcher.run(["ssh", "h0", "ip address; rm /dev/shm/mine"]).stdout


def test_a_session_that_is_dropped(cluster):
    hosts = cluster(2, ssh=True)
    client = hosts.launcher.popen(["ssh", "h1", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    client.stdin.write("up\n")
    client.stdin.flush()
    assert client.stdout.readline() == "up\n"
    dropped = sshd.sessions(hosts.hosts[1])
    assert dropped
    for pid in dropped:
        os.kill(pid, signal.SIGKILL)
    assert client.wait(20) == 255
    wait_until(lambda: sshd.sessions(hosts.hosts[1]) == [], "the end of the session")


def test_another_port_and_a_key_that_has_to_be_named(fresh_cluster):
    hosts = fresh_cluster(1)
    key = sshd.start(hosts, port=2222, identity=False)
    assert hosts.launcher.run(["ssh", "-p", "2222", "-i", key, "h0", "hostname"]).stdout == "h0\n"
    assert "Permission denied" in hosts.launcher.run(["ssh", "-p", "2222", "h0", "hostname"], check=False).stderr
    assert "Connection refused" in hosts.launcher.run(["ssh", "-i", key, "h0", "hostname"], check=False).stderr


def test_the_machines_ssh_is_not_touched(fresh_cluster):
    def state():
        folders = (Path("/etc/ssh"), Path.home() / ".ssh")
        return {path: path.stat().st_mtime_ns for folder in folders for path in folder.glob("**/*")}

    before = state()
    fresh_cluster(1, ssh=True).launcher.run(["ssh", "h0", "true"])
    assert state() == before
