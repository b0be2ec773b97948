from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from horovodlike.launcher.cli import main
from horovodlike.launcher.errors import UsageError
from horovodlike.launcher.planning.command import (
    PythonCommand,
    check_interpreter,
    check_reads_environment,
    is_python,
    resolve_command,
    split_python,
)

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


def test_a_folder_runs_with_this_python(here: Path) -> None:
    (here / "folder.py").mkdir()
    (here / "folder.py" / "__main__.py").touch()
    assert resolve_command(["folder.py"], PATH)[0] == (sys.executable, "folder.py")


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
    [["-c", "pass"], ["-m", "this"], ["-uc", "pass"], ["-W", "error", "there.py"], ["-Xdev", "-u", "there.py"]]
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
        (
            [sys.executable, "-u", "-", "x"],
            " -u - x: ranks have no standard input .*as in .*/python.* train.py, or use",
        ),
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


@pytest.mark.parametrize(
    ("head", "trouble"),
    [
        ("#! /nonexistent/interpreter -x\n", "its interpreter /nonexistent/interpreter does not exist"),
        ("#!/bin/sh\r\n", r"its interpreter '/bin/sh\\r' does not exist"),
        ("#!/etc/passwd\n", "its interpreter /etc/passwd is not executable"),
        ("echo\n", "it has no #! line"),
        ("#!\n", "it has no #! line"),
        ("", "it has no #! line"),
    ],
)
def test_a_script_without_an_interpreter_is_named(here: Path, head: str, trouble: str) -> None:
    (here / "program").write_text(head)
    with pytest.raises(UsageError, match=f"^./program: {trouble}; put its interpreter before it, as in python ./prog"):
        check_interpreter("./program")


def test_interpreters_are_looked_for_before_anything_starts(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "train.py").write_text("#!/nonexistent/python\nprint()")
    (here / "train.py").chmod(0o755)
    assert main(["-np", "2", "train.py"]) == 2
    assert capsys.readouterr().err.startswith("hvdrun: ./train.py: its interpreter /nonexistent/python does not exist;")


@pytest.mark.parametrize("head", [b"#!/usr/bin/env program\n", b"#! /bin/sh -e", b"\x7fELF\x02\x01\x01\0"])
def test_interpreters_that_are_fine(here: Path, head: bytes) -> None:
    (here / "program").write_bytes(head)
    check_interpreter("./program")


@pytest.mark.parametrize(
    ("words", "options", "how", "rest"),
    [
        ("train.py -m x", "", "script", "train.py -m x"),
        ("-u train.py", "-u", "script", "train.py"),
        ("-u -X dev -W error -B folder -u", "-u -X dev -W error -B", "script", "folder -u"),
        (
            "-Xdev -Werror --check-hash-based-pycs never t.py",
            "-Xdev -Werror --check-hash-based-pycs never",
            "script",
            "t.py",
        ),
        ("-uW error t.py", "-uW error", "script", "t.py"),
        ("-m package.train -u", "", "-m", "package.train -u"),
        ("-um package", "-u", "-m", "package"),
        ("-Bumpackage x", "-Bu", "-m", "package x"),
        ("-c print() x", "", "-c", "print() x"),
        ("-Ic print()", "-I", "-c", "print()"),
        ("-u - x", "-u", "-", "x"),
        ("-m", "", "-m", ""),
        ("--version", "--version", "", ""),
        ("", "", "", ""),
    ],
)
def test_a_command_line_of_python(words: str, options: str, how: str, rest: str) -> None:
    expected = PythonCommand(tuple(options.split()), how, tuple(rest.split()))
    assert split_python(words.split()) == expected


def test_names_of_interpreters() -> None:
    assert all(map(is_python, ["python", "/usr/bin/python3.11", "pypy3"]))
    assert not any(map(is_python, ["pythonic", "sh", "/python/run", "ipython"]))


@pytest.mark.parametrize("option", ["-I", "-uE", "-S"])
def test_python_that_would_not_install_horovods_names(option: str) -> None:
    with pytest.raises(UsageError, match=f"--compat cannot be used with {option}: "):
        check_reads_environment(["python3", option, "train.py"])
    check_reads_environment(["python3", "-u", "-WError", "train.py", option])
    check_reads_environment(["train", option])
