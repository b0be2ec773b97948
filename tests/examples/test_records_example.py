"""The example of training on records, run the way its users run it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "torch" / "records.py"
HVDRUN = Path(sys.executable).parent / "hvdrun"


@pytest.mark.thorough
def test_it_writes_the_records_once_and_learns_them_with_any_number_of_ranks(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD")}
    environment["OMP_NUM_THREADS"] = "1"
    report = tmp_path / "report.json"
    shards = {}
    for size in (2, 3):
        command = [HVDRUN, "-np", size, sys.executable, SCRIPT, "--folder", tmp_path / "digits", "--report", report]
        done = subprocess.run(
            [str(word) for word in command], capture_output=True, text=True, env=environment, timeout=120, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        result = json.loads(report.read_text())
        assert result["size"] == size and result["accuracy"] > 0.93
        shards[size] = {file: file.stat().st_mtime_ns for file in (tmp_path / "digits" / "train").glob("*.parquet")}
    assert len(shards[2]) == 6 and shards[2] == shards[3]
