"""Every error message of the product has its entry in docs/users/messages.md, and every entry is for a message."""

from __future__ import annotations

import re

import messages
import pytest
from messages import Message


@pytest.fixture(scope="module")
def found() -> tuple[Message, ...]:
    return messages.found()


def test_messages_are_found_in_python_and_in_the_core(found: tuple[Message, ...]) -> None:
    assert len(found) > 900
    kinds = {message.kind for message in found}
    assert {"RendezvousError", "UsageError", "HVL_JOB_BROKEN", "HVL_INVALID_ARGUMENT", "SystemExit"} <= kinds
    of_python = 'raise OddError(f"a {x}" " b" + y)\nmade = errors.EvenError(1, "c")'
    assert [each[:2] for each in messages._of_python(of_python)] == [
        ("OddError", "a … b…"),
        ("EvenError", "1"),
        ("EvenError", "c"),
    ]
    of_the_core = 'return Status(HVL_MISMATCH, "a " + name(b) +\n  " c" "d");\nStatus();\nlost("e (f) \\"g\\"");'
    assert list(messages._of_the_core(of_the_core)) == [
        ("HVL_MISMATCH", "…a … cd", 1),
        ("HVL_JOB_BROKEN", 'e (f) "g"', 4),
    ]


def test_every_message_has_an_entry(found: tuple[Message, ...]) -> None:
    classes = messages.classes()
    missing = [message for message in messages.without_row(found) if message.kind not in classes]
    assert not missing, f"add a row with a part of the text to docs/users/messages.md, its cause and the fix: {missing}"


def test_every_entry_is_for_some_messages_and_not_for_very_many(found: tuple[Message, ...]) -> None:
    counts = {entry: sum(messages.covers(entry, message) for message in found) for entry in messages.entries()}
    assert not {entry: count for entry, count in counts.items() if not 0 < count <= 20}
    assert messages.classes() <= {message.kind for message in found}


def test_an_entry_is_for_a_part_of_a_message_or_for_the_whole() -> None:
    message = Message("E", "rank … has lost …: …", "")
    assert messages.covers("has lost", message) and messages.covers("rank … has …: …", message)
    assert not messages.covers("… has lost", message) and not messages.covers("lost rank", message)
    assert messages.covers("… lost: …", Message("E", "… lost: …", ""))


def test_the_site_lists_the_messages_of_classes() -> None:
    page = messages.with_lists(messages.PAGE.read_text())
    assert "<!-- class" not in page and len(re.findall(r"^- `` ", page, flags=re.MULTILINE)) > 300
    assert "\n- `` -H and --hostfile contradict each other; give one of them ``\n" in page
