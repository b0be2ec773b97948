"""Fixtures that start elastic jobs and write programs for their workers."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def worker(tmp_path: Path) -> Callable[..., Path]:
    """`worker(text)` writes a program for workers, which may define `before_init` and `at_step`."""

    def write(text: str = "", name: str = "worker.py") -> Path:
        head = f"import os, signal, sys\nsys.path.append({str(Path(__file__).parent)!r})\nimport worker_program\n"
        head += "before_init = at_step = worker_program.nothing\n"
        path = tmp_path / name
        path.write_text(head + textwrap.dedent(text) + "\nworker_program.work(before_init, at_step)\n")
        return path

    return write
