"""`hvdrun` on real processes, where nothing goes wrong."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import select
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from support.hvdrun_process import on_terminal

PYTHON = sys.executable


def test_lines_have_prefixes(hvdrun: Callable[..., object]) -> None:
    job = hvdrun("-np", 2, "sh", "-c", "echo out $HOROVODLIKE_RANK; echo err $HOROVODLIKE_RANK >&2")
    assert job.code == 0
    assert sorted(job.out.splitlines()) == [b"[0]<stdout>: out 0", b"[1]<stdout>: out 1"]
    assert sorted(job.err.splitlines()) == ["[0]<stderr>: err 0", "[1]<stderr>: err 1"]


def test_the_environment_of_ranks(hvdrun: Callable[..., object], script: Callable[..., Path]) -> None:
    program = script("""
        for name, value in sorted(os.environ.items()):
            own = ("PYTHONUNBUFFERED", "OMP_NUM_THREADS", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
            if name.startswith(("HOROVODLIKE_", "MASTER_")) or name in own:
                print(name, value)
        import socket
        if rank == 0:
            socket.create_server((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))).close()
        socket.create_connection((os.environ["HOROVODLIKE_RENDEZVOUS_ADDR"],
                                  int(os.environ["HOROVODLIKE_RENDEZVOUS_PORT"]))).close()
    """)
    job = hvdrun("-np", 2, "--cycle-time-ms", 3, "--start-timeout", 11, PYTHON, program, env={"OMP_NUM_THREADS": None})
    ranks = [dict(line.decode().split() for line in job.lines_of(rank)) for rank in range(2)]
    assert job.code == 0
    for rank, environ in enumerate(ranks):
        assert re.fullmatch("[0-9a-f]{64}", environ["HOROVODLIKE_SECRET_KEY"])
        assert int(environ["HOROVODLIKE_RENDEZVOUS_PORT"]) > 0
        assert (
            environ.items()
            >= {
                "HOROVODLIKE_RANK": str(rank),
                "HOROVODLIKE_LOCAL_RANK": str(rank),
                "HOROVODLIKE_SIZE": "2",
                "HOROVODLIKE_LOCAL_SIZE": "2",
                "HOROVODLIKE_CROSS_RANK": "0",
                "HOROVODLIKE_CROSS_SIZE": "1",
                "HOROVODLIKE_RENDEZVOUS_ADDR": "127.0.0.1",
                "HOROVODLIKE_CYCLE_TIME": "3",
                "HOROVODLIKE_START_TIMEOUT": "11",
                "PYTHONUNBUFFERED": "1",
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
            }.items()
        )
        cores = len(os.sched_getaffinity(0))
        assert 1 <= int(environ["OMP_NUM_THREADS"]) <= max(1, cores // 2)
    for name in ("SECRET_KEY", "NODE_ID", "JOB_ID", "RENDEZVOUS_PORT"):
        assert len({environ[f"HOROVODLIKE_{name}"] for environ in ranks}) == 1
    assert ranks[0]["MASTER_PORT"] == ranks[1]["MASTER_PORT"]
    assert job.err.count("hvdrun: OMP_NUM_THREADS=") == 1


def test_the_key_is_on_no_command_line(launch: Callable[..., object], script: Callable[..., Path]) -> None:
    program = script("""
        print("key", os.environ["HOROVODLIKE_SECRET_KEY"], "end")
        select.select([], [], [])
    """)
    job = launch("-np", 1, "--verbose", PYTHON, program)
    key = re.search(b"key ([0-9a-f]{64}) end", job.expect(b" end"))
    assert key is not None
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            assert key[1] not in entry.read_bytes()
    job.signal(15)
    assert key[1].decode() not in job.finish().err


def test_scripts_programs_and_arguments(hvdrun: Callable[..., object], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys; print(sys.argv, sys.executable)")
    (tmp_path / "program").write_text('#!/bin/sh\nprintf "%s|" "$@"; echo')
    (tmp_path / "program").chmod(0o755)
    job = hvdrun("-np", 1, "train.py", "--st", "a b", "-np", "7")
    assert job.lines_of(0) == [f"['train.py', '--st', 'a b', '-np', '7'] {PYTHON}".encode()]
    assert hvdrun("-np", 1, "./program", "x  y", "*", "").lines_of(0) == [b"x  y|*||"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-np", 2, "train.py"], "hvdrun: no such script: train.py\n"),
        (["-np", 2, PYTHON, "train.py"], "hvdrun: no such script: train.py\n"),
        (["-np", 2, "./nothing"], "hvdrun: no such program: ./nothing\n"),
        (
            ["-np", 2],
            "hvdrun: no command given: what should each rank run? For instance: hvdrun -np 2 python train.py\n",
        ),
        (["-np", 0, "true"], "hvdrun: -np 0 cannot be used: it must be an integer >= 1, and at most 65536\n"),
        (["true"], "hvdrun: how many ranks? Give -np N, for instance: hvdrun -np 2 python train.py\n"),
        (
            ["-np", 3, "-H", "a:1,b:1", "true"],
            "hvdrun: Requested more processes (3) than there are available slots (2)",
        ),
        (["-H", "a:1,b", "true"], "hvdrun: Invalid host input 'a:1,b'"),
        (
            ["-np", 2, "--config-file", "none.yaml", "true"],
            "hvdrun: --config-file none.yaml: No such file or directory\n",
        ),
        (
            ["-np", 9999, "--bind-to", "core", "true"],
            "hvdrun: --bind-to core: 9999 ranks, but this process may use only",
        ),
        (["-np", 1, "--output-filename", "/dev/null/x", "true"], "hvdrun: --output-filename /dev/null/x: "),
    ],
)
def test_usage_errors(hvdrun: Callable[..., object], words: list[object], message: str) -> None:
    job = hvdrun(*words)
    assert job.code == 2
    assert job.err.startswith(message)
    assert job.out == b""


def test_a_program_that_cannot_be_executed(hvdrun: Callable[..., object], tmp_path: Path) -> None:
    (tmp_path / "program").write_bytes(b"\x7fELF, but no more\0")
    (tmp_path / "program").chmod(0o755)
    job = hvdrun("-np", 1, "./program")
    assert job.code == 127
    assert "hvdrun: cannot run ./program: Exec format error" in job.err


def test_standard_input_is_empty(hvdrun: Callable[..., object]) -> None:
    read, write = os.pipe()  # as a terminal without input
    try:
        assert hvdrun("-np", 2, "cat", stdin=read).code == 0
    finally:
        os.close(read)
        os.close(write)


def test_what_is_left_of_a_line_is_flushed(hvdrun: Callable[..., object]) -> None:
    job = hvdrun("-np", 1, "printf", r"whole\npart")
    assert job.out == b"[0]<stdout>: whole\n[0]<stdout>: part\n"


def test_bytes_that_are_no_text_pass(hvdrun: Callable[..., object]) -> None:
    assert hvdrun("-np", 1, "printf", r"\377\376\0\n").out == b"[0]<stdout>: \xff\xfe\0\n"


def test_progress_bars_in_a_file(hvdrun: Callable[..., object]) -> None:
    job = hvdrun("-np", 1, "printf", r"\r 10%%\r 20%%\r 30%%\ndone\n")
    assert job.out == (b"[0]<stdout>:  10%\r[0]<stdout>:  20%\r[0]<stdout>:  30%\n[0]<stdout>: done\n")


def test_timestamps(hvdrun: Callable[..., object]) -> None:
    job = hvdrun("-np", 1, "--prefix-output-with-timestamp", "echo", "hi")
    assert re.fullmatch(rb"\w{3} \w{3} [ \d]\d \d\d:\d\d:\d\d \d{4}\[0\]<stdout>: hi\n", job.out)


def test_only_the_ranks_that_are_asked_for_are_shown(hvdrun: Callable[..., object], tmp_path: Path) -> None:
    text = 'echo "out $RANK"; echo "err $RANK" >&2; exit "$RANK"'
    job = hvdrun("-np", 2, "--show-ranks", "0", "--output-filename", "logs", "sh", "-c", text)
    assert (job.out, job.lines_of(1, "stderr"), job.code) == (b"[0]<stdout>: out 0\n", [], 1)
    assert job.err.endswith("exited with code 1; its last lines:\n    err 1\n")
    assert (tmp_path / "logs" / "rank.1" / "stdout").read_bytes() == b"out 1\n"


WORK = "print('done')"
JOIN = "import horovodlike as hvd; hvd.init(); print('done')"
GROUP = "import torch.distributed as dist; dist.init_process_group('gloo'); dist.barrier(); print('done')"


@pytest.mark.parametrize(
    ("words", "is_said"),
    [
        (("-np", 3, PYTHON, "-c", WORK), True),
        (("-np", 1, PYTHON, "-c", WORK), False),
        (("-np", 2, "echo", "done"), False),
        (("-np", 2, PYTHON, "-c", JOIN), False),
        (("-np", 2, PYTHON, "-c", GROUP), False),
    ],
)
def test_ranks_that_have_worked_alone(hvdrun: Callable[..., object], words: tuple[object, ...], is_said: bool) -> None:
    job = hvdrun(*words)
    assert (job.code, job.out.count(b"done")) == (0, words[1])
    assert ("hvdrun: none of the 3 ranks called hvd.init()" in job.err) == is_said


def test_output_files(hvdrun: Callable[..., object], tmp_path: Path) -> None:
    text = r'printf "out $HOROVODLIKE_RANK\r\n\377"; printf "err $HOROVODLIKE_RANK" >&2'
    for _ in range(2):  # made anew, not appended to
        job = hvdrun("-np", 11, "--output-filename", "logs/run", "bash", "-c", text)
    folder = tmp_path / "logs" / "run"
    assert sorted(entry.name for entry in folder.iterdir()) == [f"rank.{rank:02d}" for rank in range(11)]
    for rank in range(11):
        assert (folder / f"rank.{rank:02d}" / "stdout").read_bytes() == b"out %d\r\n\xff" % rank
        assert (folder / f"rank.{rank:02d}" / "stderr").read_bytes() == b"err %d" % rank
        assert job.lines_of(rank, "stderr") == [b"err %d" % rank]


def test_one_rank_writes_to_one_file_padded_to_one_digit(hvdrun: Callable[..., object], tmp_path: Path) -> None:
    hvdrun("-np", 1, "--output-filename", "logs", "echo", "hi")
    assert (tmp_path / "logs" / "rank.0" / "stdout").read_bytes() == b"hi\n"


def test_the_configuration_file_reaches_the_ranks(hvdrun: Callable[..., object], tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("params: {cycle_time_ms: 5, cache_capacity: 7}")
    show = 'echo "$HOROVODLIKE_CYCLE_TIME $HOROVODLIKE_CACHE_CAPACITY $HOROVODLIKE_LOG_LEVEL"'
    job = hvdrun("-np", 1, "--cycle-time-ms", 6, "--config-file", "job.yaml", "sh", "-c", show)
    assert job.lines_of(0) == [b"6 7 "]


def test_binding(hvdrun: Callable[..., object], script: Callable[..., Path]) -> None:
    cores = sorted(os.sched_getaffinity(0))
    program = script("print(*sorted(os.sched_getaffinity(0)))")
    job = hvdrun("-np", 1, "--bind-to", "core", PYTHON, program)
    assert job.lines_of(0) == [" ".join(map(str, cores)).encode()]
    if len(cores) >= 2:
        job = hvdrun("-np", 2, "--bind-to", "core", PYTHON, program)
        shares = [{int(cpu) for cpu in job.lines_of(rank)[0].split()} for rank in range(2)]
        assert not shares[0] & shares[1]
    assert hvdrun("-np", 3, "--bind-to", "numa", PYTHON, program).code == 0


def test_names_that_are_no_text_arrive(hvdrun: Callable[..., object]) -> None:
    odd = b"\xff\xe9"
    text = 'printf "%s %s\\n" "$ODD" "$1"'
    job = hvdrun("-np", 1, "sh", "-c", text, "sh", os.fsdecode(odd), env={"ODD": os.fsdecode(odd)})
    assert job.lines_of(0) == [odd + b" " + odd]


def test_fast_output_is_complete_and_needs_little_memory(launch: Callable[..., object], tmp_path: Path) -> None:
    # 25 MiB a rank, and a reader that does nothing until the ranks have noticed that it does not read.
    size = 25 * 1024 * 1024
    line = b"x" * 99 + b"\n"
    program = f"""
import os, select, sys
data = memoryview({line!r} * {size // 100})
os.set_blocking(1, False)
told = False
while data:
    if not told and not select.select([], [1], [], 0.5)[1]:
        with open("news", "wb", buffering=0) as news:
            news.write(b"b")
        told = True
    select.select([], [1], [])
    data = data[os.write(1, data[:65536]):]
"""
    os.mkfifo(tmp_path / "news")
    news = os.open(tmp_path / "news", os.O_RDWR)
    job = launch("-np", 2, PYTHON, "-c", program)
    for _ in range(2):
        assert select.select([news], [], [], 60)[0]
        assert os.read(news, 1) == b"b"
    os.close(news)
    [guard] = psutil.Process(job.process.pid).children()
    for process in (psutil.Process(job.process.pid), guard, *guard.children()):
        peak = re.search(r"VmHWM:\s*(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())
        assert peak is not None
        assert int(peak[1]) < 80 * 1024
    out, _ = job.process.communicate(timeout=60)
    assert job.process.returncode == 0
    for rank in range(2):
        assert out.count(b"[%d]<stdout>: " % rank + line) == size // 100
    assert len(out) == 2 * (size // 100) * (len(line) + len(b"[0]<stdout>: "))


def test_sixteen_ranks(hvdrun: Callable[..., object]) -> None:
    job = hvdrun("-np", 16, "sh", "-c", "echo $HOROVODLIKE_RANK of $HOROVODLIKE_SIZE")
    assert job.code == 0
    assert all(job.lines_of(rank) == [b"%d of 16" % rank] for rank in range(16))


def test_prefixes_have_colours_on_a_terminal(tmp_path: Path) -> None:
    words = ["-np", "2", "--no-fold", "sh", "-c", "echo hi"]
    seen = on_terminal(words, {"NO_COLOR": ""}, tmp_path)[1]
    assert b"\x1b[36m[0]<stdout>: \x1b[0mhi\r\n" in seen
    assert b"\x1b[33m[1]<stdout>: \x1b[0mhi\r\n" in seen
    assert b"\x1b" not in on_terminal(words, {"NO_COLOR": "1"}, tmp_path)[1]


def test_a_progress_bar_overwrites_itself_on_a_terminal(tmp_path: Path) -> None:
    words = ["-np", "1", "sh", "-c", r"printf '\r 50%%'; echo line >&2; printf '\r100%%\n'"]
    seen = on_terminal(words, {"NO_COLOR": "1"}, tmp_path)[1]
    assert b"[0]<stderr>: line\r\n" in seen
    assert seen.endswith((b"[0]<stdout>: 100%\r\n", b"[0]<stderr>: line\r\n"))
    assert b" 50%\r\n" not in seen


def test_the_launcher_is_quick(launch: Callable[..., object]) -> None:
    # Processor time, which other tests on the same machine do not stretch much; half a second of it would be felt.
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert launch("-np", 2, "true").finish().code == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime) < 0.8


def test_no_framework_is_imported(hvdrun: Callable[..., object]) -> None:
    code = (
        "import sys, horovodlike.launcher.cli, horovodlike.launcher.supervisor.job, horovodlike.launcher.run\n"
        "print({'torch', 'tensorflow', 'numpy', 'yaml', 'cloudpickle'} & sys.modules.keys())"
    )
    assert hvdrun("-np", 1, PYTHON, "-c", code).lines_of(0) == [b"set()"]


def test_verbose_explains(hvdrun: Callable[..., object]) -> None:
    job = hvdrun("-np", 1, "--verbose", "true")
    assert re.search(r"hvdrun: true is /\S+ on PATH", job.err)
    assert re.search(r"hvdrun: rank 0 is process \d+", job.err)


@pytest.mark.parametrize("size", [2, 3])
def test_a_misspelt_setting_is_named_once(
    hvdrun: Callable[..., object], script: Callable[..., Path], size: int
) -> None:
    program = script("""
        import horovodlike as hvd

        for _ in range(2):
            hvd.init()
            hvd.shutdown()
    """)
    job = hvdrun("-np", size, PYTHON, program, env={"HOROVODLIKE_FUSION_TRESHOLD": "3"})
    assert job.code == 0
    assert job.err.splitlines() == [
        "[0]<stderr>: horovodlike warning: HOROVODLIKE_FUSION_TRESHOLD has no effect: there is no such setting; did "
        "you mean HOROVODLIKE_FUSION_THRESHOLD?"
    ]


def test_few_open_files_are_enough_on_one_host(hvdrun: Callable[..., object]) -> None:
    limited = ("sh", "-c", 'ulimit -n 64; exec "$@"', "sh", PYTHON, "-m", "horovodlike.launcher")
    text = "import horovodlike as hvd; hvd.init(); print(hvd.size())"
    job = hvdrun("-np", 4, PYTHON, "-c", text, program=limited)
    assert job.code == 0, job.err
    assert [job.lines_of(rank) for rank in range(4)] == [[b"4"]] * 4
