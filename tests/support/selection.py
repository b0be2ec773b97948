"""The tests that `make test` runs: all except tests that repeat others' checks, or take long for their findings.

`make test-slow` runs the tests with the mark `slow`, which have to pass each night. Most have a short form without it.
`make test-aarch64` runs those with the mark `aarch64`, which only `-m aarch64` chooses. `pytest --thorough` runs every
other test, and a test that is named (`FILE::TEST`) runs in any case. Otherwise left out are
- tests with the mark `thorough`: sweeps over all places of a fault, where other tests have the typical places; the same
  with a second framework or backend, such as Keras on torch; examples whose subject the test of a page covers;
- in folders whose tests start processes, numbers of ranks other than 3 where a test exists for several;
- in the same folders, most combinations of parameters: each value of each parameter occurs at least once;
- within tests of the core that go through very many cases, a part of the cases (`check::is_brief`).

A module that is slow as a whole says so in a line `pytestmark = ...`. `make test` does not import it: the module may
import packages of the extra `ecosystem`. No test skips itself because a package is missing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

WITH_PROCESSES = {
    "arrays",
    "cluster",
    "engine",
    "elastic",
    "examples",
    "keras",
    "mpi",
    "parameter_server",
    "tensorflow",
    "torch",
}
USUAL_SIZE = 3
"""A number of ranks that is neither even nor a power of two, and has a rank between the first and the last."""


def add_option(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="run every test, with all combinations of its parameters")
    parser.addoption("--pictures", action="store_true", help="write the pictures in docs/users that tests make")


def is_left_out(config: pytest.Config, path: Path) -> bool:
    """Return whether a module has only slow tests, and these are not chosen."""
    is_named = any("::" in argument for argument in config.args)
    if is_named or "not slow" not in config.getoption("markexpr") or not re.fullmatch(r"test_\w+\.py", path.name):
        return False
    return re.search(r"^pytestmark = .*\bpytest\.mark\.slow\b", path.read_text(), re.MULTILINE) is not None


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Remove the tests that are left out from the list of collected tests."""
    if any("::" in argument for argument in config.args):
        return
    chosen = set(items if "aarch64" in config.getoption("markexpr") else _unmarked(items, "aarch64"))
    if not config.getoption("thorough"):
        functions: dict[tuple[str, bool], list[pytest.Item]] = {}
        for item in _unmarked(filter(chosen.__contains__, items), "thorough"):
            is_slow = item.get_closest_marker("slow") is not None
            functions.setdefault((item.nodeid.partition("[")[0], is_slow), []).append(item)
        chosen = {item for those in functions.values() for item in _chosen(those)}
    left_out = [item for item in items if item not in chosen]
    items[:] = [item for item in items if item in chosen]
    config.hook.pytest_deselected(items=left_out)


def _unmarked(items: Iterable[pytest.Item], mark: str) -> Iterable[pytest.Item]:
    return (item for item in items if item.get_closest_marker(mark) is None)


def _chosen(items: list[pytest.Item]) -> Iterable[pytest.Item]:
    """Choose among the tests of one function, which differ by their parameters."""
    if len(items) == 1 or WITH_PROCESSES.isdisjoint(items[0].nodeid.partition("::")[0].split("/")):
        return items
    usual = _on_the_usual_size(items)
    to_come = {value for item in usual for value in _values(item)}
    chosen = []
    while to_come:
        chosen.append(max(usual, key=lambda item: len(to_come & _values(item))))
        to_come -= _values(chosen[-1])
    return chosen


def _on_the_usual_size(items: list[pytest.Item]) -> list[pytest.Item]:
    sizes = [item.callspec.params.get("size") for item in items]
    if None in sizes:
        return items
    usual = USUAL_SIZE if USUAL_SIZE in sizes else max(sizes)
    return [item for item, size in zip(items, sizes, strict=True) if size == usual]


def _values(item: pytest.Item) -> set[tuple[str, int]]:
    """Return the parameters of a test with the identities of their values: tests of one function share values."""
    return {(name, id(value)) for name, value in item.callspec.params.items()}
