"""Collective operations on memory: the base of the framework bindings.

A binding describes an operation once (:class:`Request`), enqueues it with addresses, and waits for the handle. All
functions may be called from any thread. Memory that is handed to :meth:`Request.enqueue` is read and written by the
engine until :func:`wait` returns: the caller keeps it alive and does not access it. Memory of a GPU is in use until the
GPU has done the request's work: it is free after :func:`wait`, and for a stream's later work after `wait_on_stream`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from horovodlike._engine.native import ffi, lib
from horovodlike._engine.requests import *  # bindings import these names from this module
from horovodlike._engine.types import *
from horovodlike.errors import HorovodInternalError

# By name and `what`: handles of interrupted requests, which the next equal call of `carry_out_once` resumes.
_interrupted: dict[tuple[str, object], int] = {}


def has_ended() -> HorovodInternalError | None:
    """Return the error that every request receives after the job has broken or was shut down; None before that.

    For bindings of frameworks that turn the engine's errors into their own. None without ``init()``, too.
    """
    status = lib.hvl_job_status()
    error = ERRORS.get(status)
    if error is None or not issubclass(error, HorovodInternalError):
        return None
    return error(text_of(lib.hvl_last_error()))


def last_handle() -> int:
    """Return the handle of the last request or message of this thread; 0 if it was refused."""
    handle: int = lib.hvl_last_handle()
    return handle


def is_known(handle: int) -> bool:
    """Return whether a handle can be waited for."""
    return bool(lib.hvl_poll(handle) >= 0)


def carry_out(request: Request, inputs: Sequence[int] = (), memory: object = None) -> list[Output]:
    """Enqueue a request, such as a barrier, and wait for it. If the wait is interrupted, the request counts as made.

    Args:
        request: The request. The engine allocates its outputs, if it has any.
        inputs: Address of each tensor's memory.
        memory: An object that keeps this memory alive.

    Raises:
        MismatchError: The ranks do not agree about the request.
        HorovodInternalError: The job is broken or shut down.
    """
    try:
        handle = request.enqueue(inputs, [])
    except BaseException:
        request.keep_if_enqueued(memory)
        raise
    try:
        return wait(handle)
    except BaseException:
        give_up(handle, memory)
        raise


def allgather_bytes(name: str, data: bytes, process_set: int = 0) -> memoryview:
    """Return the data of all ranks of a process set, one after the other; what comes is not authenticated.

    Raises:
        MismatchError: The ranks do not agree about the request.
        HorovodInternalError: The job is broken or shut down.
        ValueError: Not initialised.
    """
    memory = ffi.from_buffer(data)
    request = Request(Kind.ALLGATHER, name, [(DType["uint8"], (len(data),))], process_set=process_set)
    (output,) = carry_out(request, [int(ffi.cast("uintptr_t", memory))], memory)
    return memoryview(output.memory)


def carry_out_once(request: Request, what: object) -> list[Output]:
    """Do as :func:`carry_out`, but resume the request if an equal call was interrupted: its result is not lost.

    Args:
        request: The request.
        what: Distinguishes the request from others of its name.
    """
    handle = _interrupted.pop((request.name, what), 0)
    if not is_known(handle):  # none, or one of a previous job
        handle = request.enqueue([], [])
    try:
        return wait(handle)
    except BaseException:
        _interrupted[request.name, what] = handle
        raise


def forget_interrupted() -> None:
    """Drop the interrupted requests that no call has resumed: the job is over."""
    while _interrupted:
        forget(_interrupted.popitem()[1])


def poll(handle: int) -> bool:
    """Return True if the request is complete; the handle stays valid.

    Raises:
        KeyError: The handle is unknown.
    """
    hand_over()
    return is_complete(handle)


def is_complete(handle: int) -> bool:
    """Do as :func:`poll`, but hand nothing over; for a caller that holds a lock which that takes."""
    state: int = lib.hvl_poll(handle)
    if state < 0:
        check(-state)
    return state == 1


def wait(handle: int) -> list[Output]:
    """Block until the request is complete, and consume the handle. Signal handlers run meanwhile.

    Args:
        handle: From :meth:`Request.enqueue`.

    Returns:
        The outputs that the engine allocated. Allgather, gather: one per tensor. Alltoall: per tensor the rows, and how
        many came from each member. Join: the last rank; addition of a process set: its id; both as an int64.

    Raises:
        MismatchError: The ranks do not agree about the request.
        HorovodInternalError: The job is broken or shut down.
        KeyError: The handle is unknown.
    """
    wait_until_complete(handle)  # first, so that a signal handler that raises meanwhile does not lose the result
    outputs = ffi.new("hvl_output **")
    count = ffi.new("int32_t *")
    try:
        status = until_complete(lib.hvl_wait, handle, WAIT_SLICE_SECONDS, outputs, count)
    finally:  # take over the outputs, and so free them, also if a signal handler raises after hvl_wait()
        array = ffi.gc(outputs[0], lib.hvl_free) if count[0] else ()
        adopted = [_adopt(array[index]) for index in range(count[0])]
    check(status)
    return adopted


def wait_done(handle: int) -> None:
    """Do as :func:`wait`, for a request of which the engine allocates no outputs, at a fraction of the cost."""
    status = lib.hvl_try_wait(handle)
    if status == lib.HVL_IN_PROGRESS:
        status = until_complete(lib.hvl_wait, handle, WAIT_SLICE_SECONDS, ffi.NULL, ffi.NULL)
    if status:
        check(status)


def wait_until_complete(handle: int) -> None:
    """Block until the request is complete, failed or not; the handle stays valid. Signal handlers run meanwhile."""
    status = until_complete(lib.hvl_wait_until_complete, handle, WAIT_SLICE_SECONDS)
    if status:
        check(status)


def wait_within(handle: int, seconds: float) -> bool:
    """Do as :func:`wait_until_complete`, but for ``seconds`` at most; return whether the request is complete."""
    deadline = time.monotonic() + seconds
    while True:
        hand_over()
        left = deadline - time.monotonic()
        status = lib.hvl_wait_until_complete(handle, min(WAIT_SLICE_SECONDS, max(0.0, left)))
        raise_interruption()
        if status == 0:
            return True
        if status != IN_PROGRESS:
            check(status)
        if left <= 0:
            return False


def take_copy(handle: int, address: int) -> None:
    """Write the result of a complete request, made on the engine's copy of a tensor, to memory; consume the handle.

    Raises:
        HorovodInternalError: The request failed.
        KeyError: The handle is unknown.
    """
    check(lib.hvl_take_copy(handle, address))


def wait_on_stream(handle: int, stream: GpuStream) -> None:
    """Block until a request on a GPU is complete, consume the handle, and have a stream wait for the result.

    The host does not wait for the GPU. Work that the stream is given from now on runs after the result is there.

    Raises:
        MismatchError: The ranks do not agree about the request.
        HorovodInternalError: The job is broken or shut down.
        KeyError: The handle is unknown.
    """
    pointer = ffi.cast("void *", stream.pointer)
    check(until_complete(lib.hvl_wait_on_stream, handle, WAIT_SLICE_SECONDS, ffi.NULL, ffi.NULL, pointer))


def _adopt(native: Any) -> Output:
    memory = ffi.gc(native.data, lib.hvl_free, native.num_bytes)
    return Output(ffi.buffer(memory, native.num_bytes), shape_of(native), DType(native.dtype))


def wait_all(handles: Sequence[int], stream: GpuStream | None = None) -> None:
    """Block until all requests are complete, and consume their handles. Outputs that the engine allocated are dropped.

    Args:
        handles: The handles, of tensors on the CPU and on a GPU.
        stream: The stream that waits for results on the GPU, as by :func:`wait_on_stream`. None: the host waits.

    Raises:
        MismatchError: The ranks do not agree about a request; the first failure, in the order given, is raised.
        HorovodInternalError: The job is broken or shut down.
    """
    native = ffi.new("int64_t[]", handles)
    if stream is None:
        check(until_complete(lib.hvl_wait_all, native, len(handles), WAIT_SLICE_SECONDS))
        return
    pointer = ffi.cast("void *", stream.pointer)
    check(until_complete(lib.hvl_wait_all_on_stream, native, len(handles), WAIT_SLICE_SECONDS, pointer))


def counters() -> dict[str, int]:
    """Return the counters of this rank's engine since ``init()``; all zero if it does not run.

    Returns:
        The fields of ``hvl_counters``; :func:`horovodlike.metrics` presents them.
    """
    native = ffi.new("hvl_counters *")
    lib.hvl_get_counters(native)
    return {name: getattr(native, name) for name, _ in ffi.typeof("hvl_counters").fields}
