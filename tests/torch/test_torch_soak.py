"""A short run of the soak: random mixed collectives over four ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).resolve().parents[1] / "soak.py"
HVDRUN = Path(sys.executable).parent / "hvdrun"


@pytest.mark.thorough
def test_soak():
    command = [HVDRUN, "-np", "4", sys.executable, SOAK, "--seconds", "8", "--seed", "20261121"]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.count("no error") == 4
