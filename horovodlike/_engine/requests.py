"""Requests to the engine: operations that are described once and enqueued any number of times, and waits for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from horovodlike._engine.native import ffi, lib
from horovodlike._engine.types import Device, DType, GpuStream, Kind, ReduceOp
from horovodlike.errors import HorovodInternalError, JobBrokenError, MismatchError, NotInitializedError, ShutDownError

IN_PROGRESS: int = lib.HVL_IN_PROGRESS  # the status of a request that is not complete

# Kinds of requests that take no addresses of outputs: the engine allocates these, or there are none.
_WITHOUT_OUTPUTS = frozenset(Kind) - {
    Kind.ALLREDUCE,
    Kind.BROADCAST,
    Kind.REDUCESCATTER,
    Kind.SCATTER,
    Kind.REDUCE,
}


@dataclass(frozen=True)
class Output:
    """A tensor that the engine allocated.

    Attributes:
        memory: An object with the buffer protocol; it keeps the memory alive.
        shape: Extents by dimension.
        dtype: The element type.
    """

    memory: Any
    shape: tuple[int, ...]
    dtype: DType


def shape_of(native: Any) -> tuple[int, ...]:
    """Return the shape of an ``hvl_output``."""
    return tuple(native.shape[dimension] for dimension in range(native.ndim))


ERRORS: dict[int, type[Exception]] = {
    lib.HVL_INVALID_ARGUMENT: ValueError,
    lib.HVL_MISMATCH: MismatchError,
    lib.HVL_NOT_INITIALIZED: NotInitializedError,
    lib.HVL_JOB_BROKEN: JobBrokenError,
    lib.HVL_SHUT_DOWN: ShutDownError,
    lib.HVL_RESOURCES: MemoryError,
    lib.HVL_UNKNOWN_HANDLE: KeyError,
}


def text_of(native: Any) -> str:
    """Return a C string of the engine as a ``str``."""
    text: str = ffi.string(native).decode(errors="replace")
    return text


def check(status: int) -> None:
    """Raise the exception for a status of the engine, unless it is HVL_OK.

    Raises:
        ValueError: The call is wrong on this rank alone (also: not initialised).
        MismatchError: The ranks do not agree; only this request failed.
        JobBrokenError: A rank is lost or stalled.
        ShutDownError: A rank has shut the job down.
        KeyError: The handle is unknown.
    """
    if status != 0:
        raise ERRORS.get(status, HorovodInternalError)(text_of(lib.hvl_last_error()))


_before_waiting: list[Callable[[], None]] = []

# By handle of each request whose caller has stopped waiting: an object that keeps the memory of the request alive.
_given_up: dict[int, object] = {}

WAIT_SLICE_SECONDS = 1.0
"""A wait in the engine returns after this time, so that Python can run its signal handlers; then it is repeated."""

# By thread: the exception of a signal handler that ran while the thread allocated; the thread's wait raises it.
_interruptions: dict[int, BaseException] = {}


def raise_interruption() -> None:
    """Raise the exception of a signal handler that ran while this thread allocated outputs, if there is one."""
    if _interruptions and threading.get_ident() in _interruptions:
        raise _interruptions.pop(threading.get_ident())


class _Source:
    """The part of an `Allocation` to which the engine's callback refers; a reference back would be a cycle."""

    def __init__(self, allocate: Callable[[int, tuple[int, ...], DType], int]) -> None:
        self.allocate = allocate
        self.failure: Exception | None = None


class Allocation:
    """The callback that allocates the outputs of a request on a GPU, once the engine knows their shapes.

    Keep it alive as long as the memory of the request.

    Args:
        allocate: Called with the number of an output, its shape and its dtype; returns the address of memory for it.
            Any thread of the process may call it: the engine's, or one that waits for some request. The function may
            neither wait nor call ``shutdown()``. If it raises an error, the job is broken.
    """

    __slots__ = ("_handle", "_source", "callbacks")

    def __init__(self, allocate: Callable[[int, tuple[int, ...], DType], int]) -> None:
        self._source = _Source(allocate)
        self._handle = ffi.new_handle(self._source)
        self.callbacks = ffi.new("hvl_callbacks *", {"allocate": lib.hvl_allocate_output, "context": self._handle})

    @property
    def failure(self) -> Exception | None:
        """The exception that `allocate` has raised, or None."""
        return self._source.failure


class Destinations:
    """The caller's memory for the outputs of an allgather or alltoall, for a caller that knows their sizes.

    Keep it alive as long as the memory of the request. On a GPU, an `Allocation` asks it for the memory by `place`.

    Args:
        memory: The address and the number of bytes of each output.
    """

    __slots__ = ("_expected", "_places", "callbacks")

    def __init__(self, memory: Sequence[tuple[int, int]]) -> None:
        self._expected = [num_bytes for _, num_bytes in memory]
        places = [{"data": ffi.cast("void *", address), "num_bytes": num_bytes} for address, num_bytes in memory]
        self._places = ffi.new("hvl_output[]", places)
        place = ffi.addressof(lib, "hvl_place_output")
        self.callbacks = ffi.new("hvl_callbacks *", {"allocate": place, "context": self._places})

    def __del__(self) -> None:
        """Free the memory that the engine allocated for outputs of unexpected sizes."""
        for index, expected in enumerate(self._expected):
            if self._places[index].num_bytes != expected:
                lib.hvl_free(self._places[index].data)

    def place(self, index: int, num_bytes: int) -> int | None:
        """Return the address of the memory for an output.

        Returns:
            The address; None if the output has another size than expected, for which `check` raises an error.
        """
        if num_bytes == self._expected[index]:
            return int(ffi.cast("uintptr_t", self._places[index].data))
        self._places[index].num_bytes, self._places[index].data = num_bytes, ffi.NULL
        return None

    def check(self, name: str) -> None:
        """Make sure that the outputs had the sizes that were expected, once the request is complete.

        Raises:
            MismatchError: An output had another size, and is lost.
        """
        for index, expected in enumerate(self._expected):
            found = self._places[index].num_bytes
            if found != expected:
                raise MismatchError(
                    f"{name}: this rank has memory for a result of {expected} bytes, but the ranks have sent {found}: "
                    "their tensors do not have the sizes that it expects"
                )


@ffi.def_extern()  # type: ignore[untyped-decorator]
def hvl_allocate_output(context: Any, index: int, output: Any) -> Any:
    source: _Source = ffi.from_handle(context)
    try:
        address = source.allocate(index, shape_of(output), DType(output.dtype))
    except Exception as error:
        source.failure = error
        return ffi.NULL
    except BaseException as interruption:
        # A signal handler has raised this, because this thread happens to run Python. It must interrupt the thread's
        # wait, but not the collective, which the other ranks continue.
        _interruptions[threading.get_ident()] = interruption
        return hvl_allocate_output(context, index, output)
    return ffi.cast("void *", address) if output.num_bytes else context  # null would mean that there is no memory


def before_waiting(hand_over: Callable[[], None]) -> None:
    """Have ``hand_over`` called before a thread waits for a result, or polls for one.

    For bindings that defer requests: before a wait the engine must get all requests that are ready, since other ranks
    may need them to reach the request that this thread waits for. Any thread calls ``hand_over``, and often.
    """
    _before_waiting.append(hand_over)


def hand_over() -> None:
    """Call the functions registered by :func:`before_waiting`; for bindings that wait without this module."""
    for hand_over in _before_waiting:
        hand_over()


def until_complete(native_wait: Callable[..., int], *arguments: object) -> int:
    """Repeat a wait of the C API while it returns `HVL_IN_PROGRESS`, and return the last status.

    Each wait ends after a time slice, or at a signal, so that Python can run its signal handlers.
    """
    status: int = lib.HVL_IN_PROGRESS
    while status == lib.HVL_IN_PROGRESS:
        hand_over()
        status = native_wait(*arguments)
        raise_interruption()
    return status


def forget(handle: int) -> bool:
    """Consume a handle for which no thread waits, and drop the result, unless its memory is still in use.

    Returns:
        True if the memory is free: neither the engine nor a GPU uses it any more. Also True for an unknown handle.
    """
    return bool(lib.hvl_try_wait(handle) != lib.HVL_IN_PROGRESS)


def give_up(handle: int, memory: object) -> None:
    """Give up a request whose wait was ended by a signal handler, as by Ctrl-C, if its caller has no handle.

    The other ranks count the request as made, so it stays in flight until they have made it, too. An enqueue of the
    same name waits until then, except by a :class:`RequestList`, which is refused.

    Args:
        handle: The handle of the request, which may be complete by now.
        memory: An object that keeps the memory of the request alive; it is kept as long as the engine may use it.
    """
    _given_up[handle] = memory
    for each in list(_given_up):
        if forget(each):
            _given_up.pop(each, None)


def wait_for_given_up(handle: int) -> bool:
    """Wait until a request that was given up is complete; return False, at once, if it was not given up."""
    if handle not in _given_up:
        return False
    until_complete(lib.hvl_wait, handle, WAIT_SLICE_SECONDS, ffi.NULL, ffi.NULL)  # its error is ignored
    _given_up.pop(handle, None)
    return True


# Fields of an hvl_request for which callers have other words.
_SAID = {"reduce_op": "op", "prescale": "the prescale factor", "postscale": "the postscale factor"}


def refuse(name: str, what: str, value: object, ctype: Any) -> None:
    """Raise an error that names the value if cffi does not accept it for a C type."""
    expected = "a number" if ctype.kind == "primitive" and ctype.cname == "double" else "an integer"
    try:
        ffi.new(ffi.getctype(ctype, "[1]"), [value])  # None alone would stand for a zero
    except TypeError:
        raise TypeError(f"{name}: {what} must be {expected}, got {value!r}") from None
    except OverflowError:
        raise ValueError(f"{name}: {what} is out of range: {value!r}") from None


def _integers(name: str, what: str, values: Sequence[int]) -> Any:
    """Return the values as a C array, or raise an error that names the value that is no integer of 64 bits."""
    try:
        return ffi.new("int64_t[]", list(values))
    except (TypeError, OverflowError):
        for value in values:
            refuse(name, what, value, ffi.typeof("int64_t"))
        raise


def _check_request(status: int, name: str) -> None:
    """Do as `check`; make sure that the message names the request, also if the engine has only looked at its GPU."""
    try:
        check(status)
    except (ValueError, MemoryError) as error:
        if status not in (lib.HVL_INVALID_ARGUMENT, lib.HVL_RESOURCES) or name in str(error):
            raise
        raise type(error)(f"{name}: {error}") from None


class Request:
    """One collective operation, described once and enqueued any number of times.

    Args:
        kind: The kind of operation.
        name: Equal on all ranks; unique among the requests in flight of this rank, but for a sequence.
        tensors: Element type and shape of each tensor. More than one make a group: it is executed as a whole or not
            at all, and may mix types and shapes. A barrier, a join and changes of process sets have none. Allgather,
            gather, alltoall: dimension 0 may differ between ranks. Scatter: the shape of each rank's part.
        op: How an allreduce, a reducescatter or a reduce combines elements.
        root_rank: The global rank, in the process set, whose data a broadcast or scatter sends, or that receives the
            result of a gather or reduce; the same on all ranks. Addition of a process set: its lowest rank if only its
            ranks make the request; -1 if all ranks of the job do. Else -1.
        process_set: Id of the process set.
        device: The kind of device of the tensors, on all ranks. For a GPU, use :meth:`enqueue_on_stream`.
        prescale: Factor applied to each rank's elements before they are reduced.
        postscale: Factor applied to the result of a reduction.
        arguments: Allreduce: the :class:`MemoryFormat` of each tensor, the same on all ranks; or none, if all are
            row-major. Alltoall: for each tensor, the rows for each member of the process set. Addition of a process
            set: its ranks, ascending. Removal of one: its id. Else none.
        sequence: Requests of one sequence are announced to the other ranks in the order in which they are enqueued. One
            whose name is in flight waits for the name, and is not refused. If the ranks disagree about one, all later
            ones of the sequence fail, too: continue with another number. 0: in no sequence.

    Raises:
        ValueError: The description is wrong in a way that this rank alone can detect.
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
        device: int = Device.CPU,
        prescale: float = 1.0,
        postscale: float = 1.0,
        arguments: Sequence[int] = (),
        sequence: int = 0,
    ) -> None:
        if not isinstance(name, str):
            raise TypeError(f"{kind.name.lower()}: name must be a string, got {name!r}")
        shapes = [_integers(name, "an extent of the shape", shape) for _, shape in tensors]
        described = ffi.new("hvl_tensor[]", len(tensors))
        for native, (dtype, shape), extents in zip(described, tensors, shapes, strict=True):
            native.shape, native.ndim, native.dtype = extents, len(shape), dtype
        encoded = ffi.new("char[]", name.encode())
        numbers = _integers(name, "an argument", arguments)
        description = {
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
            "sequence": sequence,
        }
        try:
            request = ffi.new("hvl_request *", description)
        except (TypeError, OverflowError):
            for field, native in ffi.typeof("hvl_request").fields:
                if native.type.kind in ("primitive", "enum"):
                    refuse(name, _SAID.get(field, field), description[field], native.type)
            raise
        prepared = lib.hvl_prepare(request)
        if prepared == ffi.NULL:
            check(lib.HVL_INVALID_ARGUMENT)
        self._native = ffi.gc(prepared, lib.hvl_release)
        self._num_tensors = len(tensors)
        self.kind = kind
        self.name = name

    def enqueue(self, inputs: Sequence[int], outputs: Sequence[int], destinations: Destinations | None = None) -> int:
        """Hand the tensors' memory to the engine and return at once.

        Args:
            inputs: Address of each tensor's memory. Scatter: on the root, of the parts of all ranks of the process
                set, one after the other; on other ranks 0.
            outputs: Address of each result; may equal the input's, except for a reducescatter or scatter. Reduce: may
                be 0, except on the root. Empty if the engine allocates the outputs, as for a gather (whose outputs
                have no rows, except on the root), or if there are none.
            destinations: The memory for the outputs of an allgather, gather or alltoall; None: the engine allocates it.

        Returns:
            A handle for :func:`wait`, :func:`wait_all` and :func:`poll`.

        Raises:
            ValueError: The name is in flight and the request in no sequence, or an argument does not fit the job.
            HorovodInternalError: The job is broken or shut down.
        """
        addresses = self._addresses(inputs, outputs)
        callbacks = ffi.NULL if destinations is None else destinations.callbacks
        arguments = self._native, addresses, addresses + self._num_tensors, callbacks
        handle: int = lib.hvl_enqueue(*arguments)
        if handle < 0:
            handle = self.enqueue_again(handle, lambda: lib.hvl_enqueue(*arguments))
        return handle

    def keep_if_enqueued(self, memory: object, before: int | None = None) -> int:
        """Give the request up if the engine has it; call this for an exception in or right after an enqueue.

        A signal handler may raise when the engine has the request and the caller has not yet noted its handle.

        Args:
            memory: An object that keeps the request's memory alive, as for :func:`horovodlike._engine.ops.give_up`.
            before: For a request in a sequence, which has several handles in flight: ``last_handle()`` before the
                enqueue.

        Returns:
            The handle of the request that was given up; 0 if there is none.
        """
        handle: int = lib.hvl_last_handle()
        is_new = handle == self.handle_in_flight() if before is None else handle != before
        if not handle or not is_new:
            return 0
        give_up(handle, memory)
        return handle

    def handle_in_flight(self) -> int:
        """Return the handle of the request in flight under this name; 0 if there is none."""
        handle: int = lib.hvl_handle_in_flight(self._native)
        return handle

    def _addresses(self, inputs: Sequence[int], outputs: Sequence[int]) -> Any:
        if len(inputs) != self._num_tensors:
            raise ValueError(f"{self.name!r} has {self._num_tensors} tensors, not {len(inputs)}")
        if outputs and len(outputs) != self._num_tensors:
            raise ValueError(f"{self.name!r} has {self._num_tensors} tensors, not {len(outputs)} outputs")
        if not outputs and self.kind not in _WITHOUT_OUTPUTS:
            raise ValueError(f"{self.name!r} needs an output for each of its {self._num_tensors} tensors")
        return ffi.new("uintptr_t[]", [*inputs, *outputs])

    def enqueue_inplace(self, address: int) -> int:
        """Do as :meth:`enqueue`, for one tensor that is input and output: the fastest way to enqueue."""
        handle: int = lib.hvl_enqueue_inplace(self._native, address)
        if handle < 0:
            handle = self.enqueue_again(handle, lambda: lib.hvl_enqueue_inplace(self._native, address))
        return handle

    def enqueue_again(self, status: int, enqueue: Callable[[], int]) -> int:
        """Raise the error of a failed enqueue, unless a request that was given up still has the name.

        In that case wait until the earlier request has been carried out, and enqueue again.

        Args:
            status: The negated status that the enqueue has returned.
            enqueue: Enqueues again, and returns a handle or a negated status.
        """
        try:
            _check_request(-status, self.name)
        except ValueError:
            in_flight = self.handle_in_flight()  # 0: the earlier request has been carried out by now
            if in_flight and not wait_for_given_up(in_flight):
                raise
        handle = enqueue()
        if handle < 0:
            _check_request(-handle, self.name)
        return handle

    @property
    def address(self) -> int:
        """The address of the engine's description of the request, for native code; valid while this object lives."""
        return int(ffi.cast("uintptr_t", self._native))

    def enqueue_on_stream(
        self,
        inputs: Sequence[int],
        outputs: Sequence[int],
        stream: GpuStream,
        allocation: Allocation | None = None,
    ) -> int:
        """Do as :meth:`enqueue`, for memory of a GPU, which uses it after all work that the stream has by now.

        The request completes when the GPU has been given all the work; the memory is in use until the GPU has done it.

        Args:
            inputs: Address of each tensor's memory.
            outputs: Address of each result. Empty for allgather, gather and alltoall.
            stream: The stream on which the inputs are computed.
            allocation: Allocates the outputs of an allgather, gather or alltoall.

        Returns:
            A handle for :func:`wait_on_stream`, :func:`wait`, :func:`wait_all` and :func:`poll`.

        Raises:
            ValueError: As for :meth:`enqueue`; or a CUDA graph captures the stream; or this rank has used another GPU.
            MemoryError: The GPU, or the CUDA driver, cannot be used.
            HorovodInternalError: The job is broken or shut down.
        """
        addresses = self._addresses(inputs, outputs)
        callbacks = ffi.NULL if allocation is None else allocation.callbacks
        pointer = ffi.cast("void *", stream.pointer)
        arguments = (self._native, addresses, addresses + self._num_tensors, callbacks, stream.device, pointer)
        handle: int = lib.hvl_enqueue_on_stream(*arguments)
        if handle < 0:
            handle = self.enqueue_again(handle, lambda: lib.hvl_enqueue_on_stream(*arguments))
        return handle


def _accepted(new_handles: Any) -> list[int]:
    """Return the handles of the requests that have been enqueued: those in the array that are not 0."""
    count = len(new_handles)
    return [*filter(None, ffi.unpack(new_handles, count))] if count else []


class RequestList:
    """Requests that are enqueued together, at a fraction of the cost of as many calls.

    Args:
        requests: Requests of one tensor each, which is input and output.
    """

    __slots__ = ("_natives", "_requests")

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests = tuple(requests)  # keeps the objects to which the array points
        self._natives = ffi.new("hvl_prepared *[]", [request._native for request in requests])

    def enqueue_inplace(self, addresses: Sequence[int], handles: list[int]) -> None:
        """Enqueue the requests in their order, each with its tensor as input and output.

        Unlike :meth:`Request.enqueue_inplace`, do not wait for a request of the same name that was given up.

        Args:
            addresses: The address of the tensor of each request.
            handles: Their handles are appended, also the handles of the requests before one that is refused.

        Raises:
            ValueError: The number of addresses is wrong, a name is in flight, or a request does not fit the job. The
                refused request and those after it are not enqueued.
            HorovodInternalError: The job is broken or shut down.
        """
        count = self._check_count(addresses)
        memory, new_handles = ffi.new("uintptr_t[]", addresses), ffi.new("int64_t[]", count)
        try:
            status = lib.hvl_enqueue_all(self._natives, memory, count, new_handles)
            handles += _accepted(new_handles)
        except BaseException:  # raised by a signal handler
            handles += _accepted(new_handles)
            raise
        check(status)

    def enqueue_inplace_on_stream(self, addresses: Sequence[int], handles: list[int], stream: GpuStream) -> None:
        """Do what :meth:`enqueue_inplace` does, for GPU memory: see :meth:`Request.enqueue_on_stream`."""
        count = self._check_count(addresses)
        memory, new_handles = ffi.new("uintptr_t[]", addresses), ffi.new("int64_t[]", count)
        pointer = ffi.cast("void *", stream.pointer)
        try:
            status = lib.hvl_enqueue_all_on_stream(self._natives, memory, count, new_handles, stream.device, pointer)
            handles += _accepted(new_handles)
        except BaseException:  # raised by a signal handler
            handles += _accepted(new_handles)
            raise
        if status:
            _check_request(status, self._requests[min(len(_accepted(new_handles)), count - 1)].name)

    def _check_count(self, addresses: Sequence[int]) -> int:
        count = len(self._requests)
        if len(addresses) != count:
            raise ValueError(f"{count} requests need as many addresses, not {len(addresses)}")
        return count
