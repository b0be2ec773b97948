"""From torch tensors to requests and back: what all operations of `mpi_ops` have in common.

An operation in flight borrows the memory of its tensors. Until it is waited for, this module holds references to
them, whatever the caller does with his own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from horovodlike import basics, ops
from horovodlike.errors import HorovodInternalError
from horovodlike.ops import Kind, Output, Request
from horovodlike.torch._tensor import DTYPES, check, engine_shape, from_output, in_memory
from torch.autograd.graph import increment_version

Result = torch.Tensor | tuple[torch.Tensor, ...] | None
Key = tuple[object, ...]

# Building a request costs several microseconds. A training loop uses the same names again and again, so the most
# recently used requests are kept. One that is being enqueued is not in the table: no two threads can share it.
REQUESTS_KEPT = 2048
_requests: dict[Key, Request] = {}

_unnamed = itertools.count()


class Call(NamedTuple):
    """What an operation is asked to do, apart from its tensors. Equal on all ranks."""

    kind: Kind
    name: str
    op: int = ops.ReduceOp.SUM
    root_rank: int = -1
    prescale: float = 1.0
    postscale: float = 1.0


class _InFlight(NamedTuple):
    borrowed: Sequence[torch.Tensor]
    finish: Callable[[list[Output]], Result]


_in_flight: dict[int, _InFlight] = {}
_abandoned: list[tuple[Sequence[int], Sequence[object]]] = []


def full_name(operation: str, name: str | None) -> str:
    """Return the name that the ranks match an operation by.

    Unnamed operations are counted, so every rank has to call them in the same order.
    """
    return f"{operation}.{name}" if name is not None else f"{operation}.noname.{next(_unnamed)}"


def reset_names() -> None:
    """Start counting unnamed operations from 0, as ranks that are new in a job do."""
    global _unnamed
    _unnamed = itertools.count()


basics.on_init(lambda _: reset_names())


def _take_request(call: Call, tensors: Sequence[torch.Tensor]) -> tuple[Key, Request]:
    key: Key = (call, *((tensor.dtype, tensor.shape) for tensor in tensors))
    request = _requests.pop(key, None)
    if request is None:
        request = build_request(call, tensors)
    return key, request


def build_request(call: Call, tensors: Sequence[torch.Tensor]) -> Request:
    """Return a request for tensors like these."""
    described = [(DTYPES[tensor.dtype], engine_shape(tensor.shape)) for tensor in tensors]
    kind, name, op, root_rank, prescale, postscale = call
    return Request(kind, name, described, op=op, root_rank=root_rank, prescale=prescale, postscale=postscale)


def _enqueue(call: Call, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> int:
    key, request = _take_request(call, inputs)
    handle = request.enqueue([t.data_ptr() for t in inputs], [t.data_ptr() for t in outputs])
    _requests[key] = request
    if len(_requests) > REQUESTS_KEPT:
        _requests.pop(next(iter(_requests)), None)
    return handle


def start_in_place(call: Call, tensors: Sequence[torch.Tensor], single: bool) -> int:
    """Enqueue an operation whose result replaces the tensors, and return its handle.

    A tensor that is not contiguous, or not in CPU memory, is copied, and the result copied back by `synchronize`.
    """
    for tensor in tensors:
        check(tensor, call.name)
    borrowed = [in_memory(tensor) for tensor in tensors]

    def finish(_: list[Output]) -> Result:
        with torch.no_grad():
            for tensor, copy in zip(tensors, borrowed, strict=True):
                if copy is not tensor:
                    tensor.copy_(copy)
        return tensors[0] if single else tuple(tensors)

    handle = _enqueue(call, borrowed, borrowed)
    # Autograd then refuses to use a tensor that was saved for the backward pass and has been overwritten.
    for tensor in tensors:
        if not tensor.is_inference():
            increment_version(tensor)
    _in_flight[handle] = _InFlight([*borrowed, *tensors], finish)
    return handle


def run_again_in_place(call: Call, tensor: torch.Tensor) -> bool:
    """Run an operation of one tensor in place if the like of it has run before and nothing needs to be copied.

    The short way of a small synchronous operation. Returns False, having done nothing, where it does not apply.
    """
    if not (tensor.layout is torch.strided and tensor.is_cpu and tensor.is_contiguous()) or tensor.is_neg():
        return False
    key = (call, (tensor.dtype, tensor.shape))
    request = _requests.pop(key, None)
    if request is None:
        return False
    handle = request.enqueue_inplace(tensor.data_ptr())
    _requests[key] = request
    try:
        ops.wait(handle)
    except BaseException:
        abandon([handle], [tensor])
        raise
    if not tensor.is_inference():
        increment_version(tensor)
    return True


def start_to_new(call: Call, tensors: Sequence[torch.Tensor], single: bool) -> int:
    """Enqueue an operation whose result has the shapes of the tensors but memory of its own; return its handle."""
    for tensor in tensors:
        check(tensor, call.name)
    inputs = [in_memory(tensor) for tensor in tensors]
    outputs = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in tensors]

    def finish(_: list[Output]) -> Result:
        results = tuple(output.to(tensor.device) for output, tensor in zip(outputs, tensors, strict=True))
        return results[0] if single else results

    handle = _enqueue(call, inputs, outputs)
    _in_flight[handle] = _InFlight([*inputs, *outputs], finish)
    return handle


def start_allgather(call: Call, tensors: Sequence[torch.Tensor], single: bool) -> int:
    """Enqueue an allgather, for whose results the engine finds the memory; return its handle."""
    for tensor in tensors:
        check(tensor, call.name)
    inputs = [in_memory(tensor) for tensor in tensors]

    def finish(outputs: list[Output]) -> Result:
        results = tuple(from_output(output, tensor) for output, tensor in zip(outputs, tensors, strict=True))
        return results[0] if single else results

    handle = _enqueue(call, inputs, inputs)
    _in_flight[handle] = _InFlight(inputs, finish)
    return handle


def synchronize(handle: int) -> Result:
    """Wait for an operation and return its result; None for a handle that is unknown or was synchronized before.

    Raises:
        HorovodInternalError: The operation failed: the ranks disagree about it, or the job is broken or shut down.
        ValueError: The operation cannot be carried out with these arguments.
    """
    operation = _in_flight.pop(handle, None)
    if operation is None:
        return None
    try:
        outputs = ops.wait(handle)
    except BaseException:
        if is_in_flight(handle):
            # A signal handler has raised. The engine still uses the memory, and the handle can be waited for again.
            _in_flight[handle] = operation
        raise
    return operation.finish(outputs)


def poll(handle: int) -> bool:
    """Return whether `synchronize` would return at once.

    Raises:
        ValueError: The handle is unknown, or was synchronized before.
    """
    if handle not in _in_flight:
        raise ValueError(f"handle {handle} does not belong to an operation in flight")
    return ops.poll(handle)


def is_in_flight(handle: int) -> bool:
    """Whether the engine may still use the memory of an operation."""
    try:
        return not ops.poll(handle)
    except (KeyError, ValueError, HorovodInternalError):
        return False  # waited for already, or of a job that has ended


def abandon(handles: Sequence[int], borrowed: Sequence[object]) -> None:
    """After an error, keep what holds the memory of operations alive for as long as one of them is in flight."""
    _abandoned[:] = [entry for entry in _abandoned if any(map(is_in_flight, entry[0]))]
    if any(map(is_in_flight, handles)):
        _abandoned.append((handles, borrowed))
