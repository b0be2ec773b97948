"""The wheels contain and need what they should, and they install and train where there is no compiler."""

from __future__ import annotations

import importlib.metadata
import os
import re
import resource
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PACKAGING = ROOT / "build" / "packaging"
LIBRARY = "horovodlike/lib/libhorovodlike.so"
EXTENSIONS = {"horovodlike/_engine/native.abi3.so", "horovodlike/torch/_ops/native_calls.abi3.so"}
MACHINES = {"x86_64": "X86-64", "aarch64": "AArch64"}
GLIBC = {"libc.so.6", "libdl.so.2", "libm.so.6", "libpthread.so.0", "librt.so.1"}
GLIBC |= {"ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
MAX_SECONDS = 20.0

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """The folder with what `make wheels` builds of this source, or that of the variable DIST with what it has built."""
    if os.environ.get("DIST"):
        return Path(os.environ["DIST"])
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(["make", "-C", ROOT, PACKAGING.relative_to(ROOT) / "stamp"], check=True, capture_output=True)
    command = [PACKAGING / "bin" / "python", ROOT / "packaging" / "wheels.py", "--output", folder]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(params=MACHINES)
def wheel(dist, request):
    (path,) = dist.glob(f"*-cp310-abi3-manylinux_2_28_{request.param}.whl")
    return path


@pytest.fixture
def unpacked(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    return tmp_path


def machine_of(wheel):
    return next(machine for name, machine in MACHINES.items() if wheel.stem.endswith(name))


def read_elf(option, path):
    return subprocess.run(["readelf", "-W", option, path], capture_output=True, text=True, check=True).stdout


def test_size(wheel):
    assert 100_000 < wheel.stat().st_size <= 5_000_000


def test_contents(wheel, unpacked):
    files = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*") if path.is_file()}
    assert {path for path in files if path.endswith(".so")} == {LIBRARY, *EXTENSIONS}
    assert {"horovodlike/include/hvl.h", "horovodlike/launcher/cli.py", "horovodlike/tensorflow/_ops/ops.cc"} <= files
    assert not [path for path in files if path.startswith(("horovodlike/native/", "tests/"))]


@pytest.mark.parametrize("name", [LIBRARY, *sorted(EXTENSIONS)])
def test_needs_glibc_2_28_only(wheel, unpacked, name):
    path = unpacked / name
    assert machine_of(wheel) in read_elf("--file-header", path)
    needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", read_elf("--dynamic", path)))
    assert needed <= GLIBC | ({"libhorovodlike.so"} if name in EXTENSIONS else set())
    versions = {tuple(map(int, found.split("."))) for found in re.findall(r"GLIBC_([\d.]+)", read_elf("-V", path))}
    assert versions and max(versions) <= (2, 28)


def test_the_library_exports_hvl_only_and_takes_memcpy_from_glibc(unpacked):
    rows = [row.split() for row in read_elf("--dyn-syms", unpacked / LIBRARY).splitlines()]
    symbols = [(row[6], row[7].partition("@")[0]) for row in rows if len(row) >= 8 and row[0][:-1].isdigit()]
    exported = {name for index, name in symbols if index != "UND"}
    assert "hvl_init" in exported and all(name.startswith("hvl_") for name in exported)
    # Zig's runtime has functions of these names, which are slower.
    assert {"memcpy", "memset", "memmove"} <= {name for index, name in symbols if index == "UND"}


def interpreters():
    """The Pythons of this machine that the package is for: that of the tests, Debian's, those of pyenv."""
    debian = Path("/usr/bin").glob("python3.[1-9]?")
    pyenv = Path(os.environ.get("PYENV_ROOT", "/")).glob("versions/3.[1-9]?.*/bin/python")
    return [Path(sys.executable), *sorted(debian), *sorted(pyenv)]


class Environment:
    """A virtual environment whose processes find no program in PATH."""

    def __init__(self, folder, python):
        self._folder = folder
        (folder / "empty").mkdir(parents=True)
        # With the pip of the tests where Debian's Python has none. Else with its own: an old one knows no newer Python.
        has_pip = subprocess.run([python, "-c", "import ensurepip"], capture_output=True, check=False).returncode == 0
        options = [] if has_pip else ["--without-pip"]
        subprocess.run([python, "-m", "venv", *options, folder / "venv"], check=True, capture_output=True)
        self._pip = [self.bin / "python", "-m", "pip"]
        if not has_pip:
            self._pip = [sys.executable, "-m", "pip", "--python", self.bin / "python"]

    @property
    def bin(self):
        return self._folder / "venv" / "bin"

    def run(self, *command, **environment):
        environ = {"PATH": str(self._folder / "empty"), "HOME": str(self._folder), **environment}
        environ |= {name: value for name, value in os.environ.items() if name.lower().startswith(("pip_", "http"))}
        done = subprocess.run(
            command, env=environ, cwd=self._folder, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stdout}\n{done.stderr}"
        return done.stdout

    def install(self, *words):
        """Return how many seconds of a processor it takes: on a busy machine the clock says little."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        self.run(*self._pip, "install", "--only-binary=:all:", *words)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime

    def add_installed(self, *names):
        """Make distributions that the tests' environment has, and what these require, importable in this one."""
        folder = self._folder / "installed"
        folder.mkdir()
        (site,) = self.bin.parent.glob("lib/python3.*/site-packages")
        (site / "installed.pth").write_text(f"{folder}\n")
        for distribution in closure(names):
            top_level = {path.parts[0] for path in distribution.files or () if path.parts[0] != ".."}
            for name in top_level - {"__pycache__"}:
                if not (folder / name).exists():
                    (folder / name).symlink_to(distribution.locate_file(name))


def closure(names):
    """The installed distributions of these names, and those that they require."""
    found, pending = {}, list(names)
    while pending:
        distribution = importlib.metadata.distribution(pending.pop())
        if distribution.name not in found:
            found[distribution.name] = distribution
            requirements = map(Requirement, distribution.requires or ())
            pending += [
                each.name for each in requirements if each.marker is None or each.marker.evaluate({"extra": ""})
            ]
    return found.values()


def test_without_a_compiler_it_installs_in_seconds_and_the_demo_trains(dist, tmp_path):
    environment = Environment(tmp_path, sys.executable)
    environment.add_installed("torch", "numpy", "scikit-learn", "rich")
    (wheel,) = dist.glob(f"*_{os.uname().machine}.whl")
    assert environment.install(wheel) <= MAX_SECONDS
    shown = environment.run(environment.bin / "python", ROOT / "examples" / "demo.py")
    assert "2 ranks" in shown


def test_without_a_compiler_tensorflow_says_what_is_missing(dist, tmp_path):
    environment = Environment(tmp_path, sys.executable)
    environment.add_installed("tensorflow-cpu")
    (wheel,) = dist.glob(f"*_{os.uname().machine}.whl")
    environment.install(wheel)
    program = "try:\n  import horovodlike.tensorflow\nexcept ImportError as error:\n  print(error)"
    shown = environment.run(environment.bin / "python", "-c", program)
    assert "there is no C++ compiler: install g++" in shown and "horovodlike.tensorflow.build" in shown


@pytest.mark.parametrize("python", interpreters(), ids=str)
def test_on_each_python_two_ranks_communicate(dist, tmp_path, python):
    environment = Environment(tmp_path, python)
    (wheel,) = dist.glob(f"*_{os.uname().machine}.whl")
    environment.install(wheel)
    shown = environment.run(environment.bin / "hvdrun", "-np", "2", "--selftest")
    assert "inside localhost" in shown and "Gbit/s" in shown
