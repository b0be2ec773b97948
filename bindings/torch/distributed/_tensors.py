"""Converts tensors and options of torch.distributed to the engine's."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from horovodlike._engine.ops import Destinations, ReduceOp
from horovodlike.torch._ops import gpu
from horovodlike.torch._ops.loan import address_of
from horovodlike.torch._ops.tensor import DTYPES, check, in_memory

_REDUCTIONS = {
    dist.ReduceOp.SUM: ReduceOp.SUM,
    dist.ReduceOp.AVG: ReduceOp.AVERAGE,
    dist.ReduceOp.MIN: ReduceOp.MIN,
    dist.ReduceOp.MAX: ReduceOp.MAX,
    dist.ReduceOp.PRODUCT: ReduceOp.PRODUCT,
}
_OF_COMPLEX = (ReduceOp.SUM, ReduceOp.AVERAGE)


def reduction(op: Any) -> tuple[int, float]:
    """Return the engine's reduction for a reduction of torch.distributed, and the prescale factor.

    Raises:
        ValueError: The engine has no such reduction.
    """
    member = getattr(op, "op", op)
    known = _REDUCTIONS.get(member)
    if known is not None:
        return int(known), 1.0
    if member == dist.ReduceOp.PREMUL_SUM:
        factor = op.factor if hasattr(op, "factor") else op.__getstate__()[1]
        return int(ReduceOp.SUM), float(factor)
    raise ValueError(
        f"the backend hvd has no reduction {getattr(member, 'name', member)}: it knows SUM, AVG, MIN, MAX, PRODUCT and "
        "PREMUL_SUM. Convert the tensor to one of bool, and MIN is AND, MAX is OR; or use a group of the backend gloo"
    )


def seconds_of(timeout: timedelta | None) -> float | None:
    """Return an operation's timeout in seconds; None if it is 0 or not set."""
    if timeout is None or timeout.days < 0:  # torch's value for an unset one is negative
        return None
    return timeout.total_seconds() or None


def one_tensor(tensors: Any, what: str) -> torch.Tensor:
    """Return the only tensor of a list, or `tensors` itself if it is a tensor.

    Raises:
        ValueError: The list has no tensor, or more than one.
    """
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise ValueError(f"{what}: expected one tensor, got a list of {len(tensors)}")
    tensor: torch.Tensor = tensors[0]
    return tensor


def to_reduce(tensor: torch.Tensor, op: int, what: str) -> torch.Tensor:
    """Return a tensor to be reduced, in a form that the engine supports: a complex one as pairs of real numbers.

    Raises:
        ValueError: The engine does not support this reduction of the tensor.
    """
    if tensor.is_complex():
        if op not in _OF_COMPLEX:
            raise ValueError(f"{what}: complex tensors can be reduced by SUM and AVG only")
        tensor = torch.view_as_real(tensor)
    check(tensor, what)
    return tensor


def to_move(tensor: torch.Tensor, what: str) -> torch.Tensor:
    """Return a tensor to be sent or overwritten; as bytes if the engine does not support its dtype.

    Raises:
        ValueError: The tensor is sparse or has no memory; or it has gaps, and a dtype that the engine does not support.
    """
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if isinstance(tensor, torch.Tensor) and tensor.dtype not in DTYPES and tensor.layout is torch.strided:
        if not tensor.is_contiguous():
            raise ValueError(f"{what}: a tensor of dtype {tensor.dtype} must be contiguous")
        tensor = tensor.detach().unsqueeze(-1).view(torch.uint8)
    check(tensor, what)
    return tensor


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor in one dimension, in its own memory if they lie there row by row."""
    return in_memory(tensor).detach().view(-1)


def in_host_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself if its elements lie row by row in the CPU's memory, else a copy there."""
    memory = in_memory(tensor)
    return memory if gpu.is_on_cpu(memory) else memory.detach().cpu()


def place_in(tensors: Sequence[torch.Tensor]) -> Destinations:
    """Return destinations for the outputs of an allgather, gather or alltoall: tensors that are in memory."""
    return Destinations([(address_of(tensor), tensor.nbytes) for tensor in tensors])


def share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same storage."""
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)
