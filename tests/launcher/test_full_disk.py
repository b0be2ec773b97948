"""`hvdrun` whose standard output, or whose `--output-filename`, is on a disk that is full."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import pytest
from support.hvdrun_process import SLACK_S, Ended

from horovodlike.launcher.supervisor.writer import Writer

LIMITED = ("sh", "-c", 'ulimit -f 100; exec "$@"', "sh", sys.executable, "-m", "horovodlike.launcher")
FULL = "hvdrun: standard output cannot be written: No space left on device"
ELASTIC = ("--min-np", 1)


@pytest.fixture
def full() -> Iterator[BinaryIO]:
    with open("/dev/full", "wb", buffering=0) as file:
        yield file


@pytest.mark.parametrize("more", [(), ELASTIC])
@pytest.mark.parametrize("command", [("echo", "hi"), ("yes",)])
def test_standard_output(hvdrun: Callable[..., Ended], full: BinaryIO, more: tuple, command: tuple) -> None:
    job = hvdrun("-np", 2, *more, *command, stdout=full)
    assert job.code == 1
    assert job.err.splitlines().count(FULL) == 1
    assert job.seconds < SLACK_S


@pytest.mark.parametrize("more", [(), ELASTIC])
def test_ranks_are_ended_in_order(
    hvdrun: Callable[..., Ended], script: Callable[..., Path], full: BinaryIO, more: tuple
) -> None:
    program = script("""
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        print("ready", flush=True)
        signal.sigwait([signal.SIGTERM])
        sys.stderr.write("leaving")
    """)
    text = program.read_text().replace("HOROVODLIKE_RANK", "HOROVODLIKE_WORKER") if more else program.read_text()
    program.write_text(text)
    job = hvdrun("-np", 1, *more, sys.executable, program, stdout=full)
    assert job.code == 1
    assert job.err.endswith(f"{FULL}\n[0]<stderr>: leaving\n")


def test_standard_error(hvdrun: Callable[..., Ended], full: BinaryIO) -> None:
    job = hvdrun("-np", 2, "sh", "-c", "echo err >&2; echo out", stderr=full)
    assert (job.code, sorted(job.out.splitlines())) == (0, [b"[0]<stdout>: out", b"[1]<stdout>: out"])


def test_run(full: BinaryIO, tmp_path: Path) -> None:
    code = "import horovodlike; horovodlike.run(print, ('hi',), np=2)"
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, timeout=60, check=False, cwd=tmp_path)
    assert done.stderr.splitlines()[-1].endswith(
        b"RankFailedError: standard output cannot be written: No space left on device"
    )


@pytest.mark.parametrize("more", [(), ELASTIC])
def test_output_files(hvdrun: Callable[..., Ended], tmp_path: Path, more: tuple) -> None:
    line = "x" * 99
    command = ("sh", "-c", f"yes {line} | head -n 3000; echo done >&2")
    job = hvdrun("-np", 2, *more, "--output-filename", "logs", *command, program=LIMITED)
    assert job.code == 0, job.err
    for rank in range(2):
        assert job.lines_of(rank) == [line.encode()] * 3000
        name = f"logs/rank.{rank}/stdout"
        trouble = f"hvdrun: --output-filename logs: {name} cannot be written: File too large; the job goes on without"
        assert job.err.count(trouble) == 1
        data = (tmp_path / name).read_bytes()
        assert 0 < len(data) < 300_000
        assert data == (f"{line}\n".encode() * 3000)[: len(data)]
        assert (tmp_path / f"logs/rank.{rank}/stderr").read_bytes() == b"done\n"


@pytest.mark.parametrize("more", [(), ELASTIC])
def test_output_files_that_cannot_be_made(hvdrun: Callable[..., Ended], tmp_path: Path, more: tuple) -> None:
    (tmp_path / "logs" / "rank.0" / "stdout").mkdir(parents=True)
    job = hvdrun("-np", 2, *more, "--output-filename", "logs", "echo")
    assert (job.code, job.out) == (2, b"")
    assert job.err.endswith("hvdrun: --output-filename logs: logs/rank.0/stdout: Is a directory\n")


def test_a_writer_says_why_a_target_has_broken() -> None:
    read, write = os.pipe()
    os.close(read)
    changes: list[None] = []
    writer = Writer(lambda: changes.append(None))

    def broken(data: bytes) -> None:
        os.write(write, data)

    taken: list[bytes] = []
    for target in (broken, taken.append):
        writer.put(target, b"first")
        writer.put(target, b"second")
    writer.drain(lambda: False)
    assert isinstance(writer.error_of(broken), BrokenPipeError)
    assert writer.error_of(taken.append) is None
    assert taken == [b"first", b"second"]
    assert changes == [None]
    writer.put(taken.append, b"third")
    writer.close()
    assert taken[2:] == [b"third"]
    os.close(write)
