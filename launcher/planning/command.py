"""Turn the words after the options into the command to execute; report errors in it before anything starts."""

import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from horovodlike.launcher.errors import UsageError

HOROVODRUN = "horovodrun"
"""The other name of ``hvdrun --compat``."""

NO_INTERPRETER = "it has no #! line"
"""The answer of :func:`interpreter_trouble` for a text that the system cannot execute by itself, but a shell can."""
_PYTHON = re.compile(r"(python|pypy)[0-9.]*")


@dataclass(frozen=True)
class PythonCommand:
    """The parsed words after the interpreter's name.

    Attributes:
        options: The interpreter's own options.
        how: ``script``, ``-m``, ``-c``, ``-`` for standard input, or an empty string if no program will be run.
        rest: The script, module or text, and its arguments.
    """

    options: tuple[str, ...] = ()
    how: str = ""
    rest: tuple[str, ...] = ()


def is_python(program: str) -> bool:
    """Return whether a program is a Python interpreter, judging by its name."""
    return _PYTHON.fullmatch(os.path.basename(program)) is not None


def split_python(words: Sequence[str]) -> PythonCommand:
    """Parse the words after the interpreter's name."""
    index = 0
    while index < len(words):
        word, rest = words[index], tuple(words[index + 1 :])
        if word == "-":
            return PythonCommand(tuple(words[:index]), "-", rest)
        if not word.startswith("-"):
            return PythonCommand(tuple(words[:index]), "script", (word, *rest))
        # One word may combine several options (-uB); -m and -c end the options, and -W and -X have a value.
        letter = re.match(r"-[^-mcWX]*([mcWX])", word)
        if letter is not None and letter[1] in "mc":
            before = (word[: letter.end() - 1],) if letter.end() > 2 else ()
            value = (word[letter.end() :],) if letter.end() < len(word) else ()
            return PythonCommand((*words[:index], *before), f"-{letter[1]}", (*value, *rest))
        value_follows = letter is not None and letter.end() == len(word)
        index += 2 if value_follows or word == "--check-hash-based-pycs" else 1
    return PythonCommand(tuple(words))


_KERNEL_READS = 256
_INTERPRETER = re.compile(rb"#![ \t]*([^ \t\n\0]+)")
_NEEDS_NO_SCRIPT = frozenset({"-h", "-?", "--help", "-V", "--version"})


def check_reads_environment(command: Sequence[str]) -> None:
    """Check that a Python that a command starts will import the module that installs Horovod's names.

    Raises:
        UsageError: Its options have it ignore the environment or the ``site`` module.
    """
    options = split_python(command[1:]).options if is_python(command[0]) else ()
    for option in options:
        if re.match(r"-[^-mcWX]*[EIS]", option):
            raise UsageError(
                f"--compat cannot be used with {option}: Python would not import the module that installs Horovod's "
                "names; leave the option out, or call horovodlike.compat.install() in the program"
            )


def resolve_command(
    command: Sequence[str], environ: Mapping[str, str], program: str = "hvdrun"
) -> tuple[tuple[str, ...], str]:
    """Decide what each rank executes.

    Args:
        command: The words that were typed.
        environ: The environment that the ranks will have; its ``PATH`` is searched.
        program: The name by which the user started the launcher.

    Returns:
        The words to execute, the first one a path, and the reason.

    Raises:
        UsageError: There is no command, or it cannot be executed.
    """
    if not command or not command[0]:
        raise UsageError(f"no command given: what should each rank run? For instance: {program} -np 2 python train.py")
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
    if os.path.isfile(path) and os.access(path, os.X_OK):
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


def interpreter_trouble(path: str) -> str:
    """Find out what is wrong with the interpreter of an executable file; the error of exec names the file itself.

    Returns:
        The trouble, or an empty string if there is none, such as for a program that needs no interpreter.
    """
    if not os.access(path, os.R_OK):  # a program need not be readable
        return ""
    with open(path, "rb") as file:
        head = file.read(_KERNEL_READS)
    match = _INTERPRETER.match(head)
    if match is None:
        return "" if b"\0" in head else NO_INTERPRETER
    interpreter = os.fsdecode(match[1])
    shown = interpreter if interpreter.isprintable() else repr(interpreter)  # lines may end in CRLF
    if not os.path.exists(interpreter):
        return f"its interpreter {shown} does not exist"
    return "" if os.access(interpreter, os.X_OK) else f"its interpreter {shown} is not executable"


def check_interpreter(path: str) -> None:
    """Check the interpreter of the file that each rank executes.

    Raises:
        UsageError: The interpreter is missing or cannot be executed.
    """
    trouble = interpreter_trouble(path)
    if trouble:
        raise UsageError(f"{path}: {trouble}; put its interpreter before it, as in python {path}")


def _check_interpreted(command: Sequence[str]) -> None:
    """Check the script in ``python ... script``, to report a missing one once and before anything starts."""
    if not is_python(command[0]) or _NEEDS_NO_SCRIPT.intersection(command[1:2]):
        return
    asked = split_python(command[1:])
    if asked.how == "script":
        _check_script(asked.rest[0])
    elif asked.how == "-":
        raise UsageError(
            f"{' '.join(command)}: ranks have no standard input to read a program from; write it to a file, as in "
            f"{command[0]} train.py, or use -m or -c"
        )
    elif not asked.how:
        raise UsageError(
            f"{' '.join(command)}: no script given, and ranks have no terminal to read one from; add a script, -m or -c"
        )


def working_folder() -> str:
    """Return the folder in which the launcher was started; the ranks start in it too.

    Raises:
        UsageError: The folder cannot be used any more.
    """
    try:
        return os.getcwd()
    except OSError as error:
        raise UsageError(
            f"the current folder, in which the ranks would start, cannot be used ({error.strerror}): it has been "
            "deleted or replaced; change to a folder that exists (cd), and start again"
        ) from None
