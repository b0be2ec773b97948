"""Nothing of a cluster is left: after `close()`, and of a process that was killed, when the next one is made."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from cluster import namespaces, slurm, sshd, tools
from cluster.hosts import Cluster

pytestmark = pytest.mark.cluster()

TESTS = Path(__file__).resolve().parents[1]
DAEMON = textwrap.dedent("""
    import os, signal
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            print("up", flush=True)
            os.close(1)
            signal.pause()
    else:
        os.wait()
""")
OWNER = f"""
import signal, subprocess, sys
sys.path.insert(0, {str(TESTS)!r})
from cluster.hosts import Cluster
hosts = Cluster(2)
for script in sys.argv[1:]:
    program = hosts.hosts[0].popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert program.stdout.readline() == "up\\n"
print(hosts.name, program.pid, flush=True)
signal.pause()
"""


def remains(name):
    mounts = [line for line in Path("/proc/mounts").read_text().splitlines() if name in line]
    return [*namespaces.traces(name), *namespaces.processes_of(name), *mounts]


def test_nothing_is_left_after_close():
    with Cluster(2) as hosts:
        host = hosts.hosts[1]
        daemon = host.popen([sys.executable, "-c", DAEMON], stdout=subprocess.PIPE, text=True)
        assert daemon.stdout.read() == "up\n"
        host.popen(["sleep", "1000"])
        host.run(["touch", "/dev/shm/left"])
        (host.folder / "log").write_text("left")
        assert len(hosts.processes()) == 2
        assert len(remains(hosts.name)) > 10
    assert remains(hosts.name) == []
    hosts.close()


@pytest.mark.cluster("sshd", "ssh", "slurm", "munge")
def test_nothing_is_left_of_servers():
    with Cluster(2) as hosts:
        sshd.start(hosts)
        commands = slurm.start(hosts)
        hosts.launcher.popen(["ssh", "h1", "sleep 1000"])
        hosts.launcher.popen(["srun", "-n2", "-N2", "sleep", "1000"])
        namespaces.wait_until(lambda: set(commands.states().values()) == {"mixed"}, "a job on both nodes")
        namespaces.wait_until(lambda: "sleep 1000" in hosts.hosts[1].processes().values(), "a session")
    assert remains(hosts.name) == []


def test_a_cluster_that_cannot_be_made_leaves_nothing(monkeypatch):
    name = []

    def fails(self, *_):
        name.append(self.name)
        raise RuntimeError("no")

    monkeypatch.setattr(Cluster, "_write_etc", fails)
    with pytest.raises(RuntimeError, match="no"):
        Cluster(1)
    assert remains(*name) == []


def test_what_a_killed_process_leaves_is_swept():
    loop = "import signal\nprint('up', flush=True)\nsignal.pause()"
    owner = subprocess.Popen([sys.executable, "-c", OWNER, DAEMON, loop], stdout=subprocess.PIPE, text=True)
    with owner, contextlib.ExitStack() as kill:
        kill.callback(owner.kill)
        name, program = owner.stdout.readline().split()
        assert name not in namespaces.sweep()  # its owner lives
        namespaces.wait_until(lambda: len(namespaces.processes_of(name)) == 2, "the daemon alone and the program")
        pidfd = os.pidfd_open(int(program))
        kill.close()
        assert select.select([pidfd], [], [], 20)[0], "the program has survived its owner"
        os.close(pidfd)
    with Cluster(1):  # another test's process may sweep at the same moment: it is gone in any case
        namespaces.wait_until(lambda: remains(name) == [], "the end of what was left")


def test_what_is_missing_is_said_with_its_remedy(monkeypatch):
    monkeypatch.setattr(tools, "find", lambda program: None)
    tools.missing.cache_clear()
    assert tools.missing("slurm") == "slurmctld is not installed: make tools, or apt-get install slurm-wlm"
    assert tools.missing("namespaces") == "ip is not installed: make tools, or apt-get install iproute2"
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    tools.missing.cache_clear()
    assert tools.missing("namespaces") == "network namespaces need root"
    monkeypatch.undo()
    tools.missing.cache_clear()
    assert tools.missing("namespaces") == ""
