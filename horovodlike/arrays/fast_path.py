"""The fast path of a named allreduce of one NumPy array that is repeated with an array of the same dtype and shape.

To build or look up a request takes longer than the engine's own part of a small operation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from horovodlike._engine import ops
from horovodlike._engine.native import ffi
from horovodlike._engine.ops import MAX_COPIED_BYTES, Request
from horovodlike.arrays import operations
from horovodlike.arrays.memory import HostArray
from horovodlike.arrays.operations import CALLS_KEPT, ArrayCall
from horovodlike.process_set import ProcessSet

_ADDRESS = ffi.typeof("uintptr_t")


@dataclass(slots=True)  # attributes are faster to read than a named tuple's
class _Last:
    """The last allreduce under a name, with the arguments that its caller gave."""

    op: object
    prescale: float
    postscale: float
    process_set: ProcessSet
    set_id: int | None
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    request: Request


_last: dict[str, _Last] = {}


def remember(call: ArrayCall, op: object, process_set: ProcessSet, array: Any) -> None:
    """Remember a call that was made with this array for `allreduce_again`."""
    if call.name is None or type(array) is not np.ndarray or not array.flags.carray:
        return
    if len(_last) >= CALLS_KEPT:
        _last.clear()
    request = operations.request_of(call, HostArray(array, array, ops.DType[array.dtype.name]))
    _last[call.name] = _Last(
        op, call.prescale, call.postscale, process_set, call.process_set, array.dtype, array.shape, request
    )


def allreduce_again(
    name: Any, op: Any, prescale: Any, postscale: Any, process_set: Any, array: Any, in_place: bool
) -> Any:
    """Carry out an allreduce if it is the same as the last one of this name; return the array with the result.

    Returns None, without any effect, if there is no fast path.

    Args:
        name: As the caller gave it, like all other arguments; only checked arguments are remembered.
        op: Must be the same object as last: True and the sums of other libraries equal integers that mean another op.
        prescale: Must be a float, equal to the last one.
        postscale: Must be a float, equal to the last one.
        process_set: Must be the same object as last, with the same id.
        array: The array to reduce.
        in_place: True if the result replaces the array. If not, only a small array has a fast path: it is copied.
    """
    last = _last.get(name) if type(name) is str else None
    if (
        last is None
        or last.op is not op
        or type(array) is not np.ndarray
        or array.dtype is not last.dtype
        or array.shape != last.shape
        or last.process_set is not process_set
        or last.set_id != process_set.process_set_id
        or not type(prescale) is type(postscale) is float
        or last.prescale != prescale
        or last.postscale != postscale
    ):
        return None
    if not in_place:
        if array.nbytes > MAX_COPIED_BYTES or not array.flags.c_contiguous:
            return None
        array = array.copy()
    try:
        memory = ffi.from_buffer(array, require_writable=True)
    except (BufferError, ValueError):  # it is read-only or not row by row, or its dtype has no buffers
        return None
    address = int(ffi.cast(_ADDRESS, memory))
    if address % array.itemsize:
        return None
    try:
        handle = last.request.enqueue_inplace(address)
    except BaseException:
        last.request.keep_if_enqueued(memory)
        raise
    try:
        ops.wait_done(handle)
    except BaseException:
        ops.give_up(handle, memory)
        raise
    return array
