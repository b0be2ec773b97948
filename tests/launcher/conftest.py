"""Fixtures that start `hvdrun` and write programs for its ranks."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.hvdrun_process import Ended, Launch

_HEAD = """\
import os, select, signal, sys, time
rank = int(os.environ["HOROVODLIKE_RANK"])

def wait_for_signal():
    # signal.pause() does not return for a signal that comes just before it.
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing)
    os.read(reading, 1)

"""


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launch]]:
    """`launch("-np", 2, ...)` starts hvdrun."""
    launches: list[Launch] = []

    def start(*words: Any, **options: Any) -> Launch:
        options.setdefault("cwd", tmp_path)  # in a source checkout, Python would find the package that is not built
        launches.append(Launch([str(word) for word in words], **options))
        return launches[-1]

    yield start
    for started in launches:
        started.close()


@pytest.fixture
def hvdrun(launch: Callable[..., Launch]) -> Callable[..., Ended]:
    """`hvdrun("-np", 2, ...)` runs hvdrun to its end and checks that nothing is left of it."""
    return lambda *words, **options: launch(*words, **options).finish()


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., Path]:
    """`script(text)` writes a Python program that begins with `_HEAD`."""

    def write(text: str, name: str = "rank_program.py") -> Path:
        path = tmp_path / name
        path.write_text(_HEAD + textwrap.dedent(text))
        return path

    return write


@pytest.fixture
def ssh(tmp_path: Path) -> Path:
    """A folder with an `ssh` that executes everything on this machine: see `fake_ssh`."""
    folder = tmp_path / "ssh"
    folder.mkdir()
    program = folder / "ssh"
    text = Path(__file__).with_name("fake_ssh.py").read_text()
    program.write_text(f"#!{sys.executable} -IS\n" + text.partition("\n")[2])
    program.chmod(0o755)
    return folder
