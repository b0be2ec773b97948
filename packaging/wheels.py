"""Build the sdist, and from it a wheel for each architecture, into a folder: `make wheels`.

A wheel is for every Python from the one that pyproject.toml names (abi3), and for every distribution whose glibc is as
new as GLIBC. It is compiled by Zig, which brings the headers and symbols of each glibc, and checked by auditwheel.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
ARCHITECTURES = ("x86_64", "aarch64")
GLIBC = (2, 28)
MAX_BYTES = 5_000_000


def main() -> None:
    """Build what the command line asks for, and print each file with its size."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, default=ROOT / "dist")
    parser.add_argument("--architecture", choices=ARCHITECTURES, action="append", help="default: all of them")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        sdist = build_sdist(Path(folder))
        wheels = [build_wheel(sdist, name, Path(folder)) for name in arguments.architecture or ARCHITECTURES]
        for built in (sdist, *wheels):
            print(f"{put(built, arguments.output)}: {built.stat().st_size:,} bytes")


def build_sdist(folder: Path) -> Path:
    """Pack the source of this checkout."""
    run("-m", "build", "--sdist", "--no-isolation", "--outdir", folder, ROOT)
    (sdist,) = folder.glob("*.tar.gz")
    return sdist


def build_wheel(sdist: Path, architecture: str, folder: Path) -> Path:
    """Compile the source of an sdist, and name the wheel after the glibc that it needs.

    Raises:
        RuntimeError: The wheel needs more of a system than its name will say, or it is too large.
    """
    shutil.unpack_archive(sdist, folder / architecture)
    (source,) = (folder / architecture).iterdir()
    glibc = ".".join(map(str, GLIBC))
    options = {
        "cmake.define.CMAKE_TOOLCHAIN_FILE": source / "packaging" / "zig.cmake",
        "cmake.define.ZIG": Path(sysconfig.get_path("platlib"), "ziglang", "zig"),
        "cmake.define.ZIG_TARGET": f"{architecture}-linux-gnu.{glibc}",
        "cmake.define.ZIG_INCLUDE": python_config(architecture, folder),
        "install.strip": "false",
    }
    settings = [f"--config-setting={name}={value}" for name, value in options.items()]
    # The architecture that Python's own tools take for this machine's.
    environment = {"_PYTHON_HOST_PLATFORM": f"linux-{architecture}"}
    run("-m", "build", "--wheel", "--no-isolation", *settings, "--outdir", source, source, **environment)
    (wheel,) = source.glob("*.whl")
    needed = platform(wheel)
    if not is_within(needed, architecture):
        raise RuntimeError(f"{wheel.name} needs {needed}, but is to run wherever there is glibc {glibc}")
    if wheel.stat().st_size > MAX_BYTES:
        raise RuntimeError(f"{wheel.name} has {wheel.stat().st_size:,} bytes, more than {MAX_BYTES:,}")
    tag = f"manylinux_{GLIBC[0]}_{GLIBC[1]}_{architecture}"
    return source / run("-m", "wheel", "tags", "--platform-tag", tag, "--remove", wheel).split()[-1]


def python_config(architecture: str, folder: Path) -> Path:
    """Return a folder in which Debian's Python finds its configuration for an architecture, as in /usr/include.

    Zig does not look there. That of this machine stands for all of 64 bits, as it does with other builds of Python.
    """
    include = folder / f"include-{architecture}"
    include.mkdir()
    of_this_machine = Path(sysconfig.get_path("include")).parent / sysconfig.get_config_var("MULTIARCH")
    (include / f"{architecture}-linux-gnu").symlink_to(of_this_machine)
    return include


def put(built: Path, folder: Path) -> Path:
    """Copy a file to a folder, in place of those that are the same but for the version; return the copy's path."""
    for old in folder.glob(re.sub(r"-[^-]+?(-.+\.whl|\.tar\.gz)$", r"-*\1", built.name)):
        old.unlink()
    return shutil.copy(built, folder / built.name)


def platform(wheel: Path) -> str:
    """Return the oldest platform that auditwheel finds a wheel to be consistent with."""
    report = " ".join(run("-m", "auditwheel", "show", wheel).split())
    found = re.search(r'following platform tag: "(\w+)"', report)
    if found is None:
        raise RuntimeError(f"auditwheel names no platform for {wheel.name}: {report}")
    return found[1]


def is_within(platform: str, architecture: str) -> bool:
    """Whether every system with GLIBC has what a platform tag stands for."""
    found = re.fullmatch(r"manylinux_(\d+)_(\d+)_(\w+)", platform)
    return found is not None and (int(found[1]), int(found[2])) <= GLIBC and found[3] == architecture


def run(*arguments: str | Path, **environment: str) -> str:
    """Run a module of this Python's environment, whose programs come first in PATH; return what it prints."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(
        command, env=os.environ | {"PATH": path} | environment, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
