"""Horovod's module names in child processes.

A forked child has them from its parent. One that is spawned, or forked from a server, is a new interpreter: before
:mod:`multiprocessing` imports the script there, the names have to be installed. It sends each child a dictionary of
preparations, as a pickle; what is added to it here installs the names while it is unpickled.
"""

from __future__ import annotations

import multiprocessing.spawn
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["follow"]

_KEY = "horovodlike.compat"

# The child's search path is a part of the same dictionary, but comes into force only later.
_INSTALL = "import sys\nsys.path[:] = {path!r}\nimport horovodlike.compat\nhorovodlike.compat.install(quiet=True)"


class _InstallWhereRead:
    """An object whose unpickling installs the names."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, dict[str, Any]]]:
        return exec, (_INSTALL.format(path=[str(entry) for entry in sys.path]), {})


def follow() -> None:
    """Have every child that :mod:`multiprocessing` starts from now on install the names."""
    original = multiprocessing.spawn.get_preparation_data

    def with_names(name: str) -> dict[str, Any]:
        return {_KEY: _InstallWhereRead(), **original(name)}

    multiprocessing.spawn.get_preparation_data = with_names
