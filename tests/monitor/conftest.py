"""Fixtures that start `hvdrun --monitor`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.hvdrun_process import Launch


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Callable[..., tuple[Launch, str]]]:
    """`watched("-np", 2, ...)` starts `hvdrun --monitor`; returns it, and the address of the page."""
    launches: list[Launch] = []

    def start(*words: Any, **options: Any) -> tuple[Launch, str]:
        options.setdefault("cwd", tmp_path)
        launches.append(Launch(["--monitor", *map(str, words)], **options))
        return launches[-1], launches[-1].expect_error(r"can be watched at (\S+)")

    yield start
    for each in launches:
        each.close()


@pytest.fixture
def program(tmp_path: Path) -> Callable[[str], Path]:
    """`program(text)` writes a Python program."""

    def write(text: str) -> Path:
        path = tmp_path / "program.py"
        path.write_text(re.sub(r"^ {8}", "", text, flags=re.MULTILINE))
        return path

    return write
