"""From arrays to requests and back: the common part of all operations on arrays.

An operation in flight borrows the memory of its arrays, and this module keeps it until the operation is complete,
whatever the caller does with the arrays or the handle.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias, cast

from horovodlike import basics, process_set
from horovodlike._engine import ops
from horovodlike._engine.arguments import called, check_name, factor, integer, reduce_op, split_counts
from horovodlike._engine.ops import (
    Allocation,
    Device,
    DType,
    GpuStream,
    Kind,
    MemoryFormat,
    Output,
    ReduceOp,
    Request,
    engine_shape,
    rows_of,
)
from horovodlike.arrays.memory import COUNTS, Array, HostArray, Memory, check_averages, check_distinct, describe
from horovodlike.errors import HorovodInternalError, ShutDownError
from horovodlike.process_set import ProcessSet, UnnamedCounter, registered_id

Finish: TypeAlias = Callable[[list[Output]], Any]
Tensors: TypeAlias = tuple[tuple[DType, tuple[int, ...]], ...]

# Building a request costs several microseconds, and a loop uses the same names again, so requests are kept.
CALLS_KEPT = 2048

_unnamed = UnnamedCounter()
_counting = threading.Lock()  # held from counting an operation until it is enqueued, or its number is taken back


@dataclass(frozen=True)
class ArrayCall:
    """The arguments of an operation, apart from its arrays; equal on all ranks."""

    kind: Kind
    operation: str  # the name of the function, without `_async` or a trailing underscore
    name: str | None
    op: int = ReduceOp.SUM
    root_rank: int = -1
    prescale: float = 1.0
    postscale: float = 1.0
    process_set: int = 0  # its id
    is_default_op: bool = False  # the caller has not chosen `op`

    @property
    def label(self) -> str:
        """The name of the operation in messages."""
        return called(self.operation, self.name)


class _Operation(NamedTuple):
    finish: Callable[[Any], Any]  # makes the result from the value of `wait`
    borrowed: object  # the arrays, and the objects that keep their memory
    allocation: Allocation | None = None
    wait: Callable[[int], Any] = ops.wait


_in_flight: dict[int, _Operation] = {}  # by handle
_lost: frozenset[int] = frozenset()  # handles of the previous job, not synchronized when this one began


def _begin_anew(_: object) -> None:
    """Release the operations that were in flight in the previous job."""
    global _lost
    _lost = frozenset(_in_flight)
    for handle in _lost:
        ops.give_up(handle, _in_flight.pop(handle, None))


basics.on_init(_begin_anew)


def reduction(
    kind: Kind,
    operation: str,
    name: str | None,
    op: Any,
    prescale: float,
    postscale: float,
    of: ProcessSet,
    root_rank: Any = None,
) -> ArrayCall:
    """Return the call of an operation that reduces, with checked arguments."""
    set_id = registered_id(of)
    check_name(name, operation)
    label = called(operation, name)
    chosen = reduce_op(basics.Average if op is None else op, label, adasum=kind is Kind.ALLREDUCE)
    prescale, postscale = factor(prescale, "prescale_factor", label), factor(postscale, "postscale_factor", label)
    root = -1 if root_rank is None else integer(root_rank, "root_rank", label)
    return ArrayCall(kind, operation, name, chosen, root, prescale, postscale, set_id, op is None)


def movement(kind: Kind, operation: str, name: str | None, of: ProcessSet, root_rank: Any = None) -> ArrayCall:
    """Return the call of an operation that only moves data, with checked arguments."""
    set_id = registered_id(of)
    check_name(name, operation)
    root = -1 if root_rank is None else integer(root_rank, "root_rank", called(operation, name))
    return ArrayCall(kind, operation, name, root_rank=root, process_set=set_id)


def object_name(name: str | None, set_id: int) -> str:
    """Return the name by which the ranks of a process set match a collective on objects."""
    check_name(name, "object")
    return f"array.object.noname.{_unnamed.next(set_id)}" if name is None else f"object.{name}"


def group(arrays: Iterable[Any], operation: str) -> list[Any]:
    """Return the arrays of a grouped operation as a list.

    Raises:
        TypeError: `arrays` is not a list of arrays.
        ValueError: The list is empty.
    """
    if not isinstance(arrays, Iterable) or isinstance(arrays, (str, bytes)) or hasattr(arrays, "shape"):
        raise TypeError(f"{operation}: expected a list of arrays, got {type(arrays).__name__}")
    arrays = list(arrays)
    if not arrays:
        raise ValueError(f"{operation}: the list of arrays is empty")
    return arrays


def described(call: ArrayCall, given: Sequence[Any], needs_rows: bool = False) -> list[Array]:
    """Return the arrays of an operation as the engine sees them.

    Raises:
        TypeError: An element is not an array.
        ValueError: An array cannot be sent, or has no rows where they are needed; or the arrays are on several devices;
            or the caller has to say how integers or bools are reduced.
    """
    label = call.label
    arrays = [describe(each, label) for each in given]
    if call.is_default_op:
        check_averages([array.dtype for array in arrays], label)
    if needs_rows and any(not array.shape for array in arrays):
        raise ValueError(f"{label}: a scalar has no rows; it needs at least one dimension")
    if len({array.gpu for array in arrays}) > 1:
        raise ValueError(f"{label}: the arrays of a group must be on the same device")
    return arrays


@lru_cache(maxsize=CALLS_KEPT)
def _known_request(call: ArrayCall, name: str, tensors: Tensors, arguments: tuple[int, ...], on_gpu: bool) -> Request:
    return Request(
        call.kind,
        f"{call.operation}.{name}" if call.name is not None else f"array.{call.operation}.{name}",
        tensors,
        device=Device.CUDA if on_gpu else Device.CPU,
        op=call.op,
        root_rank=call.root_rank,
        process_set=call.process_set,
        prescale=call.prescale,
        postscale=call.postscale,
        arguments=arguments,
    )


_new_request = _known_request.__wrapped__


def _tensors(arrays: Sequence[Array]) -> Tensors:
    return tuple((array.dtype, tuple(engine_shape(array.shape))) for array in arrays)


def request_of(call: ArrayCall, array: Array) -> Request:
    """Return the request for a named call with an array like this, row by row in memory."""
    assert call.name is not None
    return _known_request(call, call.name, _tensors([array]), (), array.gpu is not None)


def start(
    call: ArrayCall,
    arrays: Sequence[Array],
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    finish: Finish,
    arguments: Sequence[int] = (),
    allocation: Allocation | None = None,
    tensors: Tensors = (),
) -> int:
    """Enqueue an operation and return its handle.

    Args:
        call: The arguments of the operation.
        arrays: The caller's arrays, at least one.
        inputs: For each, the array to send: itself, or a copy; None if nothing is sent.
        outputs: For each, the array for the result, or None; empty if the engine allocates the results.
        finish: Called with the outputs that the engine has allocated; returns the result.
        arguments: See `Request`.
        allocation: Finds memory for results on a GPU, when the engine knows their sizes.
        tensors: The dtypes and shapes that the ranks must agree on, if the arrays' own differ.
    """
    sources = [_memory_of(array, each) for array, each in zip(arrays, inputs, strict=True)]
    targets = [_memory_of(array, each) for array, each in zip(arrays, outputs, strict=False)]
    tensors = tensors or _tensors(arrays)
    operation = _Operation(finish, (arrays, inputs, outputs, sources, targets), allocation)
    addresses, results = [each.address for each in sources], [each.address for each in targets]
    gpu = arrays[0].gpu
    request, number = None, None
    with _counting if call.name is None else contextlib.nullcontext():
        try:
            if call.name is None:
                number = _unnamed.next(call.process_set)
                request = _new_request(call, f"noname.{number}", tensors, arguments, gpu is not None)
            else:
                request = _known_request(call, call.name, tensors, tuple(arguments), gpu is not None)
            if gpu is None:
                handle = request.enqueue(addresses, results)
            else:
                handle = request.enqueue_on_stream(addresses, results, GpuStream(gpu, 0), allocation)
            _in_flight[handle] = operation
        except BaseException:
            if (request is None or not request.keep_if_enqueued(operation)) and number is not None:
                _unnamed.take_back(call.process_set, number)
            raise
    return handle


def _memory_of(array: Array, memory: Any) -> Memory:
    return Memory(0, None) if memory is None else array.memory_of(memory)


def start_in_place(call: ArrayCall, given: Sequence[Any], single: bool) -> int:
    """Enqueue an operation whose result replaces the arrays; return its handle.

    An array with gaps is copied, and the result is copied back when the operation is synchronized.

    Args:
        call: The arguments of the operation.
        given: The caller's arrays.
        single: True if the result is the array, not a tuple.
    """
    arrays = described(call, given)
    check_distinct(arrays, call.label)
    works, formats = _in_memory(call, arrays)

    def finish(_: list[Output]) -> Any:
        for array, work in zip(arrays, works, strict=True):
            if work is not array.array:
                array.write(work)
        return given[0] if single else tuple(given)

    return start(call, arrays, works, works, finish, formats)


def start_to_new(call: ArrayCall, given: Sequence[Any], single: bool) -> int:
    """Enqueue an operation whose results are new arrays of the same shapes; return its handle."""
    arrays = described(call, given)
    inputs, formats = _in_memory(call, arrays)
    chosen = formats or [MemoryFormat.ROW_MAJOR] * len(arrays)
    outputs = [array.empty(array.shape, how) for array, how in zip(arrays, chosen, strict=True)]
    return start(call, arrays, inputs, outputs, _wrapping(arrays, outputs, single), formats)


def start_reducescatter(call: ArrayCall, given: Sequence[Any], single: bool) -> int:
    """Enqueue an operation whose result is this rank's share of the rows of the arrays; return its handle."""
    arrays = described(call, given, needs_rows=True)
    inputs, _ = _in_memory(call, arrays)
    members = process_set.members(call.process_set)
    place = members.index(basics.rank())
    outputs = [array.empty((rows_of(array.shape[0], place, len(members)), *array.shape[1:])) for array in arrays]
    return start(call, arrays, inputs, outputs, _wrapping(arrays, outputs, single))


def _wrapping(arrays: Sequence[Array], outputs: Sequence[Any], single: bool) -> Finish:
    def finish(_: list[Output]) -> Any:
        results = tuple(array.wrap(output) for array, output in zip(arrays, outputs, strict=True))
        return results[0] if single else results

    return finish


def _in_memory(call: ArrayCall, arrays: Sequence[Array]) -> tuple[list[Any], list[MemoryFormat]]:
    """Return the arrays, or copies, without gaps; and their orders, or no orders if all are row by row."""
    pairs = [array.in_memory(call.kind is Kind.ALLREDUCE) for array in arrays]
    formats = [how for _, how in pairs]
    return [work for work, _ in pairs], formats if any(formats) else []


def start_allgather(call: ArrayCall, given: Sequence[Any], single: bool) -> int:
    """Enqueue an operation whose results have the rows of all ranks; return its handle."""
    arrays = described(call, given, needs_rows=True)

    def arrange(results: Sequence[Any]) -> Any:
        return results[0] if single else tuple(results)

    return _start_varying(call, arrays, list(arrays), arrange)


def start_gather(call: ArrayCall, array: Any) -> int:
    """Enqueue an operation whose result has the rows of all ranks on the root, and is None elsewhere."""
    is_root = basics.rank() == call.root_rank
    arrays = described(call, [array], needs_rows=True)
    return _start_varying(call, arrays, arrays, lambda results: results[0] if is_root else None)


def start_scatter(call: ArrayCall, array: Any) -> int:
    """Enqueue a scatter of the root's array. The result is this rank's part; elsewhere `array` is like that part."""
    (described_array,) = arrays = described(call, [array], needs_rows=True)
    inputs, shape = [None], described_array.shape
    if basics.rank() == call.root_rank:
        parts = len(process_set.members(call.process_set))
        if shape[0] % parts != 0:
            raise ValueError(f"{call.label}: {shape[0]} rows cannot be divided evenly among {parts} ranks")
        shape = (shape[0] // parts, *shape[1:])
        inputs, _ = _in_memory(call, arrays)
    outputs = [described_array.empty(shape)]
    tensors = ((described_array.dtype, tuple(engine_shape(shape))),)
    return start(call, arrays, inputs, outputs, _wrapping(arrays, outputs, single=True), tensors=tensors)


def start_reduce(call: ArrayCall, array: Any, in_place: bool) -> int:
    """Enqueue a reduction to the root. Elsewhere its result is the array itself if in place, else None."""
    if in_place and basics.rank() == call.root_rank:
        return start_in_place(call, [array], single=True)
    arrays = described(call, [array])
    inputs, _ = _in_memory(call, arrays)
    if basics.rank() != call.root_rank:
        return start(call, arrays, inputs, [None], lambda _: array if in_place else None)
    outputs = [arrays[0].empty(arrays[0].shape)]
    return start(call, arrays, inputs, outputs, _wrapping(arrays, outputs, single=True))


def start_alltoall(call: ArrayCall, given: Sequence[Any], splits: Sequence[Any], single: bool) -> int:
    """Enqueue an alltoall, and return its handle.

    The result is, for each array, the rows received and the number from each member of the process set.

    Args:
        call: The arguments of the operation.
        given: The caller's arrays.
        splits: For each array, the number of rows for each member; or None for the same number each.
        single: True if the result is the pair, not a tuple of pairs.

    Raises:
        TypeError: An element is not an array, or its splits are not a sequence.
        ValueError: Splits do not fit the array or the process set.
    """
    arrays = described(call, given, needs_rows=True)
    counts = [_row_counts(call, array.shape[0], of_array) for array, of_array in zip(arrays, splits, strict=True)]

    def arrange(results: Sequence[Any]) -> Any:
        pairs = tuple(zip(results[::2], results[1::2], strict=True))
        return pairs[0] if single else pairs

    likes = [like for array in arrays for like in (array, COUNTS)]
    return _start_varying(call, arrays, likes, arrange, [count for each in counts for count in each])


def _start_varying(
    call: ArrayCall,
    arrays: Sequence[Array],
    likes: Sequence[Array],
    arrange: Callable[[Sequence[Any]], Any],
    arguments: Sequence[int] = (),
) -> int:
    """Enqueue an operation whose results are like `likes`, except for their rows, which depend on all ranks."""
    inputs, _ = _in_memory(call, arrays)
    shapes = [like.shape[1:] for like in likes]
    if arrays[0].gpu is None:
        on_host = cast("Sequence[HostArray]", likes)

        def adopt(outputs: list[Output]) -> Any:
            every = zip(on_host, outputs, shapes, strict=True)
            return arrange([like.adopt(output.memory, (output.shape[0], *shape)) for like, output, shape in every])

        return start(call, arrays, inputs, (), adopt, arguments)

    made: dict[int, Any] = {}
    kept = []

    def allocate(index: int, shape: Sequence[int], _: DType) -> int:
        made[index] = likes[index].empty((shape[0], *shapes[index]))
        memory = likes[index].memory_of(made[index])
        kept.append(memory)
        return memory.address

    def collect(_: list[Output]) -> Any:
        return arrange([made[index] for index in range(len(likes))])

    return start(call, arrays, inputs, (), collect, arguments, Allocation(allocate))


def _row_counts(call: ArrayCall, rows: int, splits: Any) -> list[int]:
    """Return the number of rows of an array for each member of the process set."""
    size = len(process_set.members(call.process_set))
    if splits is not None:
        counts = split_counts(splits.tolist() if hasattr(splits, "tolist") else splits, size, call.label)
        if 0 <= sum(counts) < rows:
            raise ValueError(
                f"{call.label}: the splits add up to {sum(counts)}, and the array has {rows} rows: the others would "
                "not be sent; slice the array if that is meant"
            )
        return counts
    if rows % size != 0:
        raise ValueError(f"{call.label}: {rows} rows cannot be divided evenly among {size} ranks; give splits")
    return [rows // size] * size


def start_message(
    post: Callable[[], int], wait: Callable[[int], Any], finish: Callable[[Any], Any], borrowed: object
) -> int:
    """Send or receive a message, and return its handle.

    Args:
        post: Gives the message to the engine, and returns the handle.
        wait: Waits for the handle and consumes it.
        finish: Called with the value of `wait`; returns the result.
        borrowed: The objects that keep the memory of the message.
    """
    operation = _Operation(finish, borrowed, wait=wait)
    before = ops.last_handle()
    try:
        handle = post()
        _in_flight[handle] = operation
    except BaseException:
        last = ops.last_handle()
        if last not in (0, before):  # a signal handler has raised after the engine got the message
            ops.give_up(last, operation)
            _in_flight.pop(last, None)
        raise
    return handle


def synchronize(handle: int) -> Any:
    """Wait for an operation and return its result. Any thread may do so, once for each handle.

    A result on a GPU is complete when this returns: the host waits for the GPU.

    Args:
        handle: From `isend`, `irecv` or a function whose name ends with `_async` or `_async_`.

    Returns:
        An array of the library of the caller's array; for a group, a tuple; for an operation in place, the caller's
        object.

    Raises:
        TypeError: `handle` is not an integer.
        ValueError: There is no such operation, or it was synchronized before.
        HorovodInternalError: The operation failed: the ranks disagree about it, or the job is broken or shut down, or
            a new job has begun since.
    """
    handle = integer(handle, "handle", "synchronize")
    operation = _in_flight.get(handle)  # held here before the pop: a signal handler may raise
    if operation is None and handle in _lost:
        raise ShutDownError(f"handle {handle} is of the job before the last init(): its operation is lost")
    try:
        if operation is None or _in_flight.pop(handle, None) is None:
            raise _unknown(handle)
        returned = operation.wait(handle)
    except BaseException as error:
        if operation is not None and ops.is_known(handle):  # a signal handler has raised: it can be waited for again
            _in_flight[handle] = operation
        failure = None if operation is None or operation.allocation is None else operation.allocation.failure
        if failure is not None and isinstance(error, HorovodInternalError):
            raise type(error)(f"{error}: {failure}") from failure
        raise
    return operation.finish(returned)


def poll(handle: int) -> bool:
    """Return whether `synchronize` would return at once, apart from waiting for a GPU.

    Raises:
        TypeError: `handle` is not an integer.
        ValueError: There is no such operation, or it was synchronized before.
    """
    handle = integer(handle, "handle", "poll")
    if handle not in _in_flight:
        raise _unknown(handle)
    try:
        return ops.poll(handle)
    except KeyError:  # another thread has synchronized it meanwhile
        raise _unknown(handle) from None


def _unknown(handle: int) -> ValueError:
    return ValueError(f"handle {handle} does not belong to an operation in flight: each is synchronized once")


def result(handle: int) -> Any:
    """Synchronize the handle of a blocking call, whose caller never sees the handle.

    If this raises, the request is given up, because the caller has no handle to wait for it again.
    """
    try:
        return synchronize(handle)
    except BaseException:
        ops.give_up(handle, _in_flight.get(handle))
        _in_flight.pop(handle, None)
        raise
