"""The backend `hvd` of torch.distributed. With it, DDP, FSDP and all else built on that use the engine of horovodlike.

Example::

    torch.distributed.init_process_group("hvd")

PyTorch from 2.5 on finds the backend without an import of this module, by an entry point. The parts:

* :mod:`horovodlike.torch.distributed.backend`: the creation of groups, and the ownership of the engine
* :mod:`horovodlike.torch.distributed.process_group`: the operations
"""

from __future__ import annotations

import torch
from torch.distributed import Backend


def check_version(version: str) -> None:
    """Make sure that a release of PyTorch is new enough for the backend.

    Raises:
        ImportError: The release is older than 2.1.
    """
    major, minor = (int(part) for part in version.split(".")[:2])
    if (major, minor) < (2, 1):
        raise ImportError(f"the backend hvd of torch.distributed needs torch 2.1 or newer; installed is {version}")


check_version(torch.__version__)

from horovodlike.torch.distributed.backend import create  # noqa: E402  # after the check
from horovodlike.torch.distributed.process_group import HvdProcessGroup  # noqa: E402

__all__ = ["HvdProcessGroup", "create"]

if "hvd" not in Backend.backend_list:
    Backend.register_backend("hvd", create, extended_api=True, devices=["cpu", "cuda"])
