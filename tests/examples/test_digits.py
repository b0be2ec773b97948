"""The example on real data, run the way its users run it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "torch" / "digits.py"
HVDRUN = Path(sys.executable).parent / "hvdrun"

# Every rank claims other parameters than the rest; all else is the script itself.
DISAGREEING = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import digits
import horovodlike.torch as hvd
digits.parameter_hash = lambda model: f"those of rank {hvd.rank()}"
sys.exit(digits.main())
"""


def run(*argv: object) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD")}
    environment["OMP_NUM_THREADS"] = "1"
    return subprocess.run(
        [str(word) for word in argv], capture_output=True, text=True, env=environment, timeout=240, check=False
    )


@pytest.mark.slow
def test_two_ranks_learn_and_hold_the_same_parameters(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = run(HVDRUN, "-np", 2, sys.executable, SCRIPT, "--report", report)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(report.read_text())
    assert result["size"] == 2
    assert result["accuracy"] >= 0.97
    assert result["images_per_second"] > 0
    assert len(result["hashes"]) == 2 and len(set(result["hashes"])) == 1
    assert f"all 2 ranks hold the same parameters: {result['hashes'][0]}" in done.stdout
    assert done.stdout.count("test accuracy:") == 1, "only rank 0 prints"


@pytest.mark.thorough
def test_runs_without_a_launcher(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = run(sys.executable, SCRIPT, "--epochs", 1, "--report", report)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(report.read_text())["size"] == 1


@pytest.mark.thorough
def test_different_parameters_are_a_failure(tmp_path: Path) -> None:
    script = tmp_path / "disagreeing.py"
    script.write_text(DISAGREEING)
    done = run(HVDRUN, "-np", 2, sys.executable, script, SCRIPT.parent, "--epochs", 1)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "rank 1 holds other parameters than the rest: those of rank 1" in done.stdout
    assert "hold the same parameters" not in done.stdout
