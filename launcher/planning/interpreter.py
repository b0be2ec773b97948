"""What a command line of Python asks for: ``python -u -m package.train --epochs 3``. Pure."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["PythonCommand", "is_python", "split_python"]

_PYTHON = re.compile(r"(python|pypy)[0-9.]*")


@dataclass(frozen=True)
class PythonCommand:
    """The words after the interpreter's name, taken apart.

    Attributes:
        options: The interpreter's own.
        how: ``script``, ``-m``, ``-c``, ``-`` for standard input, or an empty string if nothing is to be run.
        rest: The script, module or text, and its arguments.
    """

    options: tuple[str, ...] = ()
    how: str = ""
    rest: tuple[str, ...] = ()


def is_python(program: str) -> bool:
    """Whether a program is a Python interpreter, by its name."""
    return _PYTHON.fullmatch(os.path.basename(program)) is not None


def split_python(words: Sequence[str]) -> PythonCommand:
    """Takes the words after the interpreter's name apart."""
    index = 0
    while index < len(words):
        word, rest = words[index], tuple(words[index + 1 :])
        if word == "-":
            return PythonCommand(tuple(words[:index]), "-", rest)
        if not word.startswith("-"):
            return PythonCommand(tuple(words[:index]), "script", (word, *rest))
        # One word may hold several letters (-uB); -m and -c end the options, and -W and -X have a value.
        letter = re.match(r"-[^-mcWX]*([mcWX])", word)
        if letter is not None and letter[1] in "mc":
            before = (word[: letter.end() - 1],) if letter.end() > 2 else ()
            value = (word[letter.end() :],) if letter.end() < len(word) else ()
            return PythonCommand((*words[:index], *before), f"-{letter[1]}", (*value, *rest))
        value_follows = letter is not None and letter.end() == len(word)
        index += 2 if value_follows or word == "--check-hash-based-pycs" else 1
    return PythonCommand(tuple(words))
