"""The functions that `torch.compile` traces in place of the collectives, and in place of `rank`, `size` and the like.

Each function here has the arguments and results of the one that it stands for, and calls an operator of `custom_ops`.
Functions that are not compiled never come here.

A function that is traced in place of another may have neither a closure nor other defaults than that one: the compiler
installs its guards on the function that was called. So those below have no defaults, and pass on what they are given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from horovodlike import basics
from horovodlike._bootstrap.environment import RankInfo
from horovodlike.basics import Average, Sum
from horovodlike.errors import NotInitializedError
from horovodlike.process_set import ProcessSet, global_process_set, registered_id
from horovodlike.torch import mpi_ops
from horovodlike.torch._compile import trace_as
from horovodlike.torch._compile.custom_ops import FOUND_OUT, IS_AVAILABLE, Tensors, define
from horovodlike.torch._ops.alltoall import Exchanged, Splits
from horovodlike.torch._ops.handles import rows_of
from horovodlike.torch.compression import Compression, Compressor

_operators = torch.ops.horovodlike


def _place() -> RankInfo:
    # Not what `basics` asks: a compiler cannot trace that it makes sure that the process has not been forked. The
    # compiled function is compiled again when the place has changed.
    place = basics._place
    if place is None:
        raise NotInitializedError("horovodlike has not been initialized; use hvd.init().")
    return place


def is_initialized() -> bool:
    return basics._place is not None


def rank() -> int:
    return _place().rank


def size() -> int:
    return _place().size


def local_rank() -> int:
    return _place().local_rank


def local_size() -> int:
    return _place().local_size


def cross_rank() -> int:
    return _place().cross_rank


def cross_size() -> int:
    return _place().cross_size


def _members(process_set: ProcessSet) -> list[int]:
    return list(range(size())) if process_set is global_process_set else process_set.ranks or []


def _number(name: str | None, set_id: int) -> torch.Tensor | None:
    number: torch.Tensor | None = _operators.next_number(set_id) if name is None else None
    return number


def _carry_out(
    operator: Any,
    operation: str,
    tensors: Tensors,
    name: str | None,
    process_set: ProcessSet,
    rows: Sequence[int] | None = None,
    op: int = Sum,
    root_rank: int = -1,
    factors: tuple[float, float] = (1.0, 1.0),
) -> list[torch.Tensor]:
    set_id = registered_id(process_set)
    number = _number(name, set_id)
    results: list[torch.Tensor] = operator(
        list(tensors), rows, operation, name, number, op, root_rank, *factors, set_id
    )
    return results


def _copied_back(tensors: Tensors, results: Tensors) -> list[torch.Tensor]:
    for tensor, result in zip(tensors, results, strict=True):
        tensor.copy_(result)
    return list(tensors)


def _reduce(
    operation: str,
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    if average is not None:
        if op is not None:
            raise ValueError("op supersedes average: give only one of them")
        op = Average if average else Sum  # without the warning, which cannot be traced
    pairs = [compression.compress(tensor) for tensor in tensors]
    sent, factors = [tensor for tensor, _ in pairs], (float(prescale_factor), float(postscale_factor))
    op = Average if op is None else op
    reduced = _carry_out(_operators.allreduce, operation, sent, name, process_set, op=op, factors=factors)
    return [compression.decompress(tensor, ctx) for tensor, (_, ctx) in zip(reduced, pairs, strict=True)]


def _reduce_in_place(
    operation: str,
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    others = prescale_factor, postscale_factor, process_set
    with torch.no_grad():
        return _copied_back(tensors, _reduce(operation, tensors, average, name, Compression.none, op, *others))


def _gather(
    operation: str, tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    rows = [FOUND_OUT for _ in tensors]
    return _carry_out(_operators.allgather, operation, tensors, name, process_set, rows)


def _spread(
    operation: str,
    tensors: Tensors,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    return _carry_out(_operators.broadcast, operation, tensors, name, process_set, root_rank=root_rank)


def _spread_in_place(
    operation: str,
    tensors: Tensors,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    with torch.no_grad():
        return _copied_back(tensors, _spread(operation, tensors, root_rank, name, process_set))


def _exchange(
    operation: str,
    tensors: Tensors,
    splits: Sequence[Splits] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Exchanged]:
    of_each = [None] * len(tensors) if splits is None else splits
    if len(of_each) != len(tensors):
        raise ValueError(f"splits for {len(of_each)} tensors, but there are {len(tensors)}")
    set_id = registered_id(process_set)
    given = [
        one if isinstance(one, torch.Tensor) else torch.tensor(one, device="cpu") for one in of_each if one is not None
    ]
    have_splits = [one is not None for one in of_each]
    number = _number(name, set_id)
    results = _operators.alltoall(
        list(tensors), given, have_splits, len(_members(process_set)), operation, name, number, set_id
    )
    pairs = zip(results[::2], results[1::2], have_splits, strict=True)
    return [(rows, received) if has else rows for rows, received, has in pairs]


def _reduce_and_scatter(
    operation: str,
    tensors: Tensors,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    pairs = [compression.compress(tensor) for tensor in tensors]
    sent, factors = [tensor for tensor, _ in pairs], (float(prescale_factor), float(postscale_factor))
    members = _members(process_set)
    place = members.index(rank())
    rows = [rows_of(tensor.shape[0], place, len(members)) for tensor in sent]
    reduced = _carry_out(_operators.reducescatter, operation, sent, name, process_set, rows, op, factors=factors)
    return [compression.decompress(tensor, ctx) for tensor, (_, ctx) in zip(reduced, pairs, strict=True)]


def allreduce(tensor: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
    return _reduce("allreduce", [tensor], *others, **named)[0]


def allreduce_(tensor: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
    return _reduce_in_place("allreduce", [tensor], *others, **named)[0]


def grouped_allreduce(tensors: Sequence[torch.Tensor], *others: Any, **named: Any) -> list[torch.Tensor]:
    return _reduce("grouped_allreduce", tensors, *others, **named)


def grouped_allreduce_(tensors: Sequence[torch.Tensor], *others: Any, **named: Any) -> list[torch.Tensor]:
    return _reduce_in_place("grouped_allreduce", tensors, *others, **named)


def allgather(tensor: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
    return _gather("allgather", [tensor], *others, **named)[0]


def grouped_allgather(tensors: Sequence[torch.Tensor], *others: Any, **named: Any) -> tuple[torch.Tensor, ...]:
    return tuple(_gather("grouped_allgather", tensors, *others, **named))


def broadcast(tensor: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
    return _spread("broadcast", [tensor], *others, **named)[0]


def broadcast_(tensor: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
    return _spread_in_place("broadcast", [tensor], *others, **named)[0]


def grouped_broadcast(tensors: Sequence[torch.Tensor], *others: Any, **named: Any) -> tuple[torch.Tensor, ...]:
    return tuple(_spread("grouped_broadcast", tensors, *others, **named))


def grouped_broadcast_(tensors: Sequence[torch.Tensor], *others: Any, **named: Any) -> tuple[torch.Tensor, ...]:
    return tuple(_spread_in_place("grouped_broadcast", tensors, *others, **named))


def alltoall(
    tensor: torch.Tensor,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Exchanged:
    return _exchange("alltoall", [tensor], [splits], name, process_set)[0]


def grouped_alltoall(tensors: Sequence[torch.Tensor], *others: Any, **named: Any) -> tuple[Exchanged, ...]:
    return tuple(_exchange("grouped_alltoall", tensors, *others, **named))


def reducescatter(tensor: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
    return _reduce_and_scatter("reducescatter", [tensor], *others, **named)[0]


def grouped_reducescatter(tensors: Sequence[torch.Tensor], *others: Any, **named: Any) -> list[torch.Tensor]:
    return _reduce_and_scatter("grouped_reducescatter", tensors, *others, **named)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    _operators.barrier(registered_id(process_set))


TRACED = (
    allgather, allreduce, allreduce_, alltoall, barrier, broadcast, broadcast_, cross_rank, cross_size,
    grouped_allgather, grouped_allreduce, grouped_allreduce_, grouped_alltoall, grouped_broadcast,
    grouped_broadcast_, grouped_reducescatter, is_initialized, local_rank, local_size, rank, reducescatter, size,
)  # fmt: skip

if IS_AVAILABLE:
    define()
    for function in TRACED:
        trace_as(getattr(mpi_ops, function.__name__), function)
