"""Builds of the core with its C++ tests (`tests/native`), which the tests that need them share."""

from __future__ import annotations

import fcntl
import functools
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SANITIZERS = {"release": "", "thread": "thread", "address": "address,undefined"}
"""What each build is compiled with: as released, or with sanitizers."""


@functools.cache
def build(name: str, *targets: str) -> Path:
    """The folder of a build's tests; what has not changed since the last run is not compiled again."""
    folder = ROOT / "build" / "native" / name
    folder.mkdir(parents=True, exist_ok=True)
    sanitizers = SANITIZERS[name]
    options = [
        "-DHVL_PYTHON=OFF",
        "-DHVL_TESTS=ON",
        f"-DHVL_SANITIZE={sanitizers}",
        f"-DCMAKE_BUILD_TYPE={'None' if sanitizers else 'Release'}",
        f"-DCMAKE_CXX_FLAGS={'-O0' if sanitizers else ''}",
    ]
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several workers of pytest may come
        for command in (
            ["cmake", "-S", str(ROOT / "horovodlike" / "native"), "-B", str(folder), "-G", "Ninja", *options],
            ["cmake", "--build", str(folder), "--target", *targets],
        ):
            done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout + done.stderr
    return folder / "tests"
