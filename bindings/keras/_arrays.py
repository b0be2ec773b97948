"""Collectives on NumPy arrays, for values other than gradients, on every backend of Keras."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from horovodlike import basics
from horovodlike import process_set as process_sets
from horovodlike._engine import ops
from horovodlike._engine.arguments import called, check_name, factor, integer, reduce_op
from horovodlike._engine.ops import DType, Kind, Output, Request
from horovodlike.process_set import ProcessSet, global_process_set, members, registered_id

_unnamed = process_sets.UnnamedCounter()
_counting = threading.Lock()  # held from the number of an operation to its enqueue, which may be refused
forget_numbers = _unnamed.forget


def _described(label: str, array: np.ndarray[Any, Any]) -> tuple[DType, Sequence[int]]:
    dtype = DType.__members__.get(array.dtype.name)
    if dtype is None:
        known = ", ".join(DType.__members__)
        raise ValueError(f"{label}: arrays of dtype {array.dtype} cannot be sent; known are {known}")
    return dtype, array.shape


def _label(kind: Kind, name: str | None) -> str:
    return called(kind.name.lower(), name)


def _run(
    kind: Kind,
    name: str | None,
    inputs: Sequence[np.ndarray[Any, Any]],
    outputs: Sequence[np.ndarray[Any, Any]],
    set_id: int,
    **options: Any,
) -> list[Output]:
    check_name(name, kind.name.lower())
    described = [_described(_label(kind, name), array) for array in inputs]
    with _counting:
        number = _unnamed.next(set_id) if name is None else None
        full_name = f"keras.{kind.name.lower()}.{f'noname.{number}' if name is None else name}"
        request = None
        try:
            request = Request(kind, full_name, described, process_set=set_id, **options)
            handle = request.enqueue([array.ctypes.data for array in inputs], [array.ctypes.data for array in outputs])
        except BaseException:
            if request is not None:
                request.keep_if_enqueued((inputs, outputs))
            if number is not None:
                _unnamed.take_back(set_id, number)
            raise
    try:
        return ops.wait(handle)
    except BaseException:
        ops.give_up(handle, (inputs, outputs))
        raise


def allreduce(
    array: np.ndarray[Any, Any],
    name: str | None,
    op: int,
    prescale: float = 1.0,
    postscale: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> np.ndarray[Any, Any]:
    """Return the reduction of an array over the ranks; its dtype and shape must be the same on all ranks."""
    result = np.array(array, order="C")
    set_id = registered_id(process_set)
    label = _label(Kind.ALLREDUCE, name)
    op = reduce_op(op, label)
    prescale, postscale = factor(prescale, "prescale_factor", label), factor(postscale, "postscale_factor", label)
    _run(Kind.ALLREDUCE, name, [result], [result], set_id, op=op, prescale=prescale, postscale=postscale)
    return result


def reducescatter(
    array: np.ndarray[Any, Any], name: str | None, op: int, process_set: ProcessSet = global_process_set
) -> np.ndarray[Any, Any]:
    """Return this rank's rows of the reduction of an array; the first ranks get one more if rows are left over."""
    array = np.asarray(array, order="C")
    set_id = registered_id(process_set)
    label = _label(Kind.REDUCESCATTER, name)
    op = reduce_op(op, label, adasum=False)
    if array.ndim == 0:
        raise ValueError(f"{label}: a scalar has no rows; a reducescatter needs at least one dimension")
    ranks = members(set_id)
    rows = (array.shape[0] + len(ranks) - 1 - ranks.index(basics.rank())) // len(ranks)
    result = np.empty((rows, *array.shape[1:]), array.dtype)
    _run(Kind.REDUCESCATTER, name, [array], [result], set_id, op=op)
    return result


def allgather(
    array: np.ndarray[Any, Any], name: str | None, process_set: ProcessSet = global_process_set
) -> np.ndarray[Any, Any]:
    """Return the arrays of all ranks concatenated along dimension 0, the only one in which shapes may differ."""
    array = np.asarray(array, order="C")
    (output,) = _run(Kind.ALLGATHER, name, [array], [], registered_id(process_set))
    result: np.ndarray[Any, Any] = np.frombuffer(output.memory, array.dtype).reshape(output.shape).copy()
    return result


def broadcast(
    arrays: Sequence[np.ndarray[Any, Any]],
    root_rank: int,
    name: str | None,
    process_set: ProcessSet = global_process_set,
) -> list[np.ndarray[Any, Any]]:
    """Return the arrays of one rank, in one operation; dtypes and shapes must be the same on all ranks."""
    results = [np.array(array, order="C") for array in arrays]
    root_rank = integer(root_rank, "root_rank", _label(Kind.BROADCAST, name))
    if results:
        _run(Kind.BROADCAST, name, results, results, registered_id(process_set), root_rank=root_rank)
    return results
