"""Replacements that `torch.compile` traces for inner functions of the collectives, `rank`, `size` and the like.

The collectives are traced as they are, apart from inner functions that the compiler cannot trace. For these it traces
the functions here, which have the same names and arguments. Most of them lead to an operator of `custom_ops`. Code that
is not compiled never calls them.

A replacement may have neither a closure nor other defaults than the replaced function: the compiler installs its guards
on the function that was called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from horovodlike import basics
from horovodlike._bootstrap.environment import RankInfo
from horovodlike._engine import arguments
from horovodlike._engine.ops import Kind, rows_of
from horovodlike.basics import Average, Sum
from horovodlike.errors import NotInitializedError
from horovodlike.process_set import ProcessSet, global_process_set, registered_id
from horovodlike.torch import mpi_ops
from horovodlike.torch._ops import alltoall, autograd, calls, disable_compile, handles
from horovodlike.torch._ops.compressors import Compressor
from horovodlike.torch._ops.custom_ops import FOUND_OUT, IS_AVAILABLE, Tensors, define

_operators = torch.ops.horovodlike


class _Call(NamedTuple):
    """The replacement of `handles.Call`: constants of the graph."""

    kind: Kind
    operation: str
    name: str | None  # as given by the caller
    op: int
    root_rank: int
    factors: tuple[float, float]
    process_set: ProcessSet


def _current() -> RankInfo:
    # Unlike `basics._current`, this does not check for a fork, since the compiler cannot trace that check. When
    # `_place` changes, the compiled function is compiled again.
    place = basics._place
    if place is None:
        raise NotInitializedError("horovodlike has not been initialized; use hvd.init().")
    return place


def is_initialized() -> bool:
    return basics._place is not None


def op_of_average(op: int | None, average: bool, stacklevel: int = 4) -> int:
    if op is not None:
        raise ValueError("op supersedes average: give only one of them")
    return Average if average else Sum  # without the warning, which cannot be traced


def reduction_call(
    kind: Kind,
    operation: str,
    name: str | None,
    op: int | None,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
) -> _Call:
    op = Average if op is None else op
    return _Call(kind, operation, name, op, -1, (float(prescale), float(postscale)), process_set)


def plain_call(kind: Kind, operation: str, name: str | None, process_set: ProcessSet, root_rank: int = -1) -> _Call:
    return _Call(kind, operation, name, Sum, root_rank, (1.0, 1.0), process_set)


def compressed(compression: type[Compressor], tensors: Tensors, operation: str) -> list[tuple[torch.Tensor, object]]:
    return [compression.compress(tensor) for tensor in tensors]


def group(tensors: Tensors, operation: str) -> Tensors:
    return list(tensors)


def _members(process_set: ProcessSet) -> list[int]:
    return list(range(basics.size())) if process_set is global_process_set else process_set.ranks or []


def _number(call: _Call, set_id: int) -> torch.Tensor | None:
    number: torch.Tensor | None = _operators.next_number(set_id) if call.name is None else None
    return number


def _rows(call: _Call, tensors: Tensors) -> Sequence[int] | None:
    """Return the sizes of the results' first dimension; None if they equal the tensors' sizes."""
    if call.kind == Kind.ALLGATHER:
        return [FOUND_OUT for _ in tensors]
    if call.kind == Kind.REDUCESCATTER:
        members = _members(call.process_set)
        return [rows_of(tensor.shape[0], members.index(basics.rank()), len(members)) for tensor in tensors]
    return None


def run(call: _Call, tensors: Tensors) -> tuple[torch.Tensor, ...]:
    set_id = registered_id(call.process_set)
    rows, number = _rows(call, tensors), _number(call, set_id)
    arguments = (list(tensors), rows, call.operation, call.name, number, call.op, call.root_rank, *call.factors, set_id)
    return tuple(getattr(_operators, call.kind.name.lower())(*arguments))


def start_in_place(call: _Call, tensors: Tensors, single: bool, waits: bool = False) -> Any:
    """Return the result in place of a handle; the function `result` passes it on."""
    with torch.no_grad():
        for tensor, made in zip(tensors, run(call, tensors), strict=True):
            tensor.copy_(made)
    return tensors[0] if single else tuple(tensors)


def start_again_in_place(
    name: object, op: object, arguments: tuple[object, ...], tensor: torch.Tensor, waits: bool
) -> int:
    return 0


def start_in_place_and_remember(
    name: str | None, op: int | None, arguments: tuple[object, ...], call: _Call, tensor: torch.Tensor, waits: bool
) -> Any:
    return start_in_place(call, [tensor], single=True)


def result(handle: Any, _: type[Any]) -> Any:
    return handle


def _exchange(
    call: _Call, tensors: Tensors, splits: Sequence[alltoall.Splits]
) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
    given = [one for one in splits if one is not None]
    tensors_given = [one if isinstance(one, torch.Tensor) else torch.tensor(one, device="cpu") for one in given]
    have_splits = [one is not None for one in splits]
    set_id, num_members = registered_id(call.process_set), len(_members(call.process_set))
    number = _number(call, set_id)
    results = _operators.alltoall(
        list(tensors), tensors_given, have_splits, num_members, call.operation, call.name, number, set_id
    )
    return list(zip(results[::2], results[1::2], strict=True))


def barrier(process_set: ProcessSet = global_process_set, name: str | None = None) -> None:
    _operators.barrier(registered_id(process_set), name)


TRACED: tuple[tuple[Callable[..., Any], Callable[..., Any]], ...] = (
    (alltoall._exchange, _exchange),
    (arguments.op_of_average, op_of_average),
    (autograd.run, run),
    (basics._current, _current),
    (basics.is_initialized, is_initialized),
    (calls.compressed, compressed),
    (calls.group, group),
    (calls.plain_call, plain_call),
    (calls.reduction_call, reduction_call),
    (calls.result, result),
    (handles.start_again_in_place, start_again_in_place),
    (handles.start_in_place, start_in_place),
    (handles.start_in_place_and_remember, start_in_place_and_remember),
    (mpi_ops.barrier, barrier),
)
"""Pairs of a function that is called and the function that is traced in its place."""

_TRACED_AS_THEY_ARE: tuple[Any, ...] = (
    mpi_ops.allgather, mpi_ops.allreduce, mpi_ops.allreduce_, mpi_ops.alltoall, mpi_ops.broadcast, mpi_ops.broadcast_,
    mpi_ops.grouped_allgather, mpi_ops.grouped_allreduce, mpi_ops.grouped_allreduce_, mpi_ops.grouped_alltoall,
    mpi_ops.grouped_broadcast, mpi_ops.grouped_broadcast_, mpi_ops.grouped_reducescatter, mpi_ops.reducescatter,
    basics.cross_rank, basics.cross_size, basics.local_rank, basics.local_size, basics.rank, basics.size,
)  # fmt: skip

if IS_AVAILABLE:
    define()
    # Keep these two functions uncompiled: they get a `Call` and handles from code that is not compiled, which the
    # replacements do not take.
    disable_compile(alltoall.send_back, autograd.run_backward)
    for _function in _TRACED_AS_THEY_ARE:
        del _function._torchdynamo_disable
    for _function, _traced in TRACED:
        # torch marks its own wrappers in this way with the function to trace in their place.
        # `torch.compiler.substitute_in_graph` would do as well, but imports the compiler.
        _function._torchdynamo_inline = _traced  # type: ignore[attr-defined]  # a mark
