"""`hvdrun` whose standard input, output or error is closed, as under some daemons."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.hvdrun_process import Ended

CLOSED = ["<&-", ">&-", "2>&-", "<&- >&-", ">&- 2>&-", "<&- >&- 2>&-"]
HVDRUN = (sys.executable, "-X", "dev", "-W", "error", "-m", "horovodlike.launcher")
ELASTIC = ("--min-np", 1)


def without(closed: str) -> tuple[str, ...]:
    return ("sh", "-c", f'exec "$@" {closed}', "sh")


@pytest.mark.parametrize("closed", CLOSED)
@pytest.mark.parametrize("more", [(), ELASTIC])
def test_a_job(hvdrun: Callable[..., Ended], tmp_path: Path, closed: str, more: tuple) -> None:
    command = ("sh", "-c", "echo out; echo err >&2")
    job = hvdrun("-np", 2, *more, "--output-filename", "logs", *command, program=(*without(closed), *HVDRUN))
    assert job.code == 0, job.err
    for rank in range(2):
        assert job.lines_of(rank) == ([] if re.search("(^| )>", closed) else [b"out"])
        assert job.lines_of(rank, "stderr") == ([] if "2>" in closed else [b"err"])
        assert (tmp_path / f"logs/rank.{rank}/stdout").read_bytes() == b"out\n"
        assert (tmp_path / f"logs/rank.{rank}/stderr").read_bytes() == b"err\n"
    assert "Warning" not in job.err


@pytest.mark.parametrize("closed", [">&-", "2>&-"])
def test_errors_go_nowhere_else(hvdrun: Callable[..., Ended], closed: str) -> None:
    job = hvdrun("-np", "many", "true", program=(*without(closed), *HVDRUN))
    assert (job.code, job.out) == (2, b"")
    assert ("hvdrun: -np many " in job.err) == ("2>" not in closed)


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("more", ["", ", min_np=2"])
def test_run(tmp_path: Path, closed: str, more: str) -> None:
    code = f"import horovodlike; open('result', 'w').write(str(horovodlike.run(print, ('hi',), np=2{more})))"
    words = [*without(closed), sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, timeout=60, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "result").read_text() == ("[None]" if more else "[None, None]")  # no rank has called init()
    assert done.stdout.count(b"hi") == (2 if closed == "2>&-" else 0)
