"""`python -m horovodlike.compat train.py` does what `python train.py` does, apart from knowing horovod."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import horovodlike.compat

Run = Callable[..., "subprocess.CompletedProcess[str]"]
COMPAT = ("-m", "horovodlike.compat")

SHOW = """
import sys
print(__name__, __file__, __package__, __spec__ and __spec__.name, type(__loader__).__name__, __cached__)
print(sys.argv, sys.path)
import beside
"""


@pytest.fixture(autouse=True)
def program(tmp_path: Path) -> Callable[..., None]:
    def write(text: str, name: str = "train.py") -> None:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)

    for folder in (".", "package", "elsewhere"):
        write("print('beside', __name__)", f"{folder}/beside.py")
    write(SHOW)
    write(SHOW, "package/__main__.py")
    write(SHOW, "package/module.py")
    write("", "package/__init__.py")
    write(SHOW, "elsewhere/train.py")
    (tmp_path / "link.py").symlink_to("elsewhere/train.py")
    return write


def same(run: Run, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs the words with Python alone and with the names, and checks that one cannot tell which was which."""
    alone, ours = run(*words), run(*COMPAT, *words)
    assert (ours.returncode, ours.stdout, ours.stderr) == (alone.returncode, alone.stdout, alone.stderr)
    return ours


@pytest.mark.parametrize(
    "words",
    [
        ("train.py", "-x", "--epochs", "3", "-m", "y"),
        ("./elsewhere/../elsewhere/train.py",),
        ("link.py",),
        ("package", "-x"),
        ("-m", "package", "-x"),
        ("-m", "package.module", "-m"),
        ("-m", "train"),
        ("-c", "import sys; print(sys.argv, sys.path, __name__)", "-x", "-c"),
    ],
    ids=" ".join,
)
def test_what_a_program_sees_of_itself(run: Run, words: tuple[str, ...]) -> None:
    done = same(run, *words)
    assert done.returncode == 0
    assert "__main__" in done.stdout


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("import sys; sys.exit(3)", 3),
        ("def f():\n    raise ValueError('wrong')\nf()", 1),
        ("raise KeyboardInterrupt", -signal.SIGINT),
        ("import os; os._exit(7)", 7),
    ],
)
def test_how_a_program_ends(run: Run, program: Callable[..., None], text: str, code: int) -> None:
    program(text)
    assert same(run, "train.py").returncode == code


@pytest.mark.parametrize("words", [("missing.py",), ("elsewhere",), ("-m", "missing")], ids=" ".join)
def test_what_cannot_be_found(run: Run, words: tuple[str, ...]) -> None:
    assert same(run, *words).returncode != 0


@pytest.mark.parametrize("options", [("-P",), ("-u", "-X", "dev", "-W", "ignore"), ("-O",)], ids=" ".join)
def test_options_of_the_interpreter(run: Run, program: Callable[..., None], options: tuple[str, ...]) -> None:
    program("import sys; print(sys.flags, sys.path, __debug__)")
    alone = run(*options, "train.py")
    ours = run(*options, *COMPAT, "train.py")
    assert alone.returncode == ours.returncode
    assert ours.stdout == alone.stdout


def test_an_option_of_the_interpreter_that_is_joined_to_the_m(run: Run, program: Callable[..., None]) -> None:
    program("import sys; print(sys.flags.optimize, sys.argv)")
    assert run("-Om", "horovodlike.compat", "train.py", "-m").stdout == "1 ['train.py', '-m']\n"


@pytest.mark.parametrize("option", ["-E", "-I"])
def test_options_that_ignore_the_environment_are_refused(run: Run, option: str) -> None:
    done = run(option, *COMPAT, "train.py")
    assert done.returncode == 2
    assert "leave the option out, or call horovodlike.compat.install()" in done.stderr


def test_a_sitecustomize_of_the_environment_runs_too(run: Run, program: Callable[..., None], tmp_path: Path) -> None:
    program("print('customized', __name__)", "elsewhere/sitecustomize.py")
    program("import horovod, sitecustomize; print(sitecustomize.__file__)")
    done = run(*COMPAT, "train.py", PYTHONPATH=str(tmp_path / "elsewhere"))
    # The first line is that of the Python that executes the program's.
    assert done.stdout.splitlines() == [*["customized sitecustomize"] * 2, f"{tmp_path}/elsewhere/sitecustomize.py"]


@pytest.mark.parametrize("words", [(), ("-x",), ("-m",), ("-c",)], ids=str)
def test_a_command_line_without_a_program(run: Run, words: tuple[str, ...]) -> None:
    done = run(*COMPAT, *words)
    assert done.returncode == 2
    assert "usage: python -m horovodlike.compat script.py" in done.stderr


def test_help(run: Run) -> None:
    done = run(*COMPAT, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "hvdrun --compat" in done.stdout


CHILDREN = """
import multiprocessing, subprocess, sys

import horovod.common.util  # at the top: a new interpreter imports the script before it calls anything


def ask(word):
    import horovod
    return horovod.__version__, word, sys.argv[1:], __name__


if __name__ == "__main__":
    for method in ("fork", "spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            print(method, pool.apply(ask, ("hello",)))
            pool.close()
            pool.join()
    program = [sys.executable, "-c", "import horovod; print(horovod.__version__)"]
    print("program", subprocess.run(program, capture_output=True, text=True).stdout.strip())
"""


@pytest.mark.parametrize("words", [("children.py",), ("-m", "children")], ids=" ".join)
def test_children_have_the_names(run: Run, program: Callable[..., None], words: tuple[str, ...]) -> None:
    program(CHILDREN, "children.py")
    done = run(*COMPAT, *words, "-x")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "fork ('0.28.1', 'hello', ['-x'], '__main__')",
        "spawn ('0.28.1', 'hello', ['-x'], '__mp_main__')",
        "forkserver ('0.28.1', 'hello', ['-x'], '__mp_main__')",
        "program 0.28.1",
    ]


def test_children_of_a_script_that_installs_the_names_itself(run: Run, program: Callable[..., None]) -> None:
    program("import horovodlike.compat\nhorovodlike.compat.install()\n" + CHILDREN, "children.py")
    done = run("children.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("('0.28.1', 'hello'") == 3


@pytest.mark.slow
def test_workers_of_a_data_loader_have_the_names(run: Run, program: Callable[..., None]) -> None:
    program(
        """
import horovod.torch as hvd
import torch


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        assert hvd.__name__ == "horovodlike.torch" and torch.utils.data.get_worker_info() is not None
        return index * index


if __name__ == "__main__":
    loader = torch.utils.data.DataLoader(Squares(), num_workers=1, multiprocessing_context="spawn")
    print([int(batch) for batch in loader])
"""
    )
    done = run(*COMPAT, "train.py")
    assert (done.returncode, done.stdout) == (0, "[0, 1, 4, 9]\n"), done.stderr


def test_the_current_folder_does_not_hide_the_package(run: Run, program: Callable[..., None]) -> None:
    # As in a checkout.
    program("raise ImportError('the source')", "horovodlike/__init__.py")
    program("import horovod.common.util; print('fine')", "elsewhere/train.py")
    done = run(Path(horovodlike.compat.__file__).with_name("__main__.py"), "elsewhere/train.py")
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr
