"""Collectives on NumPy arrays: for values that are no gradients, the same on every backend of Keras."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from horovodlike import basics, ops
from horovodlike import process_set as process_sets
from horovodlike.ops import DType, Kind, Request
from horovodlike.process_set import ProcessSet, global_process_set, members, registered_id

_DTYPES = {dtype.name.lower(): dtype for dtype in DType}
_unnamed: dict[int, Iterator[int]] = {}  # by the id of a process set, whose members alone count its operations


def forget_numbers(set_id: int) -> None:
    """Start counting the unnamed operations of one process set from 0, as its other members do."""
    _unnamed.pop(set_id, None)


basics.on_init(lambda _: _unnamed.clear())
process_sets.on_added(forget_numbers)  # the id may have been another set's


def _name(operation: str, name: str | None, set_id: int) -> str:
    if name is None:
        name = f"noname.{next(_unnamed.setdefault(set_id, itertools.count()))}"
    return f"keras.{operation}.{name}"


def _described(name: str, array: np.ndarray[Any, Any]) -> tuple[DType, Sequence[int]]:
    dtype = _DTYPES.get(array.dtype.name)
    if dtype is None:
        raise ValueError(f"{name}: arrays of dtype {array.dtype} cannot be sent; known are {', '.join(_DTYPES)}")
    return dtype, array.shape


def allreduce(
    array: np.ndarray[Any, Any],
    name: str | None,
    op: int,
    prescale: float = 1.0,
    postscale: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> np.ndarray[Any, Any]:
    """Return the reduction of an array over the ranks. Of the same dtype and shape on all ranks."""
    result = np.array(array, order="C")
    set_id = registered_id(process_set)
    full_name = _name("allreduce", name, set_id)
    request = Request(
        Kind.ALLREDUCE,
        full_name,
        [_described(full_name, result)],
        op=op,
        prescale=prescale,
        postscale=postscale,
        process_set=set_id,
    )
    ops.wait(request.enqueue([result.ctypes.data], [result.ctypes.data]))
    return result


def reducescatter(
    array: np.ndarray[Any, Any], name: str | None, op: int, process_set: ProcessSet = global_process_set
) -> np.ndarray[Any, Any]:
    """Return this rank's rows of the reduction of an array; the first ranks get one more if they are uneven."""
    array = np.asarray(array, order="C")
    set_id = registered_id(process_set)
    full_name = _name("reducescatter", name, set_id)
    if array.ndim == 0:
        raise ValueError(f"{full_name}: a scalar has no rows; a reducescatter needs at least one dimension")
    ranks = members(set_id)
    rows = (array.shape[0] + len(ranks) - 1 - ranks.index(basics.rank())) // len(ranks)
    result = np.empty((rows, *array.shape[1:]), array.dtype)
    request = Request(Kind.REDUCESCATTER, full_name, [_described(full_name, array)], op=op, process_set=set_id)
    ops.wait(request.enqueue([array.ctypes.data], [result.ctypes.data]))
    return result


def allgather(
    array: np.ndarray[Any, Any], name: str | None, process_set: ProcessSet = global_process_set
) -> np.ndarray[Any, Any]:
    """Return the arrays of all ranks joined along dimension 0, in which alone they may differ."""
    array = np.asarray(array, order="C")
    set_id = registered_id(process_set)
    full_name = _name("allgather", name, set_id)
    described = _described(full_name, array)
    request = Request(Kind.ALLGATHER, full_name, [described], process_set=set_id)
    (output,) = ops.wait(request.enqueue([array.ctypes.data], []))
    result: np.ndarray[Any, Any] = np.frombuffer(output.memory, array.dtype).reshape(output.shape).copy()
    return result


def broadcast(
    arrays: Sequence[np.ndarray[Any, Any]],
    root_rank: int,
    name: str | None,
    process_set: ProcessSet = global_process_set,
) -> list[np.ndarray[Any, Any]]:
    """Return the arrays of one rank, in one operation. Of the same dtypes and shapes on all ranks."""
    results = [np.array(array, order="C") for array in arrays]
    if not results:
        return []
    set_id = registered_id(process_set)
    full_name = _name("broadcast", name, set_id)
    request = Request(
        Kind.BROADCAST,
        full_name,
        [_described(full_name, result) for result in results],
        root_rank=root_rank,
        process_set=set_id,
    )
    addresses = [result.ctypes.data for result in results]
    ops.wait(request.enqueue(addresses, addresses))
    return results


def allgather_json(value: Any, name: str) -> list[Any]:
    """Return what each rank has, by rank. For numbers, strings, lists and dictionaries of them."""
    encoded = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = allgather(np.array([len(encoded)]), f"{name}.sizes")
    joined = allgather(encoded, name).tobytes()
    ends = np.cumsum(sizes)
    return [json.loads(joined[end - size : end]) for size, end in zip(sizes, ends, strict=True)]
