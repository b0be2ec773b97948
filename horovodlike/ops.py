"""Collective operations on memory: what the framework bindings are built on.

A binding describes an operation once (:class:`Request`), enqueues it with addresses, and waits for the handle. All
functions may be called from any thread. Memory that is handed to :meth:`Request.enqueue` is read and written by the
engine until :func:`wait` returns: the caller keeps it alive and leaves it alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from horovodlike._native import ffi, lib
from horovodlike.errors import HorovodInternalError, JobBrokenError, MismatchError, NotInitializedError, ShutDownError

__all__ = [
    "DType",
    "Kind",
    "Output",
    "ReduceOp",
    "Request",
    "RequestList",
    "before_waiting",
    "counters",
    "forget",
    "hand_over",
    "has_ended",
    "is_in_flight",
    "poll",
    "wait",
    "wait_all",
    "wait_done",
]

_before_waiting: list[Callable[[], None]] = []

# A wait without end still lets Python run its signal handlers this often.
_WAIT_SLICE_SECONDS = 1.0


class Kind(IntEnum):
    """What a request does."""

    ALLREDUCE = lib.HVL_ALLREDUCE
    ALLGATHER = lib.HVL_ALLGATHER
    BROADCAST = lib.HVL_BROADCAST
    BARRIER = lib.HVL_BARRIER
    REDUCESCATTER = lib.HVL_REDUCESCATTER
    ALLTOALL = lib.HVL_ALLTOALL
    JOIN = lib.HVL_JOIN
    ADD_PROCESS_SET = lib.HVL_ADD_PROCESS_SET
    REMOVE_PROCESS_SET = lib.HVL_REMOVE_PROCESS_SET


# Of which the caller need not provide the outputs: the engine allocates them, or there are none.
_WITHOUT_OUTPUTS = frozenset(Kind) - {Kind.ALLREDUCE, Kind.BROADCAST, Kind.REDUCESCATTER}


class ReduceOp(IntEnum):
    """How an allreduce combines elements; the values are Horovod's."""

    AVERAGE = lib.HVL_AVERAGE
    SUM = lib.HVL_SUM
    ADASUM = lib.HVL_ADASUM
    MIN = lib.HVL_MIN
    MAX = lib.HVL_MAX
    PRODUCT = lib.HVL_PRODUCT


class DType(IntEnum):
    """Element types that the engine knows."""

    UINT8 = lib.HVL_UINT8
    INT8 = lib.HVL_INT8
    UINT16 = lib.HVL_UINT16
    INT16 = lib.HVL_INT16
    INT32 = lib.HVL_INT32
    INT64 = lib.HVL_INT64
    FLOAT16 = lib.HVL_FLOAT16
    FLOAT32 = lib.HVL_FLOAT32
    FLOAT64 = lib.HVL_FLOAT64
    BOOL = lib.HVL_BOOL
    BFLOAT16 = lib.HVL_BFLOAT16


@dataclass(frozen=True)
class Output:
    """A tensor that the engine allocated.

    Attributes:
        memory: An object with the buffer protocol, which keeps the memory alive.
        shape: Extents by dimension.
        dtype: The element type.
    """

    memory: Any
    shape: tuple[int, ...]
    dtype: DType


_ERRORS: dict[int, type[Exception]] = {
    lib.HVL_INVALID_ARGUMENT: ValueError,
    lib.HVL_MISMATCH: MismatchError,
    lib.HVL_NOT_INITIALIZED: NotInitializedError,
    lib.HVL_JOB_BROKEN: JobBrokenError,
    lib.HVL_SHUT_DOWN: ShutDownError,
    lib.HVL_RESOURCES: MemoryError,
    lib.HVL_UNKNOWN_HANDLE: KeyError,
}


def text_of(native: Any) -> str:
    """Return a C string of the engine's."""
    text: str = ffi.string(native).decode(errors="replace")
    return text


def check(status: int) -> None:
    """Raise the exception that stands for a status of the engine's, unless it is HVL_OK.

    Raises:
        ValueError: The call is wrong on this rank alone (also: not initialised).
        MismatchError: The ranks do not agree; only this request failed.
        JobBrokenError: A rank is lost or stalled.
        ShutDownError: A rank has shut the job down.
        KeyError: The handle is unknown.
    """
    if status != 0:
        raise _ERRORS.get(status, HorovodInternalError)(text_of(lib.hvl_last_error()))


class Request:
    """One collective operation, described once and enqueued any number of times, one at a time in flight.

    Args:
        kind: What to do.
        name: Equal on all ranks; unique among the requests in flight of this rank.
        tensors: Element type and shape of each tensor. More than one make a group: it is executed as a whole or not
            at all, and may mix types and shapes. A barrier, a join and changes of process sets have none. Allgather,
            alltoall: dimension 0 may differ between ranks.
        op: How an allreduce or a reducescatter combines elements.
        root_rank: The rank whose data a broadcast sends.
        process_set: Id of the process set.
        device: 0 for memory of the CPU.
        prescale: Factor applied to each rank's elements before they are reduced.
        postscale: Factor applied to the result of a reduction.
        arguments: Alltoall: of each tensor, the rows for each member of the process set. Addition of a process set: its
            ranks, ascending. Removal of one: its id. Else none.

    Raises:
        ValueError: What can be seen to be wrong without the other ranks.
    """

    __slots__ = ("_native", "_num_tensors", "kind", "name")

    def __init__(
        self,
        kind: Kind,
        name: str,
        tensors: Sequence[tuple[DType, Sequence[int]]],
        *,
        op: int = ReduceOp.SUM,
        root_rank: int = -1,
        process_set: int = 0,
        device: int = 0,
        prescale: float = 1.0,
        postscale: float = 1.0,
        arguments: Sequence[int] = (),
    ) -> None:
        shapes = [ffi.new("int64_t[]", list(shape)) for _, shape in tensors]
        described = ffi.new("hvl_tensor[]", len(tensors))
        for native, (dtype, shape), extents in zip(described, tensors, shapes, strict=True):
            native.shape, native.ndim, native.dtype = extents, len(shape), dtype
        encoded = ffi.new("char[]", name.encode())
        numbers = ffi.new("int64_t[]", list(arguments))
        request = ffi.new(
            "hvl_request *",
            {
                "name": encoded,
                "tensors": described,
                "num_tensors": len(tensors),
                "kind": kind,
                "reduce_op": op,
                "root_rank": root_rank,
                "process_set": process_set,
                "device": device,
                "prescale": prescale,
                "postscale": postscale,
                "arguments": numbers,
                "num_arguments": len(arguments),
            },
        )
        prepared = lib.hvl_prepare(request)
        if prepared == ffi.NULL:
            check(lib.HVL_INVALID_ARGUMENT)
        self._native = ffi.gc(prepared, lib.hvl_release)
        self._num_tensors = len(tensors)
        self.kind = kind
        self.name = name

    def enqueue(self, inputs: Sequence[int], outputs: Sequence[int]) -> int:
        """Hand the tensors' memory to the engine and return at once.

        Args:
            inputs: Address of each tensor's memory.
            outputs: Where each result goes; may equal the input. Empty where the engine allocates them or there are
                none.

        Returns:
            A handle for :func:`wait`, :func:`wait_all` and :func:`poll`.

        Raises:
            ValueError: The name is in flight, or an argument does not fit the job.
            HorovodInternalError: The job is broken or shut down.
        """
        if len(inputs) != self._num_tensors:
            raise ValueError(f"{self.name!r} has {self._num_tensors} tensors, not {len(inputs)}")
        if outputs and len(outputs) != self._num_tensors:
            raise ValueError(f"{self.name!r} has {self._num_tensors} tensors, not {len(outputs)} outputs")
        if not outputs and self.kind not in _WITHOUT_OUTPUTS:
            raise ValueError(f"{self.name!r} needs an output for each of its {self._num_tensors} tensors")
        addresses = ffi.new("uintptr_t[]", [*inputs, *outputs])
        handle: int = lib.hvl_enqueue(self._native, addresses, addresses + self._num_tensors, ffi.NULL)
        if handle < 0:
            check(-handle)
        return handle

    def enqueue_inplace(self, address: int) -> int:
        """As :meth:`enqueue`, for one tensor that is input and output: the quickest way in."""
        handle: int = lib.hvl_enqueue_inplace(self._native, address)
        if handle < 0:
            check(-handle)
        return handle


class RequestList:
    """Requests that are enqueued together, for a fraction of the price of as many calls.

    Args:
        requests: Each of one tensor that is input and output.
    """

    __slots__ = ("_natives", "_requests")

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests = tuple(requests)  # keeps what the array points to
        self._natives = ffi.new("hvl_prepared *[]", [request._native for request in requests])

    def enqueue_inplace(self, addresses: Sequence[int], handles: list[int]) -> None:
        """Do what :meth:`Request.enqueue_inplace` does for each of the requests, in their order.

        Args:
            addresses: The memory of each.
            handles: Their handles are appended, also those of the requests before one that is refused.

        Raises:
            ValueError: A name is in flight, or a request does not fit the job. Those after it are not enqueued.
            HorovodInternalError: The job is broken or shut down.
        """
        count = len(self._requests)
        if len(addresses) != count:
            raise ValueError(f"{count} requests need as many addresses, not {len(addresses)}")
        new_handles = ffi.new("int64_t[]", count)
        status = lib.hvl_enqueue_all(self._natives, ffi.new("uintptr_t[]", addresses), count, new_handles)
        handles += filter(None, ffi.unpack(new_handles, count)) if count else ()
        check(status)


def has_ended() -> HorovodInternalError | None:
    """Return the error that every request gets since the job is broken or shut down; None if it is not.

    For bindings of frameworks that make exceptions of their own of the engine's. None without ``init()``, too.
    """
    status = lib.hvl_job_status()
    error = _ERRORS.get(status)
    if error is None or not issubclass(error, HorovodInternalError):
        return None
    return error(text_of(lib.hvl_last_error()))


def before_waiting(hand_over: Callable[[], None]) -> None:
    """Have ``hand_over`` called before a thread waits for a result, or looks for one.

    For bindings that hold requests back until then, when the engine should get all that is ready: other ranks may need
    it to get to what this thread waits for. It is called by any thread, and often.
    """
    _before_waiting.append(hand_over)


def hand_over() -> None:
    """Do what was asked for with :func:`before_waiting`; for bindings that wait by themselves."""
    for hand_over in _before_waiting:
        hand_over()


def _until_complete(native_wait: Callable[..., int], *arguments: object) -> int:
    status: int = lib.HVL_IN_PROGRESS
    while status == lib.HVL_IN_PROGRESS:
        hand_over()
        status = native_wait(*arguments)
    return status


def is_in_flight(handle: int) -> bool:
    """Whether the engine may still use the memory of a request: not if the handle is unknown or was waited for."""
    return bool(lib.hvl_poll(handle) == 0)


def forget(handle: int) -> None:
    """Consume a handle for which nobody waits, and drop the result. Does nothing if it is in flight, or unknown."""
    lib.hvl_try_wait(handle)


def poll(handle: int) -> bool:
    """True if the request is complete; the handle stays valid.

    Raises:
        KeyError: The handle is unknown.
    """
    hand_over()
    state: int = lib.hvl_poll(handle)
    if state < 0:
        check(-state)
    return state == 1


def wait(handle: int) -> list[Output]:
    """Block until the request is complete, and consume the handle. Signal handlers run meanwhile.

    Args:
        handle: From :meth:`Request.enqueue`.

    Returns:
        What the engine allocated: one output per tensor of an allgather; per tensor of an alltoall the rows and how
        many came from each member; of a join the last rank and of the addition of a process set its id, as an int64
        each.

    Raises:
        MismatchError: The ranks do not agree about the request.
        HorovodInternalError: The job is broken or shut down.
        KeyError: The handle is unknown.
    """
    outputs = ffi.new("hvl_output **")
    count = ffi.new("int32_t *")
    check(_until_complete(lib.hvl_wait, handle, _WAIT_SLICE_SECONDS, outputs, count))
    if count[0] == 0:
        return []
    array = ffi.gc(outputs[0], lib.hvl_free)
    return [_adopt(array[index]) for index in range(count[0])]


def wait_done(handle: int) -> None:
    """As :func:`wait`, for a request without outputs of the engine's, at a fraction of the price."""
    status = lib.hvl_try_wait(handle)
    if status == lib.HVL_IN_PROGRESS:
        status = _until_complete(lib.hvl_wait, handle, _WAIT_SLICE_SECONDS, ffi.NULL, ffi.NULL)
    if status:
        check(status)


def _adopt(native: Any) -> Output:
    memory = ffi.gc(native.data, lib.hvl_free, native.num_bytes)
    shape = tuple(native.shape[dimension] for dimension in range(native.ndim))
    return Output(ffi.buffer(memory, native.num_bytes), shape, DType(native.dtype))


def wait_all(handles: Sequence[int]) -> None:
    """Block until all requests (no allgathers) are complete, and consume their handles.

    Raises:
        MismatchError: The ranks do not agree about a request; the first failure, in the order given, is raised.
        HorovodInternalError: The job is broken or shut down.
    """
    native = ffi.new("int64_t[]", handles)
    check(_until_complete(lib.hvl_wait_all, native, len(handles), _WAIT_SLICE_SECONDS))


def counters() -> dict[str, int]:
    """What this rank's engine has done since ``init()``; all zero if it does not run.

    Returns:
        The fields of ``hvl_counters``; :func:`horovodlike.metrics` presents them.
    """
    native = ffi.new("hvl_counters *")
    lib.hvl_get_counters(native)
    return {name: getattr(native, name) for name, _ in ffi.typeof("hvl_counters").fields}
