"""The Keras example on real data, run the way its users run it, with both backends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "keras" / "digits_fit.py"
HVDRUN = Path(sys.executable).parent / "hvdrun"


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ("tensorflow", "torch"))
def test_two_ranks_learn_and_hold_the_same_weights(tmp_path: Path, backend: str) -> None:
    report = tmp_path / "report.json"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD")}
    environment |= {"OMP_NUM_THREADS": "1", "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [HVDRUN, "-np", "2", sys.executable, SCRIPT, "--report", report]
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, env=environment, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(report.read_text())
    assert result["size"] == 2
    assert result["accuracy"] >= 0.97
    assert len(result["hashes"]) == 2 and len(set(result["hashes"])) == 1
    assert f"all 2 ranks hold the same weights: {result['hashes'][0]}" in done.stdout
    assert done.stdout.count("test accuracy:") == 1, "only rank 0 prints"
