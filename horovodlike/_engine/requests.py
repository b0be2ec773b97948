"""Requests to the engine: operations, described once and enqueued any number of times, and what they wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from horovodlike._engine.native import ffi, lib
from horovodlike._engine.types import Device, DType, GpuStream, Kind, ReduceOp
from horovodlike.errors import HorovodInternalError, JobBrokenError, MismatchError, NotInitializedError, ShutDownError

IN_PROGRESS: int = lib.HVL_IN_PROGRESS  # the status of a request that is not complete

# Kinds whose outputs the engine allocates, or which have none.
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
        memory: An object with the buffer protocol, which keeps the memory alive.
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
        raise ERRORS.get(status, HorovodInternalError)(text_of(lib.hvl_last_error()))


_before_waiting: list[Callable[[], None]] = []

# By handle: what keeps the memory of requests whose callers have stopped waiting.
_given_up: dict[int, object] = {}

WAIT_SLICE_SECONDS = 1.0
"""A wait without end lets Python run its signal handlers this often."""

# By thread: the exception of a signal handler that ran while the thread allocated; the thread's wait raises it.
_interruptions: dict[int, BaseException] = {}


def raise_interruption() -> None:
    """Raise what the handler of a signal has raised while this thread allocated outputs."""
    if _interruptions and threading.get_ident() in _interruptions:
        raise _interruptions.pop(threading.get_ident())


class _Source:
    """The part of an `Allocation` that the engine's call for memory reaches. No way back: that would be a cycle."""

    def __init__(self, allocate: Callable[[int, tuple[int, ...], DType], int]) -> None:
        self.allocate = allocate
        self.failure: Exception | None = None


class Allocation:
    """Memory for the outputs of a request on a GPU, which its caller finds when the engine knows their shapes.

    To be kept alive like the memory of the request.

    Args:
        allocate: Called with the number of an output, its shape and its dtype; returns the address of memory for it.
            Any thread of the process may call it, since it is the engine that does, or a thread that waits for some
            request. It may neither wait nor call ``shutdown()``. If it raises, the job is broken.
    """

    __slots__ = ("_handle", "_source", "callbacks")

    def __init__(self, allocate: Callable[[int, tuple[int, ...], DType], int]) -> None:
        self._source = _Source(allocate)
        self._handle = ffi.new_handle(self._source)
        self.callbacks = ffi.new("hvl_callbacks *", {"allocate": lib.hvl_allocate_output, "context": self._handle})

    @property
    def failure(self) -> Exception | None:
        """The exception that `allocate` has raised."""
        return self._source.failure


class Destinations:
    """Memory of the caller's for the outputs of an allgather or alltoall, which have the sizes that it expects.

    To be kept alive like the memory of the request. On a GPU, an `Allocation` asks it for the memory by `place`.

    Args:
        memory: Of each output, the address and the number of bytes.
    """

    __slots__ = ("_expected", "_places", "callbacks")

    def __init__(self, memory: Sequence[tuple[int, int]]) -> None:
        self._expected = [num_bytes for _, num_bytes in memory]
        places = [{"data": ffi.cast("void *", address), "num_bytes": num_bytes} for address, num_bytes in memory]
        self._places = ffi.new("hvl_output[]", places)
        place = ffi.addressof(lib, "hvl_place_output")
        self.callbacks = ffi.new("hvl_callbacks *", {"allocate": place, "context": self._places})

    def __del__(self) -> None:
        """Free the memory of outputs of other sizes."""
        for index, expected in enumerate(self._expected):
            if self._places[index].num_bytes != expected:
                lib.hvl_free(self._places[index].data)

    def place(self, index: int, num_bytes: int) -> int | None:
        """Return the address of the memory for an output.

        Returns:
            None if the output has another size than expected, which `check` will say.
        """
        if num_bytes == self._expected[index]:
            return int(ffi.cast("uintptr_t", self._places[index].data))
        self._places[index].num_bytes, self._places[index].data = num_bytes, ffi.NULL
        return None

    def check(self, name: str) -> None:
        """Make sure that the outputs had the sizes that were expected, once the request is complete.

        Raises:
            MismatchError: One had not, and is lost.
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
        # The handler of a signal has raised because this thread happens to run Python. That interrupts the wait,
        # not the collective, which the other ranks continue.
        _interruptions[threading.get_ident()] = interruption
        return hvl_allocate_output(context, index, output)
    return ffi.cast("void *", address) if output.num_bytes else context  # null would mean that there is no memory


def before_waiting(hand_over: Callable[[], None]) -> None:
    """Have ``hand_over`` called before a thread waits for a result, or polls for one.

    For bindings that hold requests back until then, when the engine should get all that is ready: other ranks may need
    it to get to what this thread waits for. It is called by any thread, and often.
    """
    _before_waiting.append(hand_over)


def hand_over() -> None:
    """Do what was asked for with :func:`before_waiting`; for bindings that wait by themselves."""
    for hand_over in _before_waiting:
        hand_over()


def until_complete(native_wait: Callable[..., int], *arguments: object) -> int:
    """Repeat a wait of the C API, which returns now and then for Python's signal handlers; return its status."""
    status: int = lib.HVL_IN_PROGRESS
    while status == lib.HVL_IN_PROGRESS:
        hand_over()
        status = native_wait(*arguments)
        raise_interruption()
    return status


def forget(handle: int) -> bool:
    """Consume a handle for which no thread waits, and drop the result, unless its memory is still in use.

    Returns:
        Whether the memory is free: neither the engine nor a GPU uses it any more. An unknown handle has none.
    """
    return bool(lib.hvl_try_wait(handle) != lib.HVL_IN_PROGRESS)


def give_up(handle: int, memory: object) -> None:
    """Let go of a request whose wait a signal handler has ended, as Ctrl-C does, where its caller has no handle.

    The other ranks count the request as made, so it stays in flight until they have made it, too. An enqueue of the
    same name waits for that.

    Args:
        handle: The request's; it may be complete by now.
        memory: What keeps its memory alive, for as long as the engine may use it.
    """
    _given_up[handle] = memory
    for each in list(_given_up):
        if forget(each):
            _given_up.pop(each, None)


def wait_for_given_up(handle: int) -> bool:
    """Wait until a request is complete that was given up; False, at once, if it was not."""
    if handle not in _given_up:
        return False
    until_complete(lib.hvl_wait, handle, WAIT_SLICE_SECONDS, ffi.NULL, ffi.NULL)  # its error was for its caller
    _given_up.pop(handle, None)
    return True


# What callers give an hvl_request by other words.
_SAID = {"reduce_op": "op", "prescale": "the prescale factor", "postscale": "the postscale factor"}


def refuse(name: str, what: str, value: object, ctype: Any) -> None:
    """Raise an error that names the value if cffi does not take it for this type."""
    expected = "a number" if ctype.kind == "primitive" and ctype.cname == "double" else "an integer"
    try:
        ffi.new(ffi.getctype(ctype, "[1]"), [value])  # None alone would stand for a zero
    except TypeError:
        raise TypeError(f"{name}: {what} must be {expected}, got {value!r}") from None
    except OverflowError:
        raise ValueError(f"{name}: {what} is out of range: {value!r}") from None


def _integers(name: str, what: str, values: Sequence[int]) -> Any:
    """Return them for cffi, or raise an error that names the one that is no integer."""
    try:
        return ffi.new("int64_t[]", list(values))
    except (TypeError, OverflowError):
        for value in values:
            refuse(name, what, value, ffi.typeof("int64_t"))
        raise


def _check_request(status: int, name: str) -> None:
    """Do as `check`, for a request that may be refused for its GPU before it is looked at: the message names it."""
    try:
        check(status)
    except (ValueError, MemoryError) as error:
        if status not in (lib.HVL_INVALID_ARGUMENT, lib.HVL_RESOURCES) or name in str(error):
            raise
        raise type(error)(f"{name}: {error}") from None


class Request:
    """One collective operation, described once and enqueued any number of times.

    Args:
        kind: What to do.
        name: Equal on all ranks; unique among the requests in flight of this rank, unless it `follows`.
        tensors: Element type and shape of each tensor. More than one make a group: it is executed as a whole or not
            at all, and may mix types and shapes. A barrier, a join and changes of process sets have none. Allgather,
            gather, alltoall: dimension 0 may differ between ranks. Scatter: the shape of each rank's part.
        op: How an allreduce, a reducescatter or a reduce combines elements.
        root_rank: The global rank, in the process set, whose data a broadcast or scatter sends, or that gets the
            result of a gather or reduce; the same on all ranks. Addition of a process set: its lowest rank if only its
            ranks make the request; -1 if all ranks of the job do. Else -1.
        process_set: Id of the process set.
        device: Where the tensors are, on all ranks. Those on a GPU are enqueued by :meth:`enqueue_on_stream`.
        prescale: Factor applied to each rank's elements before they are reduced.
        postscale: Factor applied to the result of a reduction.
        arguments: Allreduce: the :class:`MemoryFormat` of each tensor, the same on all ranks; or none, if all are
            row-major. Alltoall: of each tensor, the rows for each member of the process set. Addition of a process
            set: its ranks, ascending. Removal of one: its id. Else none.
        follows: Where requests are in flight under the name, an enqueued one follows them: it is announced to the other
            ranks when they are complete. Else it is refused.

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
        device: int = Device.CPU,
        prescale: float = 1.0,
        postscale: float = 1.0,
        arguments: Sequence[int] = (),
        follows: bool = False,
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
            "follows": follows,
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
            outputs: Where each result goes; may equal the input, except that of a reducescatter or scatter. Reduce: 0
                will do, except on the root. Empty where the engine allocates them, as it does for a gather (without
                rows, except on the root), or there are none.
            destinations: Where the outputs of an allgather, gather or alltoall go; None: the engine allocates them.

        Returns:
            A handle for :func:`wait`, :func:`wait_all` and :func:`poll`.

        Raises:
            ValueError: The name is in flight, or an argument does not fit the job.
            HorovodInternalError: The job is broken or shut down.
        """
        addresses = self._addresses(inputs, outputs)
        callbacks = ffi.NULL if destinations is None else destinations.callbacks
        arguments = self._native, addresses, addresses + self._num_tensors, callbacks
        handle: int = lib.hvl_enqueue(*arguments)
        if handle < 0:
            handle = self.enqueue_again(handle, lambda: lib.hvl_enqueue(*arguments))
        return handle

    def keep_if_enqueued(self, memory: object) -> int:
        """Give the request up if the engine has it, after an exception of an enqueue or just behind it.

        A signal handler may raise when the engine has the request and the caller has not yet noted its handle.

        Args:
            memory: What keeps the memory of the request, as of :func:`horovodlike._engine.ops.give_up`.

        Returns:
            The handle of the request that was given up; 0 if there is none.
        """
        handle: int = lib.hvl_last_handle()
        if not handle or handle != self.handle_in_flight():
            return 0
        give_up(handle, memory)
        return handle

    def handle_in_flight(self) -> int:
        """Return the handle of the last request in flight under this name; 0 if there is none."""
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
        """Do as :meth:`enqueue`, for one tensor that is input and output: the quickest way in."""
        handle: int = lib.hvl_enqueue_inplace(self._native, address)
        if handle < 0:
            handle = self.enqueue_again(handle, lambda: lib.hvl_enqueue_inplace(self._native, address))
        return handle

    def enqueue_again(self, status: int, enqueue: Callable[[], int]) -> int:
        """Raise what stands for the status of an enqueue, unless it is an interrupted call that keeps the name.

        Then wait until that has been carried out, and do it again.

        Args:
            status: The negated status that the enqueue has returned.
            enqueue: Does it again, and returns a handle or a negated status.
        """
        try:
            _check_request(-status, self.name)
        except ValueError:
            in_flight = self.handle_in_flight()  # none: it has been carried out by now
            if in_flight and not wait_for_given_up(in_flight):
                raise
        handle = enqueue()
        if handle < 0:
            _check_request(-handle, self.name)
        return handle

    @property
    def address(self) -> int:
        """That of the engine's description of the request, for native code: valid as long as this object is."""
        return int(ffi.cast("uintptr_t", self._native))

    def enqueue_on_stream(
        self,
        inputs: Sequence[int],
        outputs: Sequence[int],
        stream: GpuStream,
        allocation: Allocation | None = None,
    ) -> int:
        """Do as :meth:`enqueue`, for memory of a GPU, which is used after all work that the stream has by now.

        The request completes when the GPU has been given all the work; the memory is in use until the GPU has done it.

        Args:
            inputs: Address of each tensor's memory.
            outputs: Where each result goes. Empty for allgather, gather and alltoall.
            stream: The one on which the inputs are made.
            allocation: Finds the memory of the outputs of an allgather, gather or alltoall.

        Returns:
            A handle for :func:`wait_on_stream`, :func:`wait`, :func:`wait_all` and :func:`poll`.

        Raises:
            ValueError: Also: the stream is being captured into a CUDA graph, or this rank has used another GPU before.
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
    """Return the handles of those requests that have been enqueued, of an array for all of them."""
    count = len(new_handles)
    return [*filter(None, ffi.unpack(new_handles, count))] if count else []


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
        count = self._check_count(addresses)
        memory, new_handles = ffi.new("uintptr_t[]", addresses), ffi.new("int64_t[]", count)
        try:
            status = lib.hvl_enqueue_all(self._natives, memory, count, new_handles)
            handles += _accepted(new_handles)
        except BaseException:  # of a signal handler
            handles += _accepted(new_handles)
            raise
        check(status)

    def enqueue_inplace_on_stream(self, addresses: Sequence[int], handles: list[int], stream: GpuStream) -> None:
        """Do as :meth:`enqueue_inplace`, for memory of a GPU: see :meth:`Request.enqueue_on_stream`."""
        count = self._check_count(addresses)
        memory, new_handles = ffi.new("uintptr_t[]", addresses), ffi.new("int64_t[]", count)
        pointer = ffi.cast("void *", stream.pointer)
        try:
            status = lib.hvl_enqueue_all_on_stream(self._natives, memory, count, new_handles, stream.device, pointer)
            handles += _accepted(new_handles)
        except BaseException:  # of a signal handler
            handles += _accepted(new_handles)
            raise
        if status:
            _check_request(status, self._requests[min(len(_accepted(new_handles)), count - 1)].name)

    def _check_count(self, addresses: Sequence[int]) -> int:
        count = len(self._requests)
        if len(addresses) != count:
            raise ValueError(f"{count} requests need as many addresses, not {len(addresses)}")
        return count
