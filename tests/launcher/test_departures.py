"""SIGTERM to a job with commits: what is on disk, the last line, and the exit code (the table in elastic.md)."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from support.hvdrun_process import LIMIT_S, Ended, Launch

from horovodlike.elastic._state_file import StateFile

PROGRAM = """
import os, signal
import horovodlike
from horovodlike import elastic

read, write = os.pipe()
os.set_blocking(write, False)
signal.set_wakeup_fd(write)
horovodlike.init()
state = elastic.ObjectState(step=0)
{persist}

@elastic.run
def train(state):
    while state.step < 6:
        state.step += 1
        if state.step == 5:
            print("rank", horovodlike.rank(), "is", os.getpid(), ".", flush=True)
            {wait}
        state.commit()

train(state)
"""
PERSIST = "state.persist('state', every=2)"
# The signal comes within the step, which then ends: its number stands in the pipe, whenever it came.
UNTIL_NOTICED = """
            os.read(read, 1)
"""
NEVER = """
            while True: signal.pause()
"""
RAISES = """
            if horovodlike.rank() == {rank}: raise RuntimeError("DataLoader worker is killed by signal: Terminated.")
"""
ALL = "SIGTERM has ended the job; commit 5 is on disk; nothing newer is lost"
STATIC, ELASTIC = (), ("--min-np", 1)


def _start(launch: Callable[..., Launch], folder: Path, np: int, *words: object, **parts: str) -> Launch:
    program = folder / "train.py"
    words = (*words, "--max-np", np) if "--min-np" in words else words
    program.write_text(PROGRAM.format(**{"persist": PERSIST, "wait": UNTIL_NOTICED, **parts}))
    return launch("-np", np, "--start-timeout", LIMIT_S, *words, sys.executable, program)


def _indented(text: str) -> str:
    return text.replace("\n", "\n    ")


def _pids(job: Launch, np: int) -> dict[int, int]:
    """Wait until all ranks are in step 5; return their processes."""
    out = job.expect(b" .\n", np)
    return {int(rank): int(pid) for rank, pid in re.findall(rb"rank (\d+) is (\d+) \.\n", out)}


def _check(ended: Ended, code: int, last: str, folder: Path) -> None:
    assert (ended.code, ended.err.splitlines()[-1]) == (code, f"hvdrun: {last}")
    if (named := re.search(r"commit (\d+)", last)) is not None:
        assert StateFile(str(folder / "state")).commits() == int(named[1])


@pytest.mark.parametrize(("np", "kind"), [(2, STATIC), (3, ELASTIC)])
def test_sigterm_to_hvdrun_and_a_commit_in_time(
    launch: Callable[..., Launch], tmp_path: Path, np: int, kind: tuple[object, ...]
) -> None:
    job = _start(launch, tmp_path, np, *kind)
    _pids(job, np)
    job.signal(signal.SIGTERM)
    _check(job.finish(), 143, ALL, tmp_path)


@pytest.mark.parametrize(("np", "kind"), [(3, STATIC), (2, ELASTIC)])
def test_sigterm_to_hvdrun_and_no_commit_within_the_grace(
    launch: Callable[..., Launch], tmp_path: Path, np: int, kind: tuple[object, ...]
) -> None:
    job = _start(launch, tmp_path, np, "--grace-period", 1, *kind, wait=NEVER)
    _pids(job, np)
    job.signal(signal.SIGTERM)
    noun = "workers" if kind else "ranks"
    who = ", ".join(map(str, range(np)))
    last = f"SIGTERM has ended the job; {noun} {who} had to be killed; commit 4 is on disk; newer work is lost"
    _check(job.finish(), 75, last, tmp_path)


@pytest.mark.parametrize(("np", "kind"), [(3, STATIC), (2, ELASTIC)])
def test_sigterm_to_hvdrun_and_the_training_ends(
    launch: Callable[..., Launch], tmp_path: Path, np: int, kind: tuple[object, ...]
) -> None:
    job = _start(launch, tmp_path, np, *kind, wait=UNTIL_NOTICED + "            return\n")
    _pids(job, np)
    job.signal(signal.SIGTERM)
    _check(job.finish(), 143, "SIGTERM has ended the job; commit 4 is on disk; nothing newer is lost", tmp_path)


def test_an_elastic_job_that_is_not_persistent_loses_its_work(launch: Callable[..., Launch], tmp_path: Path) -> None:
    job = _start(launch, tmp_path, 2, *ELASTIC, persist="")
    _pids(job, 2)
    job.signal(signal.SIGTERM)
    last = "SIGTERM has ended the job; no rank has said which commit is on disk; newer work is lost"
    _check(job.finish(), 75, last, tmp_path)


@pytest.mark.parametrize("np", [2, 3])
def test_sigterm_to_one_rank_of_a_job_of_fixed_size(launch: Callable[..., Launch], tmp_path: Path, np: int) -> None:
    wait = "if horovodlike.rank() == 1:" + _indented(UNTIL_NOTICED)
    job = _start(launch, tmp_path, np, wait=wait)
    os.kill(_pids(job, np)[1], signal.SIGTERM)
    ended = job.finish()
    _check(ended, 143, ALL, tmp_path)
    assert "exited with code" not in ended.err.replace("since rank", "")


@pytest.mark.parametrize(
    ("np", "kind", "first"),
    [(2, STATIC, "hvdrun"), (3, STATIC, "ranks"), (2, ELASTIC, "ranks"), (3, ELASTIC, "hvdrun")],
)
def test_sigterm_to_all_processes(
    launch: Callable[..., Launch], tmp_path: Path, np: int, kind: tuple[object, ...], first: str
) -> None:
    job = _start(launch, tmp_path, np, *kind)
    _pids(job, np)
    processes = [psutil.Process(job.process.pid), *psutil.Process(job.process.pid).children(recursive=True)]
    for process in processes if first == "hvdrun" else reversed(processes):
        process.terminate()
    _check(job.finish(), 143, ALL, tmp_path)


@pytest.mark.parametrize(("np", "kind", "rank"), [(2, STATIC, 1), (3, STATIC, 0), (3, ELASTIC, 1), (2, ELASTIC, 0)])
def test_an_exception_after_sigterm(
    launch: Callable[..., Launch], tmp_path: Path, np: int, kind: tuple[object, ...], rank: int
) -> None:
    wait = UNTIL_NOTICED + RAISES.format(rank=rank)
    job = _start(launch, tmp_path, np, *kind, wait=wait, persist="state.persist('state', every=9)")
    _pids(job, np)
    job.signal(signal.SIGTERM)
    ended = job.finish()
    # Rank 0 has saved what it commits while it waits for another rank.
    last = f"SIGTERM has ended the job; commit {4 if rank == 0 else 5} is on disk; newer work is lost"
    _check(ended, 75, last, tmp_path)
    assert "Traceback" not in ended.err
    assert f"worker {np}" not in ended.err


def test_an_exception_before_the_signal_comes(launch: Callable[..., Launch], tmp_path: Path) -> None:
    """Such as an exception of a data loader, whose processes the same signal has reached first."""
    wait = "if os.environ['HOROVODLIKE_WORKER'] == '0': raise RuntimeError"
    job = _start(launch, tmp_path, 2, *ELASTIC, wait=wait, persist="state.persist('state', every=9)")
    ended = job.finish()
    assert ended.code == 0 and "RuntimeError ends the training; commit 4 is on disk" in ended.err


def test_an_exception_after_sigterm_to_one_rank(launch: Callable[..., Launch], tmp_path: Path) -> None:
    wait = "if horovodlike.rank() == 1:" + _indented(UNTIL_NOTICED + RAISES.format(rank=1))
    job = _start(launch, tmp_path, 2, wait=wait, persist="state.persist('state', every=9)")
    os.kill(_pids(job, 2)[1], signal.SIGTERM)
    _check(job.finish(), 75, "SIGTERM has ended the job; commit 5 is on disk; newer work is lost", tmp_path)


@pytest.mark.parametrize("np", [2, 3])
def test_a_worker_that_fails_after_sigterm_is_not_replaced(
    launch: Callable[..., Launch], tmp_path: Path, np: int
) -> None:
    """The others continue, and hvdrun does not report a failure."""
    wait = "if os.environ['HOROVODLIKE_WORKER'] == '1':" + _indented(UNTIL_NOTICED + RAISES.format(rank=1))
    job = _start(launch, tmp_path, np, *ELASTIC, wait=wait)
    os.kill(_pids(job, np)[1], signal.SIGTERM)
    ended = job.finish()
    assert (ended.code, "hvdrun: worker" in ended.err) == (0, False)
    assert f"[{np}]".encode() not in ended.out


@pytest.mark.parametrize("kind", [STATIC, ELASTIC])
def test_a_rank_is_killed_after_sigterm(
    launch: Callable[..., Launch], tmp_path: Path, kind: tuple[object, ...]
) -> None:
    job = _start(launch, tmp_path, 2, "--grace-period", 600, *kind, wait=NEVER)
    pids = _pids(job, 2)
    job.signal(signal.SIGTERM)
    job.expect_error("(leaves at the next commit, as SIGTERM has asked)[^\n]*\n[^\n]*leaves at")
    for pid in pids.values():
        os.kill(pid, signal.SIGKILL)
    last = "SIGTERM has ended the job; {} 0, 1 had to be killed; commit 4 is on disk; newer work is lost"
    _check(job.finish(), 75, last.format("workers" if kind else "ranks"), tmp_path)


def test_a_program_without_commits(launch: Callable[..., Launch], tmp_path: Path) -> None:
    job = launch("-np", 2, "sh", "-c", "echo ready; exec sleep 600")
    job.expect(b"ready", 2)
    job.signal(signal.SIGTERM)
    _check(job.finish(), 143, "SIGTERM: ending 2 ranks within 5 s; a second signal kills at once", tmp_path)
