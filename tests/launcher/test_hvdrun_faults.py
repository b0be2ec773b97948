"""`hvdrun` when ranks fail, are killed, or do not want to die; each test also checks that nothing is left."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from hvdrun_process import LIMIT_S

PYTHON = sys.executable
SLACK_S = 15.0  # what a busy machine may add
GRACE_S = 5.0
SETTLE_S = 2.0

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


def test_the_first_failing_rank_ends_the_job(hvdrun: Callable[..., object], script: Callable[..., Path]) -> None:
    program = script("""
        if rank == 1:
            for number in range(30):
                print("line", number, file=sys.stderr)
            sys.exit(3)
        signal.pause()
    """)
    job = hvdrun("-np", 3, PYTHON, program)
    assert job.code == 3
    report = re.search(r"^hvdrun: rank 1 \(pid \d+\) exited with code 3; its last lines:\n((    .*\n)+)", job.err, re.M)
    assert report is not None
    assert report[1].splitlines() == [f"    line {number}" for number in range(10, 30)]
    assert job.err.count("hvdrun: rank") == 1
    assert job.seconds < SETTLE_S + SLACK_S


@pytest.mark.parametrize(("signum", "name"), [(signal.SIGKILL, "SIGKILL"), (signal.SIGSEGV, "SIGSEGV")])
def test_a_rank_killed_by_a_signal(
    hvdrun: Callable[..., object], script: Callable[..., Path], signum: int, name: str
) -> None:
    program = script(f"""
        import resource
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if rank == 0:
            os.kill(os.getpid(), {int(signum)})
        signal.pause()
    """)
    job = hvdrun("-np", 2, PYTHON, program)
    assert job.code == 128 + signum
    assert re.search(rf"rank 0 \(pid \d+\) was killed by signal {int(signum)} \({name}\); it wrote nothing", job.err)
    assert job.seconds < SETTLE_S + SLACK_S


def test_an_exception_shows_its_traceback(hvdrun: Callable[..., object], script: Callable[..., Path]) -> None:
    job = hvdrun("-np", 1, PYTHON, script("1 / 0"))
    assert job.code == 1
    assert job.err.rstrip().endswith("    ZeroDivisionError: division by zero")


def test_of_several_failures_the_first_to_exit_is_reported(
    hvdrun: Callable[..., object], script: Callable[..., Path], tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pid")
    os.mkfifo(tmp_path / "go")
    # Rank 0 fails the moment that rank 1 has gone.
    program = script("""
        if rank == 1:
            with open("pid", "w") as file:
                file.write(str(os.getpid()))
            with open("go") as file:
                file.read()
            os._exit(7)
        elif rank == 0:
            with open("pid") as file:
                peer = os.pidfd_open(int(file.read()))
            open("go", "w").close()
            select.select([peer], [], [])
            os._exit(5)
    """)
    job = hvdrun("-np", 3, PYTHON, program)
    assert job.code == 7
    assert "hvdrun: rank 1 (pid" in job.err
    assert "hvdrun: rank 0 (pid" not in job.err


def test_a_rank_that_has_lost_a_peer_is_not_to_blame(
    hvdrun: Callable[..., object], script: Callable[..., Path], tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pid")
    # Rank 0 notices that rank 1 is about to leave, and is gone before it.
    program = script("""
        class HorovodInternalError(RuntimeError):
            pass
        if rank == 0:
            with open("pid", "w") as file:
                file.write(str(os.getpid()))
            raise HorovodInternalError("rank 1 has shut down")
        with open("pid") as file:
            peer = int(file.read())
        try:
            select.select([os.pidfd_open(peer)], [], [])
        except ProcessLookupError:
            pass
        sys.exit("the cause")
    """)
    job = hvdrun("-np", 2, PYTHON, program)
    assert job.code == 1
    assert re.search(r"hvdrun: rank 1 \(pid \d+\) exited with code 1; its last lines:\n    the cause\n", job.err)
    assert "hvdrun: rank 0 (pid" not in job.err


def test_a_rank_that_ends_early_and_well_is_no_failure(
    hvdrun: Callable[..., object], script: Callable[..., Path], tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pid")
    program = script("""
        if rank == 0:
            with open("pid", "w") as file:
                file.write(str(os.getpid()))
        else:
            with open("pid") as file:
                peer = int(file.read())
            try:
                select.select([os.pidfd_open(peer)], [], [])
            except ProcessLookupError:
                pass
            print("after")
    """)
    job = hvdrun("-np", 2, PYTHON, program)
    assert (job.code, job.out) == (0, b"[1]<stdout>: after\n")


def test_survivors_may_speak_before_the_end(
    hvdrun: Callable[..., object], script: Callable[..., Path], tmp_path: Path
) -> None:
    program = script("""
        if rank == 0:
            sys.exit(3)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("asked to end"))
        signal.pause()
    """)
    job = hvdrun("-np", 2, PYTHON, program)
    assert job.code == 3
    assert job.lines_of(1, "stderr") == [b"asked to end"]


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_signals_are_passed_on(
    launch: Callable[..., object], script: Callable[..., Path], signum: int, code: int
) -> None:
    program = script(f"""
        def leave(number, frame):
            print("got", number)
            sys.exit(0)
        signal.signal({int(signum)}, leave)
        print("ready")
        signal.pause()
    """)
    job = launch("-np", 2, PYTHON, program)
    job.expect(b"ready", 2)
    job.signal(signum)
    ended = job.finish()
    assert ended.code == code
    for rank in range(2):
        assert ended.lines_of(rank) == [b"ready", b"got %d" % signum]
    assert f"hvdrun: {signum.name}: ending 2 ranks" in ended.err
    assert "exited with code" not in ended.err


def test_sigterm_leaves_the_helpers_of_a_rank_alone(launch: Callable[..., object], script: Callable[..., Path]) -> None:
    program = script("""
        def leave(number, frame):
            os.write(to_child, b"one more")
            assert os.read(from_child, 99) == b"one more"
            print("finished")
            sys.exit(0)
        signal.signal(signal.SIGTERM, leave)
        child_in, to_child = os.pipe()
        from_child, child_out = os.pipe()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.write(child_out, os.read(child_in, 99))
            os._exit(0)
        print("ready")
        while True:
            signal.pause()
    """)
    job = launch("-np", 1, PYTHON, program)
    job.expect(b"ready")
    job.signal(signal.SIGTERM)
    assert job.finish().lines_of(0)[-1] == b"finished"


def test_ranks_that_ignore_signals_are_killed_after_the_grace(
    launch: Callable[..., object], script: Callable[..., Path]
) -> None:
    job = launch("-np", 2, PYTHON, script(STUBBORN + "    print('ready')\n" + FOREVER))
    job.expect(b"ready", 2)
    job.signal(signal.SIGTERM)
    ended = job.finish()
    assert ended.code == 143
    assert GRACE_S < ended.seconds < GRACE_S + SLACK_S


def test_a_second_signal_kills_at_once(launch: Callable[..., object], script: Callable[..., Path]) -> None:
    program = script("""
        signal.signal(signal.SIGINT, lambda *_: print("ignored"))
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("ready")
        while True:
            signal.pause()
    """)
    job = launch("-np", 2, PYTHON, program)
    job.expect(b"ready", 2)
    job.signal(signal.SIGINT)
    job.expect(b"ignored", 2)
    job.signal(signal.SIGINT)
    ended = job.finish(GRACE_S)  # measured from here: less than the grace
    assert ended.code == 130


def test_a_stopped_rank_is_ended(hvdrun: Callable[..., object], script: Callable[..., Path], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pid")
    program = script("""
        if rank == 0:
            with open("pid", "w") as file:
                file.write(str(os.getpid()))
            signal.pause()
        with open("pid") as file:
            os.kill(int(file.read()), signal.SIGSTOP)
        sys.exit(4)
    """)
    job = hvdrun("-np", 2, PYTHON, program)
    assert job.code == 4
    assert job.seconds < SETTLE_S + SLACK_S


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
            if child.status() == psutil.STATUS_ZOMBIE:
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


def test_a_stuck_screen_does_not_keep_an_impatient_user(
    launch: Callable[..., object], script: Callable[..., Path], tmp_path: Path
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
        [PYTHON, "-m", "horovodlike.launcher.agent"],
        input=b"",
        capture_output=True,
        timeout=LIMIT_S,
        cwd=tmp_path,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_an_agent_that_cannot_understand_ends(tmp_path: Path) -> None:
    done = subprocess.run(
        [PYTHON, "-m", "horovodlike.launcher.agent"],
        input=b"GET / HTTP/1.1\r\n\r\n",
        capture_output=True,
        timeout=LIMIT_S,
        cwd=tmp_path,
        check=False,
    )
    assert done.stdout == b""
    assert b"hvdrun agent: a frame of" in done.stderr
