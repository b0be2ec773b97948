"""`hvdrun --mpi` and mpirun, for real."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import numpy as np
import pytest
from mpi_job import Mpi
from support.collectives import allreduce
from support.hvdrun_process import Launch

from horovodlike import basics

BOUND_S = 20.0
HVDRUN = [sys.executable, "-m", "horovodlike.launcher"]


@pytest.fixture
def beside(mpi: Mpi, monkeypatch: pytest.MonkeyPatch) -> Mpi:
    """The library, with its mpirun where hvdrun looks for it."""
    for name in set(os.environ) - set(mpi.environ):
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", f"{os.path.dirname(mpi.mpirun)}{os.pathsep}{os.environ['PATH']}")
    if "MPI4PY_LIBMPI" in mpi.environ:
        monkeypatch.setenv("MPI4PY_LIBMPI", mpi.environ["MPI4PY_LIBMPI"])
    return mpi


def _train() -> list[object]:
    basics.init()
    keys = [name for name in os.environ if "SECRET" in name]
    return [basics.rank(), basics.size(), basics.mpi_enabled(), allreduce("x", np.ones(1000)).sum(), keys]


@pytest.mark.parametrize("words", [["-np", "3"], ["-H", "localhost:3"], ["-np", "2", "--mpi-args", "-wdir /"]])
def test_ranks_use_mpi(beside, words):
    size = 2 if "2" in words else 3
    ended = beside.start([*HVDRUN, "--mpi", *words], _train, settings=dict(os.environ))
    assert ended.code == 0, ended.err
    assert ended.values == {rank: [rank, size, True, 1000.0 * size, []] for rank in range(size)}


PROGRAM = """
import os, sys
from horovodlike import basics
key = os.environ["HOROVODLIKE_SECRET_KEY"]
basics.init()
shown = [pid for pid in os.listdir("/proc") if pid.isdigit() and os.path.exists(f"/proc/{pid}/cmdline")
         and key.encode() in open(f"/proc/{pid}/cmdline", "rb").read()]
os.write(1, f"rank {basics.rank()} found {shown}\\n".encode())  # as a whole
sys.exit(5 if basics.rank() == 1 else 0)
"""


def test_exit_code_output_and_key(beside, tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    done = subprocess.run(
        [*HVDRUN, "--mpi", "--verbose", "-np", "2", "python", str(tmp_path / "train.py")],
        env={**os.environ, "PATH": f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == 5, done.stderr
    for rank in range(2):
        assert re.search(rf"^\[(1,)?{rank}\].*rank {rank} found \[\]$", done.stdout.replace("\0", ""), re.MULTILINE)
    assert f"hvdrun: {beside.mpirun} -np 2" in done.stderr
    assert not re.search(r"[0-9a-f]{64}", done.stdout + done.stderr)


WAITS = """
import time
from horovodlike import basics
basics.init()
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left(beside, tmp_path, number):
    """mpirun and the ranks end with hvdrun, also if it is killed."""
    (tmp_path / "train.py").write_text(WAITS)
    launch = Launch(["--mpi", "-np", "2", sys.executable, str(tmp_path / "train.py")], cwd=tmp_path)
    try:
        launch.expect(b"ready", times=2)
        launch.signal(number)
        if number == signal.SIGKILL:
            launch.wait_gone(BOUND_S)
        else:
            assert launch.finish().code == 128 + number
    finally:
        launch.close()
