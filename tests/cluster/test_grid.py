"""The whole grid of collectives, on this machine and over hosts, each time by one hvdrun command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from cluster.hosts import environment

GRID = Path(__file__).with_name("grid.py")
HVDRUN = Path(sys.executable).with_name("hvdrun")
LIMIT_S = 280


def check(done, size):
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("no error") == size


def test_on_one_host(tmp_path):
    command = [HVDRUN, "-np", "4", sys.executable, GRID, "--layout", "4"]
    done = subprocess.run(
        command, env=environment(), cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    check(done, 4)
