"""Write the diagrams of `architecture.md` from the code: which folder includes or imports which. Part of `make docs`.

An arrow points from a folder to one that it uses, and it is left out where a longer path of arrows implies it. The
folders of the core are read from `#include` lines, those of the Python packages from the imports at the head of a
module. An import inside a function is not an arrow. Folders that use each other share one box.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = Path(__file__).with_name("architecture.md")
NATIVE = ROOT / "horovodlike" / "native"
# Installed name of a package, and its folder in the checkout.
PACKAGES = {
    "horovodlike.torch": "bindings/torch",
    "horovodlike.tensorflow": "bindings/tensorflow",
    "horovodlike.keras": "bindings/keras",
    "horovodlike.ray": "bindings/ray",
    "horovodlike.spark": "bindings/spark",
    "horovodlike.launcher": "launcher",
    "horovodlike": "horovodlike",
}
# Modules that stand below all others of their package.
BASE = ("errors", "config", "routes", "__version__")

Graph = dict[str, set[str]]


def core() -> Graph:
    """Return which folders of the core include headers of which."""
    sources = sorted([*NATIVE.rglob("*.h"), *NATIVE.rglob("*.cc")])
    graph: Graph = {path.relative_to(NATIVE).parts[0]: set() for path in sources if path.parent != NATIVE}
    for path in sources:
        if path.parent != NATIVE:
            folder = path.relative_to(NATIVE).parts[0]
            headers = re.findall(r'^#include "(\w+)/', path.read_text(), flags=re.MULTILINE)
            graph[folder] |= set(headers) - {folder}
    return graph


def package() -> Graph:
    """Return which parts of the package, the bindings and the launcher import which."""
    return _imports(_part)


def launcher() -> Graph:
    """Return which folders of the launcher import which."""
    return _imports(_launcher_part)


def _part(module: str) -> str:
    words = [*module.split("."), ""]
    if f"horovodlike.{words[1]}" in PACKAGES:
        return words[1]
    if words[1] in BASE:
        return "errors, config"
    if words[1:3] == ["_engine", "native"]:
        return "core (hvl.h)"
    return words[1] if words[1] and (ROOT / "horovodlike" / words[1]).is_dir() else "public modules"


def _launcher_part(module: str) -> str | None:
    words = [*module.split("."), "", ""]
    if words[1] != "launcher":
        return None
    is_part = words[2] == "errors" or (words[2] and (ROOT / "launcher" / words[2]).is_dir())
    return words[2] if is_part else "command line, options, run()"


def _imports(part: Callable[[str], str | None]) -> Graph:
    graph: Graph = {}
    for module, path in _modules():
        if own := part(module):
            used = {part(name) for name in _imported(path) if name.split(".")[0] == "horovodlike"}
            graph.setdefault(own, set()).update(found for found in used if found and found != own)
    return {**{found: set() for used in graph.values() for found in used}, **graph}


def _modules() -> Iterator[tuple[str, Path]]:
    for name, folder in PACKAGES.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            inside = path.relative_to(ROOT / folder).with_suffix("").parts
            yield ".".join([name, *(word for word in inside if word != "__init__")]), path


def _imported(path: Path) -> Iterator[str]:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            # `from horovodlike import config`: the module is what is imported.
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def below(graph: Graph) -> Graph:
    """Return for each node all that can be reached from it."""
    reached: Graph = {}
    for node in graph:
        reached[node], more = set(), set(graph[node])
        while more:
            reached[node] |= more
            more = set().union(*(graph[used] for used in more)) - reached[node]
    return reached


def circles(graph: Graph) -> list[list[str]]:
    """Return the nodes that use each other, also by way of others."""
    reached = below(graph)
    found = {tuple(sorted(b for b in reached[a] if a in reached[b])) for a in graph if a in reached[a]}
    return [list(circle) for circle in sorted(found)]


def without_circles(graph: Graph) -> Graph:
    """Return the graph with one node in place of each circle."""
    name = {node: ", ".join(circle) for circle in circles(graph) for node in circle}
    merged: Graph = {}
    for node, used in graph.items():
        own = name.get(node, node)
        merged.setdefault(own, set()).update({name.get(other, other) for other in used} - {own})
    return merged


def mermaid(graph: Graph) -> str:
    """Return the graph as a Mermaid flow chart, the highest nodes first."""
    graph = without_circles(graph)
    reached = below(graph)
    names = sorted(graph, key=lambda node: (-len(reached[node]), node))
    lines = [f'  n{number}["{name}"]' for number, name in enumerate(names)]
    for number, name in enumerate(names):
        direct = {used for used in graph[name] if not any(used in reached[other] for other in graph[name])}
        lines += [f"  n{number} --> n{names.index(used)}" for used in sorted(direct, key=names.index)]
    return "\n".join(["```mermaid", "flowchart TB", *lines, "```"])


def page(text: str) -> str:
    """Return the text of the page with current diagrams."""
    for graph in (core, package, launcher):
        mark = f"<!-- diagram: {graph.__name__} -->"
        head, found, tail = text.partition(mark)
        if not found:
            raise ValueError(f"{PAGE.name} has no {mark}")
        text = f"{head}{mark}\n\n{mermaid(graph())}\n\n<!-- end -->{tail.partition('<!-- end -->')[2]}"
    return text


if __name__ == "__main__":
    current = page(PAGE.read_text())
    if current != PAGE.read_text():
        PAGE.write_text(current)
        print(f"written: {PAGE.name}")
