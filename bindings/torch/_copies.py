"""Small tensors in flight, of which the engine has copies: nothing that is done to the tensors reaches the engine.

For a tensor of up to `ops.MAX_COPIED_BYTES` a copy takes less time than a loan (`_loan`). The result is written to the
tensor when the operation is waited for, by the thread that waits.
"""

from __future__ import annotations

from typing import TypeAlias

import torch

from horovodlike import ops
from horovodlike.ops import Request
from horovodlike.torch._loan import put

# The tensor, its address, bytes, dtype and shape when it was copied, and what it was copied for.
Copied: TypeAlias = tuple[torch.Tensor, int, int, torch.dtype, torch.Size, Request]

in_flight: dict[int, Copied] = {}  # by handle


def wait(handle: int, copied: Copied) -> torch.Tensor | None:
    """Wait for an operation found in `in_flight`, and return its tensor with the result; None if another one waits.

    Raises:
        HorovodInternalError: The operation failed.
        ValueError: The operation failed, or the tensor was resized meanwhile.
    """
    tensor, address, num_bytes, dtype, shape, request = copied
    try:
        if in_flight.pop(handle, None) is None:  # another thread waits for it
            return None
        while True:  # the tensor may be changed during each wait
            memory = tensor.untyped_storage()  # kept while it is written to
            end = tensor.storage_offset() * tensor.element_size() + num_bytes
            if tensor.data_ptr() == address and memory.nbytes() >= end:
                if ops.take_copy(handle, address):
                    return tensor
            else:
                result = torch.empty(shape, dtype=dtype)
                if ops.take_copy(handle, result.data_ptr()):
                    put(result, tensor, request.name)
                    return tensor
            del memory
            ops.wait_until_complete(handle)
    except BaseException:
        if ops.is_known(handle):  # a signal handler has raised: the handle can be waited for again
            in_flight[handle] = copied
        raise


def forget_all() -> set[int]:
    """Let go of all operations, and return their handles."""
    handles = set(in_flight)
    for handle in handles:
        in_flight.pop(handle, None)
        ops.forget(handle)
    return handles
