"""List the public API: `python tests/docs/public_api.py MODULE ...` prints every exported name with its parameters.

`tests/docs/public_api.txt` is the list of all modules. What is removed or changed on purpose is changed there too, and
has a line in CHANGELOG.md; `python tests/docs/public_api.py > tests/docs/public_api.txt` writes the file.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs"))

from generate import MODULES, exported  # the modules that the site describes

from horovodlike.process_set import ProcessSet


def parameters(value: Any) -> str:
    """Return the parameters of a function or class with their defaults, without annotations; "" if it has none."""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    plain = [
        one.replace(annotation=inspect.Parameter.empty, default=_Plain.of(one.default))
        for one in signature.parameters.values()
    ]
    return str(inspect.Signature(plain))


class _Plain:
    """A default value, shown by its name alone if it is a class, a function or a process set."""

    def __init__(self, name: str) -> None:
        self.name = name

    @classmethod
    def of(cls, value: Any) -> Any:
        """Return the value itself if its `repr` is the same in every process."""
        if value is inspect.Parameter.empty:
            return value
        if isinstance(value, ProcessSet):
            return cls("global_process_set")
        return cls(value.__name__) if inspect.isclass(value) or inspect.isroutine(value) else value

    def __repr__(self) -> str:
        return self.name


def members(cls: type) -> Iterator[str]:
    """Yield the public methods and properties of a class that are defined in the project."""
    for name in sorted({name for base in cls.__mro__ if _is_ours(base) for name in vars(base)}):
        value = inspect.getattr_static(cls, name)
        if name.startswith("_") or inspect.isclass(value):
            continue
        value = getattr(value, "__func__", value)
        yield f".{name}{parameters(value) if inspect.isroutine(value) else ''}"


def _is_ours(cls: type) -> bool:
    return cls.__module__.split(".")[0].startswith("horovodlike")


def listed(name: str) -> Iterator[str]:
    """Yield a line `MODULE NAME(PARAMETERS)` for each exported name of a module, and its public members."""
    module = importlib.import_module(name)
    for export in sorted(exported(module)):
        value = getattr(module, export)
        title = f"{name} {export}"
        if not inspect.isclass(value):
            yield title + (parameters(value) if callable(value) else "")
            continue
        yield title + ("" if issubclass(value, BaseException) else parameters(value))
        if _is_ours(value):
            yield from (title + member for member in members(value))


if __name__ == "__main__":
    # PyTorch's compiler first: TensorFlow and Triton can abort in one process that imports them in the other order.
    if "torch" in " ".join(sys.argv[1:] or MODULES):
        importlib.import_module("torch._dynamo")
    for module_name in sys.argv[1:] or MODULES:
        print(*listed(module_name), sep="\n")
