from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from horovodlike.launcher.command import resolve_command
from horovodlike.launcher.errors import UsageError

PATH = {"PATH": os.defpath}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_python_script_runs_with_this_python(here: Path) -> None:
    (here / "train.py").write_text("print()")
    assert resolve_command(["train.py", "-x"], PATH)[0] == (sys.executable, "train.py", "-x")
    (here / "train.py").chmod(0o755)  # executable, but with no interpreter's name
    assert resolve_command(["train.py"], PATH)[0] == (sys.executable, "train.py")


def test_an_executable_script_with_an_interpreter_runs_by_itself(here: Path) -> None:
    (here / "train.py").write_text("#!/usr/bin/env python3\n")
    assert resolve_command(["train.py"], PATH)[0] == (sys.executable, "train.py")
    (here / "train.py").chmod(0o755)
    assert resolve_command(["train.py", "a"], PATH)[0] == ("./train.py", "a")


def test_programs_are_found_on_path(here: Path) -> None:
    assert resolve_command(["sh", "-c", "exit"], PATH)[0][0].endswith("/sh")
    program = here / "program"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert resolve_command(["./program"], PATH)[0] == ("./program",)
    assert resolve_command(["program"], {"PATH": str(here)})[0] == (str(program),)


@pytest.mark.parametrize(
    "words",
    [["-c", "pass"], ["-m", "this"], ["-uc", "pass"], ["-W", "error", "there.py"], ["-Xdev", "-u", "there.py"], ["-"]]
    + [["--version"], ["-X", "dev", "-Bm", "this"]],
)
def test_python_commands_that_are_fine(here: Path, words: list[str]) -> None:
    (here / "there.py").touch()
    assert resolve_command([sys.executable, *words], PATH)[0] == (sys.executable, *words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no command given.*hvdrun -np 2 python train.py"),
        ([""], "no command given"),
        (["missing.py"], "^no such script: missing.py$"),
        ([sys.executable, "missing.py", "-c"], "^no such script: missing.py$"),
        ([sys.executable, "-u", "-W", "error", "missing.py"], "^no such script: missing.py$"),
        ([sys.executable, "-u"], "no script given"),
        (["./missing"], "no such program: ./missing"),
        (["no-such-program-anywhere"], "no such program: no-such-program-anywhere; check the spelling and PATH"),
        (["data"], "no such program: data; did you mean ./data?"),
        (["./data"], r"./data is not executable; chmod \+x ./data"),
        (["./folder"], "./folder is a folder, not a program"),
        (["folder.py"], "folder.py is a folder without __main__.py"),
    ],
)
def test_what_cannot_run_is_named(here: Path, words: list[str], message: str) -> None:
    (here / "data").touch()
    (here / "folder").mkdir()
    (here / "folder.py").mkdir()
    with pytest.raises(UsageError, match=message):
        resolve_command(words, PATH)
