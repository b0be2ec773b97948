"""The whole grid of collectives, on this machine and over hosts, each time by one hvdrun command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cluster.hosts import environment
from cluster.namespaces import wait_until

GRID = Path(__file__).with_name("grid.py")
SOAK = GRID.parents[1] / "soak.py"
HVDRUN = Path(sys.executable).with_name("hvdrun")
LIMIT_S = 280


def check(done, size):
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("no error") == size


@pytest.mark.thorough
def test_on_one_host(tmp_path):
    command = [HVDRUN, "-np", "4", sys.executable, GRID, "--layout", "4"]
    done = subprocess.run(
        command, env=environment(), cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    check(done, 4)


def run_over(hosts, layout, tmp_path, program, *options):
    """Run a program on this number of ranks of each host; nothing is left on any of them."""
    names = ",".join(f"{host.name}:{count}" for host, count in zip(hosts.hosts, layout, strict=True))
    command = [HVDRUN, *options, "-np", str(sum(layout)), "-H", names, sys.executable, *program]
    # All hosts share the processors of this machine, which Open MPI does not know.
    env = environment(OMPI_MCA_mpi_yield_when_idle="1")
    done = hosts.launcher.run(command, env=env, cwd=tmp_path, timeout=LIMIT_S, check=False)
    check(done, sum(layout))
    wait_until(lambda: servers_only(hosts), "no process but the servers", 20)
    assert {host.name: host.shm_entries() for host in hosts.machines} == {host.name: set() for host in hosts.machines}


def grid_of(layout):
    return [GRID, "--layout", ",".join(map(str, layout))]


def servers_only(hosts):
    return all("[listener]" in words for words in hosts.processes().values())


LAYOUTS = ([2, 2], [1, 1, 1, 1], [2, 1, 1])


layouts = pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout, marks=pytest.mark.slow if layout == [2, 1, 1] else pytest.mark.thorough)
        for layout in LAYOUTS
    ],
    ids=str,
)
extents = pytest.mark.parametrize("extent", [["--brief"], pytest.param([], marks=pytest.mark.thorough)], ids=str)


@pytest.mark.cluster("sshd", "ssh")
@layouts
@extents
def test_over_ssh(cluster, layout, extent, tmp_path):
    run_over(cluster(len(layout), ssh=True), layout, tmp_path, [*grid_of(layout), *extent])


@pytest.mark.cluster("sshd", "ssh")
@pytest.mark.parametrize(
    "family", [pytest.param("ipv4", marks=pytest.mark.thorough), pytest.param("ipv6", marks=pytest.mark.slow)]
)
def test_where_hosts_have_addresses_of_one_family(cluster, family, tmp_path):
    other = {"ipv4": "ipv6", "ipv6": "ipv4"}[family]
    program = [*grid_of([1, 1]), "--brief", "allreduce", "alltoall", "process_sets", "join"]
    run_over(cluster(2, ssh=True, **{other: False}), [1, 1], tmp_path, program)


@pytest.mark.thorough
@pytest.mark.cluster("sshd", "ssh")
def test_soak_over_ssh(cluster, tmp_path):
    run_over(cluster(2, ssh=True), [2, 2], tmp_path, [SOAK, "--seconds", "8", "--seed", "20261122"])


@pytest.mark.slow
@pytest.mark.cluster("sshd", "ssh", "mpirun")
def test_a_part_over_mpi(cluster, tmp_path):
    program = [*grid_of([1, 1]), "--brief", "--mpi", "allreduce", "alltoall", "process_sets", "join"]
    run_over(cluster(2, ssh=True), [1, 1], tmp_path, program, "--mpi")


@pytest.mark.thorough
@pytest.mark.cluster("sshd", "ssh", "mpirun")
@layouts
@extents
def test_over_mpi(cluster, layout, extent, tmp_path):
    run_over(cluster(len(layout), ssh=True), layout, tmp_path, [*grid_of(layout), *extent, "--mpi"], "--mpi")
