"""The error messages of the product, as its source has them, and the entries of `docs/users/messages.md`.

A message is the text that is handed to an exception (a call of a name that ends with Error or Exit) or, in the core, to
a `Status`. What varies in it is `…`. An entry of the page is one of two kinds:

* a row of a table whose first cell has one or more messages in backticks: it is for the messages that contain one of
  these texts, where `…` stands for anything. A text that begins with `…` must be the whole message;
* `<!-- class: NAME ... -->`: the section below is for all other messages of these exceptions, or of these values of
  `hvl_status`. The site lists them there.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "users" / "messages.md"
VARIABLE = "…"
CLASS = re.compile(r"^<!-- class: (.*?) -->$", flags=re.MULTILINE | re.DOTALL)
# Functions of the core that make a Status of a text, and the class of their messages.
_MAKERS = {"invalid": "HVL_INVALID_ARGUMENT", "lost": "HVL_JOB_BROKEN", "malformed": "Protocol", "wrong": "Protocol"}
_MAKERS |= {"protocol_error": "Protocol", "violation": "Protocol"}


@dataclass(frozen=True, order=True)
class Message:
    """An error message.

    Attributes:
        kind: The name of the exception, or of the value of `hvl_status`.
        text: The text.
        place: The file and the line.
    """

    kind: str
    text: str
    place: str


@cache
def found() -> tuple[Message, ...]:
    """Return the messages of the product."""
    messages: list[Message] = []
    for folder in ("horovodlike", "bindings", "launcher"):
        for path in sorted((ROOT / folder).rglob("*.*")):
            read = {".py": _of_python, ".cc": _of_the_core, ".h": _of_the_core}.get(path.suffix)
            for kind, text, line in read(path.read_text()) if read else ():
                if re.search(r"[A-Za-z]{3}", text):
                    messages.append(Message(kind, " ".join(text.split()), f"{path.relative_to(ROOT)}:{line}"))
    return tuple(messages)


def _of_python(source: str) -> Iterator[tuple[str, str, int]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            name = "UsageError" if called == "parser.error" else called.rpartition(".")[2]
            if name.endswith(("Error", "Exit")):
                yield from ((name, _text(value), node.lineno) for value in node.args)


def _text(value: ast.expr) -> str:
    if isinstance(value, ast.Constant):
        return str(value.value)
    if isinstance(value, ast.JoinedStr):
        return "".join(map(_text, value.values))
    if isinstance(value, ast.BinOp):
        return _text(value.left) + _text(value.right)
    return VARIABLE


def _of_the_core(source: str) -> Iterator[tuple[str, str, int]]:
    for call in re.finditer(rf"\b(Status|{'|'.join(_MAKERS)})\((?=[^)])", source):
        depth, words = 1, []
        for word in re.finditer(r'"((?:[^"\\]|\\.)*)"|[()]|[^\s"()]+', source[call.end() :]):
            depth += {"(": 1, ")": -1}.get(word[0], 0)
            if depth == 0:
                break
            words.append(word)
        code = " ".join(word[0] for word in words if word[1] is None)
        kind = re.search(r"\bHVL_[A-Z_]+\b", code)
        parts = [VARIABLE if word[1] is None else word[1] for word in words]
        text = re.sub(f"{VARIABLE}+", VARIABLE, "".join(parts).replace("\\", ""))
        yield _MAKERS.get(call[1], kind[0] if kind else "Status"), text, source.count("\n", 0, call.start()) + 1


def entries() -> list[str]:
    """Return the texts of the page's rows."""
    cells = re.findall(r"^\| (`.*?`) \| ", PAGE.read_text(), flags=re.MULTILINE)
    return [text for cell in cells for text in re.findall(r"`([^`]+)`", cell)]


def classes() -> set[str]:
    """Return the classes that the page explains as a whole."""
    return {name for names in CLASS.findall(PAGE.read_text()) for name in names.split()}


def covers(entry: str, message: Message) -> bool:
    """Return whether an entry is for a message."""
    return _pattern(entry).search(message.text) is not None


@cache
def _pattern(entry: str) -> re.Pattern[str]:
    pattern = ".*".join(map(re.escape, entry.strip(VARIABLE).split(VARIABLE)))
    return re.compile(f"^{VARIABLE}{pattern}{VARIABLE}?$" if entry.startswith(VARIABLE) else pattern)


def without_row(messages: Iterable[Message]) -> list[Message]:
    """Return the messages for which the page has no row."""
    listed = entries()
    return [message for message in messages if not any(covers(entry, message) for entry in listed)]


def with_lists(page: str) -> str:
    """Return the page with all messages of each class below its comment."""
    left = sorted({(message.kind, message.text) for message in without_row(found())})
    texts = {kind: [text for _, text in group] for kind, group in groupby(left, key=lambda pair: pair[0])}

    def listed(mark: re.Match[str]) -> str:
        lines = sorted({f"- `` {text.strip(' .:')} ``" for name in mark[1].split() for text in texts.get(name, ())})
        return "\n".join(["<details><summary>All messages</summary>", "", *lines, "", "</details>"])

    return CLASS.sub(listed, page)
