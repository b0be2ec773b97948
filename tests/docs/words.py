"""List comments and docstrings that break the rules of plain wording: `python tests/docs/words.py [FOLDER ...]`.

Five rules, to which `make lint` holds the whole project:

* a docstring, also one below an assignment, does not begin with What, Who, Where or Which, and a comment above C++ code
  does not either;
* no rank, thread or process is *he*, *him*, *his*, *whoever*, *somebody*, *someone*, *nobody* or *everybody*;
* the product's comments and docstrings name the noun again instead of *that of*, except after a comparison, and do
  without the other phrases in `PHRASES`;
* the words in the glossary's table of retired words (`docs/developers/glossary.md`) do not come back: not in prose, and
  not as parts of an identifier, which is split at underscores and capitals. Case and a plural's ending do not matter;
* no class name is defined twice, neither in the package and the launcher, nor in one binding, nor in the core.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GLOSSARY = ROOT / "docs" / "developers" / "glossary.md"
RIDDLE = re.compile(r"(What|Who|Whom|Whose|Where|Which)\b")
PERSON = re.compile(
    r"\b(he(?! et al)|him|his|himself|whoever|whomever|somebody|someone|nobody|everybody)\b", re.IGNORECASE
)
# For the product's comments and docstrings.
PHRASES = re.compile(
    r"(?<!\bthan )(?<!\bas )(?<!\blike )\b(that|those) of\b"
    r"|\bso (many|much)\b|\banew\b|\bfor ever\b"
    r"|(\b(the|a|its|their|whose|at)|'s) begin\b|\bbegin of\b",  # the noun is "start"
    re.IGNORECASE,
)
PRODUCT = ("horovodlike/", "bindings/", "launcher/")
# Copies of other projects' words: names of the API, and lists of names.
EXEMPT = ("docs/developers/glossary.md", "tests/docs/words.py", "docs/users/horovod_names.md")

# What each binding defines for itself: all have Horovod's API, under the name of their framework.
BINDINGS = ("bindings/torch", "bindings/tensorflow", "bindings/keras")
CLASS = {
    ".py": re.compile(r"^class ([A-Za-z]\w*)", re.MULTILINE),  # private ones are known to their own module only
    ".h": re.compile(r"^(?:class|struct)\s+(\w+)(?:\s+final)?\s*(?::[^:;{][^;{]*)?\{", re.MULTILINE),
}
# Names that are defined twice for a reason.
SHARED = {
    "ParameterServer": "torch: the same for tensors and modules",
    "Gradients": "keras: implementations of one protocol",
    "UnsupportedReductionError": "tensorflow: only errors of its own classes leave a graph",
}


@dataclass(frozen=True)
class RetiredWord:
    """A row of the glossary's table of retired words.

    Attributes:
        word: The word, in lower case; several words are separated by spaces.
        folders: The beginnings of paths where the word is retired; empty: everywhere.
        phrases: Phrases in which the word stays, written like `word`.
    """

    word: str
    folders: tuple[str, ...]
    phrases: tuple[str, ...]

    @property
    def pattern(self) -> str:
        """A pattern of the word and its plural."""
        return self.word[:-1] + "(?:y|ies)" if self.word.endswith("y") else self.word + "s?"

    def is_in(self, name: str, line: str) -> bool:
        """Return whether a file's line, split by `split`, has the word where it is retired."""
        if self.folders and not name.startswith(self.folders):
            return False
        for phrase in self.phrases:
            line = line.replace(phrase, "")
        return re.search(rf"\b{self.pattern}\b", line) is not None


def split(text: str) -> str:
    """Return a text in lower case, with single spaces where it has spaces, hyphens, underscores or camel case."""
    return re.sub(r"[\s_-]+|(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", " ", text).lower()


def retired() -> list[RetiredWord]:
    """Return the rows of the glossary's table of retired words."""
    table = GLOSSARY.read_text().partition("## Retired words")[2]
    rows = re.findall(r"^\| `([^`]+)` \|[^|]*\|([^|]*)\|([^|]*)\|$", table, flags=re.MULTILINE)
    cells = [(word, re.findall(r"`([^`]+)`", folders), re.findall(r"`([^`]+)`", kept)) for word, folders, kept in rows]
    return [RetiredWord(split(word), tuple(folders), tuple(map(split, kept))) for word, folders, kept in cells]


def prose(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Yield the lines of all comments and docstrings of a file: number, text, whether it is the first."""
    text = path.read_text()
    if path.suffix == ".py":
        yield from _python(text)
    elif path.suffix in (".h", ".cc", ".c"):
        yield from _cpp(text)
    elif path.suffix == ".md":
        yield from ((number, line, False) for number, line in enumerate(text.split("\n"), 1))


def _python(text: str) -> Iterator[tuple[int, str, bool]]:
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Expr(value=ast.Constant(value=str() as docstring)):
                for offset, line in enumerate(docstring.split("\n")):
                    yield node.lineno + offset, line, offset == 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.removeprefix("#").strip(), False


def _cpp(text: str) -> Iterator[tuple[int, str, bool]]:
    before = False
    for number, line in enumerate(text.split("\n"), 1):
        code, mark, comment = line.partition("//")
        is_whole = not code.strip()
        if mark and not comment.startswith("/") and '"' not in code:
            yield number, comment.strip(), is_whole and not before
        before = bool(mark) and is_whole
    for block in re.finditer(r"/\*(.*?)\*/", text, re.DOTALL):
        first = text.count("\n", 0, block.start()) + 1
        is_whole = not text[: block.start()].rpartition("\n")[2].strip()
        for offset, line in enumerate(block[1].split("\n")):
            yield first + offset, line.strip(" *"), is_whole and offset == 0


def phrases(path: Path) -> Iterator[tuple[int, str]]:
    """Yield each of `PHRASES` in a file's prose, also across the end of a line, with the number of its line."""
    lines = {number: line.strip() for number, line, _ in prose(path)}
    for number, line in lines.items():
        for match in PHRASES.finditer(f"{line} {lines.get(number + 1, '')}"):
            if match.start() < len(line):
                yield number, match[0]


def findings(folders: list[str]) -> Iterator[str]:
    """Yield a line for each place where a rule is broken."""
    words = retired()
    any_word = re.compile(rf"\b({'|'.join(word.pattern for word in words)})\b")
    tracked = subprocess.run(["git", "ls-files", *folders], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in tracked.splitlines():
        path = ROOT / name
        if name in EXEMPT or path.suffix not in (".py", ".h", ".cc", ".c", ".md") or not path.exists():
            continue
        for number, line, begins in prose(path):
            if begins and RIDDLE.match(line):
                yield f"{name}:{number}: begins with a riddle: {line.strip()}"
            if person := PERSON.search(line):
                yield f"{name}:{number}: {person[0]!r}: {line.strip()}"
        if name.startswith(PRODUCT) and path.suffix != ".md":
            yield from (f"{name}:{number}: {phrase!r}" for number, phrase in phrases(path))
        for number, line in enumerate(path.read_text().split("\n"), 1):
            if any_word.search(parts := split(line)):
                yield from (
                    f"{name}:{number}: {word.word!r} is retired: {line.strip()}"
                    for word in words
                    if word.is_in(name, parts)
                )


def repeated() -> Iterator[str]:
    """Yield a line for each class name that is defined in two files."""
    folders = ["horovodlike", "launcher", *BINDINGS]
    tracked = subprocess.run(["git", "ls-files", *folders], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    places: dict[tuple[str, str], list[str]] = defaultdict(list)
    for path in map(Path, tracked.splitlines()):
        suffix = ".h" if path.suffix == ".cc" else path.suffix
        if suffix == ".py" or (suffix == ".h" and path.parts[:2] == ("horovodlike", "native")):
            for name in {*CLASS[suffix].findall((ROOT / path).read_text())} - SHARED.keys():
                places[suffix, name].append(str(path))
    for (_, name), files in sorted(places.items()):
        parts = ["/".join(file.split("/")[:2]) if file.startswith(BINDINGS) else "" for file in files]
        if len(files) > 1 and ("" in parts or len({*parts}) < len(parts)):
            yield f"{files[0]}: class {name} is defined in {', '.join(files[1:])} too"


if __name__ == "__main__":
    found = [*findings(sys.argv[1:]), *([] if sys.argv[1:] else repeated())]
    print(*found, sep="\n")
    sys.exit(f"{len(found)} lines" if found else 0)
