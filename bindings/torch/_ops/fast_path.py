"""The fast path of an allreduce in place that is repeated with a row-major CPU tensor of the same dtype and shape.

An asynchronous operation on up to `ops.MAX_COPIED_BYTES` works on a copy, so changes of the tensor do not reach the
engine: a copy takes less time than a loan (`loan`). The thread that waits for the operation writes the result to the
tensor. A synchronous operation works on the tensor's own memory. Either consists of two C calls (`native_calls`), which
need PyTorch's C functions for other libraries. PyTorch has them from 2.10 on; before that there is no fast path.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from horovodlike._engine import ops
from horovodlike._engine.ops import Request
from horovodlike.torch._ops import native_calls
from horovodlike.torch._ops.loan import put
from horovodlike.torch._ops.tensor import DTYPES


@dataclass(slots=True)  # attributes are faster to read than a named tuple's
class FastPath:
    """The C calls for tensors that fit a request."""

    # Enqueues a tensor, and writes the handle and the storage that keeps its memory to a list of two. Returns the
    # handle; or 0, without any effect, if the tensor does not fit the request or the engine refuses it.
    enqueue: Callable[[torch.Tensor, list[Any]], int]
    # Consumes a handle, and returns the status of its operation; if that is HVL_OK, the tensor has the result. Returns
    # HVL_IN_PROGRESS if the operation is not complete, or -1 if the tensor does not fit the request; then the handle is
    # not consumed.
    take: Callable[[int, torch.Tensor], int]
    request: Request
    dtype: torch.dtype
    shape: torch.Size


# The tensor, its fast path, and the storage that the engine uses; None if the engine uses a copy.
Operation: TypeAlias = tuple[torch.Tensor, FastPath, torch.UntypedStorage | None]
in_flight: dict[int, Operation] = {}  # by handle


def _use_torch() -> bool:
    """Give PyTorch's functions to `native_calls`; return False if this PyTorch lacks them."""
    exchange_api = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    is_mode_enabled = getattr(torch._C, "_is_torch_function_mode_enabled", None)
    if exchange_api is None or is_mode_enabled is None:
        return False
    tensor = torch.empty(0, device="cpu")
    storage = tensor.untyped_storage()
    functions = tensor.is_neg, tensor.untyped_storage, storage.nbytes, storage.data_ptr, is_mode_enabled
    try:
        native_calls.use_torch(torch.Tensor, torch.nn.Parameter, exchange_api, *functions)
    except (TypeError, ValueError):  # another version of DLPack, or functions that are not PyTorch's
        return False
    return True


_IS_POSSIBLE = _use_torch()
_OF_DTYPE = {dtype: torch.empty(0, dtype=dtype, device="cpu") for dtype in DTYPES}


def context(request: Request, dtype: torch.dtype, shape: torch.Size, memory_format: torch.memory_format) -> object:
    """Return a description of a request's CPU tensors for `native_calls`; None if there is no fast path."""
    if not _IS_POSSIBLE:
        return None
    strides = torch.empty(shape, device="meta", memory_format=memory_format).stride()
    try:
        return native_calls.context(request, request.address, _OF_DTYPE[dtype], tuple(shape), strides)
    except TypeError:  # the DLPack of this PyTorch does not know the dtype
        return None


def fast_paths(
    request: Request, dtype: torch.dtype, shape: torch.Size, num_bytes: int
) -> tuple[FastPath | None, FastPath | None]:
    """Return the asynchronous and the synchronous fast path of row-major tensors; None if there is none."""
    described = context(request, dtype, shape, torch.contiguous_format)
    if described is None or num_bytes == 0:
        return None, None
    calls = native_calls.calls(described)
    copied = FastPath(*calls[:2], request, dtype, shape) if num_bytes <= ops.MAX_COPIED_BYTES else None
    return copied, FastPath(*calls[2:], request, dtype, shape)


def wait(handle: int, operation: Operation, status: int) -> torch.Tensor | None:
    """Wait for an operation found in `in_flight`, and return its tensor with the result.

    Args:
        handle: The operation's handle.
        operation: The operation, from `in_flight`.
        status: The status that `take` has returned for it.

    Returns:
        The tensor, or None if another thread waits for the operation, or has waited for it.

    Raises:
        HorovodInternalError: The operation failed.
        ValueError: The operation failed, or the tensor was resized meanwhile.
    """
    tensor, by, _ = operation
    result = None
    try:
        if in_flight.pop(handle, None) is None:
            return None
        while status == ops.IN_PROGRESS:
            ops.wait_until_complete(handle)
            status = by.take(handle, tensor)
        if status >= 0:
            ops.check(status)
        else:
            ops.wait_until_complete(handle)
            result = torch.empty(by.shape, dtype=by.dtype, device="cpu")
            ops.take_copy(handle, result.data_ptr())
    except BaseException as error:
        if ops.is_known(handle):  # a signal handler has raised: the handle can be waited for again
            in_flight[handle] = operation
        elif isinstance(error, KeyError):  # another thread has consumed the handle meanwhile
            return None
        raise
    if result is not None:
        put(result, tensor, by.request.name)
    return tensor


def forget_all() -> set[int]:
    """Forget all operations, and return their handles."""
    handles = set(in_flight)
    for handle in handles:
        in_flight.pop(handle, None)
        ops.forget(handle)
    return handles
