"""The example on real data, run the way its users run it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "tensorflow" / "digits_tape.py"
HVDRUN = Path(sys.executable).parent / "hvdrun"


@pytest.mark.thorough
def test_two_ranks_learn_and_hold_the_same_parameters(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD")}
    done = subprocess.run(
        [HVDRUN, "-np", "2", sys.executable, SCRIPT, "--epochs", "8", "--report", report],
        capture_output=True,
        text=True,
        env={**environment, "OMP_NUM_THREADS": "1"},
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(report.read_text())
    assert result["size"] == 2
    assert result["accuracy"] >= 0.96
    assert len(result["hashes"]) == 2 and len(set(result["hashes"])) == 1
    assert done.stdout.count("test accuracy:") == 1, "only rank 0 prints"
