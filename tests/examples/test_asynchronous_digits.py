"""The example of asynchronous training with one slow rank, run the way its users run it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "parameter_server" / "digits.py"
HVDRUN = Path(sys.executable).parent / "hvdrun"


def run(*words: object) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD")}
    environment["OMP_NUM_THREADS"] = "1"
    command = [HVDRUN, "-np", 4, sys.executable, SCRIPT, *words]
    return subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, env=environment, timeout=240, check=False
    )


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ("downpour", "sync", "easgd", "ssp"))
def test_each_mode_reaches_the_loss(tmp_path: Path, mode: str) -> None:
    report = tmp_path / "report.json"
    done = run("--mode", mode, "--slowdown", 2, "--report", report)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(report.read_text())
    assert result["reached"] and result["points"][-1][1] <= 0.1 < result["points"][0][1]
    assert f"{mode}: reached a loss of 0.1 in" in done.stdout
    *fast, slow = result["steps"]
    assert len({*fast, slow}) == 1 if mode == "sync" else slow < max(fast)


@pytest.mark.thorough
def test_a_loss_that_is_not_reached_is_a_failure() -> None:
    done = run("--seconds", 1)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "downpour: came to a loss of" in done.stdout
