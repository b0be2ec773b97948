"""A short run of soak.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SOAK = Path(__file__).with_name("soak.py")


def test_soak() -> None:
    options = ["--seconds", "15", "--every", "2.5", "--target", "0.9"]
    done = subprocess.run([sys.executable, SOAK, *options], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
