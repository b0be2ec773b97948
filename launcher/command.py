"""From what a user typed after the options to what is executed, with the errors that can be known beforehand."""

import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence

from horovodlike.launcher.errors import UsageError

__all__ = ["resolve_command"]

_PYTHON = re.compile(r"(python|pypy)[0-9.]*")
_NEEDS_NO_SCRIPT = frozenset({"-h", "-?", "--help", "-V", "--version"})
_TAKES_VALUE = ("-W", "-X", "--check-hash-based-pycs")


def resolve_command(command: Sequence[str], environ: Mapping[str, str]) -> tuple[tuple[str, ...], str]:
    """Decides what each rank executes.

    Args:
        command: The words that were typed.
        environ: The environment that the ranks will have; its ``PATH`` counts.

    Returns:
        The words to execute, the first one a path, and the reason.

    Raises:
        UsageError: There is nothing that could be executed.
    """
    if not command or not command[0]:
        raise UsageError("no command given: what should each rank run? For instance: hvdrun -np 2 python train.py")
    name = command[0]
    if name.endswith(".py"):
        return _script(command)
    if os.sep in name:
        _check_executable(name)
        _check_interpreted(command)
        return tuple(command), "it is a path"
    found = shutil.which(name, path=environ.get("PATH"))
    if found is None:
        here = f"; did you mean ./{name}?" if os.path.isfile(name) else "; check the spelling and PATH"
        raise UsageError(f"no such program: {name}{here}")
    _check_interpreted(command)
    return (found, *command[1:]), f"{name} is {found} on PATH"


def _script(command: Sequence[str]) -> tuple[tuple[str, ...], str]:
    name = command[0]
    _check_script(name)
    path = name if os.sep in name else os.path.join(os.curdir, name)
    if os.access(path, os.X_OK):
        with open(path, "rb") as file:
            if file.read(2) == b"#!":
                return (path, *command[1:]), f"{name} is executable and names its interpreter"
    return (sys.executable, *command), f"{name} is not executable with a #! line, so it runs with this Python"


def _check_script(name: str) -> None:
    if not os.path.exists(name):
        raise UsageError(f"no such script: {name}")
    if os.path.isdir(name):  # Python runs a folder that has a __main__.py
        if not os.path.exists(os.path.join(name, "__main__.py")):
            raise UsageError(f"{name} is a folder without __main__.py, not a script")
    elif not os.access(name, os.R_OK):
        raise UsageError(f"no permission to read {name}")


def _check_executable(name: str) -> None:
    if not os.path.exists(name):
        raise UsageError(f"no such program: {name}")
    if os.path.isdir(name):
        raise UsageError(f"{name} is a folder, not a program")
    if not os.access(name, os.X_OK):
        raise UsageError(f"{name} is not executable; chmod +x {name}, or put its interpreter before it")


def _check_interpreted(command: Sequence[str]) -> None:
    """Looks at ``python ... script``: that the script is missing should be said once, before anything starts."""
    if not _PYTHON.fullmatch(os.path.basename(command[0])):
        return
    if _NEEDS_NO_SCRIPT.intersection(command[1:2]):
        return None
    words = iter(command[1:])
    for word in words:
        if not word.startswith("-"):
            return _check_script(word)
        # -c and -m, alone or after other letters (-uc, -Bm), are followed by something else than a script; - is stdin.
        if word == "-" or (not word.startswith("--") and not word.startswith(("-W", "-X")) and re.search("[cm]", word)):
            return None
        if word in _TAKES_VALUE:
            next(words, None)
    raise UsageError(
        f"{' '.join(command)}: no script given, and ranks have no terminal to read one from; add a script, -m or -c"
    )
