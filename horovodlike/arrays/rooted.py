"""The collectives on arrays in which one rank, the root, sends data to all ranks or receives the data of all.

The rules of `functions` for arrays, names, handles and errors hold for them as well.
"""

from __future__ import annotations

from typing import Any, TypeVar

from horovodlike._engine.ops import Kind
from horovodlike.arrays.operations import movement, reduction, result, start_gather, start_reduce, start_scatter
from horovodlike.process_set import ProcessSet, global_process_set

T = TypeVar("T")

__all__ = [
    "gather",
    "gather_async",
    "reduce",
    "reduce_",
    "reduce_async",
    "reduce_async_",
    "scatter",
    "scatter_async",
]


def gather(array: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Return on the root the arrays of all ranks concatenated along dimension 0, in rank order; elsewhere None.

    Args:
        array: Of at least one dimension. Dimension 0 may be 0, and may differ between ranks; the others may not differ.
        root_rank: The (global) rank that receives the result.
        name: The name by which the ranks match the operation; if None, a counter supplies one.
        process_set: The ranks that take part.

    Raises:
        HorovodInternalError: The ranks disagree, or the job is broken or shut down.
        TypeError: `array` is not an array.
        ValueError: An argument cannot be used, or the name is in flight already.
    """
    return result(gather_async(array, root_rank, name, process_set))


def gather_async(
    array: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start what `gather` does and return a handle for `poll` and `synchronize`."""
    return start_gather(movement(Kind.GATHER, "gather", name, process_set, root_rank), array)


def scatter(array: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Return this rank's part of the root's array, as a new array: equal parts along dimension 0, in rank order.

    Args:
        array: On the root, the parts of all ranks one after the other. On other ranks, an array of the shape and dtype
            of one part, such as `numpy.empty` makes; its content does not matter.
        root_rank: The (global) rank whose array is sent.
        name: The name by which the ranks match the operation; if None, a counter supplies one.
        process_set: The ranks that take part.

    Raises:
        HorovodInternalError: The ranks disagree, or the job is broken or shut down.
        TypeError: `array` is not an array.
        ValueError: The rows cannot be divided evenly, another argument cannot be used, or the name is in flight
            already.
    """
    return result(scatter_async(array, root_rank, name, process_set))


def scatter_async(
    array: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start what `scatter` does and return a handle for `poll` and `synchronize`."""
    return start_scatter(movement(Kind.SCATTER, "scatter", name, process_set, root_rank), array)


def reduce(
    array: Any,
    root_rank: int,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduce an array over all ranks and return the result as a new array on the root; elsewhere None.

    Args:
        array: Of the same shape and dtype on all ranks, or a number, as in `allreduce`.
        root_rank: The (global) rank that receives the result.
        name: The name by which the ranks match the operation; if None, a counter supplies one.
        op: Average, Sum, Min, Max or Product; None as for `allreduce`.
        prescale_factor: Multiplies the array before the reduction.
        postscale_factor: Multiplies the result.
        process_set: The ranks that take part.

    Raises:
        HorovodInternalError: The ranks disagree, or the job is broken or shut down.
        UnsupportedReductionError: `op` is Adasum.
        TypeError: `array` is not an array.
        ValueError: An argument cannot be used, or the name is in flight already.
    """
    return result(reduce_async(array, root_rank, name, op, prescale_factor, postscale_factor, process_set))


def reduce_async(
    array: Any,
    root_rank: int,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start what `reduce` does and return a handle for `poll` and `synchronize`."""
    call = reduction(Kind.REDUCE, "reduce", name, op, prescale_factor, postscale_factor, process_set, root_rank)
    return start_reduce(call, array, in_place=False)


def reduce_(
    array: T,
    root_rank: int,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> T:
    """Do what `reduce` does in place: overwrite the root's array, leave the others unchanged; return the array."""
    result(reduce_async_(array, root_rank, name, op, prescale_factor, postscale_factor, process_set))
    return array


def reduce_async_(
    array: Any,
    root_rank: int,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start what `reduce_` does and return a handle for `poll` and `synchronize`."""
    call = reduction(Kind.REDUCE, "reduce", name, op, prescale_factor, postscale_factor, process_set, root_rank)
    return start_reduce(call, array, in_place=True)
