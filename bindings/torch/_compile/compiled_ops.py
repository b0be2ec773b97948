"""What takes the place of the collectives, and of what tells about the job, in functions that are compiled.

Each function here has the arguments and results of the one that it stands for, and calls an operator of `_library`.
`torch.compile` traces it in its place; functions that are not compiled never come here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from horovodlike import basics
from horovodlike._bootstrap.environment import RankInfo
from horovodlike.basics import Average, Sum
from horovodlike.errors import NotInitializedError
from horovodlike.process_set import ProcessSet, global_process_set, registered_id
from horovodlike.torch import mpi_ops
from horovodlike.torch._compile.custom_ops import FOUND_OUT, IS_AVAILABLE, define
from horovodlike.torch._compile.disable_compile import trace_as
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


def _reduce(
    operation: str,
    tensors: Sequence[torch.Tensor],
    average: bool | None,
    name: str | None,
    op: int | None,
    factors: tuple[float, float],
    process_set: ProcessSet,
) -> list[torch.Tensor]:
    if average is not None:
        if op is not None:
            raise ValueError("op supersedes average: give only one of them")
        op = Average if average else Sum  # without the warning, which cannot be traced
    set_id = registered_id(process_set)
    chosen = Average if op is None else op
    number = _number(name, set_id)
    reduced: list[torch.Tensor] = _operators.allreduce(
        list(tensors), None, operation, name, number, chosen, -1, *factors, set_id
    )
    return reduced


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    compressed, ctx = compression.compress(tensor)
    factors = float(prescale_factor), float(postscale_factor)
    (reduced,) = _reduce("allreduce", [compressed], average, name, op, factors, process_set)
    return compression.decompress(reduced, ctx)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    factors = float(prescale_factor), float(postscale_factor)
    with torch.no_grad():
        (reduced,) = _reduce("allreduce", [tensor], average, name, op, factors, process_set)
        tensor.copy_(reduced)
    return tensor


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    pairs = [compression.compress(tensor) for tensor in tensors]
    factors = float(prescale_factor), float(postscale_factor)
    compressed = [tensor for tensor, _ in pairs]
    reduced = _reduce("grouped_allreduce", compressed, average, name, op, factors, process_set)
    return [compression.decompress(tensor, ctx) for tensor, (_, ctx) in zip(reduced, pairs, strict=True)]


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    factors = float(prescale_factor), float(postscale_factor)
    with torch.no_grad():
        reduced = _reduce("grouped_allreduce", tensors, average, name, op, factors, process_set)
        for tensor, result in zip(tensors, reduced, strict=True):
            tensor.copy_(result)
    return list(tensors)


def _gather(
    operation: str, tensors: Sequence[torch.Tensor], name: str | None, process_set: ProcessSet
) -> list[torch.Tensor]:
    set_id = registered_id(process_set)
    rows = [FOUND_OUT for _ in tensors]
    number = _number(name, set_id)
    gathered: list[torch.Tensor] = _operators.allgather(
        list(tensors), rows, operation, name, number, Sum, -1, 1.0, 1.0, set_id
    )
    return gathered


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    return _gather("allgather", [tensor], name, process_set)[0]


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[torch.Tensor, ...]:
    return tuple(_gather("grouped_allgather", tensors, name, process_set))


def _spread(
    operation: str, tensors: Sequence[torch.Tensor], root_rank: int, name: str | None, process_set: ProcessSet
) -> list[torch.Tensor]:
    set_id = registered_id(process_set)
    number = _number(name, set_id)
    results: list[torch.Tensor] = _operators.broadcast(
        list(tensors), None, operation, name, number, Sum, root_rank, 1.0, 1.0, set_id
    )
    return results


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    return _spread("broadcast", [tensor], root_rank, name, process_set)[0]


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    with torch.no_grad():
        tensor.copy_(_spread("broadcast", [tensor], root_rank, name, process_set)[0])
    return tensor


def grouped_broadcast(
    tensors: Sequence[torch.Tensor],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> tuple[torch.Tensor, ...]:
    return tuple(_spread("grouped_broadcast", tensors, root_rank, name, process_set))


def grouped_broadcast_(
    tensors: Sequence[torch.Tensor],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> tuple[torch.Tensor, ...]:
    with torch.no_grad():
        results = _spread("grouped_broadcast", tensors, root_rank, name, process_set)
        for tensor, result in zip(tensors, results, strict=True):
            tensor.copy_(result)
    return tuple(tensors)


def _exchange(
    operation: str,
    tensors: Sequence[torch.Tensor],
    splits: Sequence[Splits],
    name: str | None,
    process_set: ProcessSet,
) -> list[Exchanged]:
    set_id = registered_id(process_set)
    given = [
        one if isinstance(one, torch.Tensor) else torch.tensor(one, device="cpu") for one in splits if one is not None
    ]
    have_splits = [one is not None for one in splits]
    number = _number(name, set_id)
    results = _operators.alltoall(
        list(tensors), given, have_splits, len(_members(process_set)), operation, name, number, set_id
    )
    pairs = zip(results[::2], results[1::2], have_splits, strict=True)
    return [(rows, received) if has else rows for rows, received, has in pairs]


def alltoall(
    tensor: torch.Tensor,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Exchanged:
    return _exchange("alltoall", [tensor], [splits], name, process_set)[0]


def grouped_alltoall(
    tensors: Sequence[torch.Tensor],
    splits: Sequence[Splits] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> tuple[Exchanged, ...]:
    of_each = [None] * len(tensors) if splits is None else splits
    if len(of_each) != len(tensors):
        raise ValueError(f"splits for {len(of_each)} tensors, but there are {len(tensors)}")
    return tuple(_exchange("grouped_alltoall", tensors, of_each, name, process_set))


def _reduce_and_scatter(
    operation: str,
    tensors: Sequence[torch.Tensor],
    name: str | None,
    op: int,
    factors: tuple[float, float],
    process_set: ProcessSet,
) -> list[torch.Tensor]:
    set_id = registered_id(process_set)
    members = _members(process_set)
    place = members.index(rank())
    rows = [rows_of(tensor.shape[0], place, len(members)) for tensor in tensors]
    number = _number(name, set_id)
    results: list[torch.Tensor] = _operators.reducescatter(
        list(tensors), rows, operation, name, number, op, -1, *factors, set_id
    )
    return results


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    compressed, ctx = compression.compress(tensor)
    factors = float(prescale_factor), float(postscale_factor)
    (reduced,) = _reduce_and_scatter("reducescatter", [compressed], name, op, factors, process_set)
    return compression.decompress(reduced, ctx)


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    pairs = [compression.compress(tensor) for tensor in tensors]
    factors = float(prescale_factor), float(postscale_factor)
    compressed = [tensor for tensor, _ in pairs]
    reduced = _reduce_and_scatter("grouped_reducescatter", compressed, name, op, factors, process_set)
    return [compression.decompress(tensor, ctx) for tensor, (_, ctx) in zip(reduced, pairs, strict=True)]


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
