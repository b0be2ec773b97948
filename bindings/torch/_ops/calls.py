"""From arguments of the collectives to `Call`s, with a cache for names that are used again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TypeVar

import torch

from horovodlike._engine.arguments import called, check_compression, check_name, factor, integer, reduce_op
from horovodlike._engine.ops import Kind
from horovodlike.basics import Average, Sum
from horovodlike.process_set import ProcessSet, global_process_set, registered_id
from horovodlike.torch._ops.compressors import Compressor, NoneCompressor
from horovodlike.torch._ops.handles import CALLS_KEPT, Call, full_name, give_up, synchronize
from horovodlike.torch._ops.tensor import check

T = TypeVar("T")


def reduction_call(
    kind: Kind,
    operation: str,
    name: str | None,
    op: int | None,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
) -> Call:
    """Return the call of an allreduce or a reducescatter; `operation` begins its full name."""
    set_id = 0 if process_set is global_process_set else registered_id(process_set)
    check_name(name, operation)
    label = called(operation, name)
    op = Average if op is None else reduce_op(op, label, adasum=kind is Kind.ALLREDUCE)
    prescale, postscale = factor(prescale, "prescale_factor", label), factor(postscale, "postscale_factor", label)
    return (new_call if name is None else known_call)(kind, operation, name, set_id, op, -1, prescale, postscale)


def plain_call(kind: Kind, operation: str, name: str | None, process_set: ProcessSet, root_rank: int = -1) -> Call:
    """Return the call of an operation that reduces nothing; `operation` begins its full name."""
    set_id = registered_id(process_set)
    check_name(name, operation)
    if kind is Kind.BROADCAST:
        root_rank = integer(root_rank, "root_rank", called(operation, name))
    return (new_call if name is None else known_call)(kind, operation, name, set_id, Sum, root_rank)


def new_call(
    kind: Kind,
    operation: str,
    name: str | None,
    set_id: int,
    op: int,
    root_rank: int,
    prescale: float = 1.0,
    postscale: float = 1.0,
) -> Call:
    """Return a call; its arguments have been checked. `known_call` caches calls that have names."""
    return Call(kind, full_name(operation, name, set_id), op, root_rank, prescale, postscale, set_id)


known_call = lru_cache(maxsize=CALLS_KEPT)(new_call)


def compressed(
    compression: type[Compressor], tensors: Sequence[torch.Tensor], operation: str
) -> list[tuple[torch.Tensor, object]]:
    """Return for each tensor what `compress` returns: the tensor to send, and what `decompress` needs.

    Raises:
        TypeError: `compression` is not a compression, or an element of `tensors` is not a tensor.
    """
    check_compression(compression, operation)
    if compression is not NoneCompressor:
        for tensor in tensors:
            check(tensor, operation)
    return [compression.compress(tensor) for tensor in tensors]


def group(tensors: Iterable[torch.Tensor], operation: str) -> Sequence[torch.Tensor]:
    """Return the tensors of a grouped operation as a list.

    Raises:
        TypeError: `tensors` is not a list of tensors.
        ValueError: The list is empty, or its tensors are on more than one device.
    """
    if isinstance(tensors, torch.Tensor) or not isinstance(tensors, Iterable):
        raise TypeError(f"{operation}: expected a list of tensors, got {type(tensors).__name__}")
    tensors = list(tensors)
    if not tensors:
        raise ValueError(f"{operation}: the list of tensors is empty")
    if len({tensor.device for tensor in tensors if isinstance(tensor, torch.Tensor)}) > 1:
        raise ValueError(f"{operation}: the tensors of a group must be on the same device")
    return tensors


def result(handle: int, _: type[T]) -> T:
    """Synchronize a handle that has just been made; the second argument is the type that its result has."""
    try:
        return synchronize(handle)  # type: ignore[return-value]  # as the caller knows
    except BaseException:
        give_up(handle)  # the caller has no handle to wait for
        raise
