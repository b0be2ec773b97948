"""Small tensors in flight, of which the engine has copies: nothing that is done to the tensors reaches the engine.

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
in_place: dict[int, torch.Tensor] = {}  # by handle: those that have their results, and have not been waited for
_lock = threading.RLock()  # held by a thread that takes handles which another one may wait for
_together = 1  # how many are likely to be complete

os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


def wait(handle: int) -> torch.Tensor | None:
    """Wait for an operation, and return its tensor with the result; None if the handle is not in flight here.

    Raises:
        HorovodInternalError: The operation failed.
        ValueError: The operation failed, or the tensor was resized meanwhile.
    """
    if handle in in_flight:
        ops.wait_until_complete(handle)  # before looking at the tensor: what runs meanwhile may change it
    with _lock:
        done, copied = in_place.pop(handle, None), in_flight.pop(handle, None)
        if copied is None:
            return done
        tensor, address, num_bytes, dtype, shape, request = copied
        if _are_where_they_were((tensor,), (address,), (num_bytes,)):
            ops.take_copy(handle, address)
            mark_overwritten([tensor])
        else:
            result = torch.empty(shape, dtype=dtype)
            ops.take_copy(handle, result.data_ptr())
            put(result, tensor, request.name)
        _put_in_place()
    return tensor


def forget_all() -> set[int]:
    """Let go of all operations, and return their handles."""
    with _lock:
        handles = {*in_flight, *in_place}
        for handle in list(in_flight):
            ops.forget(handle)
        in_flight.clear()
        in_place.clear()
    return handles


def _are_where_they_were(tensors: Sequence[torch.Tensor], before: Sequence[int], num_bytes: Sequence[int]) -> bool:
    return tuple(map(torch.Tensor.data_ptr, tensors)) == before and have_memory(tensors, num_bytes)


def _put_in_place() -> None:
    """Put the results of the oldest operations in place, as far as they are complete."""
    global _together
    oldest = list(islice(in_flight.items(), _together))
    if not oldest:
        return
    handles, copied = zip(*oldest, strict=True)
    tensors, addresses, num_bytes, *_ = zip(*copied, strict=True)
    taken = ops.take_copies(handles) if _are_where_they_were(tensors, addresses, num_bytes) else [False] * len(handles)
    if not all(taken):
        handles, tensors = tuple(compress(handles, taken)), tuple(compress(tensors, taken))
    in_place.update(zip(handles, tensors, strict=True))
    for handle in handles:  # others may be added meanwhile
        del in_flight[handle]
    mark_overwritten(tensors)
    _together = min(2 * _together, _MOST_TOGETHER) if len(handles) == len(oldest) else max(1, len(handles))
