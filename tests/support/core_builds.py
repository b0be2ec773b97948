"""Builds of the core with its C++ tests (`tests/native`), which the tests that need them share."""

from __future__ import annotations

import fcntl
import functools
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

BUILDS = Path(__file__).parents[2] / "build"
SANITIZERS = {"thread": "thread", "address": "address,undefined"}


@functools.cache
def released() -> Path:
    """Return the folder of the core's tests in the release build, which is made with the package.

    Raises:
        RuntimeError: They were built before a source was changed.
    """
    folder = BUILDS / "release" / "tests"
    programs = [path for path in folder.glob("*") if path.is_file() and path.suffix in ("", ".so")]
    built = max((path.stat().st_mtime for path in programs), default=0.0)
    for source in (path for part in ("horovodlike", "tests") for path in (BUILDS.parent / part / "native").rglob("*")):
        if source.suffix in (".cc", ".h") and source.stat().st_mtime > built:
            raise RuntimeError(
                f"{source} is newer than the tests in {folder}: build them as `make test` does, by "
                "`pip install --config-settings=cmake.define.HVL_TESTS=ON .`"
            )
    return folder


@functools.cache
def sanitized(name: str, *targets: str) -> Path:
    """Return the folder of the tests with one of SANITIZERS, after compiling the sources that have changed."""
    options = [
        "-DHVL_PYTHON=ON",  # Python's parts are built only if `targets` names them
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-DHVL_SANITIZE={SANITIZERS[name]}",
        "-DCMAKE_BUILD_TYPE=None",
        "-DCMAKE_CXX_FLAGS=-O0",
    ]
    return _compiled(name, options, targets)


@functools.cache
def for_aarch64() -> Path:
    """Return the folder of the tests for aarch64, compiled with the tools of `make wheels` and as the wheel is.

    Raises:
        RuntimeError: The tools are not installed.
    """
    zig = next(BUILDS.glob("packaging/lib/python3*/site-packages/ziglang/zig"), None)
    if zig is None:
        raise RuntimeError("there is no compiler for aarch64: run `make test-aarch64`, which installs it")
    options = [
        f"-DCMAKE_TOOLCHAIN_FILE={BUILDS.parent / 'packaging' / 'zig.cmake'}",
        f"-DZIG={zig}",
        "-DZIG_TARGET=aarch64-linux-gnu.2.28",
        "-DHVL_PYTHON=OFF",
    ]
    return _compiled("aarch64", options, ["all"])


def _compiled(name: str, options: Sequence[str], targets: Sequence[str]) -> Path:
    """Compile changed files into a folder of BUILDS, and return the folder of its tests."""
    folder = BUILDS / name
    folder.mkdir(parents=True, exist_ok=True)
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    source = BUILDS.parent / "horovodlike" / "native"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several workers of pytest may build at the same time
        for command in (
            ["cmake", "-S", str(source), "-B", str(folder), "-G", "Ninja", "-DHVL_TESTS=ON", *options],
            ["cmake", "--build", str(folder), "--target", *targets],
        ):
            done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout + done.stderr
    return folder / "tests"


@functools.cache
def sanitized_package() -> Path:
    """A folder for PYTHONPATH with the package on a core under AddressSanitizer; its Python files are these sources."""
    built = sanitized("address", "native", "native_calls").parent
    folder = BUILDS / "address_package"
    package = folder / "horovodlike"
    root = BUILDS.parent
    sources = {"include/hvl.h": root / "horovodlike/native/hvl.h"}
    for extension in ("_engine/native.abi3.so", "torch/_ops/native_calls.abi3.so", "lib/libhorovodlike.so"):
        sources[extension] = built / Path(extension).name
    parts = {
        "torch": root / "bindings/torch",
        "tensorflow": root / "bindings/tensorflow",
        "keras": root / "bindings/keras",
    }
    parts |= {".": root / "horovodlike", "launcher": root / "launcher"}
    for name, part in parts.items():
        files = [
            path.relative_to(part) for path in part.rglob("*") if path.is_file() and "__pycache__" not in path.parts
        ]
        sources |= {str(Path(name) / path): part / path for path in files if path.parts[0] != "native"}
    with (built / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for name, source in sources.items():
            link = package / name
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.is_symlink():
                link.symlink_to(source)
    return folder
