"""`init(comm, process_sets=[ProcessSet(comm.Split(...))])` in jobs that MPI starts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., "subprocess.CompletedProcess[str]"]

SCRIPT = Path(__file__).parent / "scripts" / "process_sets.py"
MPI_ARGS = "--oversubscribe --allow-run-as-root"
MIXED = """
import horovod.torch as hvd
from mpi4py import MPI
world = MPI.COMM_WORLD
part = world.Split(world.rank % 2)
given = hvd.ProcessSet(part if world.rank else [0, 1])
try:
    hvd.init(process_sets=[given])
except ValueError as error:
    print(error)
"""


def check(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stderr
    assert "process sets: [0, 1, 2] [0, 2] [1] [0, 1]\n" in done.stdout


@pytest.mark.slow
def test_the_parts_of_a_split_communicator_are_process_sets(run: Run) -> None:
    check(run("-m", "horovodlike.launcher", "--compat", "--mpi", "-np", 3, "--mpi-args", MPI_ARGS, "python", SCRIPT))


@pytest.mark.thorough
def test_the_same_with_mpirun_itself(run: Run, tmp_path: Path) -> None:
    mpirun = shutil.which("mpirun", path=os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]]))
    assert mpirun is not None, "mpirun is not installed"
    libraries = [*(Path(mpirun).parents[1] / "lib").glob("libmpi.so.*")]  # mpi4py looks elsewhere
    environ = {"MPI4PY_LIBMPI": str(libraries[0])} if libraries else {}
    text = "import subprocess, sys; sys.exit(subprocess.run(sys.argv[1:], stdin=subprocess.DEVNULL).returncode)"
    words = (mpirun, *MPI_ARGS.split(), "-n", 3, sys.executable, "-m", "horovodlike.compat", SCRIPT)
    check(run("-c", text, *words, **environ, XDG_RUNTIME_DIR=str(tmp_path)))


@pytest.mark.thorough
def test_sets_that_are_no_parts_are_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "mixed.py").write_text(MIXED)
    words = ("--mpi", "-np", 3, "--mpi-args", MPI_ARGS, "python", "mixed.py")
    done = run("-m", "horovodlike.launcher", "--compat", *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("init() could not register entry number 0 of process_sets: Mismatched") == 3
