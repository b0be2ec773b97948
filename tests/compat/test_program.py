"""`python -m horovodlike.compat train.py` does what `python train.py` does, apart from knowing horovod."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

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
        ("raise SystemExit('a text')", 1),
        ("def f():\n    raise ValueError('wrong')\nf()", 1),
        ("try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise ValueError('wrong') from e", 1),
        ("raise KeyboardInterrupt", -signal.SIGINT),
        ("import no_such_module_anywhere", 1),
        ("this is no Python", 1),
        ("import sys\nsys.excepthook = lambda kind, value, trace: print(trace.tb_lineno, trace.tb_next)\n1 / 0", 1),
        ("import atexit, sys\natexit.register(lambda: print(sys.modules['__main__'].held))\nheld = 5", 0),
        ("import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))) is A)", 0),
        (
            "import threading\nvalue = 1\nthreading.Thread(target=lambda: print(__import__('__main__').value)).start()",
            0,
        ),
        ("import os; os._exit(7)", 7),
    ],
)
def test_how_a_program_ends(run: Run, program: Callable[..., None], text: str, code: int) -> None:
    program(text)
    assert same(run, "train.py").returncode == code


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("missing.py",), 2),
        (("elsewhere",), 1),
        (("-m", "missing"), 1),
        (("-m", "missing.module"), 1),
        (("-m", "elsewhere"), 1),
    ],
)
def test_what_cannot_be_found(run: Run, words: tuple[str, ...], code: int) -> None:
    alone, ours = run(*words), run(*COMPAT, *words)
    assert ours.returncode == alone.returncode == code
    assert ours.stderr.count("\n") == 1 and words[-1] in ours.stderr


def test_the_traceback_of_a_module_has_no_frame_of_ours(run: Run, program: Callable[..., None]) -> None:
    program("1 / 0", "package/module.py")
    done = run(*COMPAT, "-m", "package.module")
    assert done.returncode == 1
    assert "package/module.py" in done.stderr
    assert "horovodlike" not in done.stderr and "runpy" not in done.stderr


@pytest.mark.parametrize("options", [("-P",), ("-I",), ("-u", "-X", "dev", "-W", "ignore"), ("-O",)], ids=" ".join)
def test_options_of_the_interpreter(run: Run, program: Callable[..., None], options: tuple[str, ...]) -> None:
    program("import sys; print(sys.flags, sys.path, __debug__)")
    alone, ours = run(*options, "train.py"), run(*options, *COMPAT, "train.py")
    assert alone.returncode == ours.returncode
    assert ours.stdout == alone.stdout


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
import multiprocessing, sys

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
    # As in a checkout: hvdrun starts the program by its path for this reason.
    program("raise ImportError('the source')", "horovodlike/__init__.py")
    program("import horovod.common.util; print('fine')", "elsewhere/train.py")
    import horovodlike.compat

    done = run(Path(horovodlike.compat.__file__).with_name("__main__.py"), "elsewhere/train.py")
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr
