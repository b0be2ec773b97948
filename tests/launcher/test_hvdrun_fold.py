"""`hvdrun` on a terminal: what several ranks write is shown once, and the first failure comes last."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.hvdrun_process import LIMIT_S, on_terminal

PYTHON = (sys.executable, "-SE")
# The window is long enough for the most crowded machine: what all ranks have written is shown at once anyway.
HVDRUN = f"""
import functools, sys
from horovodlike.launcher.cli import main
from horovodlike.launcher.supervisor import fold, static_job
static_job.Fold = functools.partial(fold.Fold, window={LIMIT_S})
sys.exit(main())
"""


class StartingGun(threading.Thread):
    """Lets the ranks of a job continue when all of them have come, and end when all of them have come again."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=size)
        self._listener.settimeout(LIMIT_S)

    @property
    def code(self) -> str:
        port = self._listener.getsockname()[1]
        return (
            "import atexit, os, socket, sys\n"
            "def wait():\n"
            f"    socket.create_connection(('127.0.0.1', {port})).recv(1)\n"
            "wait()\n"
            "atexit.register(wait)\n"
        )

    def run(self) -> None:
        with self._listener:
            for _ in ("start", "end"):
                with ExitStack() as stack:
                    for _ in range(self._size):
                        stack.enter_context(self._listener.accept()[0])


@pytest.fixture
def terminal(tmp_path: Path) -> Callable[..., tuple[int, list[str]]]:
    """Run Python code on some ranks after all have started; return the exit code and the lines on the screen."""

    def run(size: int, code: str, *options: str) -> tuple[int, list[str]]:
        gun = StartingGun(size)
        program = tmp_path / "program.py"
        program.write_text(gun.code + 'rank = int(os.environ["HOROVODLIKE_RANK"])\n' + code)
        gun.start()
        words = ["-np", str(size), *options, *PYTHON, str(program)]
        ended, seen = on_terminal(words, {"NO_COLOR": "1"}, tmp_path, ("-c", HVDRUN))
        gun.join()
        return ended, seen.decode().replace("\r\n", "\n").splitlines()

    return run


RAISE = 'def step():\n    raise ValueError("no such batch")\n\n\nstep()\n'


def ranks_of(line: str) -> list[int]:
    """Return the ranks that the prefix of a line names."""
    parts = [part.partition("-") for part in line[1 : line.index("]")].split(",")]
    return [rank for first, _, last in parts for rank in range(int(first), int(last or first) + 1)]


def test_an_exception_of_32_ranks_is_shown_for_all_of_them(
    terminal: Callable[..., tuple[int, list[str]]], tmp_path: Path
) -> None:
    """On a busy machine they do not come within the window, so there may be several blocks."""
    code, lines = terminal(32, RAISE, "--output-filename", "logs")
    assert code == 1
    shown = [line for line in lines if "ValueError: no such batch" in line]
    assert sorted(rank for line in shown for rank in ranks_of(line)) == [*range(32)]
    assert len(shown) < 16
    begun = [line.partition(">")[0] for line in lines if "Traceback (most recent call last):" in line]
    assert begun == [line.partition(">")[0] for line in shown]
    assert lines[-2] == shown[-1]
    assert lines[-1].startswith("hvdrun: rank ")
    assert lines[-1].endswith(" exited with code 1; its traceback is above")
    logs = {(tmp_path / "logs" / f"rank.{rank:02d}" / "stderr").read_text() for rank in range(32)}
    assert len(logs) == 1
    last = shown[-1].partition(">")[0]
    assert logs.pop().splitlines() == [line.partition(">: ")[2] for line in lines if line.startswith(f"{last}>")]


@pytest.mark.parametrize("has_files", [True, False])
def test_the_first_failure_comes_first_and_others_because_of_it_in_a_line(
    terminal: Callable[..., tuple[int, list[str]]], has_files: bool
) -> None:
    others = 'class JobBrokenError(Exception):\n    pass\n\n\nraise JobBrokenError("rank 1 has gone")\n'
    options = ("--output-filename", "logs") if has_files else ()
    code, lines = terminal(3, f"if rank == 1:\n    raise ValueError('the cause')\n{others}", *options)
    assert code == 1
    because = lines.index("[0,2]<stderr>: JobBrokenError: rank 1 has gone (traceback left out)")
    assert "[1]<stderr>: ValueError: the cause" in lines[:because]
    assert "[0,2]<stderr>: Traceback (most recent call last):" not in lines
    begin = max(number for number, line in enumerate(lines) if line.endswith("Traceback (most recent call last):"))
    last = [line.removeprefix("[1]<stderr>: ").strip() for line in lines[begin:] if not line.startswith("hvdrun: ")]
    assert last[-1] == "ValueError: the cause"
    assert any(line.startswith("File ") for line in last)
    report = [line for line in lines if line.startswith("hvdrun: rank 1 (pid ")]
    assert len(report) == 1
    assert report[0].endswith("its traceback is above" if report[0] == lines[-1] else "its last lines:")


def test_every_rank_is_shown_if_asked_for(terminal: Callable[..., tuple[int, list[str]]]) -> None:
    code, lines = terminal(3, "print('hi')\n", "--no-fold")
    assert code == 0
    shown = sorted(line for line in lines if not line.startswith("hvdrun: "))
    assert shown == [f"[{rank}]<stdout>: hi" for rank in range(3)]
