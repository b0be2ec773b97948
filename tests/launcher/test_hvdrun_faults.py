"""`hvdrun` when ranks fail, are killed, or get signals; each test also checks that nothing is left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.hvdrun_process import GRACE_S, SETTLE_S, SLACK_S, Launch

PYTHON = sys.executable


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


OUT_OF_MEMORY = "killed by the kernel for lack of memory; give this host or container more, or fewer ranks"


@pytest.mark.parametrize("elastic", [(), ("--min-np", 2)])
def test_a_rank_killed_by_the_kernel_for_lack_of_memory(launch: Callable[..., Launch], elastic: tuple[object]) -> None:
    groups = Path("/proc/self/cgroup").read_text().splitlines()
    group = next((line.removeprefix("0::") for line in groups if line.startswith("0::")), None)
    if group is None or subprocess.run(["unshare", "-rm", "true"], check=False).returncode != 0:
        pytest.skip("needs the second version of control groups, and the right to mount in a name space")
    # The kernel's files are replaced, so that the rank can do the kernel's work.
    counter = f"/sys/fs/cgroup{group}/memory.events"
    setup = f"mount -t tmpfs none /sys/fs/cgroup && mkdir -p {os.path.dirname(counter)} && echo oom_kill 1 > {counter}"
    inside = ["unshare", "-rm", "sh", "-c", f'{setup} && exec "$@"', "sh", PYTHON, "-m", "horovodlike.launcher"]
    rank = f"""
case ${{HOROVODLIKE_WORKER:-$HOROVODLIKE_RANK}} in
    0) exec sleep 100;;
    1) echo oom_kill 2 > {counter}; kill -9 $$;;
    *) kill -9 $$;;  # not by the kernel: the workers that replace it
esac
"""
    job = launch("-np", 2, *elastic, "sh", "-c", rank, program=inside).finish()
    assert re.search(
        rf"1 \(pid \d+\) was killed by signal 9 .*; its last lines:\n    hvdrun: {OUT_OF_MEMORY}\n", job.err
    )
    assert job.code == 137
    assert job.err.count(f"<stderr>: hvdrun: {OUT_OF_MEMORY}\n") == 1


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("at_the_end", ["pass", "hvd.shutdown()"])
def test_the_errors_of_the_others_name_the_exception_of_the_rank_that_failed(
    hvdrun: Callable[..., object], script: Callable[..., Path], size: int, at_the_end: str
) -> None:
    program = script(f"""
        import numpy as np
        import horovodlike as hvd
        hvd.init()
        try:
            if rank == 1:
                raise ValueError("the batch is empty")
            hvd.allreduce(np.ones(4), op=hvd.Sum)
        finally:
            {at_the_end}
    """)
    job = hvdrun("-np", size, PYTHON, program)
    assert job.code == 1
    others = re.findall(r"^\[[02]\]<stderr>: horovodlike.errors.ShutDownError: (.*)$", job.err, re.M)
    assert len(others) == size - 1
    for text in others:
        assert text.startswith("rank 1 has shut the job down: ValueError: the batch is empty")
    assert re.search(r"^hvdrun: rank 1 \(pid \d+\) exited with code 1", job.err, re.M)


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
        wait_for_signal()
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
        wait_for_signal()
    """)
    job = launch("-np", 2, PYTHON, program)
    job.expect(b"ready", 2)
    job.signal(signum)
    ended = job.finish()
    assert ended.code == code
    for rank in range(2):
        assert ended.lines_of(rank) == [b"ready", b"got %d" % signum]
    assert f"hvdrun: {signum.name}: ending 2 ranks within 5 s; a second signal kills at once\n" in ended.err
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
            wait_for_signal()
    """)
    job = launch("-np", 1, PYTHON, program)
    job.expect(b"ready")
    job.signal(signal.SIGTERM)
    assert job.finish().lines_of(0)[-1] == b"finished"


def test_a_second_signal_kills_at_once(launch: Callable[..., object], script: Callable[..., Path]) -> None:
    program = script("""
        signal.signal(signal.SIGINT, lambda *_: print("ignored"))
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("ready")
        while True:
            wait_for_signal()
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


@pytest.mark.parametrize("hosts", [(), ("-H", "localhost:1,node-b:2")])
def test_a_rank_that_exits_well_before_init_ends_the_wait_of_the_others(
    hvdrun: Callable[..., object], script: Callable[..., Path], ssh: Path, hosts: tuple[str, ...]
) -> None:
    program = script("""
        if rank == 2:
            sys.exit(0)
        from horovodlike import basics
        basics.init()
    """)
    env = {"PATH": f"{ssh}{os.pathsep}{os.environ['PATH']}"}
    job = hvdrun("-np", 3, "--start-timeout", 300, *hosts, PYTHON, program, env=env)
    assert job.code == 1
    assert job.seconds < SLACK_S
    where = " on node-b" if hosts else ""
    early = rf"rank 2 \(pid \d+{where}\) exited with code 0 before it called init\(\)"
    assert re.search(rf"^hvdrun: {early}, and others waited for it\nhvdrun: rank [01] ", job.err, re.M)
    assert len(re.findall(rf"^\[[01]\]<stderr>: .*RendezvousError.*{early}; every rank", job.err, re.M)) == 2


def test_a_rank_that_fails_before_init_is_to_blame(hvdrun: Callable[..., object], script: Callable[..., Path]) -> None:
    program = script("""
        if rank == 1:
            sys.exit(7)
        from horovodlike import basics
        basics.init()
    """)
    job = hvdrun("-np", 2, "--start-timeout", 300, PYTHON, program)
    assert job.code == 7
    assert re.search(r"^hvdrun: rank 1 \(pid \d+\) exited with code 7; it wrote nothing", job.err, re.M)
    assert re.search(r"RendezvousError: .*rank 1 \(pid \d+\) exited with code 7 before it called init\(\)", job.err)


def test_ranks_that_never_call_init_disturb_nobody(hvdrun: Callable[..., object], script: Callable[..., Path]) -> None:
    assert hvdrun("-np", 2, PYTHON, script("print('done')")).code == 0


def test_a_wrapper_may_leave_its_child_behind(hvdrun: Callable[..., object], script: Callable[..., Path]) -> None:
    program = script("""
        import subprocess
        if rank == 1 and len(sys.argv) == 1:
            subprocess.Popen([sys.executable, __file__, str(os.getpid())])
            sys.exit(0)
        if rank == 1:  # its parent has exited before it comes
            pidfd = os.pidfd_open(int(sys.argv[1])) if os.getppid() == int(sys.argv[1]) else None
            select.select([pidfd] if pidfd else [], [], [], None if pidfd else 0)
        from horovodlike import basics
        basics.init()
        print("size", basics.size(), flush=True)
        basics.shutdown()
    """)
    job = hvdrun("-np", 2, PYTHON, program)
    assert job.code == 0
    assert job.lines_of(0) == [b"size 2"]


DELETED = "the current folder, in which the ranks would start, cannot be used (No such file or directory): it has been "
RUN = "import horovodlike; horovodlike.run(print, np=2)"


@pytest.mark.parametrize(
    "words",
    [["-m", "horovodlike.launcher", *more, PYTHON, "-c", "0"] for more in (["-np", "2"], ["-np", "2", "--min-np", "1"])]
    + [["-c", f"try: {RUN}\nexcept ValueError as error: print(f'hvdrun: {{error}}', file=__import__('sys').stderr)"]],
    ids=["static", "elastic", "run"],
)
def test_a_folder_that_was_deleted(tmp_path: Path, words: list[str]) -> None:
    program = (
        "import os, sys; os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone'); os.execv(sys.argv[1], sys.argv[1:])"
    )
    done = subprocess.run([PYTHON, "-c", program, PYTHON, "-P", *words], cwd=tmp_path, capture_output=True, text=True)
    assert done.stderr.startswith(f"hvdrun: {DELETED}")
    assert "cd" in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.returncode == (2 if "-m" in words else 0)


def test_a_folder_that_is_deleted_before_a_worker_starts(launch: Callable[..., Launch], tmp_path: Path) -> None:
    """The driver of an elastic job starts workers long after it has looked for its folder."""
    folder = tmp_path / "folder"
    folder.mkdir()
    # Each worker has words of its own: an error that all workers make alike ends the job.
    text = f"import os; os.path.exists({str(folder)!r}) and os.rmdir({str(folder)!r}); os.write(2, b'%d' % os.getpid())"
    job = launch("-np", 2, "--min-np", 1, PYTHON, "-c", f"{text}; os._exit(1)", cwd=folder).finish()
    assert f"the folder {folder} cannot be entered: No such file or directory" in job.err
    assert "Traceback" not in job.err
