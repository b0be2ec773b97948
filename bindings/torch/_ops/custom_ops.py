"""The collectives as operators of torch, `torch.ops.horovodlike.*`, for calls in compiled functions.

A compiler may remove an operator whose result is not used, merge two that look alike, and reorder operators. Other
ranks would then wait forever. So all operators here are registered with an ordered effect: a graph carries out every
operator that was traced, in the order of the trace, forward and backward. Each rank thus calls them in the same order
as without the compiler, even if the ranks have compiled different parts.

Arguments that are known when a function is traced, such as the name, are constants of the graph. Unnamed operations
are counted at run time, by a separate operator, `next_number`. The number is an argument of the unnamed operator and of
the operator in its backward pass, so both have the names that they would have without the compiler.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any

import torch

from horovodlike._engine import ops
from horovodlike._engine.arguments import reduce_op
from horovodlike._engine.ops import Kind, Request
from horovodlike.torch._ops.alltoall import Counts, row_counts, send_back
from horovodlike.torch._ops.autograd import carry_out, is_differentiable, rows_in, run_backward
from horovodlike.torch._ops.calls import group, known_call, new_call, result
from horovodlike.torch._ops.handles import Call, next_number, numbered
from horovodlike.torch._ops.variable_size import start_alltoall

# Older releases of torch lack ordered effects, or may have bugs with them in the backward pass, such as pytorch issue
# 172248. None of these releases has been tested.
IS_AVAILABLE = torch.__version__ >= "2.13" and hasattr(torch.library, "_register_effectful_op")

# `rows`: dimension 0 of each result, FOUND_OUT if only the operation determines it; null if the results have the shapes
# of the tensors. An unnamed operation has `number` in place of `name`. Results are lists, because Inductor of torch
# 2.13 takes sizes that are determined at run time from the wrong element of a tuple.
_SCHEMA = (
    "(Tensor[] tensors, SymInt[]? rows, str operation, str? name, Tensor? number, int op, int root_rank, "
    "float prescale, float postscale, int process_set) -> Tensor[]"
)
# `splits` holds the splits of only those tensors for which `have_splits` is true.
_SPLITS = "Tensor[] splits, bool[] have_splits"
_OF_ALLTOALL = "str operation, str? name, Tensor? number, int process_set"
FOUND_OUT = -1

Tensors = Sequence[torch.Tensor]


def define() -> None:
    """Register the operators. To be called once, and only if `IS_AVAILABLE`."""
    for kind in (Kind.ALLREDUCE, Kind.ALLGATHER, Kind.BROADCAST, Kind.REDUCESCATTER):
        name = kind.name.lower()
        _define(f"{name}_backward", _SCHEMA, _backward(kind), _like_results)
        _define(name, _SCHEMA, _forward(kind), _like_results, _differentiate(kind), _save)
    schema = f"(Tensor[] gradients, Tensor[] received, {_SPLITS}, SymInt[] rows, {_OF_ALLTOALL}) -> Tensor[]"
    _define("alltoall_backward", schema, _alltoall_backward, _like_tensors)
    schema = f"(Tensor[] tensors, {_SPLITS}, int members, {_OF_ALLTOALL}) -> Tensor[]"
    _define("alltoall", schema, _alltoall, _like_exchanged, _differentiate_alltoall, _save_exchanged)
    _define("next_number", "(int process_set) -> Tensor", _next_number, _like_number)
    _define("barrier", "(int process_set, str? name) -> Tensor", _barrier, _nothing)


def _define(
    name: str,
    schema: str,
    carry_out: Callable[..., Any],
    like_results: Callable[..., Any],
    differentiate: Callable[..., Any] | None = None,
    save: Callable[..., None] | None = None,
) -> None:
    """Register an operator, its fake kernel, and its backward pass if it has one."""
    from torch._library.effects import EffectType

    def trace(*arguments: Any) -> Any:
        _keep_order_in_inductor()
        return like_results(*arguments)

    tags = torch.Tag.cudagraph_unsafe  # it cannot be part of a CUDA graph
    operator = torch.library.custom_op(f"horovodlike::{name}", carry_out, mutates_args=(), schema=schema, tags=tags)
    operator.register_fake(trace)
    torch.library._register_effectful_op(f"horovodlike::{name}", EffectType.ORDERED)
    if differentiate is not None:
        operator.register_autograd(differentiate, setup_context=save)


def _keep_order_in_inductor() -> None:
    """Make Inductor keep the order of operators with effects.

    Inductor stores the predecessors of an operator under the name of the operator's buffer, but looks them up under the
    name of the operator. See https://github.com/pytorch/pytorch/pull/188301; from the release with that fix on, this
    changes nothing. Called when an operator is traced: by then Inductor is imported if it will compile the graph.
    """
    lowering: Any = sys.modules.get("torch._inductor.lowering")
    with_effects = torch.ops.higher_order.with_effects
    lower = getattr(lowering, "lowerings", {}).get(with_effects)
    if lower is None or hasattr(lower, "keeps_order"):
        return

    def lower_in_order(*arguments: Any, **keywords: Any) -> Any:
        graph = lowering.V.graph
        known = len(graph.operations)
        results = lower(*arguments, **keywords)
        for operation in graph.operations[known:]:
            before = graph.additional_star_deps.pop(operation.get_name(), ())
            graph.additional_buffer_deps[operation.get_operation_name()].update(before)
        return results

    lower_in_order.keeps_order = True  # type: ignore[attr-defined]  # a mark
    lowering.lowerings[with_effects] = lower_in_order


def _call(
    kind: Kind,
    operation: str,
    name: str | None,
    number: torch.Tensor | None,
    op: int,
    root_rank: int,
    prescale: float,
    postscale: float,
    set_id: int,
) -> Call:
    name = _name(name, number)
    if kind in (Kind.ALLREDUCE, Kind.REDUCESCATTER):
        op = reduce_op(op, operation, adasum=kind is Kind.ALLREDUCE)
    call = known_call if number is None else new_call
    return call(kind, operation, name, set_id, op, root_rank, prescale, postscale)


def _name(name: str | None, number: torch.Tensor | None) -> str | None:
    return name if number is None else numbered(int(number))


def _forward(kind: Kind) -> Callable[..., list[torch.Tensor]]:
    def forward(tensors: Tensors, _: Sequence[int] | None, *options: Any) -> list[torch.Tensor]:
        with torch.no_grad():
            call = _call(kind, *options)
            return list(carry_out(call, group(tensors, call.name)))

    return forward


def _backward(kind: Kind) -> Callable[..., list[torch.Tensor]]:
    def backward(gradients: Tensors, rows: Sequence[int] | None, *options: Any) -> list[torch.Tensor]:
        with torch.no_grad():
            results = run_backward(_call(kind, *options), gradients, rows or ())
        # The gradients of an allgather are views, but an operator must return tensors with memory of their own.
        return [result.clone() if result.storage_offset() else result for result in results]

    return backward


def _like_results(tensors: Tensors, rows: Sequence[int | torch.SymInt] | None, *_: Any) -> list[torch.Tensor]:
    if rows is None:
        return [tensor.new_empty(tensor.shape) for tensor in tensors]
    return [_with_rows(tensor, count) for tensor, count in zip(tensors, rows, strict=True)]


def _with_rows(tensor: torch.Tensor, rows: int | torch.SymInt) -> torch.Tensor:
    if isinstance(rows, int) and rows == FOUND_OUT:
        rows = torch.library.get_ctx().new_dynamic_size()
    return tensor.new_empty((rows, *tensor.shape[1:]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
    tensors, rows, operation, name, number, *others = inputs
    ctx.save_for_backward(number)
    ctx.operation, ctx.name, ctx.others = operation, name, others
    # Without `rows` the results have the shapes of the tensors, and so have the gradients.
    ctx.rows = None if rows is None else [rows_in(tensor) for tensor in tensors]


def _differentiate(kind: Kind) -> Callable[..., tuple[Any, ...]]:
    backward = f"{kind.name.lower()}_backward"

    def differentiate(ctx: Any, gradients: Sequence[torch.Tensor | None]) -> tuple[Any, ...]:
        (number,) = ctx.saved_tensors
        passed_on = [is_differentiable(gradient) for gradient in gradients]
        operator = getattr(torch.ops.horovodlike, backward)
        chosen = list(compress(gradients, passed_on))
        rows = None if ctx.rows is None else list(compress(ctx.rows, passed_on))
        results = iter(operator(chosen, rows, ctx.operation, ctx.name, number, *ctx.others))
        of_tensors = [next(results) if passed else None for passed in passed_on]
        return of_tensors, None, None, None, None, *(None for _ in ctx.others)

    return differentiate


def _alltoall(
    tensors: Tensors, splits: Tensors, have_splits: Sequence[bool], members: int, *options: Any
) -> list[torch.Tensor]:
    call = _call_of_alltoall(*options)
    with torch.no_grad():
        tensors = group(tensors, call.name)
        counts = _counts(call, tensors, splits, have_splits)
        pairs = result(start_alltoall(call, tensors, counts, single=False, waits=True), tuple)
    return [one for pair in pairs for one in pair]


def _call_of_alltoall(operation: str, name: str | None, number: torch.Tensor | None, process_set: int) -> Call:
    return Call(Kind.ALLTOALL, f"{operation}.{_name(name, number)}", process_set=process_set)


def _counts(call: Call, tensors: Tensors, splits: Tensors, have_splits: Sequence[bool]) -> list[Counts]:
    given = iter(splits)
    chosen = [next(given) if has else None for has in have_splits]
    return [row_counts(tensor, one, call) for tensor, one in zip(tensors, chosen, strict=True)]


def _like_exchanged(
    tensors: Tensors, splits: Tensors, have_splits: Sequence[bool], members: int, *_: Any
) -> list[torch.Tensor]:
    pairs = [
        (_with_rows(tensor, FOUND_OUT), torch.empty(members, dtype=torch.int32, device="cpu")) for tensor in tensors
    ]
    return [one for pair in pairs for one in pair]


def _save_exchanged(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
    tensors, splits, ctx.have_splits, _, ctx.operation, ctx.name, number, ctx.process_set = inputs
    ctx.rows = [rows_in(tensor) for tensor in tensors]
    ctx.num_splits = len(splits)
    ctx.save_for_backward(number, *splits, *output[1::2])


def _differentiate_alltoall(ctx: Any, gradients: Sequence[torch.Tensor | None]) -> tuple[Any, ...]:
    number, *saved = ctx.saved_tensors
    splits, received = saved[: ctx.num_splits], saved[ctx.num_splits :]
    of_rows = gradients[::2]
    passed_on = [is_differentiable(gradient) for gradient in of_rows]
    passed_on_with_splits = list(compress(passed_on, ctx.have_splits))
    results = iter(
        torch.ops.horovodlike.alltoall_backward(
            list(compress(of_rows, passed_on)),
            list(compress(received, passed_on)),
            list(compress(splits, passed_on_with_splits)),
            list(compress(ctx.have_splits, passed_on)),
            list(compress(ctx.rows, passed_on)),
            *(ctx.operation, ctx.name, number, ctx.process_set),
        )
    )
    of_tensors = [next(results) if passed else None for passed in passed_on]
    return of_tensors, [None] * ctx.num_splits, None, None, None, None, None, None


def _alltoall_backward(
    gradients: Tensors,
    received: Tensors,
    splits: Tensors,
    have_splits: Sequence[bool],
    rows: Sequence[int],
    *options: Any,
) -> list[torch.Tensor]:
    call = _call_of_alltoall(*options)
    given = iter(splits)
    sent = [
        next(given).tolist() if has else [count // len(of_each)] * len(of_each)
        for has, count, of_each in zip(have_splits, rows, received, strict=True)
    ]
    with torch.no_grad():
        return send_back(call, gradients, [counts.tolist() for counts in received], sent, rows)


def _like_tensors(
    gradients: Tensors, received: Tensors, splits: Tensors, have_splits: Sequence[bool], rows: Sequence[int], *_: Any
) -> list[torch.Tensor]:
    return [_with_rows(gradient, count) for gradient, count in zip(gradients, rows, strict=True)]


def _next_number(process_set: int) -> torch.Tensor:
    return torch.tensor(next_number(process_set), device="cpu")


def _like_number(_: int) -> torch.Tensor:
    return torch.empty((), dtype=torch.int64, device="cpu")


def _barrier(process_set: int, name: str | None) -> torch.Tensor:
    ops.carry_out(Request(Kind.BARRIER, f"barrier.{name or 'noname'}", [], process_set=process_set))
    return _nothing(process_set)


def _nothing(*_: object) -> torch.Tensor:
    # Returns a tensor, because Inductor of torch 2.13 moves C++ kernels that use a buffer behind a call without result,
    # but frees the buffer before that call.
    return torch.empty(0, device="cpu")
