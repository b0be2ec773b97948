"""Builds of the core with its C++ tests (`tests/native`), which the tests that need them share."""

from __future__ import annotations

import fcntl
import functools
import os
import subprocess
import sys
from pathlib import Path

BUILDS = Path(__file__).parents[1] / "build"
SANITIZERS = {"thread": "thread", "address": "address,undefined"}


def released() -> Path:
    """The folder of the tests of the core as released: they were built with the package that is installed."""
    folder = BUILDS / "release" / "tests"
    assert (folder / "engine_test").exists(), (
        f"{folder} has no tests: build them as `make test` does, by "
        "`pip install --config-settings=cmake.define.HVL_TESTS=ON .`"
    )
    return folder


@functools.cache
def sanitized(name: str, *targets: str) -> Path:
    """The folder of the tests of one of SANITIZERS; what has not changed since the last run is not compiled again."""
    folder = BUILDS / name
    folder.mkdir(parents=True, exist_ok=True)
    options = [
        "-DHVL_PYTHON=OFF",
        "-DHVL_TESTS=ON",
        f"-DHVL_SANITIZE={SANITIZERS[name]}",
        "-DCMAKE_BUILD_TYPE=None",
        "-DCMAKE_CXX_FLAGS=-O0",
    ]
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    source = BUILDS.parent / "horovodlike" / "native"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several workers of pytest may come
        for command in (
            ["cmake", "-S", str(source), "-B", str(folder), "-G", "Ninja", *options],
            ["cmake", "--build", str(folder), "--target", *targets],
        ):
            done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout + done.stderr
    return folder / "tests"
