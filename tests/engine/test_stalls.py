"""Ranks that do not come: the report says which, for what tensor, and where in their Python code they are."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.ranks import RankPool

from horovodlike._engine import stack_dump

HVDRUN = Path(sys.executable).parent / "hvdrun"

SCRIPT = """\
import threading
import numpy as np
from horovodlike import basics
from horovodlike._engine import ops

def waiting_for_data():
    threading.Event().wait()  # until the job ends

basics.init()
if basics.rank() == 1:
    waiting_for_data()
array = np.ones(4, np.float32)
request = ops.Request(ops.Kind.ALLREDUCE, "gradients", [(ops.DType["float32"], array.shape)])
ops.wait(request.enqueue_inplace(array.ctypes.data))
"""
LINE = next(number for number, line in enumerate(SCRIPT.splitlines(), 1) if "Event" in line)


@pytest.mark.parametrize("host", ["here", "host-$HOROVODLIKE_RANK"])
def test_the_report_has_the_function_and_the_line_in_which_a_rank_waits(tmp_path: Path, host: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    settings = {"HOROVODLIKE_STALL_CHECK_TIME_SECONDS": "1", "HOROVODLIKE_STALL_SHUTDOWN_TIME_SECONDS": "3"}
    command = [HVDRUN, "-np", "3", "sh", "-c", f'HOROVODLIKE_HOSTID={host} exec "$0" "$1"', sys.executable, str(script)]
    done = subprocess.run(
        command, env={**os.environ, **settings}, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode != 0
    output = done.stdout + done.stderr
    where = f'File "{script}", line {LINE}, in waiting_for_data'
    warning, error = output.split("Traceback (most recent call last)", 1)
    assert "allreduce of 'gradients': ready on ranks [0, 2]" in warning
    assert "missing on ranks [1]" in warning
    assert "thread MainThread" in warning
    assert where in warning
    assert "JobBrokenError: stalled" in error
    assert where in error


def _wait_for_rank_1(events: str) -> None:
    import numpy as np
    from support.collectives import allreduce

    from horovodlike import basics

    print("begun", flush=True)
    if basics.rank() == 1:
        with open(events) as events_file:  # a FIFO: blocks until the test opens it
            events_file.read()
    allreduce("gradients", np.ones(4, np.float32))


def _wait_for_output(pool: RankPool, rank: int, text: str) -> None:
    deadline = time.monotonic() + 30
    while text not in pool.output(rank):
        assert time.monotonic() < deadline, pool.output(rank)
        os.sched_yield()


@pytest.mark.parametrize("stopped", [False, True])
def test_the_job_goes_on_after_a_warning(fresh_ranks: Callable[..., RankPool], tmp_path: Path, stopped: bool) -> None:
    events = tmp_path / "events"
    os.mkfifo(events)
    pool = fresh_ranks(2, {"HOROVODLIKE_STALL_CHECK_TIME_SECONDS": "1"})
    pool.start(_wait_for_rank_1, [(str(events),)] * 2)
    _wait_for_output(pool, 1, "begun")
    if stopped:
        pool.kill(1, signal.SIGSTOP)
    begun = time.monotonic()
    _wait_for_output(pool, 0, "Where the missing ranks are")
    expected = "did not answer within 2 s: its process is stopped" if stopped else "in _wait_for_rank_1"
    _wait_for_output(pool, 0, expected)
    assert time.monotonic() - begun < 10
    assert f"rank 1 (pid {pool.processes[1].pid}):" in pool.output(0)
    pool.kill(1, signal.SIGCONT)
    events.write_text("")
    assert all(outcome.ok for outcome in pool.collect(30))


def test_the_coordinators_own_stack_is_in_the_report(fresh_ranks: Callable[..., RankPool], tmp_path: Path) -> None:
    def wait_for_rank_0(events: str) -> None:
        import numpy as np
        from support.collectives import allreduce

        from horovodlike import basics

        if basics.rank() == 0:
            with open(events) as events_file:
                events_file.read()
        allreduce("gradients", np.ones(4, np.float32))

    events = tmp_path / "events"
    os.mkfifo(events)
    pool = fresh_ranks(2, {"HOROVODLIKE_STALL_CHECK_TIME_SECONDS": "1"})
    pool.start(wait_for_rank_0, [(str(events),)] * 2)
    _wait_for_output(pool, 0, "in wait_for_rank_0")
    events.write_text("")
    assert all(outcome.ok for outcome in pool.collect(30))


def test_the_innermost_calls_are_kept_where_there_is_no_room() -> None:
    def call(depth: int) -> str:
        return call(depth - 1) if depth > 0 else stack_dump.describe_threads(2000).decode()

    text = call(100)
    assert len(text) <= 2000
    lines = text.splitlines()
    assert lines[0] == "    thread MainThread:"
    assert lines[-1] == "      in horovodlike._engine.stack_dump.describe_threads()"
    assert re.fullmatch(rf'      File "{re.escape(__file__)}", line [0-9]+, in call', lines[-2])
    assert "in call" in lines[1]


def test_other_threads_come_after_the_main_one_with_their_innermost_calls() -> None:
    entered, leave = threading.Lock(), threading.Lock()  # which have no calls of their own
    entered.acquire()
    leave.acquire()

    def in_a_loader() -> None:
        innermost()

    def innermost() -> None:
        entered.release()
        leave.acquire()

    loader = threading.Thread(target=in_a_loader, name="loader 1")
    loader.start()
    entered.acquire()
    text = stack_dump.describe_threads(100_000).decode()  # the stack of a test runner is long
    leave.release()
    loader.join()
    assert re.search(r"thread MainThread:(.|\n)*thread loader 1:\n(.|\n)*in in_a_loader\n.*in innermost", text)
