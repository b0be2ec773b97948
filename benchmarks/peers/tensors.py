"""PyTorch as all peers use it, and buffers as its tensors."""

from __future__ import annotations

import torch

from benchmarks.buffers import Buffer


def configure_torch() -> None:
    """Have this thread compute alone, and take denormal numbers for zero.

    Else the time of a step would depend on how many steps a peer has made before, see `benchmarks/__init__.py`.
    """
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)


def as_tensor(buffer: Buffer, dtype: str) -> torch.Tensor:
    """Return a tensor on the buffer's memory."""
    tensor = torch.from_numpy(buffer)
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor
