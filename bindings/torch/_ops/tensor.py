"""Torch tensors as the engine sees them: an address, a dtype and a shape of at most eight dimensions.

Their elements lie in memory without gaps, and most often row by row. Gradients may also be channels-last, as torch
makes them for parameters in that memory format.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

import torch
from torch.autograd.graph import increment_version

from horovodlike._engine.ops import DType, MemoryFormat, Output
from horovodlike.torch._ops import gpu

# From torch 2.7 on, increment_version takes several tensors, also inference tensors.
_VERSIONS_OF_MANY = torch.__version__ >= "2.7"

# PyTorch's dtypes have the engine's names. PyTorch supports little more than the name of uint16.
DTYPES: dict[torch.dtype, DType] = {
    getattr(torch, each.name): each for each in DType if hasattr(torch, each.name) and each.name != "uint16"
}
BYTES_OF = {known: dtype.itemsize for dtype, known in DTYPES.items()}  # the size of an element, by the engine's dtype
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}  # by the number of dimensions


def check(tensor: torch.Tensor, name: str) -> None:
    """Refuse a tensor that the engine cannot reduce or send, before any rank waits for it.

    Raises:
        ValueError: The dtype, layout or device is not supported, or the tensor is larger than its storage; the message
            says which of these, and names the tensor.
        TypeError: `tensor` is not a tensor.
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
    if not fits_its_storage(tensor):
        raise ValueError(f"a tensor of {name!r} has no memory for its {tensor.nbytes} bytes: was its storage resized?")


def fits_its_storage(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's storage is large enough for it: torch allows a storage to shrink, without a check."""
    count = tensor.numel()
    if count == 0:
        return True
    last = count - 1
    if not tensor.is_contiguous():
        last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + last + 1) * tensor.element_size()
    return tensor.untyped_storage().nbytes() >= needed


def have_memory(tensors: Sequence[torch.Tensor], num_bytes: Sequence[int]) -> bool:
    """Return whether each storage has `num_bytes` from the beginning of its tensor on. Fast for many tensors."""
    sizes = map(torch.UntypedStorage.nbytes, map(torch.Tensor.untyped_storage, tensors))
    offsets = list(map(torch.Tensor.storage_offset, tensors))
    if any(offsets):
        sizes = map(operator.sub, sizes, map(operator.mul, offsets, map(torch.Tensor.element_size, tensors)))
    return all(map(operator.ge, sizes, num_bytes))


def _is_channels_last(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is channels-last without gaps, and not row-major at the same time."""
    how = CHANNELS_LAST.get(tensor.dim())
    return how is not None and tensor.is_contiguous(memory_format=how) and not tensor.is_contiguous()


def _is_readable(tensor: torch.Tensor) -> bool:
    """Return whether the engine can read the tensor's values in its memory, on the CPU or on a GPU."""
    return (gpu.is_on_cpu(tensor) or gpu.is_on_gpu(tensor)) and not tensor.is_neg()


def is_in_memory(tensor: torch.Tensor) -> bool:
    """Return whether the tensor's elements lie row by row in memory that the engine can read."""
    return _is_readable(tensor) and tensor.is_contiguous()


def in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself if `is_in_memory`, else a copy that is: on the GPU for a tensor on a GPU."""
    if is_in_memory(tensor):
        return tensor
    detached = tensor.detach()
    return (detached if gpu.is_on_gpu(tensor) else detached.to("cpu")).resolve_neg().contiguous()


def in_memory_like(tensor: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, MemoryFormat]:
    """Return the tensor or a copy, channels-last if `like` is and has the same shape, else row-major; and the format.

    The tensor's own format does not matter, since ranks with the same model may have gradients in different formats.
    """
    if tensor.shape != like.shape or not _is_channels_last(like):
        return in_memory(tensor), MemoryFormat.ROW_MAJOR
    if not _is_readable(tensor):
        tensor = in_memory(tensor)
    return tensor.contiguous(memory_format=CHANNELS_LAST[tensor.dim()]), MemoryFormat.CHANNELS_LAST


def from_output(output: Output, like: torch.Tensor) -> torch.Tensor:
    """Return an engine output as a tensor with rows shaped as in `like`. On the CPU it keeps that memory, uncopied."""
    shape = (output.shape[0], *like.shape[1:])
    if math.prod(shape) == 0:
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    return torch.frombuffer(output.memory, dtype=like.dtype).reshape(shape).to(like.device)


def mark_overwritten(tensors: Sequence[torch.Tensor]) -> None:
    """Tell autograd that tensors were overwritten: a backward pass for which one of them was saved then raises."""
    if _VERSIONS_OF_MANY:
        increment_version(tensors)
        return
    for tensor in tensors:
        if not tensor.is_inference():  # autograd saves no inference tensors
            increment_version(tensor)
