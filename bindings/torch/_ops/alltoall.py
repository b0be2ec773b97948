"""Alltoall: every rank sends some of its rows to every other one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

import torch

from horovodlike._engine.arguments import split_counts
from horovodlike._engine.ops import Kind
from horovodlike.process_set import ProcessSet, global_process_set, members
from horovodlike.torch._ops.autograd import is_differentiable
from horovodlike.torch._ops.calls import group, plain_call, result
from horovodlike.torch._ops.handles import Call
from horovodlike.torch._ops.tensor import check
from horovodlike.torch._ops.variable_size import start_alltoall

Splits = Sequence[int] | torch.Tensor | None
Counts = list[int]  # the number of rows for, or from, each member of the process set
Exchanged = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def alltoall(
    tensor: torch.Tensor,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Exchanged:
    """Send consecutive rows of the tensor to each rank, and return the rows received from all ranks, in rank order.

    Differentiable: the gradient of each row goes back to the rank that has sent the row; the gradient of rows that were
    not sent is zero.

    Args:
        tensor: Of at least one dimension and the same dtype on all ranks. Dimension 0 may differ, the others may not.
        splits: The number of rows for each rank of the process set. Rows beyond the sum of the splits are not sent. If
            None, all ranks get the same number.
        name: The name by which the ranks match the operation; if None, a counter supplies one.
        process_set: The ranks that take part.

    Returns:
        The rows received; and, if `splits` were given, how many came from each rank (int32, on the CPU).

    Raises:
        HorovodInternalError: The ranks disagree, or the job is broken or shut down.
        ValueError: `splits` do not fit the tensor or the process set, or the name is in flight already.
    """
    call = plain_call(Kind.ALLTOALL, "alltoall", name, process_set)
    (pair,) = _exchange(call, [tensor], [splits])
    return pair[0] if splits is None else pair


def alltoall_async(
    tensor: torch.Tensor,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start `alltoall` and return a handle. Its result is always the pair of rows and counts. Not differentiable."""
    call = plain_call(Kind.ALLTOALL, "alltoall", name, process_set)
    return start_alltoall(call, [tensor], [row_counts(tensor, splits, call)], single=True)


def grouped_alltoall(
    tensors: Sequence[torch.Tensor],
    splits: Sequence[Splits] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> tuple[Exchanged, ...]:
    """Exchange the rows of a list of tensors, of any dtypes, as `alltoall` does, in one operation; return a tuple.

    `splits` has an entry for each tensor. If the entry is None, the tensor's result is the rows received, else the pair
    that `alltoall` returns with splits.
    """
    call = plain_call(Kind.ALLTOALL, "grouped_alltoall", name, process_set)
    tensors = group(tensors, call.name)
    of_each = _splits_of_each(tensors, splits, call.name)
    pairs = _exchange(call, tensors, of_each)
    return tuple(pair[0] if chosen is None else pair for pair, chosen in zip(pairs, of_each, strict=True))


def grouped_alltoall_async(
    tensors: Sequence[torch.Tensor],
    splits: Sequence[Splits] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start `grouped_alltoall` and return a handle. Its result is a tuple of such pairs. Not differentiable."""
    call = plain_call(Kind.ALLTOALL, "grouped_alltoall", name, process_set)
    tensors = group(tensors, call.name)
    of_each = _splits_of_each(tensors, splits, call.name)
    return start_alltoall(call, tensors, _counts_of_each(tensors, of_each, call), single=False)


def _splits_of_each(
    tensors: Sequence[torch.Tensor], splits: Sequence[Splits] | None, operation: str
) -> Sequence[Splits]:
    if splits is None:
        return [None] * len(tensors)
    if not isinstance(splits, (list, tuple)):
        raise TypeError(f"{operation}: splits must be a list with an entry for each tensor, got {splits!r}")
    if len(splits) != len(tensors):
        raise ValueError(f"{operation}: splits for {len(splits)} tensors, but there are {len(tensors)}")
    return splits


def _counts_of_each(tensors: Sequence[torch.Tensor], splits: Sequence[Splits], call: Call) -> list[Counts]:
    return [row_counts(tensor, chosen, call) for tensor, chosen in zip(tensors, splits, strict=True)]


def row_counts(tensor: torch.Tensor, splits: Splits, call: Call) -> Counts:
    """Return the number of rows for each member of the process set.

    Raises:
        TypeError: `tensor` is not a tensor, or `splits` is not a sequence.
        ValueError: `splits` do not fit the tensor or the process set.
    """
    check(tensor, call.name)
    size = len(members(call.process_set))
    if splits is None:
        rows = tensor.shape[0] if tensor.dim() > 0 else 0
        if rows % size != 0:
            raise ValueError(f"{call.name}: {rows} rows cannot be divided evenly among {size} ranks; give splits")
        return [rows // size] * size
    if isinstance(splits, torch.Tensor):
        if splits.dim() != 1 or splits.is_floating_point() or splits.dtype is torch.bool:
            raise ValueError(f"{call.name}: splits must be integers in one dimension, got {splits!r}")
        splits = splits.tolist()
    return split_counts(splits, size, call.name)


def _exchange(
    call: Call, tensors: Sequence[torch.Tensor], splits: Sequence[Splits]
) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
    """Carry out a call, and record it for autograd if a tensor requires a gradient; return pairs."""
    counts = _counts_of_each(tensors, splits, call)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        results = _Alltoall.apply(call, counts, *tensors)  # type: ignore[no-untyped-call]  # not annotated
        return list(zip(results[::2], results[1::2], strict=True))
    return result(start_alltoall(call, tensors, counts, single=False, waits=True), tuple)


def send_back(
    call: Call,
    gradients: Sequence[torch.Tensor],
    received: Sequence[Counts],
    sent: Sequence[Counts],
    rows: Sequence[int],
) -> list[torch.Tensor]:
    """Carry out the backward pass of a call.

    Args:
        call: The call of the forward pass.
        gradients: The gradients of the floating-point results.
        received: For each of these results, the number of rows received from each rank.
        sent: For the input tensor of each result, the number of rows sent to each rank.
        rows: The number of rows of each of these input tensors.
    """
    backward = Call(Kind.ALLTOALL, f"{call.name}.grad", process_set=call.process_set)
    pairs = result(start_alltoall(backward, gradients, received, single=False, waits=True), tuple)
    return [_of_all_rows(*pair, *of_tensor) for pair, *of_tensor in zip(pairs, sent, rows, strict=True)]


def _of_all_rows(back: torch.Tensor, returned: torch.Tensor, sent: Counts, rows: int) -> torch.Tensor:
    """Add zeros for rows that were not sent, and for rows whose gradient is missing as their rank has joined."""
    if returned.tolist() != sent:
        blocks = zip(torch.split(back, returned.tolist()), sent, strict=True)
        back = torch.cat([block if len(block) else back.new_zeros((n, *back.shape[1:])) for block, n in blocks])
    not_sent = rows - back.shape[0]
    return torch.cat([back, back.new_zeros((not_sent, *back.shape[1:]))]) if not_sent > 0 else back


class _Context(torch.autograd.function.FunctionCtx):
    call: Call
    received: list[Counts]
    sent: list[Counts]
    rows: list[int]


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, call: Call, counts: list[Counts], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        pairs = result(start_alltoall(call, tensors, counts, single=False, waits=True), tuple)
        ctx.call, ctx.sent, ctx.rows = call, counts, [tensor.shape[0] for tensor in tensors]
        ctx.received = [received.tolist() for _, received in pairs]
        ctx.mark_non_differentiable(*(received for _, received in pairs))
        return tuple(one for pair in pairs for one in pair)

    @staticmethod
    def backward(ctx: _Context, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        of_rows = gradients[::2]
        passed_on = [is_differentiable(gradient) for gradient in of_rows]
        chosen = [list(compress(values, passed_on)) for values in (of_rows, ctx.received, ctx.sent, ctx.rows)]
        results = iter(send_back(ctx.call, *chosen))  # type: ignore[arg-type]  # each of its own type
        return (None, None, *(next(results) if passed else None for passed in passed_on))
