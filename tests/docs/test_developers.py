"""The developers' pages agree with the code: diagrams, formats, and the tests that hold promises."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path

import diagram
import pytest
import tables

from horovodlike._bootstrap import mesh_handshake
from horovodlike._net import secure_channel
from horovodlike.launcher.agent import protocol

ROOT = Path(__file__).resolve().parents[2]
DEVELOPERS = ROOT / "docs" / "developers"


def test_the_diagrams_are_current() -> None:
    assert diagram.page(diagram.PAGE.read_text()) == diagram.PAGE.read_text(), "run `make docs`"


@pytest.mark.parametrize("graph", [diagram.core, diagram.launcher])
def test_no_folders_use_each_other_in_a_circle(graph: Callable[[], diagram.Graph]) -> None:
    assert diagram.circles(graph()) == []


def test_the_formats_are_those_of_the_code() -> None:
    page = (DEVELOPERS / "protocols.md").read_text()
    for magic in (secure_channel._MAGIC, mesh_handshake._MAGIC):
        assert f"`{magic.decode()}`" in page
    assert {kind.name: kind.value for kind in protocol.FrameKind} == {
        name: int(number) for name, number in re.findall(r"`([A-Z_]+)` (\d+)", page.partition("## Launcher")[2])
    }
    messages = (ROOT / "horovodlike" / "native" / "negotiate" / "message.h").read_text()
    for name, number in re.findall(r"k([A-Z]\w+) = (\d),", messages):
        assert re.search(rf"^\| {name.lower()} \| {number} \|", page, flags=re.MULTILINE), name


def of_make_test(path: Path) -> set[str]:
    """The tests of a module that `make test` runs."""
    body = ast.parse(path.read_text()).body
    marks = {f"pytest.mark.{name}" for name in ("aarch64", "gpu", "slow", "thorough")}
    all_have = [ast.unparse(each.value) for each in body if ast.unparse(each).startswith("pytestmark =")]
    if any(mark in text for mark in marks for text in all_have):
        return set()
    functions = [each for each in body if isinstance(each, ast.FunctionDef)]
    return {each.name for each in functions if marks.isdisjoint(map(ast.unparse, each.decorator_list))}


def test_each_promise_has_a_test_of_make_test() -> None:
    rows = [row for row in tables.rows("testing.md", "## Promises") if "::" in row[-1]]
    assert len(rows) > 60
    for feature, _, test in rows:
        file, name = test.strip("`").split("::")
        assert name in of_make_test(ROOT / "tests" / file), feature
