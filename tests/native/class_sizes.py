"""List the largest classes of the core, and fail where one is too large: python tests/native/class_sizes.py."""

import re
import sys
from pathlib import Path

CORE = Path(__file__).parents[2] / "horovodlike/native"
MOST_METHODS = 25
MOST_MEMBERS = 15
SHOWN = 10

NO_CODE = re.compile(r"//[^\n]*|\"(?:\\.|[^\"\\\n])*\"|^[ \t]*#[^\n]*|\balignas\([^)]*\)", re.MULTILINE)
CLASS = re.compile(r"(?<!enum )\bclass\s+(\w+)[^;{<>()]*\{")
PARENTHESES = re.compile(r"\([^()]*\)")
BRACES = re.compile(r"\{[^{}]*\}")
TEMPLATE = re.compile(r"<[^<>]*>")
NEITHER = re.compile(r"(using|friend|static_assert|static|enum|class|struct)\b|.*=\s*delete$|$", re.DOTALL)


def body_at(code, begin):
    """Return the text from `begin`, behind a brace, to the one that closes it."""
    depth = 1
    for end in range(begin, len(code)):
        depth += {"{": 1, "}": -1}.get(code[end], 0)
        if depth == 0:
            return code[begin:end]
    raise ValueError("a brace is not closed")


def flatten(pattern, replacement, text):
    """Replace the innermost matches of the pattern until none is left."""
    while (flat := pattern.sub(replacement, text)) != text:
        text = flat
    return text


def size_of(body):
    """Return the numbers of methods and of data members that the body of a class declares."""
    body = flatten(BRACES, ";", flatten(PARENTHESES, "@", body))  # @: parameters
    declarations = re.sub(r"\b(public|private|protected):", ";", flatten(TEMPLATE, "", body)).split(";")
    counted = [text.strip() for text in declarations if not NEITHER.match(text.strip())]
    methods = sum("operator" in text or "@" in text.split("=")[0] for text in counted)
    return methods, len(counted) - methods


def classes():
    """Yield file, name, number of methods and number of data members of each class in a header."""
    for header in sorted(CORE.rglob("*.h")):
        code = NO_CODE.sub("", header.read_text())
        for head in CLASS.finditer(code):
            yield header.relative_to(CORE), head[1], *size_of(body_at(code, head.end()))


def main():
    found = list(classes())
    for column, what, limit in ((2, "methods", MOST_METHODS), (3, "data members", MOST_MEMBERS)):
        print(f"Most {what} (at most {limit}):")
        for entry in sorted(found, key=lambda each: -each[column])[:SHOWN]:
            print(f"{entry[column]:4} {entry[1]} ({entry[0]})")
    too_large = [name for _, name, methods, members in found if methods > MOST_METHODS or members > MOST_MEMBERS]
    if too_large:
        print("Too large:", *too_large)
    return bool(too_large)


if __name__ == "__main__":
    sys.exit(main())
