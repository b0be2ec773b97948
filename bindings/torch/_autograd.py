"""The synchronous operations that return new tensors, with their gradients.

The gradients follow the convention that a loss is averaged over the ranks: what all ranks read is averaged on its way
back. An operation in the backward pass is named after the one in the forward pass, so ranks match them whatever the
order in which autograd runs them. If a tensor requires a gradient on one rank it has to on all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.autograd.function import FunctionCtx

from horovodlike import basics, process_set
from horovodlike.ops import Kind
from horovodlike.torch._engine import Call, start_allgather, start_reducescatter, start_to_new, synchronize

Tensors = tuple[torch.Tensor, ...]
Gradients = tuple[torch.Tensor | None, ...]


def run(call: Call, tensors: Sequence[torch.Tensor]) -> Tensors:
    """Carry out a call that returns new tensors, and record it for the backward pass if that is needed."""
    if torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in tensors):
        results: Tensors = _FUNCTIONS[call.kind].apply(call, *tensors)  # type: ignore[no-untyped-call]
        return results
    return _carry_out(call, tensors)


def _carry_out(call: Call, tensors: Sequence[torch.Tensor]) -> Tensors:
    results = synchronize(_START.get(call.kind, start_to_new)(call, tensors, single=False))
    assert isinstance(results, tuple)
    return results


_START = {Kind.ALLGATHER: start_allgather, Kind.REDUCESCATTER: start_reducescatter}


class _Context(FunctionCtx):
    call: Call
    first_dims: list[int]


def _communicate(call: Call, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Run a call on the gradients of floating-point tensors; others have none. The choice is the same on all ranks."""
    floating = [gradient for gradient in gradients if gradient is not None and gradient.is_floating_point()]
    results = iter(run(replace(call, name=f"{call.name}.grad"), floating))
    return [next(results) if g is not None and g.is_floating_point() else None for g in gradients]


def _reduce_gradients(call: Call, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    return _communicate(replace(call, kind=Kind.ALLREDUCE), gradients)


def _check_differentiable(call: Call, what: str) -> None:
    if call.op not in (basics.Average, basics.Sum):
        raise NotImplementedError(
            f"{call.name}: {what} has a gradient for op=Average and op=Sum only; detach() its input"
        )


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, call: Call, *tensors: torch.Tensor) -> Tensors:
        ctx.call = call
        return _carry_out(call, tensors)


class _Allreduce(_Collective):
    @staticmethod
    def backward(ctx: _Context, *gradients: torch.Tensor) -> Gradients:
        _check_differentiable(ctx.call, "an allreduce")
        return (None, *_reduce_gradients(ctx.call, gradients))


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, call: Call, *tensors: torch.Tensor) -> Tensors:
        ctx.call = call
        ctx.first_dims = [tensor.shape[0] for tensor in tensors]
        return _carry_out(call, tensors)

    @staticmethod
    def backward(ctx: _Context, *gradients: torch.Tensor) -> Gradients:
        mine = torch.tensor([ctx.first_dims])
        (rows,) = _carry_out(replace(ctx.call, name=f"{ctx.call.name}.grad.rows"), [mine])
        place = process_set.members(ctx.call.process_set).index(basics.rank())
        starts = rows[:place].sum(dim=0).tolist()
        averaged = _reduce_gradients(replace(ctx.call, op=basics.Average), gradients)
        own = zip(averaged, starts, ctx.first_dims, strict=True)
        return (None, *(None if g is None else g.narrow(0, start, count) for g, start, count in own))


class _Broadcast(_Collective):
    @staticmethod
    def backward(ctx: _Context, *gradients: torch.Tensor) -> Gradients:
        averaged = _reduce_gradients(replace(ctx.call, op=basics.Average, root_rank=-1), gradients)
        if basics.rank() == ctx.call.root_rank:
            return (None, *averaged)
        return (None, *(None if gradient is None else torch.zeros_like(gradient) for gradient in averaged))


class _Reducescatter(_Collective):
    @staticmethod
    def backward(ctx: _Context, *gradients: torch.Tensor) -> Gradients:
        call = ctx.call
        _check_differentiable(call, "a reducescatter")
        size = len(process_set.members(call.process_set))
        factor = call.prescale * call.postscale * (size if call.op == basics.Sum else 1)
        gathered = _communicate(Call(Kind.ALLGATHER, call.name, process_set=call.process_set), gradients)
        return (None, *(g if g is None or factor == 1 else g * factor for g in gathered))


_FUNCTIONS: dict[Kind, type[torch.autograd.Function]] = {
    Kind.ALLREDUCE: _Allreduce,
    Kind.ALLGATHER: _Allgather,
    Kind.BROADCAST: _Broadcast,
    Kind.REDUCESCATTER: _Reducescatter,
}
