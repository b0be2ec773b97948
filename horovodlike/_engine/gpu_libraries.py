"""The files and the versions of the GPU libraries: the CUDA driver and NCCL."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

from horovodlike import config
from horovodlike._engine.native import ffi, lib
from horovodlike._engine.requests import check

__all__ = ["GpuLibraries", "find", "nccl_library"]


@dataclass(frozen=True)
class GpuLibraries:
    """The libraries for GPUs that this process finds.

    Attributes:
        cuda_version: The CUDA version of the driver: 12040 for 12.4; 0 if it cannot be used.
        why_no_cuda: The reason why the driver cannot be used; empty if it can.
        num_gpus: The number of GPUs that this process sees; 0 if they were not counted.
        nccl_version: The version of NCCL: 21903 for 2.19.3; 0 if it cannot be used.
        why_no_nccl: The reason why NCCL cannot be used; empty if it can.
        nccl_file: The file of NCCL, as it was opened; empty if it was not.
    """

    cuda_version: int
    why_no_cuda: str
    num_gpus: int
    nccl_version: int
    why_no_nccl: str
    nccl_file: str


def nccl_library(configured: str) -> str:
    """Return the file of NCCL; does not import any package.

    Args:
        configured: The file that the settings name, or an empty string.

    Returns:
        That file; else the library of a package ``nvidia-nccl-cu*``; else an empty string: the loader must find it.
    """
    if configured:
        return configured
    spec = importlib.util.find_spec("nvidia")  # a namespace package, of which each NVIDIA package has a part
    folders = spec.submodule_search_locations if spec is not None else None
    files = [Path(folder) / "nccl" / "lib" / "libnccl.so.2" for folder in folders or ()]
    return next((str(file) for file in files if file.exists()), "")


def find(counts_gpus: bool = True) -> GpuLibraries:
    """Open the libraries that the settings name. They stay open as long as this process lives.

    Args:
        counts_gpus: Initialise CUDA, which shows whether it can be used, and count the GPUs. After that, processes
            that are forked cannot use CUDA, and changes of ``CUDA_VISIBLE_DEVICES`` have no effect. False: only read
            the driver's version.

    Raises:
        ConfigError: A setting has a value that cannot be used.
        MemoryError: There is no memory to look for them.
    """
    settings = config.load()
    file = nccl_library(settings.nccl_library)
    found = ffi.new("hvl_gpu_libraries *")
    check(lib.hvl_find_gpu_libraries(os.fsencode(settings.cuda_library), os.fsencode(file), counts_gpus, found))
    return GpuLibraries(
        cuda_version=found.cuda_version,
        why_no_cuda=ffi.string(found.why_no_cuda).decode(errors="replace"),
        num_gpus=found.num_gpus,
        nccl_version=found.nccl_version,
        why_no_nccl=ffi.string(found.why_no_nccl).decode(errors="replace"),
        nccl_file=(file or _opened("libnccl.so")) if found.nccl_version else "",
    )


def _opened(beginning: str) -> str:
    """Return the file of a loaded library, given the beginning of its name; empty if there is none."""
    for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
        _, slash, rest = line.partition("/")
        if slash and rest.rpartition("/")[2].startswith(beginning):
            return slash + rest
    return ""
