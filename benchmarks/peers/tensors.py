"""Buffers as PyTorch tensors."""

from __future__ import annotations

import torch

from benchmarks.buffers import Buffer


def as_tensor(buffer: Buffer, dtype: str) -> torch.Tensor:
    """Return a tensor on the buffer's memory."""
    tensor = torch.from_numpy(buffer)
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor
