"""The recipes of adding.md name files that exist and contain what a reader must look for."""

from __future__ import annotations

import pytest
from tables import ROOT, rows

RECIPES = [cells for cells in rows("adding.md") if cells[0].startswith("`")]


@pytest.mark.parametrize(("path", "text"), [(file.strip("`"), text.strip("`")) for file, text, _ in RECIPES])
def test_file_contains_what_the_recipe_points_at(path: str, text: str) -> None:
    assert text in (ROOT / path).read_text()
