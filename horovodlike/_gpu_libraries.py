"""Where the libraries for GPUs are: those that are not the system's own."""

from __future__ import annotations

import importlib.util
from pathlib import Path

__all__ = ["nccl_library"]


def nccl_library(configured: str) -> str:
    """The file of NCCL; imports nothing.

    Args:
        configured: What the settings say, or an empty string.

    Returns:
        That, or the library of the packages ``nvidia-nccl-cu*``, or an empty string: the loader is to look for it.
    """
    if configured:
        return configured
    spec = importlib.util.find_spec("nvidia")  # a namespace, of which each package has a part
    folders = spec.submodule_search_locations if spec is not None else None
    files = [Path(folder) / "nccl" / "lib" / "libnccl.so.2" for folder in folders or ()]
    return next((str(file) for file in files if file.exists()), "")
