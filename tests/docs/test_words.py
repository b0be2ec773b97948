"""The glossary is short and true, and `words.py`, which `make lint` runs, finds what it should."""

from __future__ import annotations

import re
from pathlib import Path

import words
from tables import ROOT, rows


def test_no_class_name_is_defined_twice() -> None:
    assert list(words.repeated()) == []
    text = "struct A;\nclass B final : public C {\nstruct C::D {\nclass E {};\n"
    assert words.CLASS[".h"].findall(text) == ["B", "E"]


def test_the_glossary_has_few_words_and_their_classes_exist() -> None:
    retired = {cells[0] for cells in rows("glossary.md", "## Retired words")}
    current = [cells for cells in rows("glossary.md") if len(cells) == 3 and cells[0] not in {"word", *retired}]
    assert len(current) <= 80
    assert [cells[0] for cells in current] == sorted({cells[0] for cells in current})
    text = [words.split(" ".join(cells)) for cells in current]
    assert [(word.word, line) for word in words.retired() for line in text if word.is_in("glossary.md", line)] == []
    sources = [path for folder in ("horovodlike", "bindings", "launcher") for path in (ROOT / folder).rglob("*.*")]
    code = "\n".join(path.read_text() for path in sources if path.suffix in (".py", ".h"))
    for cells in current:
        for name in re.findall(r"^`([A-Z]\w*[a-z]\w*)`(?:, `(\w+)`)?:", cells[1]):
            assert all(re.search(rf"\b(class|struct) {each}\b", code) for each in name if each), name


def test_retired_words_are_found_in_identifiers_of_their_folders() -> None:
    word = words.RetiredWord("night watch", ("launcher",), ("night watch list",))
    for line in ("kNightWatch", "the_night_watchs", "Night-watch", "HTTPNight watch"):
        assert word.is_in("launcher/job.py", words.split(line)), line
        assert not word.is_in("horovodlike/config.py", words.split(line))
    for line in ("knight_watch", "night, watch", "night_watchman", "NightWatchList"):
        assert not word.is_in("launcher/job.py", words.split(line)), line


def test_phrases_are_found_in_comments_and_in_docstrings_of_constants(tmp_path: Path) -> None:
    python = tmp_path / "rules.py"
    python.write_text('LIMIT = 1\n"""What the queue has: those\nof a batch."""\nEND = "that of"  # taken anew\n')
    assert [*words.prose(python)][0] == (2, "What the queue has: those", True)
    assert [*words.phrases(python)] == [(2, "those of"), (4, "anew")]
    header = tmp_path / "rules.h"
    header.write_text("int begin();  // the begin of a step\n/* Begin it. So many\n * wait for ever. */\n")
    assert [*words.phrases(header)] == [(1, "the begin"), (2, "So many"), (3, "for ever")]


def test_a_pronoun_may_stand_after_a_comparison() -> None:
    for line in ("smaller than that of a sum", "as large as those of the others", "to begin a copy of [begin, end)"):
        assert not words.PHRASES.search(line), line
    for line in ("the batch's begin", "becomes that of the last one", "so much is unsent"):
        assert words.PHRASES.search(line), line
