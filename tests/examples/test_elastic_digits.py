"""The elastic examples on real data, run without a driver: with fixed ranks, and alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "elastic"
HVDRUN = Path(sys.executable).parent / "hvdrun"


@pytest.mark.parametrize(("script", "backend"), [("torch", ""), ("keras", "tensorflow"), ("keras", "torch")])
def test_it_learns_with_fixed_ranks(tmp_path: Path, script: str, backend: str) -> None:
    done, result = _run(tmp_path, script, backend, "-np", "2")
    assert result["size"] == 2 and len(set(result["hashes"])) == 1
    assert result["accuracy"] >= 0.97 and result["resets"] == 0
    assert done.stdout.count("test accuracy:") == 1, "only rank 0 prints"


@pytest.mark.parametrize(("script", "backend"), [("torch", ""), ("keras", "torch")])
def test_it_runs_alone(tmp_path: Path, script: str, backend: str) -> None:
    _, result = _run(tmp_path, script, backend, epochs=1)
    assert result["size"] == 1 and result["accuracy"] > 0.5


def _run(
    tmp_path: Path, script: str, backend: str, *options: str, epochs: int = 12
) -> tuple[subprocess.CompletedProcess[str], dict[str, object]]:
    report = tmp_path / "report.json"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD")}
    environment |= {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    if backend:
        environment["KERAS_BACKEND"] = backend
    program = [sys.executable, str(FOLDER / f"digits_{script}.py"), "--report", str(report), "--epochs", str(epochs)]
    launched = [str(HVDRUN), *options, *program] if options else program
    done = subprocess.run(launched, capture_output=True, text=True, env=environment, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done, json.loads(report.read_text())
