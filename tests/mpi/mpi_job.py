"""Jobs whose ranks mpirun starts, for tests. This file is also the program that the ranks run."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cloudpickle

_FOREIGN = ("HOROVOD", "OMPI_", "PMI", "PMIX_", "PRTE_", "SLURM_", "TORCHELASTIC_", "MASTER_")


@dataclass
class Ended:
    """How a job has ended."""

    code: int
    out: str
    err: str
    seconds: float
    values: dict[int, Any] = field(default_factory=dict)  # what the function returned, by rank
    errors: dict[int, str] = field(default_factory=dict)  # or the traceback of what it raised


@dataclass(frozen=True)
class Mpi:
    """The MPI library of this environment."""

    mpirun: str
    is_open_mpi: bool
    environ: Mapping[str, str]

    def command(self, size: int) -> list[str]:
        words = [self.mpirun, "-n", str(size)]
        if self.is_open_mpi:
            words += ["--oversubscribe", "--bind-to", "none", *(["--allow-run-as-root"] if os.geteuid() == 0 else [])]
        return words

    def start(
        self,
        launcher: list[str],
        fn: Callable[..., Any],
        *args: Any,
        settings: Mapping[str, str] | None = None,
        timeout: float = 90.0,
    ) -> Ended:
        """Has a launcher start ranks that call a function, and returns when it has ended."""
        from horovodlike._net.object_seal import dumps

        module = sys.modules[fn.__module__]
        cloudpickle.register_pickle_by_value(module)  # test modules cannot be imported by the ranks
        try:
            work = dumps((fn, args))
        finally:
            cloudpickle.unregister_pickle_by_value(module)
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "work").write_bytes(work)
            started = time.monotonic()
            done = subprocess.run(
                [*launcher, sys.executable, "-P" if sys.version_info >= (3, 11) else "-u", __file__, folder],
                env={**self.environ, "OMP_NUM_THREADS": "1", **(settings or {})},
                cwd=folder,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout,
                stdin=subprocess.DEVNULL,
            )
            ended = Ended(done.returncode, done.stdout, done.stderr, time.monotonic() - started)
            for path in Path(folder).glob("answer.*"):
                ok, value = cloudpickle.loads(path.read_bytes())
                (ended.values if ok else ended.errors)[int(path.suffix[1:])] = value
        return ended

    def run(
        self, size: int, fn: Callable[..., Any], *args: Any, settings: Mapping[str, str] | None = None
    ) -> list[Any]:
        """The results by rank of a function on ranks whose data MPI moves."""
        settings = {"HOROVODLIKE_CPU_OPERATIONS": "mpi", **(settings or {})}
        ended = self.start(self.command(size), fn, *args, settings=settings)
        assert ended.code == 0 and not ended.errors, f"{ended.code}: {ended.errors}\n{ended.err}"
        return [ended.values[rank] for rank in range(size)]


def find_mpi() -> Mpi | str:
    """The MPI library of this environment, or why there is none."""
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed"
    folders = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    mpirun = shutil.which("mpirun", path=folders)
    if mpirun is None:
        return "there is no mpirun"
    environ = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    # mpi4py looks where Python is installed, and then where the system has libraries; mpirun may be from elsewhere.
    library = next((Path(mpirun).parents[1] / "lib").glob("libmpi.so.*"), None)
    if library is not None:
        environ["MPI4PY_LIBMPI"] = str(library)
    said = subprocess.run([mpirun, "--version"], env=environ, capture_output=True, text=True, check=True).stdout
    return Mpi(mpirun, "Open MPI" in said, environ)


def _main() -> None:
    folder = Path(sys.argv[1])
    rank = next(os.environ[name] for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK") if name in os.environ)
    sys.path.append(str(Path(__file__).parents[1]))
    warnings.simplefilter("error")
    failed = False
    try:
        fn, args = cloudpickle.loads((folder / "work").read_bytes())
        answer = cloudpickle.dumps((True, fn(*args)))
    except BaseException:
        failed = True
        answer = cloudpickle.dumps((False, traceback.format_exc()))
    part = folder / f"part.{rank}"
    part.write_bytes(answer)
    part.rename(folder / f"answer.{rank}")
    if failed:
        sys.exit(3)


if __name__ == "__main__":
    _main()
