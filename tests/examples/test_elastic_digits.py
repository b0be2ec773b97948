"""The elastic examples on real data: with a rank that is killed, with fixed ranks, and alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "elastic"
HVDRUN = Path(sys.executable).parent / "hvdrun"


@pytest.mark.thorough
@pytest.mark.parametrize(("script", "backend"), [("torch", ""), ("keras", "tensorflow")])
def test_it_learns_although_a_rank_is_killed(tmp_path: Path, script: str, backend: str) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text("- {rank: 1, step: 30, point: commit, action: SIGKILL, generation: 1}\n")
    elastic = ("-np", "2", "--min-np", "1", "--max-np", "2", "--chaos", str(plan))
    done, result = _run(tmp_path, script, backend, *elastic)
    assert "hvdrun: worker 1 (pid " in done.stderr
    assert result["resets"] >= 1 and len(set(result["hashes"])) == 1
    assert result["accuracy"] >= 0.96  # the learning rate depends on how many there were
    assert done.stdout.count("test accuracy:") == 1, "only rank 0 prints"


@pytest.mark.parametrize(("script", "backend", "options"), [("torch", "", ()), ("keras", "torch", ("-np", "2"))])
@pytest.mark.thorough
def test_it_runs_without_a_driver(tmp_path: Path, script: str, backend: str, options: tuple[str, ...]) -> None:
    done, result = _run(tmp_path, script, backend, *options, epochs=2)
    assert result["size"] == (2 if options else 1) and len(set(result["hashes"])) == 1
    assert result["accuracy"] > 0.5 and result["resets"] == 0
    assert done.stdout.count("test accuracy:") == 1, "only rank 0 prints"


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
