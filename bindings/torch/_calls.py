"""Checked arguments of the collectives as calls for `_engine`, which are kept for names that are used again."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TypeVar

import torch

from horovodlike.basics import Adasum, Average, Max, Min, Product, Sum
from horovodlike.ops import Kind
from horovodlike.process_set import ProcessSet, global_process_set, registered_id
from horovodlike.torch._engine import CALLS_KEPT, Call, full_name, synchronize

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
    if name is None:
        return new_reduction(kind, operation, None, op, prescale, postscale, set_id)
    return known_reduction(kind, operation, name, op, prescale, postscale, set_id)


def new_reduction(
    kind: Kind, operation: str, name: str | None, op: int | None, prescale: float, postscale: float, set_id: int
) -> Call:
    """As `reduction_call`, for the id of a process set; `known_reduction` keeps those that have names."""
    if op is None:
        op = Average
    if op not in (Average, Sum, Min, Max, Product) and not (op == Adasum and kind is Kind.ALLREDUCE):
        also = ", Product and Adasum" if kind is Kind.ALLREDUCE else " and Product"
        raise ValueError(f"op must be one of hvd.Average, Sum, Min, Max{also}, got {op!r}")
    return Call(kind, full_name(operation, name, set_id), op, -1, prescale, postscale, set_id)


known_reduction = lru_cache(maxsize=CALLS_KEPT)(new_reduction)


def group(tensors: Sequence[torch.Tensor], operation: str) -> Sequence[torch.Tensor]:
    """Return the tensors of a grouped operation as a list.

    Raises:
        ValueError: There are none, or they are on more than one device.
    """
    tensors = list(tensors)
    if not tensors:
        raise ValueError(f"{operation}: the list of tensors is empty")
    if len({tensor.device for tensor in tensors if isinstance(tensor, torch.Tensor)}) > 1:
        raise ValueError(f"{operation}: the tensors of a group must be on the same device")
    return tensors


def result(handle: int, _: type[T]) -> T:
    """Synchronize a handle that has just been made, whose result is known to be of the given type."""
    return synchronize(handle)  # type: ignore[return-value]
