"""Torch tensors as the engine sees them: an address, a dtype and a shape of at most eight dimensions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from horovodlike.ops import DType, Output
from horovodlike.torch import _gpu

MAX_DIMENSIONS = 8

DTYPES: dict[torch.dtype, DType] = {
    torch.uint8: DType.UINT8,
    torch.int8: DType.INT8,
    torch.int16: DType.INT16,
    torch.int32: DType.INT32,
    torch.int64: DType.INT64,
    torch.float16: DType.FLOAT16,
    torch.float32: DType.FLOAT32,
    torch.float64: DType.FLOAT64,
    torch.bool: DType.BOOL,
    torch.bfloat16: DType.BFLOAT16,
}


def check(tensor: torch.Tensor, name: str) -> None:
    """Refuse what the engine cannot reduce or send, before any rank waits for it.

    Raises:
        ValueError: The dtype, layout or device is not supported; the message names it and the tensor.
        TypeError: It is no tensor.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
    if tensor.layout is not torch.strided:
        raise ValueError(f"{name}: tensors of layout {tensor.layout} are not supported; use .to_dense() first")
    if tensor.dtype not in DTYPES:
        supported = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise ValueError(f"{name}: tensors of dtype {tensor.dtype} are not supported; supported are {supported}")
    if tensor.device.type == "meta":
        raise ValueError(f"{name}: tensors on the meta device hold no data")


def is_in_memory(tensor: torch.Tensor) -> bool:
    """Whether the tensor's elements lie in order where the engine gets at them, which is on the CPU or on a GPU."""
    return (_gpu.is_on_cpu(tensor) or _gpu.is_on_gpu(tensor)) and tensor.is_contiguous() and not tensor.is_neg()


def in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself if `is_in_memory`, else a copy of which that is true: of a GPU's tensor on the GPU."""
    if is_in_memory(tensor):
        return tensor
    detached = tensor.detach()
    return (detached if _gpu.is_on_gpu(tensor) else detached.to("cpu")).resolve_neg().contiguous()


def engine_shape(shape: Sequence[int]) -> Sequence[int]:
    """Return `shape` with its last dimensions multiplied together where there are more than the engine takes."""
    if len(shape) <= MAX_DIMENSIONS:
        return shape
    return [*shape[: MAX_DIMENSIONS - 1], math.prod(shape[MAX_DIMENSIONS - 1 :])]


def from_output(output: Output, like: torch.Tensor) -> torch.Tensor:
    """Wrap memory that the engine allocated for an allgather of `like`, without a copy; the tensor keeps it alive."""
    shape = (output.shape[0], *like.shape[1:])
    if math.prod(shape) == 0:
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    return torch.frombuffer(output.memory, dtype=like.dtype).reshape(shape).to(like.device)
