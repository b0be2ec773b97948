"""The glossary is short and true, and the wording of the folders that are listed as clean is plain."""

from __future__ import annotations

import re

import words
from tables import ROOT, rows


def test_the_words_are_plain() -> None:
    assert list(words.findings([])) == []


def test_no_class_name_is_defined_twice() -> None:
    assert list(words.repeated()) == []
    text = "struct A;\nclass B final : public C {\nstruct C::D {\nclass E {};\n"
    assert words.CLASS[".h"].findall(text) == ["B", "E"]


def test_the_glossary_has_few_words_and_their_classes_exist() -> None:
    retired = {cells[0] for cells in rows("glossary.md", "## Retired words")}
    current = [cells for cells in rows("glossary.md") if len(cells) == 3 and cells[0] != "word"]
    assert len(current) <= 80
    assert [cells[0] for cells in current] == sorted({cells[0] for cells in current})
    assert not retired & {word for cells in current for word in re.findall(r"`\w+`", cells[1])}
    sources = [path for folder in ("horovodlike", "bindings", "launcher") for path in (ROOT / folder).rglob("*.*")]
    code = "\n".join(path.read_text() for path in sources if path.suffix in (".py", ".h"))
    for cells in current:
        for name in re.findall(r"^`([A-Z]\w*[a-z]\w*)`(?:, `(\w+)`)?:", cells[1]):
            assert all(re.search(rf"\b(class|struct) {each}\b", code) for each in name if each), name
