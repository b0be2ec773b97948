"""``hvdrun --check-build``: what this installation can do, found out without importing any framework."""

import ctypes.util
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

__all__ = ["check_build", "package_version"]

Row = tuple[bool, str, str]
"""Whether it can be used, its name, and a remark."""


def package_version() -> str:
    """The version of horovodlike."""
    return _version("horovodlike") or str(getattr(sys.modules.get("horovodlike"), "__version__", "(version unknown)"))


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _framework(name: str, module: str, binding: str, distributions: Sequence[str]) -> Row:
    if not _exists(module):
        return False, name, "not installed"
    version = next(filter(None, map(_version, distributions)), "of unknown version")
    if not _exists(f"horovodlike.{binding}"):
        return False, name, f"{version} is installed, but this release has no binding for it"
    return True, name, version


def _mpi() -> Row:
    version = _version("mpi4py")
    return bool(version), "MPI", f"mpi4py {version}, hvdrun --mpi uses it" if version else "mpi4py not found"


def _nccl() -> str:
    spec = importlib.util.find_spec("nvidia") if _exists("nvidia") else None
    folders = spec.submodule_search_locations or () if spec else ()
    found: list[str | Path] = [path for folder in folders for path in Path(folder).glob("nccl/lib/libnccl.so*")]
    name = ctypes.util.find_library("nccl") if not found else found[0]
    return f"{name} found, but this release does not use it" if name else "library not found"


def _sections() -> list[tuple[str, list[Row]]]:
    tensorflow = ("tensorflow", "tensorflow-cpu")
    mpi = _mpi()
    return [
        (
            "Available Frameworks",
            [
                _framework("TensorFlow", "tensorflow", "tensorflow", tensorflow),
                _framework("PyTorch", "torch", "torch", ("torch",)),
                _framework("Keras", "keras", "keras", ("keras",)),
            ],
        ),
        (
            "Available Controllers",
            [(True, "horovodlike", "ordered log in shared memory"), (False, "MPI", "not needed")],
        ),
        (
            "Available Tensor Operations",
            [(False, "NCCL", _nccl()), mpi, (True, "Shared memory", "one machine")],
        ),
    ]


def check_build(sections: Callable[[], list[tuple[str, list[Row]]]] = _sections) -> str:
    """The block that ``--check-build`` prints."""
    lines = [f"horovodlike v{package_version()}:"]
    for title, rows in sections():
        lines += ["", f"{title}:"]
        lines += [f"    [{'X' if works else ' '}] {name} ({remark})" for works, name, remark in rows]
    return "\n".join(lines)
