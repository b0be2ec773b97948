"""The example of tensor and data parallelism on real text, run the way its users run it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "torch" / "parallel_gpt.py"
HVDRUN = Path(sys.executable).parent / "hvdrun"


def run(size: int, *words: object) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD")}
    environment["OMP_NUM_THREADS"] = "1"
    command = [HVDRUN, "-np", size, sys.executable, SCRIPT, *words]
    return subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, env=environment, timeout=240, check=False
    )


@pytest.mark.thorough
def test_two_by_two_learns_what_one_rank_learns(tmp_path: Path) -> None:
    results = []
    for size, tensor, steps in ((4, 2, 100), (1, 1, 20)):
        report = tmp_path / f"{size}.json"
        done = run(size, "--tensor", tensor, "--steps", steps, "--report", report)
        assert done.returncode == 0, done.stdout + done.stderr
        results.append(json.loads(report.read_text()))
    split, alone = results
    assert len(split["hashes"]) == 4 and len(set(split["hashes"])) == 1
    assert split["losses"][:20] == pytest.approx(alone["losses"], rel=1e-3)
    assert split["held_out"] < 3.0 < split["losses"][0]
    assert split["own"] < 0.55 * alone["own"]


@pytest.mark.thorough
def test_ranks_that_make_no_groups() -> None:
    done = run(3, "--tensor", 2)
    assert done.returncode == 2 and "3 ranks cannot be split in groups of 2" in done.stdout
