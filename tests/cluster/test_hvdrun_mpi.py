"""`hvdrun --mpi` over hosts, with servers of ssh that are reached only with options of the user's."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster import mpirun, sshd
from cluster.hosts import Cluster, environment
from horovodlike.launcher.planning import RemoteStart
from horovodlike.launcher.schedulers.mpirun import Flavor, Mpirun, make_ssh_variables

PROGRAM = f"""
import os, sys
sys.path.append({str(Path(__file__).resolve().parents[1])!r})
import numpy as np
from support.collectives import allreduce
from horovodlike import basics
basics.init()
total = allreduce("total", np.full(1000, basics.rank() + 1.0))
os.write(1, f"sum {{np.unique(total).tolist()}} {{basics.cross_size()}}\\n".encode())  # as a whole
"""
PORT = 2222
HVDRUN = (sys.executable, "-m", "horovodlike.launcher")


@pytest.fixture
def locked(fresh_cluster: Callable[..., Cluster]) -> tuple[Cluster, RemoteStart]:
    """Two hosts, and how they are reached."""
    hosts = fresh_cluster(2)
    return hosts, RemoteStart(PORT, str(sshd.start(hosts, port=PORT, identity=False)))


@pytest.mark.cluster("sshd", "ssh", "mpirun")
def test_options_for_ssh(locked: tuple[Cluster, RemoteStart], tmp_path: Path) -> None:
    hosts, remote = locked
    flags = ["-p", str(remote.ssh_port), "-i", str(remote.ssh_identity_file)]
    where = ",".join(f"{host.name}:1" for host in hosts.hosts)
    command = [*HVDRUN, "--mpi", "-H", where, *flags, sys.executable, "-c", PROGRAM]
    done = hosts.launcher.run(command, cwd=tmp_path, env=environment(OMP_NUM_THREADS="1"))
    assert done.stdout.count("sum [3.0] 2") == 2, done


@pytest.mark.parametrize(
    "whose",
    [
        pytest.param("debian", marks=pytest.mark.cluster("sshd", "ssh", "mpirun")),
        pytest.param("python", marks=pytest.mark.cluster("sshd", "ssh", "mpirun")),
        pytest.param("mpich", marks=pytest.mark.cluster("sshd", "ssh", "mpich")),
    ],
)
def test_every_mpirun_understands_them(locked: tuple[Cluster, RemoteStart], whose: str, tmp_path: Path) -> None:
    hosts, remote = locked
    flavor = Flavor.HYDRA if whose == "mpich" else Flavor.OPEN_MPI
    env = environment(OMP_NUM_THREADS="1", **make_ssh_variables(Mpirun(whose, flavor), remote))
    argv: list[str | Path] = [sys.executable, "-c", PROGRAM]
    if whose == "mpich":
        done = mpirun.run_mpich(hosts, argv, [1, 1], cwd=tmp_path, env=env)
    else:
        program = mpirun.DEBIAN if whose == "debian" else mpirun.of_python()
        done = mpirun.run(hosts, argv, [1, 1], mpirun=program, cwd=tmp_path, env=env)
    assert done.stdout.count("sum [3.0] 2") == 2, done
