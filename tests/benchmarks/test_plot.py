"""Every peer that a table has can be among the rows of a plot."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2]))

from benchmarks import plot
from benchmarks.tables import MODELS, PEERS

pytestmark = pytest.mark.slow


def test_rows_of_all_peers(tmp_path: Path) -> None:
    bandwidths = [{"np": 2, "dtype": "float32", "nbytes": 4, "peer": peer, "algbw": 1e9} for peer in PEERS]
    steps = [
        {"np": 2, "model": model, "peer": peer, "seconds": 1.0, "samples": [1.0]} for model in MODELS for peer in PEERS
    ]
    plot.draw({"allreduce": bandwidths, "training": steps}, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 0
    plot.draw({}, tmp_path / "nothing.png")
    assert not (tmp_path / "nothing.png").exists()
