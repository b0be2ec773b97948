"""A short run of api_fuzz.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FUZZ = Path(__file__).with_name("api_fuzz.py")


@pytest.mark.slow
@pytest.mark.timeout(900)  # it may have to build the core
@pytest.mark.parametrize(
    ("overlap", "seed", "sequences"),
    [pytest.param("never", 2231930870, 5, marks=pytest.mark.thorough), ("always", 48013157, 2)],
)
def test_nothing_done_to_tensors_in_flight_corrupts_memory(
    overlap: str, seed: int, sequences: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOROVODLIKE_OVERLAP", overlap)
    command = [sys.executable, FUZZ, "--seed", str(seed), "--sequences", str(sequences)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=840, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
