"""Remains that `hvdrun` must not leave: stubborn ranks, daemons, ports; also when it is killed itself, or its agent."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from support.hvdrun_process import GRACE_S, LIMIT_S, SETTLE_S, SLACK_S

PYTHON = sys.executable
STUBBORN = """
    import contextlib
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
"""
DAEMON = """
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            # It keeps none of the rank's pipes, as daemons do.
            null = os.open(os.devnull, os.O_RDWR)
            for number in (0, 1, 2):
                os.dup2(null, number)
            os.write(ready, b"d")
            while True:
                signal.pause()
        os._exit(0)
    os.wait()
    assert os.read(is_ready, 1) == b"d"
"""
FOREVER = """
    while True:
        signal.pause()
"""
PIPE = """
    is_ready, ready = os.pipe()
"""


def test_ranks_that_ignore_signals_are_killed_after_the_grace(
    launch: Callable[..., object], script: Callable[..., Path]
) -> None:
    job = launch("-np", 2, PYTHON, script(STUBBORN + "    print('ready')\n" + FOREVER))
    job.expect(b"ready", 2)
    job.signal(signal.SIGTERM)
    ended = job.finish()
    assert (ended.code, ended.err.splitlines()[-1]) == (
        75,
        "hvdrun: SIGTERM has ended the job; ranks 0, 1 had to be killed",
    )
    assert GRACE_S < ended.seconds < GRACE_S + SLACK_S


def test_stubborn_daemons_of_a_failed_job_are_ended(hvdrun: Callable[..., object], script: Callable[..., Path]) -> None:
    job = hvdrun("-np", 2, PYTHON, script(PIPE + STUBBORN + DAEMON + "    sys.exit(6 * rank)"))
    assert job.code == 6
    assert job.seconds < GRACE_S + SETTLE_S + SLACK_S


def test_daemons_of_a_good_job_are_ended_too(hvdrun: Callable[..., object], script: Callable[..., Path]) -> None:
    job = hvdrun("-np", 2, PYTHON, script(PIPE + DAEMON))
    assert job.code == 0
    assert job.seconds < SLACK_S


def test_a_grandchild_that_keeps_the_pipes_does_not_hold_the_job(
    hvdrun: Callable[..., object], script: Callable[..., Path]
) -> None:
    job = hvdrun("-np", 1, PYTHON, script("if os.fork() == 0:\n    signal.pause()\nprint('end')"))
    assert (job.code, job.out) == (0, b"[0]<stdout>: end\n")
    assert job.seconds < SLACK_S


STUBBORN_TREE = PIPE + STUBBORN + DAEMON + "    os.fork()\n    os.write(1, b'ready\\n')\n" + FOREVER


def test_the_launcher_is_killed(launch: Callable[..., object], script: Callable[..., Path]) -> None:
    job = launch("-np", 2, PYTHON, script(STUBBORN_TREE))
    job.expect(b"ready", 4)
    job.signal(signal.SIGKILL)
    job.wait_gone(GRACE_S + SLACK_S)


def test_the_launcher_is_killed_while_output_is_stuck(
    launch: Callable[..., object], script: Callable[..., Path]
) -> None:
    job = launch("-np", 2, PYTHON, script("print('ready')\nwhile True:\n    print('x' * 9999)"))
    job.expect(b"ready", 2)
    job.signal(signal.SIGKILL)
    job.wait_gone(SLACK_S)


@pytest.mark.parametrize("which", ["guard", "agent"])
def test_the_agent_is_killed(launch: Callable[..., object], script: Callable[..., Path], which: str) -> None:
    job = launch("-np", 2, PYTHON, script(STUBBORN_TREE))
    job.expect(b"ready", 4)
    [guard] = psutil.Process(job.process.pid).children()
    [agent] = guard.children()
    (guard if which == "guard" else agent).kill()
    ended = job.finish(GRACE_S + SLACK_S)
    assert ended.code == 1
    assert re.search(r"hvdrun: the agent .*(killed|ended)", ended.err)
    assert "hvdrun: rank" not in ended.err


def test_nothing_below_the_agent_stays_a_zombie(launch: Callable[..., object], script: Callable[..., Path]) -> None:
    # A grandchild is orphaned and exits; the rank learns from the end of a pipe that it has gone.
    program = script("""
        gone, held = os.pipe()
        if os.fork() == 0:
            if os.fork() == 0:
                os.setsid()
            os._exit(0)
        os.close(held)
        os.wait()
        os.read(gone, 1)
        print("ready")
        signal.pause()
    """)
    job = launch("-np", 1, PYTHON, program)
    job.expect(b"ready")
    [guard] = psutil.Process(job.process.pid).children()
    [agent] = guard.children()
    # The kernel tells the agent of the death as it tells us: what is a zombie now is reaped by its next look.
    for child in agent.children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if str(program) not in child.cmdline():  # it is about to exit, or has
                child.wait(LIMIT_S)
    assert [child.status() == psutil.STATUS_ZOMBIE for child in agent.children()] == [False]
    job.signal(signal.SIGTERM)
    assert job.finish().code == 143


def test_nobody_reads_the_output_any_more(launch: Callable[..., object]) -> None:
    job = launch("-np", 2, "yes")
    job.expect(b"<stdout>: y\n", 2)
    job.process.stdout.close()
    assert job.process.wait(SLACK_S) == 128 + signal.SIGPIPE
    job.wait_gone(SLACK_S)


@pytest.mark.parametrize("seconds", [0, 2], ids=["at once", "when the launcher takes no more"])
def test_a_stuck_screen_does_not_keep_an_impatient_user(
    launch: Callable[..., object], script: Callable[..., Path], tmp_path: Path, seconds: float
) -> None:
    os.mkfifo(tmp_path / "news")
    program = script("""
        def interrupted(number, frame):
            os.write(news, b"i")
        signal.signal(signal.SIGINT, interrupted)
        news = os.open("news", os.O_WRONLY)
        os.write(news, b"r")
        while True:
            os.write(1, b"x" * 4095 + b"\\n")
    """)
    job = launch("-np", 1, PYTHON, program)
    with open(tmp_path / "news", "rb", buffering=0) as news:
        assert news.read(1) == b"r"
        time.sleep(seconds)
        job.signal(signal.SIGINT)
        assert news.read(1) == b"i"
    job.signal(signal.SIGINT)
    assert job.process.wait(GRACE_S + SLACK_S) == 130
    job.wait_gone(GRACE_S)


def test_no_port_is_left(launch: Callable[..., object], script: Callable[..., Path]) -> None:
    job = launch("-np", 1, PYTHON, script("print('port', os.environ['HOROVODLIKE_RENDEZVOUS_PORT'])\nsignal.pause()"))
    port = re.search(rb"port (\d+)", job.expect(b"\n"))
    assert port is not None
    job.signal(signal.SIGTERM)
    job.finish()
    listening = [
        line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines()[1:] if line.split()[3] == "0A"
    ]
    assert f"0100007F:{int(port[1]):04X}" not in listening


def test_a_fork_of_the_calling_process_does_not_keep_the_ranks(tmp_path: Path, launch: Callable[..., object]) -> None:
    # A forked copy holds the caller's end of the agent's connection open; the caller is killed.
    os.mkfifo(tmp_path / "ready")
    program = tmp_path / "caller.py"
    program.write_text(
        "import os, signal, threading, horovodlike\n"
        "def work():\n"
        "    import signal\n"
        "    open('ready', 'w').close()\n"
        "    signal.pause()\n"
        "def copy():\n"
        "    open('ready').close()\n"
        "    if os.fork() == 0:\n"
        "        print('copied', os.getpid(), flush=True)\n"
        "        signal.pause()\n"
        "threading.Thread(target=copy).start()\n"
        "horovodlike.run(work)\n"
    )
    job = launch(program, program=(PYTHON,))
    copied = re.search(rb"copied (\d+)", job.expect(b"\n"))
    assert copied is not None
    ranks = [process for process in psutil.process_iter(["cmdline"]) if "run_task.py" in str(process.info["cmdline"])]
    mine = [process for process in ranks if process.environ().get("HOROVODLIKE_TEST_MARK") == job.mark]
    assert len(mine) == 1
    job.signal(signal.SIGKILL)
    mine[0].wait(GRACE_S + SLACK_S)
    os.kill(int(copied[1]), signal.SIGKILL)
    job.wait_gone(SLACK_S)


def test_the_agent_by_itself_ends_with_its_input(tmp_path: Path) -> None:
    done = subprocess.run(
        [PYTHON, "-m", "horovodlike.launcher.agent.agent"],
        input=b"",
        capture_output=True,
        timeout=LIMIT_S,
        cwd=tmp_path,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_an_agent_that_cannot_understand_ends(tmp_path: Path) -> None:
    done = subprocess.run(
        [PYTHON, "-m", "horovodlike.launcher.agent.agent"],
        input=b"GET / HTTP/1.1\r\n\r\n",
        capture_output=True,
        timeout=LIMIT_S,
        cwd=tmp_path,
        check=False,
    )
    assert done.stdout == b""
    assert b"hvdrun agent: a frame of" in done.stderr
