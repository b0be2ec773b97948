"""Alltoall: every rank sends some of its rows to every other one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from horovodlike.ops import Kind
from horovodlike.process_set import ProcessSet, global_process_set, members, registered_id
from horovodlike.torch._calls import result
from horovodlike.torch._engine import Call, full_name, start_alltoall

Splits = Sequence[int] | torch.Tensor | None


def alltoall(
    tensor: torch.Tensor,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Send consecutive rows of the tensor to each rank, and return what the ranks have sent here, in their order.

    Differentiable: the gradient of each row goes back to where the row came from; that of rows which were not sent is
    zero.

    Args:
        tensor: Of at least one dimension and the same dtype on all ranks. Dimension 0 may differ, the others may not.
        splits: How many rows go to each rank of the process set. Rows beyond their sum are not sent. None: the same
            number to each.
        name: What the ranks match the operation by; counted if None.
        process_set: The ranks that take part.

    Returns:
        The rows received; and, if `splits` were given, how many came from each rank (int32, on the CPU).

    Raises:
        HorovodInternalError: The ranks disagree, or the job is broken or shut down.
        ValueError: `splits` do not fit the tensor or the process set, or the name is in flight already.
    """
    call = _call(name, process_set)
    counts = row_counts(tensor, splits, call)
    if torch.is_grad_enabled() and isinstance(tensor, torch.Tensor) and tensor.requires_grad:
        rows, received = _Alltoall.apply(call, counts, tensor)  # type: ignore[no-untyped-call]
    else:
        rows, received = result(start_alltoall(call, tensor, counts), tuple)
    return rows if splits is None else (rows, received)


def alltoall_async(
    tensor: torch.Tensor,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start what `alltoall` does and return a handle, whose result is always the pair. Not differentiable."""
    call = _call(name, process_set)
    return start_alltoall(call, tensor, row_counts(tensor, splits, call))


def _call(name: str | None, process_set: ProcessSet) -> Call:
    set_id = registered_id(process_set)
    return Call(Kind.ALLTOALL, full_name("alltoall", name, set_id), process_set=set_id)


def row_counts(tensor: torch.Tensor, splits: Splits, call: Call) -> list[int]:
    """Return how many rows go to each member of the process set.

    Raises:
        ValueError: `splits` do not fit the tensor or the process set.
    """
    size = len(members(call.process_set))
    if splits is None:
        rows = tensor.shape[0] if tensor.dim() > 0 else 0
        if rows % size != 0:
            raise ValueError(f"{call.name}: {rows} rows cannot be divided evenly among {size} ranks; give splits")
        return [rows // size] * size
    if isinstance(splits, torch.Tensor):
        if splits.dim() != 1 or splits.is_floating_point() or splits.dtype is torch.bool:
            raise ValueError(f"{call.name}: splits must be integers in one dimension")
        splits = splits.tolist()
    counts = [int(count) for count in splits]
    if len(counts) != size:
        raise ValueError(f"{call.name}: {len(counts)} splits for {size} ranks")
    return counts


def send_back(
    call: Call, gradient: torch.Tensor, received: list[int], rows: int, sent: list[int] | None = None
) -> torch.Tensor:
    """Carry out the backward pass of a call, whose tensor had so many rows and sent so many to each rank."""
    backward = Call(Kind.ALLTOALL, f"{call.name}.grad", process_set=call.process_set)
    back, returned = result(start_alltoall(backward, gradient, received), tuple)
    if sent is not None and returned.tolist() != sent:  # ranks that have joined send nothing back
        blocks = zip(back.split(returned.tolist()), sent, strict=True)
        back = torch.cat([block if len(block) else back.new_zeros((n, *back.shape[1:])) for block, n in blocks])
    not_sent = rows - back.shape[0]
    return torch.cat([back, back.new_zeros((not_sent, *back.shape[1:]))]) if not_sent > 0 else back


class _Context(torch.autograd.function.FunctionCtx):
    call: Call
    sent: list[int]
    sent_rows: int
    received: list[int]


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context, call: Call, counts: list[int], tensor: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, received = result(start_alltoall(call, tensor, counts), tuple)
        ctx.call, ctx.sent, ctx.sent_rows, ctx.received = call, counts, tensor.shape[0], received.tolist()
        ctx.mark_non_differentiable(received)
        return rows, received

    @staticmethod
    def backward(ctx: _Context, gradient: torch.Tensor, _: object) -> tuple[None, None, torch.Tensor]:
        return None, None, send_back(ctx.call, gradient, ctx.received, ctx.sent_rows, ctx.sent)
