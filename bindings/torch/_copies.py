"""Small tensors in flight, of which the engine has copies: what is done to the tensors meanwhile does not disturb it.

For a tensor of up to `ops.MAX_COPIED_BYTES` a copy takes less time than a loan (`_loan`). The results of operations
that were complete together are put in place together, when the first of them is waited for.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from itertools import compress, islice
from typing import TypeAlias

import torch

from horovodlike import ops
from horovodlike.ops import Request
from horovodlike.torch._loan import put
from horovodlike.torch._tensor import have_memory, mark_overwritten

_MOST_TOGETHER = 256

# The tensor, its address, bytes, dtype and shape when it was copied, and what it was copied for.
Copied: TypeAlias = tuple[torch.Tensor, int, int, torch.dtype, torch.Size, Request]

in_flight: dict[int, Copied] = {}  # by handle
in_place: dict[int, torch.Tensor] = {}  # by handle: those that have their results, for which nobody has waited
_lock = threading.Lock()  # held by a thread that takes handles which another one may wait for
_together = 1  # how many are likely to be complete

os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


def wait(handle: int) -> torch.Tensor | None:
    """Wait for an operation, and return its tensor with the result; None if the handle is not in flight here.

    Raises:
        HorovodInternalError: The operation failed.
        ValueError: The operation failed, or the tensor was resized meanwhile.
    """
    with _lock:
        done, copied = in_place.pop(handle, None), in_flight.pop(handle, None)
    if copied is None:
        return done
    tensor, address, num_bytes, dtype, shape, request = copied
    try:
        if _are_where_they_were((tensor,), (address,), (num_bytes,)):
            ops.wait_copied(handle, address)
            mark_overwritten([tensor])
        else:
            result = torch.empty(shape, dtype=dtype)
            ops.wait_copied(handle, result.data_ptr())
            put(result, tensor, request.name)
    except BaseException:
        if ops.is_known(handle):  # a signal handler has raised: the handle can be waited for again
            in_flight[handle] = copied
        raise
    if in_flight:
        _put_in_place()
    return tensor


def forget_all() -> set[int]:
    """Let go of all operations, and return their handles."""
    with _lock:
        handles = {*in_flight, *in_place}
        in_flight.clear()
        in_place.clear()
    return handles


def _are_where_they_were(tensors: Sequence[torch.Tensor], before: Sequence[int], num_bytes: Sequence[int]) -> bool:
    return tuple(map(torch.Tensor.data_ptr, tensors)) == before and have_memory(tensors, num_bytes)


def _put_in_place() -> None:
    """Put the results of the oldest operations in place, as far as they are complete."""
    global _together
    with _lock:
        handles, oldest = zip(*islice(in_flight.items(), _together), strict=True)
        tensors, addresses, num_bytes, *_ = zip(*oldest, strict=True)
        if _are_where_they_were(tensors, addresses, num_bytes):
            taken = ops.take_copied(handles)
        else:
            taken = [False] * len(handles)
        if all(taken) and len(taken) == len(in_flight):
            in_place.update(zip(handles, tensors, strict=True))
            in_flight.clear()
        else:
            tensors = tuple(compress(tensors, taken))
            for handle, tensor in zip(compress(handles, taken), tensors, strict=True):
                in_place[handle] = tensor
                del in_flight[handle]
    mark_overwritten(tensors)
    _together = min(2 * _together, _MOST_TOGETHER) if all(taken) else max(1, len(tensors))
