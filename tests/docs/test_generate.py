"""The pages of the site as they are written for Sphinx: links, tables of contents, flow charts."""

from __future__ import annotations

from pathlib import Path

import generate
import picture
import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_links_lead_to_the_same_pages_on_the_site(monkeypatch: pytest.MonkeyPatch) -> None:
    page = generate.DOCS / "users" / "quickstart.md"
    readme = generate.place(ROOT / "README.md")
    assert readme == generate.SITE / "README.md"

    def moved(text: str) -> str:
        return generate._with_links(text, page)

    for kept in ("[a](gpu.md#b)", "[a](#b)", "[a](https://example.com/x.md)", "[a](none.md)", "![a](elastic.png)"):
        assert moved(kept) == kept
    assert moved("[a](../../README.md#b) c") == "[a](../README.md#b) c"
    assert moved("[a](../developers/design.md)") == "[a](../developers/design.md)"
    assert moved("[a](../../packaging/kubernetes)") == "a"
    (source,) = (part for part in moved("[a](../../LICENSE)").split("(")[1:])
    assert (generate.place(page).parent / source.rstrip(")")).resolve() == ROOT / "LICENSE"


def test_the_table_of_contents_is_that_of_the_landing_page() -> None:
    trees = generate._toctrees("## A\n\n- [x](users/x.md): y\n- [z](../Z.md)\n\n## B\n\ntext [x](users/x.md)\n")
    assert trees.count("```{toctree}") == 1 and "\nx <users/x>\nz <Z>\n" in trees and ":caption: A" in trees


def test_flow_charts_become_pictures() -> None:
    chart = '```mermaid\nflowchart TB\n  a["A <1>"]\n  b["B"]\n  c["C"]\n  a --> b\n  b --> c\n  a --> c\n```'
    shown = picture.of_fence(chart)
    assert (
        shown.startswith("<svg")
        and "\n\n" not in shown
        and shown.count("<rect") == 3
        and shown.count("marker-end") == 3
    )
    assert 'aria-label="A &lt;1&gt; uses B, C; B uses C"' in shown
    assert picture.of_fence("```sh\nls\n```") == "```sh\nls\n```"
