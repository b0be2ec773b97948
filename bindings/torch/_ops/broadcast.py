"""Broadcast: one rank's tensors on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from horovodlike._engine.arguments import called, check_name, integer
from horovodlike._engine.ops import Kind
from horovodlike.process_set import ProcessSet, global_process_set, registered_id
from horovodlike.torch._ops.autograd import run
from horovodlike.torch._ops.calls import group, result
from horovodlike.torch._ops.handles import CALLS_KEPT, Call, full_name, start_in_place, start_to_new


def _broadcast_call(root_rank: int, name: str | None, process_set: ProcessSet, operation: str = "broadcast") -> Call:
    set_id = registered_id(process_set)
    check_name(name, operation)
    root_rank = integer(root_rank, "root_rank", called(operation, name))
    return (_new_broadcast if name is None else _known_broadcast)(operation, root_rank, name, set_id)


def _new_broadcast(operation: str, root_rank: int, name: str | None, set_id: int) -> Call:
    return Call(Kind.BROADCAST, full_name(operation, name, set_id), root_rank=root_rank, process_set=set_id)


_known_broadcast = lru_cache(maxsize=CALLS_KEPT)(_new_broadcast)


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return the root's tensor as a new tensor on every rank.

    Differentiable: the gradient is the average of the ranks' gradients on the root, and zero elsewhere.

    Args:
        tensor: Of the same shape and dtype on all ranks; its content matters on the root only.
        root_rank: The (global) rank whose tensor is sent.
        name: What the ranks match the operation by; counted if None.
        process_set: The ranks that take part.

    Raises:
        HorovodInternalError: The ranks disagree, or the job is broken or shut down.
        ValueError: An argument cannot be used, or the name is in flight already.
    """
    return run(_broadcast_call(root_rank, name, process_set), [tensor])[0]


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start what `broadcast` does and return a handle for `poll` and `synchronize`. Not differentiable."""
    return start_to_new(_broadcast_call(root_rank, name, process_set), [tensor], single=True)


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Overwrite the tensor with the root's on every rank, and return it. Not differentiable."""
    call = _broadcast_call(root_rank, name, process_set)
    return result(start_in_place(call, [tensor], single=True, waits=True), torch.Tensor)


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start what `broadcast_` does and return a handle for `poll` and `synchronize`."""
    return start_in_place(_broadcast_call(root_rank, name, process_set), [tensor], single=True)


def grouped_broadcast(
    tensors: Sequence[torch.Tensor],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> tuple[torch.Tensor, ...]:
    """Do what `broadcast` does for a list of tensors, of any dtypes, as one operation; return a tuple."""
    call = _broadcast_call(root_rank, name, process_set, "grouped_broadcast")
    return run(call, group(tensors, call.name))


def grouped_broadcast_async(
    tensors: Sequence[torch.Tensor],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start what `grouped_broadcast` does and return a handle, whose result is a tuple. Not differentiable."""
    call = _broadcast_call(root_rank, name, process_set, "grouped_broadcast")
    return start_to_new(call, group(tensors, call.name), single=False)


def grouped_broadcast_(
    tensors: Sequence[torch.Tensor],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> tuple[torch.Tensor, ...]:
    """Do what `broadcast_` does for a list of tensors, of any dtypes, as one operation; return a tuple of them."""
    call = _broadcast_call(root_rank, name, process_set, "grouped_broadcast")
    return result(start_in_place(call, group(tensors, call.name), single=False, waits=True), tuple)


def grouped_broadcast_async_(
    tensors: Sequence[torch.Tensor],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start what `grouped_broadcast_` does and return a handle, whose result is a tuple."""
    call = _broadcast_call(root_rank, name, process_set, "grouped_broadcast")
    return start_in_place(call, group(tensors, call.name), single=False)
