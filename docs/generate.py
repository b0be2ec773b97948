"""Write the pages that come from the source: `docs/users/settings.md` and `build/docs/api.md`.

Works on the installed package: run it with `make docs`. The page of the API is not committed: its text is that of the
docstrings.
"""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType

from horovodlike import config

ROOT = Path(__file__).resolve().parents[1]

SETTINGS_HEAD = """# Settings

<!-- Written by `make docs` from the table in horovodlike/config.py. -->

Every setting is an environment variable, read once, in `init()`; those that concern the launcher (elastic jobs, GPUs
per rank, time-outs) by `hvdrun` when it starts, so that a script comes too late to set them. Where Horovod has the same
setting, its variable works too; if both are set, the first column wins. `hvdrun` passes its environment on to every
rank, and has options for the most used settings: see `hvdrun --help`. A value that cannot be used is an error that
names the variable, the value and what is accepted.

Ranks that `hvdrun` has not started find each other by `HOROVODLIKE_RENDEZVOUS_ADDR`, `HOROVODLIKE_RENDEZVOUS_PORT` and
`HOROVODLIKE_SECRET_KEY` or `HOROVODLIKE_SECRET_KEY_FILE`: see [hosts.md](hosts.md).

"""

RULES = """
## Transports by operation and size

`hvd.collective_availability()` shows what each transport can do for each operation, device and mode: before `init()`
with what is installed, after it in this job, with the reasons.

```python
import horovodlike as hvd

print(hvd.collective_availability())
hvd.init()
print(hvd.collective_availability().find("TCP", "allreduce"))
```

The engine chooses well by itself. Where you have measured that another transport is faster, the settings
`HOROVODLIKE_CPU_OPERATIONS` and `HOROVODLIKE_GPU_OPERATIONS` take rules in place of a name:

```sh
export HOROVODLIKE_CPU_OPERATIONS="allreduce:<64K=mpi,broadcast=mpi"
export HOROVODLIKE_GPU_OPERATIONS="nccl,allreduce:<16K=staging"
```

- A value is made of parts, with commas between them: `OPERATION=NAME`, `OPERATION:<SIZE=NAME`, and at most one `NAME`,
  for all other operations; without it, `auto`. The names are those of the table above.
- `OPERATION` is allreduce (with Adasum), allgather, broadcast, reducescatter, alltoall, gather, scatter or reduce.
  Barriers and messages always take the engine's own way.
- `SIZE` is in bytes, or with `K`, `M` or `G` in units of 1024. Of an operation's parts the first that fits counts:
  write the smaller size first, and the part without a size last.
- The size that counts is that of the tensor, or of all tensors of a group; not that of the batch into which the engine
  fuses tensors. It never depends on when tensors are ready, so each tensor takes the same way on all ranks, in
  every run. Tensors that take different ways are never in one batch.
- An allgather and a gather have the size of their result, an alltoall that of what all ranks send together, a scatter
  that of one part.
- All ranks need the same rules: `init()` fails if they differ, and names the ranks.
- MPI is loaded only if a rule chooses it, and the job is then started as [mpi.md](mpi.md) says. The engine calls MPI
  from its own thread alone, so each change between MPI and the other transports costs the switch of a thread.
- `nccl` in any part is an error where the ranks cannot use NCCL ([gpu.md](gpu.md)). What a rule stages is moved between
  ranks by shared memory and TCP if the CPU's setting has rules, and else as that setting says.
- MPI and sealed data exclude each other, and so do MPI and elastic jobs, even if MPI is for one operation only.
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
    "horovodlike.torch.distributed",
    "horovodlike.torch.elastic",
    "horovodlike.torch.nn",
    "horovodlike.torch.parameter_server",
    "horovodlike",
    "horovodlike.data",
    "horovodlike.elastic",
    "horovodlike.parameter_server",
    "horovodlike.ray",
    "horovodlike.testing",
    "horovodlike.compat",
    "horovodlike.errors",
    "horovodlike.config",
)


def settings_page() -> str:
    """Return the tables of settings and of variables that are ignored."""
    return SETTINGS_HEAD + config.render_markdown() + RULES + IGNORED_HEAD + config.render_without_effect()


def api_page() -> str:
    """Return signatures and docstrings of everything that the modules export."""
    return API_HEAD + "".join(_module(importlib.import_module(name)) for name in MODULES)


def _module(module: ModuleType) -> str:
    parts = [f"\n## {module.__name__}\n"]
    constants = []
    for name in exported(module):
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


def exported(module: ModuleType) -> list[str]:
    """Return the names in `__all__`, or else those that the module defines, in the order of the source."""
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
    """Return the signature with annotations as in the source; long ones with a line for each parameter."""
    signature = inspect.signature(function)  # type: ignore[arg-type]
    parts = [_readable(str(parameter)) for parameter in signature.parameters.values()]
    returns = ""
    if signature.return_annotation is not signature.empty:
        returns = f" -> {inspect.formatannotation(signature.return_annotation)}".replace("'", "")
    line = f"({', '.join(parts)}){returns}"
    return line if len(line) < 90 else "(\n    " + ",\n    ".join(parts) + f",\n){returns}"


def _readable(parameter: str) -> str:
    """Return the parameter without the quotes of annotations, and with classes by name."""
    return re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", re.sub(r": '([^']*)'", r": \1", parameter))


def _docstring(value: object) -> str:
    """Return the docstring as text; lists of arguments stay aligned as they are."""
    text = inspect.getdoc(value) or ""
    return f"\n```text\n{text}\n```\n" if text else ""


def main() -> None:
    """Write the pages that differ from what there is."""
    for name, page in (("docs/users/settings.md", settings_page()), ("build/docs/api.md", api_page())):
        path = ROOT / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text() != page:
            path.write_text(page)
            print(f"written: {name}")


if __name__ == "__main__":
    main()
