"""``python -m horovodlike.compat train.py``: runs a program that imports horovod, with horovodlike in its place."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

# Python has put an entry in front of the search path: with -m, the current folder, where a checkout would hide the
# installed package; with a path, the folder of this file.
if not (getattr(sys.flags, "safe_path", False) or sys.flags.isolated):
    del sys.path[0]

from horovodlike.compat import environment  # noqa: E402 - after the search path was put in order

_USAGE = """usage: python -m horovodlike.compat script.py [arguments]
       python -m horovodlike.compat -m module [arguments]
       python -m horovodlike.compat -c text [arguments]

Runs a program that imports horovod, with horovodlike in its place. Options of Python, such as -u, stand before the
first -m. For several ranks: hvdrun --compat -np 2 python script.py"""

_USAGE_ERROR = 2


def main(words: Sequence[str]) -> NoReturn:
    """Execute Python again, in this process, with the program that a command line names.

    Args:
        words: The script, or ``-m`` and a module, or ``-c`` and a string of code; then the program's arguments.

    Raises:
        SystemExit: The words name no program, or Python was told to ignore the environment.
    """
    if words and words[0] in ("-h", "--help"):
        print(_USAGE)
        sys.exit(0)
    if not words or (words[0].startswith("-") and (words[0] not in ("-m", "-c") or len(words) == 1)):
        _fail(_USAGE)
    if sys.flags.ignore_environment or sys.flags.no_site:
        _fail(
            "with -E, -I or -S Python would not import what installs Horovod's names: leave the option out, or call "
            "horovodlike.compat.install() in the program"
        )
    sys.stdout.flush()  # a `sitecustomize` may have written
    os.execve(sys.executable, [sys.executable, *_options(len(words)), *words], environment(os.environ))


def _fail(reason: str) -> NoReturn:
    print(f"{sys.executable}: {reason}", file=sys.stderr)
    sys.exit(_USAGE_ERROR)


def _options(num_words: int) -> list[str]:
    """Return the options of Python that stand before this module on the command line, or before its path."""
    *options, last = sys.orig_argv[1 : len(sys.orig_argv) - num_words]
    if last == "horovodlike.compat":
        last = options.pop() + last
    combined, found, _ = last.rpartition("mhorovodlike.compat")  # such as -um
    return [*options, combined] if found and combined != "-" else options


if __name__ == "__main__":
    main(sys.argv[1:])
