"""A short run of soak.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).with_name("soak.py")


@pytest.mark.thorough
def test_soak() -> None:
    options = ["--seconds", "15", "--every", "2.5", "--target", "0.95", "--seed", "1"]
    soak = subprocess.Popen(
        [sys.executable, SOAK, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        out, _ = soak.communicate(timeout=240)
    finally:
        soak.terminate()
        soak.wait()
    assert soak.returncode == 0, out
