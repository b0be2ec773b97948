"""Runs the C++ tests of the core: as released, under ThreadSanitizer and AddressSanitizer, and for aarch64 in qemu."""

import hashlib
import hmac
import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support import core_builds
from support.core_builds import SANITIZERS

HERE = Path(__file__).parent
INCLUDE = re.compile(r'^#include [<"](.+)[>"]$', re.MULTILINE)
# The system of an aarch64 machine, as far as the tests need one: Debian's package libc6-arm64-cross.
AARCH64 = Path("/usr/aarch64-linux-gnu")
STARTS_THREADS = re.compile(r"\bstd::(thread|this_thread|async)\b")


def starts_threads(source):
    """Whether a test, or a header of the tests that it includes, starts threads of its own."""
    text = source.read_text()
    headers = [HERE / name for name in INCLUDE.findall(text) if (HERE / name).exists()]
    return STARTS_THREADS.search(text) is not None or any(map(starts_threads, headers))


def files_of(build):
    """All files, but for ThreadSanitizer, which sees nothing where there are no threads."""
    return [path for path in sorted(HERE.glob("*/*_test.cc")) if build != "thread" or starts_threads(path)]


def program_of(test):
    """Its folder's; with the name of the file it runs the tests of that file only."""
    return f"{test.parent.name}_tests"


# They wait for time limits, or try very many orders of events.
TAKE_LONG = {"external_test", "aggregator_race_test", "gpu_collectives_test", "hosts_life_test"}
TAKE_LONG |= {"negotiate_race_test", "stall_test"}


def of_build(build, *more):
    """Parameters of a test; `make sanitize` runs those of builds with sanitizers, `make test-aarch64` those of qemu."""
    if build == "aarch64":
        return pytest.param(build, *more, marks=pytest.mark.aarch64)
    if build in SANITIZERS:
        return pytest.param(build, *more, marks=pytest.mark.thorough)
    return pytest.param(build, *more, marks=[pytest.mark.slow for test in more if test.stem in TAKE_LONG])


without_threads = pytest.mark.parametrize(
    "build", [of_build(each) for each in ("release", "address", "aarch64")], indirect=True
)


@pytest.fixture
def build(request):
    """`build(name)`: the command that runs a program of a build."""
    return lambda name: [*runner(request.param), folder_of(request.param) / name]


def runner(build):
    if build != "aarch64":
        return []
    qemu = shutil.which("qemu-aarch64")
    assert qemu is not None and AARCH64.exists(), "install Debian's packages qemu-user and libc6-arm64-cross"
    return [qemu, "-L", AARCH64]


def folder_of(build):
    if build == "release":
        return core_builds.released()
    if build == "aarch64":
        return core_builds.for_aarch64()
    programs = sorted({program_of(test) for test in files_of("thread")}) if build == "thread" else ["all"]
    return core_builds.sanitized(build, *programs)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("build", "test"),
    [of_build(each, test) for each in ("release", *SANITIZERS, "aarch64") for test in files_of(each)],
    indirect=["build"],
    ids=lambda value: value.stem if isinstance(value, Path) else None,
)
def test_core(build, test, pytestconfig):
    env = os.environ if pytestconfig.getoption("thorough") else os.environ | {"CHECK_BRIEFLY": "1"}
    command = build(program_of(test))
    seconds = 300 if len(command) == 1 else 1500  # qemu takes long
    done = subprocess.run([*command, test.stem], env=env, capture_output=True, text=True, timeout=seconds, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("target", ["fuzz_message", "fuzz_frames"])
@without_threads
def test_decoders_survive_mutated_input(build, target):
    done = subprocess.run([*build(target), "3"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timeout(900)
@without_threads
def test_macs_are_those_of_pythons_hmac(build):
    seed = random.randrange(1 << 32)
    done = subprocess.run([*build("print_macs"), str(seed)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 400
    for line in lines:
        key, message, mac = (bytes.fromhex(part) for part in line.split(" "))
        assert hmac.digest(key, message, hashlib.sha256) == mac, f"seed {seed}: {line}"


@pytest.mark.timeout(900)
@without_threads
def test_no_process_gets_more_messages_than_its_fan_out_and_its_own_ranks(build):
    command = [*build("negotiation_cost"), "512", "4", "20", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["messages"] <= 4 + 8


def test_no_class_is_too_large():
    command = [sys.executable, HERE / "class_sizes.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
