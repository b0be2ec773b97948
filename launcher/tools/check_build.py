"""``hvdrun --check-build``: reports the capabilities of this installation, without importing any framework."""

import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from horovodlike import config
from horovodlike._engine.gpu_libraries import GpuLibraries, find

_BUILD_FILES = {
    "torch": ("version.py", r"^cuda\b[^=\n]*= *'?([\w.]+)"),
    "tensorflow": ("python/platform/build_info.py", r"'is_cuda_build', (True|False)"),
}
"""The file that says whether a framework was built for CUDA, and a pattern for that, by framework."""

Row = tuple[bool, str, str]
"""One line of the report: whether the item can be used, its name, and a remark."""


def package_version() -> str:
    """Return the version of horovodlike."""
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


def framework_build(module: str) -> str:
    """Return a text about the framework's CUDA build, or an empty string; reads its files and does not import it."""
    if module not in _BUILD_FILES or not _exists(module):
        return ""
    name, pattern = _BUILD_FILES[module]
    spec = importlib.util.find_spec(module)
    files = [Path(folder) / name for folder in (spec and spec.submodule_search_locations) or ()]
    text = next((file.read_text(errors="replace") for file in files if file.exists()), "")
    match = re.search(pattern, text, re.MULTILINE)
    if match is None:
        return ""
    if match[1] in ("None", "False"):
        return "not built for CUDA"
    return "built for CUDA" if match[1] == "True" else f"built for CUDA {match[1]}"


def _framework(name: str, module: str, binding: str, distributions: Sequence[str]) -> Row:
    if not _exists(module):
        return False, name, "not installed"
    version = next(filter(None, map(_version, distributions)), "of unknown version")
    version = ", ".join(filter(None, [version, framework_build(module)]))
    if not _exists(f"horovodlike.{binding}"):
        return False, name, f"{version} is installed, but this release has no binding for it"
    return True, name, version


def _mpi() -> Row:
    version = _version("mpi4py")
    return bool(version), "MPI", f"mpi4py {version}, hvdrun --mpi uses it" if version else "mpi4py not found"


def _cuda(found: GpuLibraries) -> Row:
    if found.why_no_cuda:
        return False, "CUDA", found.why_no_cuda
    version = f"{found.cuda_version // 1000}.{found.cuda_version % 1000 // 10}"
    return found.num_gpus > 0, "CUDA", f"driver of CUDA {version}, GPUs: {found.num_gpus}"


def _nccl(found: GpuLibraries) -> Row:
    if found.why_no_nccl:
        return False, "NCCL", found.why_no_nccl
    code = found.nccl_version
    version = f"{code // 10000}.{code // 100 % 100}.{code % 100}"
    configured = config.load().nccl_library != ""
    source = (
        config.SETTINGS["nccl_library"].variable if configured else _package_of_nccl(found.nccl_file) or "the loader"
    )
    unused = "" if found.num_gpus else "; there is no GPU to use it for"
    return found.num_gpus > 0, "NCCL", f"{version}, {found.nccl_file}, from {source}{unused}"


def _package_of_nccl(file: str) -> str | None:
    """Return NVIDIA's NCCL package that the file belongs to, with its version; None for another file."""
    for name in ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11"):
        version = _version(name)
        if version is not None:
            place = importlib.metadata.distribution(name).locate_file("nvidia/nccl/lib")
            if Path(file).parent == Path(str(place)):
                return f"{name} {version}"
    return None


def _sections() -> list[tuple[str, list[Row]]]:
    tensorflow = ("tensorflow", "tensorflow-cpu")
    mpi = _mpi()
    gpus = find()
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
            [(True, "horovodlike", "one ordered log, in shared memory and over TCP"), (False, "MPI", "not needed")],
        ),
        (
            "Available Tensor Operations",
            [_nccl(gpus), _cuda(gpus), mpi, (True, "Shared memory", "within a host"), (True, "TCP", "between hosts")],
        ),
    ]


def check_build(sections: Callable[[], list[tuple[str, list[Row]]]] = _sections) -> str:
    """Return the text that ``--check-build`` prints."""
    lines = [f"horovodlike v{package_version()}:"]
    for title, rows in sections():
        lines += ["", f"{title}:"]
        lines += [f"    [{'X' if works else ' '}] {name} ({remark})" for works, name, remark in rows]
    return "\n".join(lines)
