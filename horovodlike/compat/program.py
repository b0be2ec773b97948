"""Runs a script, a module or a string of code as ``python`` itself would, but with Horovod's module names.

The program's module remains ``__main__`` until the interpreter ends, since exit handlers, threads and pickles may still
need it. This does not use :mod:`runpy`, which would restore the previous ``__main__`` when the program's code ends.
"""

from __future__ import annotations

import builtins
import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType, TracebackType
from typing import Any, NoReturn

from horovodlike.compat import install

__all__ = ["main"]

_USAGE = """usage: python -m horovodlike.compat script.py [arguments]
       python -m horovodlike.compat -m module [arguments]
       python -m horovodlike.compat -c text [arguments]

Runs a program that imports horovod, with horovodlike in its place. Options of Python, such as -u, stand before the
first -m. For several ranks: hvdrun --compat -np 2 python script.py"""

_USAGE_ERROR = 2


@dataclass(frozen=True)
class _Program:
    """The program to run.

    Attributes:
        code: The code.
        name: The value of ``sys.argv[0]``.
        attributes: The attributes of its module before the code runs.
    """

    code: CodeType
    name: str
    attributes: dict[str, Any]


def main(words: Sequence[str]) -> None:
    """Run the program that a command line names.

    Args:
        words: The script, or ``-m`` and a module, or ``-c`` and a string of code; then the program's arguments.

    Raises:
        SystemExit: The program cannot be found, or has raised this itself.
        BaseException: The program has raised it; the traceback is shown without the frames of this module.
    """
    if not words or words[0] in ("-h", "--help"):
        print(_USAGE, file=sys.stdout if words else sys.stderr)
        sys.exit(0 if words else _USAGE_ERROR)
    install()
    how, *rest = words
    if how in ("-m", "-c"):
        if not rest:
            _fail(f"argument expected for the {how} option\n{_USAGE}")
        what, *rest = rest
    elif how.startswith("-"):
        _fail(f"unknown option {how}\n{_USAGE}")
    else:
        how, what = "script", how
    _prepend(how, what)
    _run(_load(how, what), rest)


def _fail(reason: str, code: int = _USAGE_ERROR) -> NoReturn:
    print(f"{sys.executable}: {reason}", file=sys.stderr)
    sys.exit(code)


def _prepend(how: str, what: str) -> None:
    """Add the entry to the search path that Python itself would add for this program."""
    if getattr(sys.flags, "safe_path", False) or sys.flags.isolated:
        return
    if how == "script":
        sys.path.insert(0, _absolute(what) if os.path.isdir(what) else os.path.dirname(os.path.realpath(what)))
    else:
        sys.path.insert(0, os.getcwd() if how == "-m" else "")


def _absolute(path: str) -> str:
    return os.path.join(os.getcwd(), path)


def _load(how: str, what: str) -> _Program:
    try:
        if how == "-m":
            return _module(what)
        if how == "-c":
            return _Program(compile(what, "<string>", "exec", dont_inherit=True), "-c", {"__spec__": None})
        return _folder(what) if os.path.isdir(what) else _script(what)
    except SyntaxError as error:
        _show_only(error, None)
        raise


def _script(name: str) -> _Program:
    path = _absolute(name)
    loader = SourceFileLoader("__main__", path)
    try:
        code = loader.source_to_code(loader.get_data(path), path)
    except OSError as error:
        _fail(f"can't open file {path!r}: [Errno {error.errno}] {error.strerror}")
    return _Program(code, name, {"__file__": path, "__loader__": loader, "__spec__": None, "__cached__": None})


def _folder(name: str) -> _Program:
    path = _absolute(name)
    spec = PathFinder.find_spec("__main__", [path])
    if spec is None or spec.origin is None:
        _fail(f"can't find '__main__' module in {path!r}", code=1)
    return _from_spec(spec, name)


def _module(name: str) -> _Program:
    spec = _find(name)
    if spec is not None and spec.submodule_search_locations is not None:
        name = f"{name}.__main__"
        spec = _find(name)
    if spec is None or spec.origin is None:
        _fail(f"No module named {name}", code=1)
    return _from_spec(spec, spec.origin)


def _find(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        _fail(f"Error while finding module specification for {name!r} ({type(error).__name__}: {error})", code=1)


def _from_spec(spec: ModuleSpec, name: str) -> _Program:
    code = getattr(spec.loader, "get_code", lambda name: None)(spec.name)
    if not isinstance(code, CodeType):
        _fail(f"No code object available for {spec.name}", code=1)
    attributes = {
        "__file__": spec.origin,
        "__loader__": spec.loader,
        "__package__": spec.parent,
        "__spec__": spec,
        "__cached__": spec.cached,
    }
    return _Program(code, name, attributes)


def _run(program: _Program, words: Sequence[str]) -> None:
    module = ModuleType("__main__")
    module.__dict__.update(__builtins__=builtins, **program.attributes)
    sys.argv[:] = [program.name, *words]
    sys.modules["__main__"] = module
    try:
        exec(program.code, module.__dict__)
    except BaseException as error:
        trace = error.__traceback__
        _show_only(error, trace.tb_next if trace is not None else None)
        raise


def _show_only(shown: BaseException, trace: TracebackType | None) -> None:
    """Keep the frames of this module out of the traceback of an exception that will end the interpreter.

    The interpreter handles the exception as usual (exit code, the signal after an interrupt), and calls the hook that
    the program may have set. Since re-raising adds frames of this module, they are removed just before that hook runs.
    """
    hook = sys.excepthook

    def show(kind: type[BaseException], value: BaseException, whole: TracebackType | None) -> None:
        if value is shown:
            whole = trace
            value = value.with_traceback(trace)
        hook(kind, value, whole)

    sys.excepthook = show
