"""Reads tables of Markdown pages."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def rows(page: str, heading: str = "# ") -> list[list[str]]:
    """Return the cells of all rows of the tables below a heading, without their heads."""
    text = (ROOT / "docs" / "developers" / page).read_text().partition(heading)[2]
    found = re.findall(r"^\| (.*) \|$", text, flags=re.MULTILINE)
    return [row.split(" | ") for row in found]
