"""Programs of MPI over the hosts, started through ssh."""

from __future__ import annotations

import sys

import pytest

from cluster import mpirun

pytestmark = pytest.mark.cluster("sshd", "ssh", "mpirun")

PROGRAM = """
import os
from mpi4py import MPI
world = MPI.COMM_WORLD
total = world.allreduce(world.rank + 1)
os.write(1, f"{world.rank} {os.uname().nodename} {total} {MPI.Get_library_version()[:11]}\\n".encode())
"""


@pytest.mark.parametrize(("whose", "version"), [("debian", "Open MPI v4"), ("python", "Open MPI v5")])
def test_a_sum_over_two_hosts(cluster, whose, version):
    hosts = cluster(2, ssh=True)
    program = mpirun.DEBIAN if whose == "debian" else mpirun.of_python()
    before = hosts.hosts[0].counters()
    done = mpirun.run(hosts, [sys.executable, "-c", PROGRAM], [2, 1], mpirun=program)
    assert sorted(done.stdout.splitlines()) == [f"0 h0 6 {version}", f"1 h0 6 {version}", f"2 h1 6 {version}"]
    assert (hosts.hosts[0].counters() - before).sent_bytes > 0
