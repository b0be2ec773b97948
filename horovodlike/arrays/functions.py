"""The collectives on arrays of any library.

Every operation on arrays has a synchronous form, an asynchronous form that returns a handle at once (`*_async`), and
both for a list of arrays that is carried out as a whole or not at all (`grouped_*`). Allreduce and broadcast also have
forms that work in place (a trailing underscore). The following holds for all operations:

* An array is a NumPy array, an array of another library that has DLPack (`__dlpack__`), on the CPU or an NVIDIA GPU, or
  an object with the buffer protocol, such as a `bytearray`. Results are arrays of the same library; for a buffer, NumPy
  arrays.
* Arrays may be of any dtype of docs/users/arrays.md, in the machine's byte order, of any shape, 0-d and empty ones
  included, and of any strides. An array with gaps is copied. So is an array in Fortran order (column by column), except
  in an allreduce, for which all ranks must have the array in the same order.
* Ranks match operations by name. Unnamed ones are counted, so every rank has to call them in the same order. A name
  may be used again when the last operation of that name has been synchronized.
* If the ranks disagree about an operation it raises `HorovodInternalError` on all of them, and the job continues.
* The arrays of an asynchronous operation must be left alone until `synchronize`, called once for each handle.
* A rank has one GPU. An array must be in host memory on all ranks, or on a GPU on all ranks.
* Every operation takes a process set. The ranks outside the set do not need to call it.
* Any thread may call operations, as long as all ranks use the same names.

All raise `TypeError` for an object that is not an array, `ValueError` for arguments that cannot be used and for a name
that is in flight, and `HorovodInternalError` if the ranks disagree, or the job is broken or shut down.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from horovodlike import objects
from horovodlike._engine.ops import Kind
from horovodlike.arrays.fast_path import allreduce_again, remember
from horovodlike.arrays.memory import array_of_number, is_number, number_like
from horovodlike.arrays.operations import (
    group,
    movement,
    object_name,
    poll,
    reduction,
    result,
    start_allgather,
    start_alltoall,
    start_in_place,
    start_reducescatter,
    start_to_new,
    synchronize,
)
from horovodlike.process_set import ProcessSet, global_process_set, registered_id

T = TypeVar("T")

__all__ = [
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_alltoall",
    "grouped_alltoall_async",
    "grouped_broadcast",
    "grouped_broadcast_",
    "grouped_broadcast_async",
    "grouped_broadcast_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "join",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "synchronize",
]


def allreduce(
    array: Any,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduce an array over all ranks and return the result as a new array.

    Args:
        array: Of the same shape and dtype on all ranks. A number of Python or NumPy gives a number; an int of Python is
            reduced as int64, a float as float64.
        name: The name by which the ranks match the operation; if None, a counter supplies one.
        op: Average, Sum, Min, Max or Product; or, for floating-point arrays, Adasum, which reduces each array of a
            group separately. None: Average for floating-point arrays, and an error for integers, which Average
            truncates, and for bool, with which it cannot be used.
        prescale_factor: Multiplies the array before the reduction.
        postscale_factor: Multiplies the result.
        process_set: The ranks that take part.

    Raises:
        HorovodInternalError: The ranks disagree, or the job is broken or shut down.
        TypeError: `array` is not an array.
        ValueError: An argument cannot be used, or the name is in flight already.
    """
    with_number = is_number(array)
    work = array_of_number(array, "allreduce") if with_number else array
    reduced = allreduce_again(name, op, prescale_factor, postscale_factor, process_set, work, in_place=with_number)
    if reduced is None:
        call = reduction(Kind.ALLREDUCE, "allreduce", name, op, prescale_factor, postscale_factor, process_set)
        reduced = result(start_to_new(call, [array], single=True))
        remember(call, op, process_set, work)
    elif with_number:
        reduced = number_like(array, reduced)
    return reduced


def allreduce_async(
    array: Any,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start what `allreduce` does and return a handle for `poll` and `synchronize`."""
    call = reduction(Kind.ALLREDUCE, "allreduce", name, op, prescale_factor, postscale_factor, process_set)
    return start_to_new(call, [array], single=True)


def allreduce_(
    array: T,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> T:
    """Do what `allreduce` does in place, in the array's own memory, and return the array."""
    if allreduce_again(name, op, prescale_factor, postscale_factor, process_set, array, in_place=True) is None:
        call = reduction(Kind.ALLREDUCE, "allreduce", name, op, prescale_factor, postscale_factor, process_set)
        result(start_in_place(call, [array], single=True))
        remember(call, op, process_set, array)
    return array


def allreduce_async_(
    array: Any,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start what `allreduce_` does and return a handle for `poll` and `synchronize`."""
    call = reduction(Kind.ALLREDUCE, "allreduce", name, op, prescale_factor, postscale_factor, process_set)
    return start_in_place(call, [array], single=True)


def grouped_allreduce(
    arrays: Iterable[Any],
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> tuple[Any, ...]:
    """Do what `allreduce` does for a list of arrays, of any dtypes, as one operation; return a tuple."""
    call = reduction(Kind.ALLREDUCE, "grouped_allreduce", name, op, prescale_factor, postscale_factor, process_set)
    reduced: tuple[Any, ...] = result(start_to_new(call, group(arrays, call.label), single=False))
    return reduced


def grouped_allreduce_async(
    arrays: Iterable[Any],
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start what `grouped_allreduce` does and return a handle."""
    call = reduction(Kind.ALLREDUCE, "grouped_allreduce", name, op, prescale_factor, postscale_factor, process_set)
    return start_to_new(call, group(arrays, call.label), single=False)


def grouped_allreduce_(
    arrays: Iterable[T],
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> tuple[T, ...]:
    """Do what `allreduce_` does for a list of arrays, of any dtypes, as one operation; return a tuple of them."""
    call = reduction(Kind.ALLREDUCE, "grouped_allreduce", name, op, prescale_factor, postscale_factor, process_set)
    reduced: tuple[T, ...] = result(start_in_place(call, group(arrays, call.label), single=False))
    return reduced


def grouped_allreduce_async_(
    arrays: Iterable[Any],
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start what `grouped_allreduce_` does and return a handle."""
    call = reduction(Kind.ALLREDUCE, "grouped_allreduce", name, op, prescale_factor, postscale_factor, process_set)
    return start_in_place(call, group(arrays, call.label), single=False)


def allgather(array: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Return the arrays of all ranks concatenated along dimension 0, in the order of the ranks.

    Args:
        array: Of at least one dimension. Dimension 0 may be 0, and may differ between ranks; the others may not differ.
        name: The name by which the ranks match the operation; if None, a counter supplies one.
        process_set: The ranks that take part.

    Raises:
        HorovodInternalError: The ranks disagree, or the job is broken or shut down.
        TypeError: `array` is not an array.
        ValueError: An argument cannot be used, or the name is in flight already.
    """
    return result(allgather_async(array, name, process_set))


def allgather_async(array: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Start what `allgather` does and return a handle for `poll` and `synchronize`."""
    return start_allgather(movement(Kind.ALLGATHER, "allgather", name, process_set), [array], single=True)


def grouped_allgather(
    arrays: Iterable[Any], name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[Any, ...]:
    """Do what `allgather` does for a list of arrays, of any dtypes, as one operation; return a tuple."""
    gathered: tuple[Any, ...] = result(grouped_allgather_async(arrays, name, process_set))
    return gathered


def grouped_allgather_async(
    arrays: Iterable[Any], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start what `grouped_allgather` does and return a handle."""
    call = movement(Kind.ALLGATHER, "grouped_allgather", name, process_set)
    return start_allgather(call, group(arrays, call.label), single=False)


def broadcast(array: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Return the root's array as a new array on every rank.

    Args:
        array: Of the same shape and dtype on all ranks, or a number, as in `allreduce`; its content matters on the root
            only.
        root_rank: The (global) rank whose array is sent.
        name: The name by which the ranks match the operation; if None, a counter supplies one.
        process_set: The ranks that take part.

    Raises:
        HorovodInternalError: The ranks disagree, or the job is broken or shut down.
        TypeError: `array` is not an array.
        ValueError: An argument cannot be used, or the name is in flight already.
    """
    return result(broadcast_async(array, root_rank, name, process_set))


def broadcast_async(
    array: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start what `broadcast` does and return a handle for `poll` and `synchronize`."""
    return start_to_new(movement(Kind.BROADCAST, "broadcast", name, process_set, root_rank), [array], single=True)


def broadcast_(array: T, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set) -> T:
    """Overwrite the array with the root's on every rank, and return it."""
    result(broadcast_async_(array, root_rank, name, process_set))
    return array


def broadcast_async_(
    array: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start what `broadcast_` does and return a handle for `poll` and `synchronize`."""
    return start_in_place(movement(Kind.BROADCAST, "broadcast", name, process_set, root_rank), [array], single=True)


def grouped_broadcast(
    arrays: Iterable[Any], root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[Any, ...]:
    """Do what `broadcast` does for a list of arrays, of any dtypes, as one operation; return a tuple."""
    sent: tuple[Any, ...] = result(grouped_broadcast_async(arrays, root_rank, name, process_set))
    return sent


def grouped_broadcast_async(
    arrays: Iterable[Any], root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start what `grouped_broadcast` does and return a handle."""
    call = movement(Kind.BROADCAST, "grouped_broadcast", name, process_set, root_rank)
    return start_to_new(call, group(arrays, call.label), single=False)


def grouped_broadcast_(
    arrays: Iterable[T], root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[T, ...]:
    """Do what `broadcast_` does for a list of arrays, of any dtypes, as one operation; return a tuple of them."""
    sent: tuple[T, ...] = result(grouped_broadcast_async_(arrays, root_rank, name, process_set))
    return sent


def grouped_broadcast_async_(
    arrays: Iterable[Any], root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start what `grouped_broadcast_` does and return a handle."""
    call = movement(Kind.BROADCAST, "grouped_broadcast", name, process_set, root_rank)
    return start_in_place(call, group(arrays, call.label), single=False)


def reducescatter(
    array: Any,
    name: str | None = None,
    op: int | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Reduce an array over all ranks and return this rank's rows of the result.

    Dimension 0 is divided among the ranks in their order. If it is not a multiple of the number of ranks, the first
    ranks get one row more; if it is less than that number, the last ranks get an empty array.

    Args:
        array: Of at least one dimension, and of the same shape and dtype on all ranks.
        name: The name by which the ranks match the operation; if None, a counter supplies one.
        op: Average, Sum, Min, Max or Product; None as for `allreduce`.
        process_set: The ranks that take part.
        prescale_factor: Multiplies the array before the reduction.
        postscale_factor: Multiplies the result.

    Raises:
        HorovodInternalError: The ranks disagree, or the job is broken or shut down.
        UnsupportedReductionError: `op` is Adasum.
        TypeError: `array` is not an array.
        ValueError: An argument cannot be used, or the name is in flight already.
    """
    return result(reducescatter_async(array, name, op, process_set, prescale_factor, postscale_factor))


def reducescatter_async(
    array: Any,
    name: str | None = None,
    op: int | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start what `reducescatter` does and return a handle for `poll` and `synchronize`."""
    call = reduction(Kind.REDUCESCATTER, "reducescatter", name, op, prescale_factor, postscale_factor, process_set)
    return start_reducescatter(call, [array], single=True)


def grouped_reducescatter(
    arrays: Iterable[Any],
    name: str | None = None,
    op: int | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> tuple[Any, ...]:
    """Do what `reducescatter` does for a list of arrays, of any dtypes, as one operation; return a tuple."""
    handle = grouped_reducescatter_async(arrays, name, op, process_set, prescale_factor, postscale_factor)
    reduced: tuple[Any, ...] = result(handle)
    return reduced


def grouped_reducescatter_async(
    arrays: Iterable[Any],
    name: str | None = None,
    op: int | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start what `grouped_reducescatter` does and return a handle."""
    call = reduction(
        Kind.REDUCESCATTER, "grouped_reducescatter", name, op, prescale_factor, postscale_factor, process_set
    )
    return start_reducescatter(call, group(arrays, call.label), single=False)


def alltoall(
    array: Any, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Send consecutive rows of the array to each rank, and return the rows received from all ranks, in rank order.

    Args:
        array: Of at least one dimension and the same dtype on all ranks. Dimension 0 may differ, the others may not.
        splits: The number of rows for each rank of the process set, which add up to the rows of the array. If None, all
            ranks get the same number.
        name: The name by which the ranks match the operation; if None, a counter supplies one.
        process_set: The ranks that take part.

    Returns:
        The rows received; and, if `splits` were given, how many came from each rank (a NumPy array of int32).

    Raises:
        HorovodInternalError: The ranks disagree, or the job is broken or shut down.
        TypeError: `array` is not an array.
        ValueError: `splits` do not fit the array or the process set, or the name is in flight already.
    """
    pair = result(alltoall_async(array, splits, name, process_set))
    return pair[0] if splits is None else pair


def alltoall_async(
    array: Any, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start what `alltoall` does and return a handle. Its result is always the pair of rows and counts."""
    call = movement(Kind.ALLTOALL, "alltoall", name, process_set)
    return start_alltoall(call, [array], [splits], single=True)


def grouped_alltoall(
    arrays: Iterable[Any],
    splits: Sequence[Any] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> tuple[Any, ...]:
    """Do what `alltoall` does for a list of arrays, of any dtypes, as one operation; return a tuple.

    `splits` has an entry for each array. If the entry is None, the array's result is the rows received, else the pair
    that `alltoall` returns with splits.
    """
    pairs = result(grouped_alltoall_async(arrays, splits, name, process_set))
    chosen = [None] * len(pairs) if splits is None else splits
    return tuple(pair[0] if each is None else pair for pair, each in zip(pairs, chosen, strict=True))


def grouped_alltoall_async(
    arrays: Iterable[Any],
    splits: Sequence[Any] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start what `grouped_alltoall` does and return a handle. Its result is a tuple of such pairs."""
    call = movement(Kind.ALLTOALL, "grouped_alltoall", name, process_set)
    given = group(arrays, call.label)
    if splits is None:
        splits = [None] * len(given)
    if not isinstance(splits, (list, tuple)):
        raise TypeError(f"{call.label}: splits must be a list with an entry for each array, got {splits!r}")
    if len(splits) != len(given):
        raise ValueError(f"{call.label}: splits for {len(splits)} arrays, but there are {len(given)}")
    return start_alltoall(call, given, splits, single=False)


def barrier(process_set: ProcessSet = global_process_set, name: str | None = None) -> None:
    """Return when all ranks of the process set have called it. Barriers of several threads need names."""
    objects.barrier(registered_id(process_set), name)


def join(process_set: ProcessSet = global_process_set) -> int:
    """Declare that this rank has no more data, and return when all ranks of the process set have done so.

    Until then the other ranks continue without this one: a rank that has joined contributes nothing to any operation,
    as docs/users/groups.md describes.

    Returns:
        The rank that joined last, the same on all ranks.

    Raises:
        HorovodInternalError: The job is broken or shut down.
        ValueError: Another thread of this rank is joining already.
    """
    return objects.join(registered_id(process_set))


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the root's object: the object itself on the root, a copy of it elsewhere.

    Objects are serialized by cloudpickle, and unpickling runs code that the sender chose: all ranks of a job hold its
    secret key and trust each other.

    Args:
        obj: Anything that cloudpickle can serialize; ignored on ranks other than the root.
        root_rank: The rank whose object is sent.
        name: The name by which the ranks match the operation; if None, a counter supplies one, for objects of any type.
        process_set: The ranks that take part.

    Raises:
        IntegrityError: (A `HorovodInternalError`.) The object was changed on its way, and was not unpickled.
        HorovodInternalError: The job is broken; or the root could not pickle its object (the root raises the cause), or
            has joined.
        ValueError: The root is not one of the ranks that take part.
    """
    set_id = registered_id(process_set)
    return objects.broadcast_object(obj, root_rank, object_name(name, set_id), set_id)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return the objects of all ranks, in the order of the ranks. This rank receives a copy of its own object, too.

    Args:
        obj: Anything that cloudpickle can serialize.
        name: The name by which the ranks match the operation; if None, a counter supplies one, for objects of any type.
        process_set: The ranks that take part.

    Raises:
        IntegrityError: (A `HorovodInternalError`.) An object was changed on its way; none was unpickled.
        HorovodInternalError: The job is broken; or a rank could not pickle its object (that rank raises the cause).
    """
    set_id = registered_id(process_set)
    return objects.allgather_object(obj, object_name(name, set_id), set_id)
