"""The synchronous operations that return new tensors, with their gradients.

The gradients follow the convention that a loss is averaged over the ranks: where the forward pass sends a value to all
ranks, the backward pass averages their gradients. An operation in the backward pass is named after the one in the
forward pass, so ranks match them in any order in which autograd runs them. A tensor that requires a gradient on one
rank must require one on all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import compress

import torch
from torch.autograd.function import FunctionCtx

from horovodlike import basics, process_set
from horovodlike._engine.ops import Kind, rows_of
from horovodlike.torch._ops.calls import result
from horovodlike.torch._ops.handles import Call, start_reducescatter, start_to_new
from horovodlike.torch._ops.variable_size import start_allgather

Tensors = tuple[torch.Tensor, ...]
Gradients = tuple[torch.Tensor | None, ...]


def run(call: Call, tensors: Sequence[torch.Tensor]) -> Tensors:
    """Carry out a call that returns new tensors, and record it for autograd if a tensor requires a gradient."""
    if torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in tensors):
        results: Tensors = _Collective.apply(call, *tensors)  # type: ignore[no-untyped-call]  # not annotated
        return results
    return carry_out(call, tensors)


def carry_out(call: Call, tensors: Sequence[torch.Tensor]) -> Tensors:
    """Carry out a call that returns new tensors, without a record for autograd."""
    return result(_START.get(call.kind, start_to_new)(call, tensors, single=False, waits=True), tuple)


_START = {Kind.ALLGATHER: start_allgather, Kind.REDUCESCATTER: start_reducescatter}


def rows_in(tensor: torch.Tensor) -> int:
    """Return the extent of dimension 0; 0 for a scalar."""
    return tensor.shape[0] if tensor.dim() else 0


def _communicate(call: Call, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return list(run(replace(call, name=f"{call.name}.grad"), gradients))


def _average(call: Call, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return _communicate(replace(call, kind=Kind.ALLREDUCE, op=basics.Average, root_rank=-1), gradients)


def _check_differentiable(call: Call, what: str) -> None:
    if call.op not in (basics.Average, basics.Sum):
        raise NotImplementedError(
            f"{call.name}: {what} has a gradient for op=Average and op=Sum only; detach() its input"
        )


def _of_allreduce(call: Call, gradients: Sequence[torch.Tensor], _: Sequence[int]) -> list[torch.Tensor]:
    _check_differentiable(call, "an allreduce")
    return _communicate(call, gradients)


def _of_allgather(call: Call, gradients: Sequence[torch.Tensor], rows: Sequence[int]) -> list[torch.Tensor]:
    mine = torch.tensor([[basics.rank(), *rows]], device="cpu")
    (of_each,) = carry_out(replace(call, name=f"{call.name}.grad.rows"), [mine])
    starts = of_each[of_each[:, 0] < basics.rank(), 1:].sum(dim=0).tolist()  # ranks that have joined have no row
    own = zip(_average(call, gradients), starts, rows, strict=True)
    return [gradient.narrow(0, start, count) for gradient, start, count in own]


def _of_broadcast(call: Call, gradients: Sequence[torch.Tensor], _: Sequence[int]) -> list[torch.Tensor]:
    averaged = _average(call, gradients)
    return averaged if basics.rank() == call.root_rank else [torch.zeros_like(gradient) for gradient in averaged]


def _of_reducescatter(call: Call, gradients: Sequence[torch.Tensor], rows: Sequence[int]) -> list[torch.Tensor]:
    _check_differentiable(call, "a reducescatter")
    size = len(process_set.members(call.process_set))
    factor = call.prescale * call.postscale * (size if call.op == basics.Sum else 1)
    ranks = torch.full((1,), basics.rank(), device=gradients[0].device)
    *gathered, present = _communicate(
        Call(Kind.ALLGATHER, call.name, process_set=call.process_set), [*gradients, ranks]
    )
    if present.shape[0] < size:
        absent = partial(_with_rows_of_absent, call=call, present=present.tolist())
        gathered = [absent(*pair) for pair in zip(gathered, rows, strict=True)]
    return [gradient if factor == 1 else gradient * factor for gradient in gathered]


def _with_rows_of_absent(gradient: torch.Tensor, rows: int, call: Call, present: list[int]) -> torch.Tensor:
    """Insert zeros for the rows of ranks that have joined into the gathered gradient of a reducescatter."""
    members = process_set.members(call.process_set)
    shares = [rows_of(rows, place, len(members)) for place in range(len(members))]
    blocks = iter(torch.split(gradient, [shares[members.index(rank)] for rank in present]))
    zeros = (gradient.new_zeros((share, *gradient.shape[1:])) for share in shares)
    return torch.cat([next(blocks) if rank in present else zero for rank, zero in zip(members, zeros, strict=True)])


# By kind, the backward pass: it takes the floating-point gradients of the results and the rows of the inputs.
_GRADIENTS = {
    Kind.ALLREDUCE: _of_allreduce,
    Kind.ALLGATHER: _of_allgather,
    Kind.BROADCAST: _of_broadcast,
    Kind.REDUCESCATTER: _of_reducescatter,
}


def run_backward(call: Call, gradients: Sequence[torch.Tensor], rows: Sequence[int]) -> list[torch.Tensor]:
    """Carry out the backward pass of a call.

    Args:
        call: The call of the forward pass.
        gradients: The gradients of the floating-point results.
        rows: The extents of dimension 0 of the input tensors of these results.
    """
    return _GRADIENTS[call.kind](call, gradients, rows)


def is_differentiable(gradient: torch.Tensor | None) -> bool:
    """Return whether the backward pass sends a gradient: only floating-point ones, the same ones on all ranks."""
    return gradient is not None and gradient.is_floating_point()


class _Context(FunctionCtx):
    call: Call
    rows: list[int]


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, call: Call, *tensors: torch.Tensor) -> Tensors:
        results = carry_out(call, tensors)
        ctx.call, ctx.rows = call, [rows_in(tensor) for tensor in tensors]
        return results

    @staticmethod
    def backward(ctx: _Context, *gradients: torch.Tensor) -> Gradients:
        passed_on = [is_differentiable(gradient) for gradient in gradients]
        results = iter(run_backward(ctx.call, [*compress(gradients, passed_on)], [*compress(ctx.rows, passed_on)]))
        return (None, *(next(results) if passed else None for passed in passed_on))
