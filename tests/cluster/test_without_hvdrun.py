"""Ranks on several hosts that hvdrun has not started: by srun, by mpirun, and with an address that the user gives."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster import mpirun, slurm
from cluster.hosts import Cluster, Host, environment

TESTS = Path(__file__).resolve().parents[1]
PROGRAM = f"""
import os, sys
sys.path.append({str(TESTS)!r})
import numpy as np
from support.collectives import allreduce
from horovodlike import basics
for _ in range(2):
    basics.init()
    total = allreduce("total", np.full(1000, basics.rank() + 1.0))
    places = basics.local_rank(), basics.local_size(), basics.cross_rank(), basics.cross_size()
    rank, size = basics.rank(), basics.size()
    basics.shutdown()
os.write(1, f"{{rank}} {{size}} {{places}} {{np.unique(total).tolist()}} {{'mpi4py.MPI' in sys.modules}}\\n".encode())
"""
PLACES = [
    "0 3 (0, 2, 0, 2) [6.0]",
    "1 3 (1, 2, 0, 1) [6.0]",
    "2 3 (0, 1, 1, 2) [6.0]",
]


def check(done, *, mpi):
    assert sorted(done.stdout.splitlines()) == [f"{place} {mpi}" for place in PLACES], done.stderr


def listening(host: Host) -> str:
    return host.run(["ss", "--tcp", "--listening", "--no-header", "--numeric"]).stdout


@pytest.mark.cluster("slurm", "munge")
def test_srun_without_mpi(cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    """The key comes in credentials. A program `munge` that uses the cluster's munged stands first in PATH."""
    hosts = cluster(2)
    commands = slurm.start(hosts)
    for program in ("munge", "unmunge"):
        script = tmp_path / program
        script.write_text(f'#!/bin/sh\nexec {shutil.which(program)} --socket={commands.folder}/munge/socket "$@"\n')
        script.chmod(0o700)
    env = environment()
    env["PATH"] = f"{tmp_path}:{env['PATH']}"
    before = [listening(host) for host in hosts.hosts]
    done = commands.srun(
        [sys.executable, "-c", PROGRAM], ntasks=3, nodes=2, options=["--distribution=block"], cwd=tmp_path, env=env
    )
    check(done, mpi=False)
    assert [listening(host) for host in hosts.hosts] == before


@pytest.mark.cluster("sshd", "ssh", "mpirun")
@pytest.mark.parametrize("whose", ["debian", "python"])
def test_mpirun_and_its_broadcast(cluster: Callable[..., Cluster], whose: str, tmp_path: Path) -> None:
    hosts = cluster(2, ssh=True)
    program = mpirun.DEBIAN if whose == "debian" else mpirun.of_python()
    done = mpirun.run(hosts, [sys.executable, "-c", PROGRAM], [2, 1], mpirun=program, cwd=tmp_path)
    check(done, mpi=True)


@pytest.mark.cluster("sshd", "ssh", "mpich")
def test_mpich_and_its_broadcast(cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    done = mpirun.run_mpich(cluster(2, ssh=True), [sys.executable, "-c", PROGRAM], [2, 1], cwd=tmp_path)
    check(done, mpi=True)


@pytest.mark.parametrize(
    ("whose", "plugin"),
    [
        pytest.param("debian", "pmix", marks=pytest.mark.cluster("slurm", "munge", "mpirun", "pmix")),
        pytest.param("python", "pmix", marks=pytest.mark.cluster("slurm", "munge", "pmix")),
        pytest.param("mpich", "pmi2", marks=pytest.mark.cluster("slurm", "munge", "mpich")),
    ],
)
def test_srun_starts_mpi(fresh_cluster: Callable[..., Cluster], whose: str, plugin: str, tmp_path: Path) -> None:
    hosts = fresh_cluster(2)
    commands = slurm.start(hosts)
    env = environment(**mpirun.library(whose))
    options = [f"--mpi={plugin}", "--distribution=block"]
    done = commands.srun(
        [sys.executable, "-c", f"from mpi4py import MPI\n{PROGRAM}"],
        ntasks=3,
        nodes=2,
        options=options,
        cwd=tmp_path,
        env=env,
    )
    check(done, mpi=True)


@pytest.mark.slow
@pytest.mark.cluster
def test_torchrun_with_an_address_and_a_key(cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    hosts = cluster(2).hosts
    key = tmp_path / "key"
    key.write_text("0123456789abcdef" * 4)
    key.chmod(0o600)
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    given = {"RENDEZVOUS_ADDR": hosts[0].name, "RENDEZVOUS_PORT": "29511", "SECRET_KEY_FILE": str(key)}
    env = environment(**{f"HOROVODLIKE_{name}": value for name, value in given.items()}, OMP_NUM_THREADS="1")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--master-addr={hosts[0].name}"]
    running = [
        host.popen(
            [*torchrun, f"--node-rank={node}", f"--nproc-per-node={2 - node}", script],
            env=env,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node, host in enumerate(hosts)
    ]
    written = [process.communicate(timeout=60) for process in running]
    assert [process.returncode for process in running] == [0, 0], written
    lines = sorted("".join(out for out, _ in written).splitlines())
    assert lines == [f"{place} False" for place in PLACES]
