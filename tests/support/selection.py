"""The tests that `make test` runs: all but those that repeat what others check, or take long for what they find.

`make test-slow` runs those with the mark `slow`: the rest of what has to pass before a change lands.
`pytest --thorough` runs every test, and so does one that is named (`FILE::TEST`). Otherwise left out are
- those with the mark `thorough`, among them most of the examples, of Keras on torch and of faults in all places;
- in the folders whose tests start processes, other numbers of ranks than 3 where a test comes on several;
- there as well, combinations of parameters: each value of each parameter comes once, but not with all of the others;
- within tests of the core that go through very many cases, a part of these (`check::is_brief`).
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

WITH_PROCESSES = {"cluster", "engine", "elastic", "examples", "keras", "mpi", "tensorflow", "torch"}
USUAL_SIZE = 3
"""A number of ranks that is neither even nor a power of two, and has a rank between the first and the last."""


def add_option(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="run every test, with all combinations of its parameters")


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take the tests that are left out from the list of those that were collected."""
    if config.getoption("thorough") or any("::" in argument for argument in config.args):
        return
    functions: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("thorough") is None:
            functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    chosen = {item for those in functions.values() for item in _chosen(those)}
    left_out = [item for item in items if item not in chosen]
    items[:] = [item for item in items if item in chosen]
    config.hook.pytest_deselected(items=left_out)


def _chosen(items: list[pytest.Item]) -> Iterable[pytest.Item]:
    """Those of one function, which differ by their parameters."""
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
    """The parameters of a test with their values, by identity: the tests of a function share them."""
    return {(name, id(value)) for name, value in item.callspec.params.items()}
