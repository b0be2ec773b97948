"""Write what comes from the source: `docs/users/settings.md`, and the pages that Sphinx reads (`build/docs/source`).

Works on the installed package: run it with `make docs`. The pages of the site are those of the checkout, in the same
folders without `docs/`, with links that lead there, and a page for each public module, whose text is its docstrings.
The order of the site is that of `docs/index.md`.
"""

from __future__ import annotations

import inspect
import os
import re
from pathlib import Path
from types import ModuleType

import picture

from horovodlike import config

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
SITE = ROOT / "build" / "docs" / "source"

SETTINGS_HEAD = """# Settings

<!-- Written by `make docs` from the table in horovodlike/config.py. -->

Every setting is an environment variable, read once, in `init()`; those that concern the launcher (elastic jobs, GPUs
per rank, time-outs) by `hvdrun` when it starts, so that a script comes too late to set them. Where Horovod has the same
setting, its variable works too; if both are set, the first column wins. `hvdrun` passes its environment on to every
rank, and has options for the most used settings: see `hvdrun --help`. A value that cannot be used is an error that
names the variable, the value and what is accepted. Rank 0 warns once of a variable `HOROVODLIKE_...` whose name is not
that of a setting, but nearly.

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

# The public modules, each with a page of the API. The framework modules first: they are what scripts use.
MODULES = (
    "horovodlike.torch",
    "horovodlike.torch.distributed",
    "horovodlike.torch.elastic",
    "horovodlike.torch.lightning",
    "horovodlike.torch.nn",
    "horovodlike.torch.parameter_server",
    "horovodlike.tensorflow",
    "horovodlike.tensorflow.data",
    "horovodlike.tensorflow.data.compute_service",
    "horovodlike.tensorflow.elastic",
    "horovodlike.keras",
    "horovodlike.keras.callbacks",
    "horovodlike.keras.elastic",
    "horovodlike.keras.layers",
    "horovodlike",
    "horovodlike.data",
    "horovodlike.elastic",
    "horovodlike.launcher.elastic",
    "horovodlike.monitor",
    "horovodlike.parameter_server",
    "horovodlike.ray",
    "horovodlike.spark",
    "horovodlike.spark.keras",
    "horovodlike.spark.store",
    "horovodlike.spark.torch",
    "horovodlike.testing",
    "horovodlike.compat",
    "horovodlike.errors",
    "horovodlike.config",
)
FENCE = re.compile(r"^( *)```.*?^\1```$", flags=re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)#\s]+)(#[^)]*)?\)")


def settings_page() -> str:
    """Return the tables of settings and of variables that are ignored."""
    return SETTINGS_HEAD + config.render_markdown() + RULES + IGNORED_HEAD + config.render_without_effect()


def pages() -> list[Path]:
    """Return the Markdown pages of the checkout that are pages of the site."""
    return [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]


def place(page: Path) -> Path:
    """Return the path of a page among those that Sphinx reads."""
    return SITE / page.relative_to(DOCS if DOCS in page.parents else ROOT)


def site_page(page: Path) -> str:
    """Return a page as Sphinx needs it: links that lead to where the site has their targets, diagrams as pictures."""
    text = page.read_text()
    parts, end = [], 0
    for fence in FENCE.finditer(text):
        parts += [_with_links(text[end : fence.start()], page), picture.of_fence(fence[0])]
        end = fence.end()
    return "".join([*parts, _with_links(text[end:], page)]) + (_toctrees(text) if page == DOCS / "index.md" else "")


def _with_links(text: str, page: Path) -> str:
    def link(found: re.Match[str]) -> str:
        mark, title, target, anchor = found.groups()
        path = (page.parent / target).resolve()
        if "://" in target or not path.exists():
            return found[0]
        if path.is_dir():  # the site has none
            return title
        path = place(path) if path in known or mark else path
        return f"{mark}[{title}]({os.path.relpath(path, place(page).parent)}{anchor or ''})"

    known = {*pages()}
    return LINK.sub(link, text)


def _toctrees(index: str) -> str:
    """Return the site's table of contents: the pages to which each section of the landing page links in a list."""
    trees = []
    for section in re.split(r"^## ", index, flags=re.MULTILINE)[1:]:
        listed = re.findall(r"^- \[([^\]]*)\]\((?:\.\./)?([^)]+)\.md\)", section, flags=re.MULTILINE)
        if listed:
            title, *_ = section.splitlines()
            names = [*(f"{text} <{name}>" for text, name in listed), *(["api/index"] if title == "Reference" else [])]
            head = ["", "```{toctree}", ":hidden:", ":titlesonly:", f":caption: {title}", ""]
            trees.append("\n".join([*head, *names, "```", ""]))
    return "".join(trees)


def api_pages() -> dict[str, str]:
    """Return a page for each public module, to which Sphinx adds its names, and their index."""
    index = ["API", "===", "", "The API is Horovod's: a script works after ``sed s/horovod/horovodlike/``.", ""]
    found = {
        "index": "\n".join([*index, ".. toctree::", "   :maxdepth: 1", "", *(f"   {name}" for name in MODULES), ""])
    }
    for name in MODULES:
        found[name] = "\n".join([name, "=" * len(name), "", f".. automodule:: {name}", ""])
    return found


def exported(module: ModuleType) -> list[str]:
    """Return the names in `__all__`, or else those that the module defines, in the order of the source."""
    defined = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
    names: list[str] = getattr(module, "__all__", defined)
    return names


def directives(module: ModuleType) -> str:
    """Return the directives of autodoc for all names of a module, also those that it imports when they are used."""
    found, constants = [], []
    for name in exported(module):
        value = getattr(module, name)
        title = f"{module.__name__}.{name}"
        if inspect.isclass(value):
            kind = "exception" if issubclass(value, BaseException) else "class"
            found.append(f".. auto{kind}:: {title}\n   :members:\n   :show-inheritance:\n")
        elif inspect.isroutine(value):
            found.append(f".. autofunction:: {title}\n")
        elif not inspect.ismodule(value) and not name.startswith("__"):
            constants.append(f".. py:data:: {name}\n   :type: {type(value).__name__}\n")
    return "\n" + "\n".join([*found, *constants])


def write_site() -> None:
    """Write what Sphinx reads where it differs from what there is, and remove pages that are no more."""
    files = {place(page): site_page(page).encode() for page in pages()}
    files |= {place(image): image.read_bytes() for image in DOCS.rglob("*.png")}
    files |= {SITE / "api" / f"{name}.rst": page.encode() for name, page in api_pages().items()}
    for path, content in files.items():
        _write(path, content)
    for path in SITE.rglob("*.*"):
        if path not in files:
            path.unlink()


def _write(path: Path, content: bytes) -> bool:
    """Write a file if it differs from what there is; return whether it did."""
    if path.exists() and path.read_bytes() == content:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return True


if __name__ == "__main__":
    if _write(DOCS / "users" / "settings.md", settings_page().encode()):
        print("written: docs/users/settings.md")
    write_site()
