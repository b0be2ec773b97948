"""Write the pages that come from the source: `settings.md` and `api.md` in `docs/users`. With `--check`, only compare.

Works on the installed package: run it with `make docs`.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
import sys
from pathlib import Path
from types import ModuleType

from horovodlike import config

DOCS = Path(__file__).parent / "users"

SETTINGS_HEAD = """# Settings

<!-- Written by `make docs` from the table in horovodlike/config.py. -->

Every setting is an environment variable, read once, in `init()`; those that concern the launcher (elastic jobs, GPUs
per rank, time-outs) by `hvdrun` when it starts, so that a script comes too late to set them. Where Horovod has the same
setting, its variable works too; if both are set, the first column wins. `hvdrun` passes its environment on to every
rank, and has options for the most used settings: see `hvdrun --help`. A value that cannot be used is an error that
names the variable, the value and what is accepted.

Where ranks meet that `hvdrun` has not started is said by `HOROVODLIKE_RENDEZVOUS_ADDR`, `HOROVODLIKE_RENDEZVOUS_PORT`
and `HOROVODLIKE_SECRET_KEY` or `HOROVODLIKE_SECRET_KEY_FILE`: see [hosts.md](hosts.md).

"""

IGNORED_HEAD = """
## Horovod's variables that have no effect

They are accepted. `hvdrun --verbose` says which of them are set, and so does rank 0 if the log level is `debug`.

"""

API_HEAD = """# API

<!-- Written by `make docs` from the docstrings. -->

The API is Horovod's: a script works after `sed s/horovod/horovodlike/`. This page lists what there is, and what each
call guarantees.
"""

# The framework modules first: they are what scripts use.
MODULES = (
    "horovodlike.torch",
    "horovodlike.torch.elastic",
    "horovodlike",
    "horovodlike.data",
    "horovodlike.elastic",
    "horovodlike.testing",
    "horovodlike.compat",
    "horovodlike.errors",
    "horovodlike.config",
)


def settings_page() -> str:
    """Returns the tables of settings and of what is ignored."""
    return SETTINGS_HEAD + config.render_markdown() + IGNORED_HEAD + config.render_without_effect()


def api_page() -> str:
    """Returns signatures and docstrings of everything that the modules export."""
    return API_HEAD + "".join(_module(importlib.import_module(name)) for name in MODULES)


def _module(module: ModuleType) -> str:
    parts = [f"\n## {module.__name__}\n"]
    constants = []
    for name in _exported(module):
        value = getattr(module, name)
        if inspect.isclass(value):
            parts.append(_class(module, name, value))
        elif inspect.isroutine(value):
            parts.append(_entry(f"{module.__name__}.{name}", value, "###"))
        elif not inspect.ismodule(value) and not name.startswith("__"):
            constants.append(f"`{name}`")
    if constants:
        parts.insert(1, f"\nConstants: {', '.join(constants)}.\n")
    return "".join(parts)


def _exported(module: ModuleType) -> list[str]:
    """What the module lists in `__all__`, else the classes that it defines, in the order of the source."""
    defined = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
    names: list[str] = getattr(module, "__all__", defined)
    return names


def _class(module: ModuleType, name: str, value: type) -> str:
    bases = ", ".join(base.__name__ for base in value.__bases__ if base is not object)
    parts = [f"\n### class {module.__name__}.{name}" + (f"({bases})" if bases else "") + "\n", _docstring(value)]
    for method_name, method in vars(value).items():
        if not method_name.startswith("_") and inspect.isroutine(getattr(value, method_name)):
            parts.append(_entry(f"{name}.{method_name}", inspect.unwrap(getattr(value, method_name)), "####", method))
    return "".join(parts)


def _entry(title: str, function: object, level: str, described: object = None) -> str:
    try:
        signature = _signature(function)
    except (TypeError, ValueError):
        signature = "(...)"
    text = _docstring(function) or _docstring(described)
    return f"\n{level} {title}\n\n```python\n{title.rpartition('.')[2]}{signature}\n```\n{text}"


def _signature(function: object) -> str:
    """The signature with annotations as they stand in the source; long ones with a line for each parameter."""
    signature = inspect.signature(function)  # type: ignore[arg-type]
    parts = [_readable(str(parameter)) for parameter in signature.parameters.values()]
    returns = ""
    if signature.return_annotation is not signature.empty:
        returns = f" -> {inspect.formatannotation(signature.return_annotation)}".replace("'", "")
    line = f"({', '.join(parts)}){returns}"
    return line if len(line) < 90 else "(\n    " + ",\n    ".join(parts) + f",\n){returns}"


def _readable(parameter: str) -> str:
    """Without the quotes of annotations, and with classes by name."""
    return re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", re.sub(r": '([^']*)'", r": \1", parameter))


def _docstring(value: object) -> str:
    """The docstring as text; lists of arguments stay aligned as they are."""
    text = inspect.getdoc(value) or ""
    return f"\n```text\n{text}\n```\n" if text else ""


def main() -> int:
    """Writes or compares; returns 1 if a page is out of date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page is out of date")
    check = parser.parse_args().check
    stale = []
    for name, page in (("settings.md", settings_page()), ("api.md", api_page())):
        path = DOCS / name
        if path.exists() and path.read_text() == page:
            continue
        stale.append(name)
        if not check:
            path.write_text(page)
    if stale:
        print(f"{'out of date' if check else 'written'}: {', '.join(stale)}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
