"""From torch tensors to requests and back: the common part of all operations of `mpi_ops`.

An operation in flight borrows the memory of its tensors. This module keeps that memory until the operation is
synchronized, whatever the caller does with the tensors: in a synchronous call by references to their storages, in an
asynchronous one by loans (`loan`). `gpu` describes how memory on a GPU is kept after that.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from horovodlike import basics, process_set
from horovodlike._engine import ops
from horovodlike._engine.arguments import integer
from horovodlike._engine.ops import (
    Allocation,
    Destinations,
    Device,
    DType,
    GpuStream,
    Kind,
    Output,
    Request,
    engine_shape,
    rows_of,
)
from horovodlike.errors import HorovodInternalError, ShutDownError
from horovodlike.torch._ops import fast_path, gpu
from horovodlike.torch._ops.fast_path import FastPath
from horovodlike.torch._ops.loan import Loan, address_of, give_back, keep, lend, put
from horovodlike.torch._ops.tensor import BYTES_OF, DTYPES, check, in_memory, is_in_memory, mark_overwritten

Tensors = tuple[torch.Tensor, ...]
# The result of an alltoall has pairs of tensors.
Result = torch.Tensor | tuple[torch.Tensor, ...] | tuple[tuple[torch.Tensor, torch.Tensor], ...] | None

# Building a request costs several microseconds, and a training loop uses the same names again and again. So `calls`
# keeps the calls used last, and each call keeps requests for the dtypes and shapes that it was used with.
CALLS_KEPT = 2048
REQUESTS_KEPT_PER_CALL = 4

_unnamed = process_set.UnnamedCounter()
next_number = _unnamed.next


@dataclass(eq=False)
class Call:
    """The arguments of an operation, apart from its tensors; equal on all ranks."""

    kind: Kind
    name: str
    op: int = ops.ReduceOp.SUM
    root_rank: int = -1
    prescale: float = 1.0
    postscale: float = 1.0
    process_set: int = 0  # its id
    sequence: int = 0  # see `Request`
    # By device, dtype and shape of each tensor, and the request's arguments.
    requests: dict[tuple[object, ...], Request] = field(default_factory=dict, init=False, repr=False)


class _InFlight(NamedTuple):
    borrowed: list[object]  # the tensors, and the objects that keep their memory
    finish: Callable[[list[Output]], Result]
    storages: list[torch.UntypedStorage]
    stream: GpuStream | None = None  # the current one at the start; None: the tensors are on the CPU
    allocation: Allocation | None = None


@dataclass(slots=True)  # attributes are faster to read than a named tuple's
class _Last:
    """The in-place allreduce that was last started under a name."""

    op: object
    arguments: tuple[object, ...]
    request: Request
    copied: FastPath | None
    in_place: FastPath | None


_in_flight: dict[int, _InFlight] = {}  # by handle
# Tensors that operations in place overwrite, not yet reported to autograd as changed.
_overwritten: list[torch.Tensor] = []
_last: dict[str | None, _Last] = {}  # by the name that the caller gave
_on_fast_path = fast_path.in_flight
_lost: frozenset[int] = frozenset()  # handles of the previous job, not synchronized when this one began
_abandoned: dict[tuple[int, ...], list[object]] = {}  # by handles, the objects that keep their memory


def full_name(operation: str, name: str | None, process_set: int = 0) -> str:
    """Return the name by which the ranks of a process set match an operation.

    Unnamed operations are counted, so every rank has to call them in the same order.
    """
    return f"{operation}.{numbered(next_number(process_set)) if name is None else name}"


def numbered(number: int) -> str:
    """Return the name of the unnamed operation of this number."""
    return f"noname.{number}"


def _begin_anew(_: object) -> None:
    """Release the operations that were in flight in the previous job."""
    global _lost
    _mark_overwritten()
    uncopied = list(_in_flight)
    _lost = frozenset([*uncopied, *fast_path.forget_all()])
    abandon(uncopied, [])


basics.on_init(_begin_anew)


def build_request(call: Call, tensors: Sequence[torch.Tensor], arguments: Sequence[int] = ()) -> Request:
    """Return a request for tensors like these, which are on one device."""
    described = [(DTYPES[tensor.dtype], engine_shape(tensor.shape)) for tensor in tensors]
    return Request(
        call.kind,
        call.name,
        described,
        device=Device.CUDA if tensors and gpu.is_on_gpu(tensors[0]) else Device.CPU,
        op=call.op,
        root_rank=call.root_rank,
        prescale=call.prescale,
        postscale=call.postscale,
        process_set=call.process_set,
        arguments=arguments,
        sequence=call.sequence,
    )


def start(
    call: Call,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    borrowed: list[object],
    finish: Callable[[list[Output]], Result],
    arguments: Sequence[int] = (),
    allocation: Allocation | Destinations | None = None,
) -> int:
    """Enqueue an operation on tensors that are in memory, and return its handle.

    Args:
        call: The arguments of the operation.
        inputs: The tensors to send or reduce, all on one device.
        outputs: The tensors for the results; empty if the engine or `allocation` finds memory for them.
        borrowed: Objects to keep until the operation is complete, also a `Destinations`; a list of the operation's own.
        finish: Makes the result from the outputs that the engine has allocated.
        arguments: The `arguments` of the request.
        allocation: Finds memory for the outputs; on the CPU it must be a `Destinations`.
    """
    on_gpu = bool(inputs) and gpu.is_on_gpu(inputs[0])
    key = (on_gpu, *(attribute for tensor in inputs for attribute in (tensor.dtype, tensor.shape)), *arguments)
    request = call.requests.get(key)
    if request is None:
        request = build_request(call, inputs, arguments)
        if len(call.requests) >= REQUESTS_KEPT_PER_CALL:
            call.requests.clear()
        call.requests[key] = request
    storages = list(map(torch.Tensor.untyped_storage, [*inputs, *outputs]))
    addresses, results = list(map(address_of, inputs)), list(map(address_of, outputs))
    stream = gpu.current_stream(gpu.device_of(inputs[0])) if on_gpu else None
    destinations = None
    if isinstance(allocation, Destinations):
        destinations, allocation = allocation, None
        if stream is not None:
            borrowed = held = [*borrowed]
            allocation = _place_on_gpu(destinations, inputs[0], held)
    operation = _InFlight(borrowed, finish, storages, stream, allocation)
    before = ops.last_handle() if call.sequence else None
    try:
        if stream is None:
            handle = request.enqueue(addresses, results, destinations)
        else:
            handle = request.enqueue_on_stream(addresses, results, stream, allocation)
        _in_flight[handle] = operation
    except BaseException:
        request.keep_if_enqueued(_kept(operation), before)
        raise
    return handle


def _place_on_gpu(destinations: Destinations, like: torch.Tensor, held: list[object]) -> Allocation:
    """Return an allocation on the GPU of `like`: an output's destination, or new memory if their sizes differ.

    An output of unexpected size is lost, but the other ranks send it all the same. `held` keeps the memory for it.
    """
    allocate_on_gpu = gpu.allocator(like)

    def allocate(index: int, shape: Sequence[int], dtype: DType) -> int:
        num_bytes = math.prod(shape) * BYTES_OF[dtype]
        address = destinations.place(index, num_bytes)
        if address is None:
            lost = allocate_on_gpu((num_bytes,), torch.uint8)
            held.append(lost)
            address = lost.data_ptr()
        return address

    return Allocation(allocate)


def _mark_overwritten() -> None:
    tensors = []
    with contextlib.suppress(IndexError):  # another thread may take the last one
        while True:
            tensors.append(_overwritten.pop())
    mark_overwritten(tensors)


def lent(tensors: Sequence[torch.Tensor], name: str, waits: bool) -> tuple[list[torch.Tensor], list[Loan | None]]:
    """Return tensors with the memory that the engine uses, and for each the loan, or None if there is none.

    Args:
        tensors: Tensors that `check` has accepted.
        name: The operation's name, for messages.
        waits: True if the caller waits at once. Then it does nothing to the tensors meanwhile, and none is lent.
    """
    works = [in_memory(tensor) for tensor in tensors]
    if waits:
        return works, [None] * len(works)
    loans = [lend(work, name) if work is tensor else None for work, tensor in zip(works, tensors, strict=True)]
    return [work if loan is None else loan[1] for work, loan in zip(works, loans, strict=True)], loans


def start_in_place(call: Call, tensors: Sequence[torch.Tensor], single: bool, waits: bool = False) -> int:
    """Enqueue an operation whose result replaces the tensors, and return its handle.

    A tensor that is not contiguous, or neither on the CPU nor on a GPU, is copied, and the result copied back by
    `synchronize`.

    Args:
        call: The arguments of the operation.
        tensors: The tensors, all on one device.
        single: True if the result is the tensor, not a tuple.
        waits: True if the caller waits at once, and does nothing to the tensors meanwhile.
    """
    for tensor in tensors:
        check(tensor, call.name)
    works, loans = lent(tensors, call.name, waits)

    def finish(_: list[Output]) -> Result:
        for tensor, work, loan in zip(tensors, works, loans, strict=True):
            if loan is not None:
                give_back(loan)
            elif work is not tensor:
                put(work, tensor, call.name)
        return tensors[0] if single else tuple(tensors)

    handle = start(call, works, works, [*works, *tensors, *loans], finish)
    _overwritten.extend(tensors)
    return handle


def start_again_in_place(
    name: object, op: object, arguments: tuple[object, ...], tensor: torch.Tensor, waits: bool
) -> int:
    """Enqueue an allreduce of one tensor in place if it is the same as the last one of this name.

    Returns 0, without any effect, if there is no fast path.

    Args:
        name: As the caller gave it, like `op`, `arguments` and `tensor`; only checked arguments are remembered.
        op: Must be the same object as last: True and torch's SUM are equal to integers that mean something else.
        arguments: All other arguments.
        tensor: The tensor to reduce.
        waits: See `start_in_place`.
    """
    last = _last.get(name) if type(name) is str else None
    if last is None or last.op is not op or last.arguments != arguments:
        return 0
    path = last.in_place if waits else last.copied
    if path is None:
        return 0
    handle = start_on_fast_path(path, tensor, waits)
    if handle:
        _overwritten.append(tensor)
    return handle


def start_on_fast_path(path: FastPath, tensor: torch.Tensor, waits: bool) -> int:
    """Enqueue an allreduce in place on a fast path. Returns 0, without any effect, if the tensor does not fit.

    `waits`: see `start_in_place`; True for a synchronous fast path, False for an asynchronous one.
    """
    if waits:
        ops.hand_over()
    # The call writes the handle and the storage here, so that a signal handler that raises does not lose them.
    kept: list[Any] = [0, None]
    try:
        handle = path.enqueue(tensor, kept)
        if handle:
            _on_fast_path[handle] = tensor, path, kept[1]
        if waits:
            ops.raise_interruption()
    except BaseException:
        if kept[0]:
            ops.give_up(kept[0], [path, kept, *keep([tensor])])
            _on_fast_path.pop(kept[0], None)
        raise
    return handle


def start_in_place_and_remember(
    name: str | None, op: int | None, arguments: tuple[object, ...], call: Call, tensor: torch.Tensor, waits: bool
) -> int:
    """Enqueue an allreduce of one tensor in place, and remember it for `start_again_in_place`."""
    handle = start_in_place(call, [tensor], single=True, waits=waits)
    dtype, shape = tensor.dtype, tensor.shape  # read once: another thread may resize the tensor
    request = call.requests.get((False, dtype, shape))
    if name is not None and request is not None and gpu.is_on_cpu(tensor) and is_in_memory(tensor):
        if len(_last) >= CALLS_KEPT:
            _last.clear()
        num_bytes = math.prod(shape) * dtype.itemsize
        _last[name] = _Last(op, arguments, request, *fast_path.fast_paths(request, dtype, shape, num_bytes))
    return handle


def start_to_new(call: Call, tensors: Sequence[torch.Tensor], single: bool, waits: bool = False) -> int:
    """Enqueue an operation whose result has the shapes of the tensors but memory of its own; return its handle.

    `waits`: see `start_in_place`.
    """
    for tensor in tensors:
        check(tensor, call.name)
    return _start_with_outputs(call, tensors, [tensor.shape for tensor in tensors], single, waits)


def start_reducescatter(call: Call, tensors: Sequence[torch.Tensor], single: bool, waits: bool = False) -> int:
    """Enqueue an operation whose result is this rank's share of the rows of the tensors; return its handle.

    `waits`: see `start_in_place`.
    """
    for tensor in tensors:
        check(tensor, call.name)
        if tensor.dim() == 0:
            raise ValueError(f"{call.name}: a scalar has no rows; a reducescatter needs at least one dimension")
    members = process_set.members(call.process_set)
    place = members.index(basics.rank())
    shapes = [(rows_of(tensor.shape[0], place, len(members)), *tensor.shape[1:]) for tensor in tensors]
    return _start_with_outputs(call, tensors, shapes, single, waits)


def _start_with_outputs(
    call: Call, tensors: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]], single: bool, waits: bool
) -> int:
    inputs, loans = lent(tensors, call.name, waits)
    devices = [tensor.device for tensor in tensors]
    outputs = [torch.empty(shape, dtype=t.dtype, device=t.device) for shape, t in zip(shapes, inputs, strict=True)]

    def finish(_: list[Output]) -> Result:
        results = tuple(output.to(device) for output, device in zip(outputs, devices, strict=True))
        return results[0] if single else results

    return start(call, inputs, outputs, [*inputs, *outputs, *loans], finish)


def synchronize(handle: int) -> Result:
    """Wait for an operation and return its result; None for a handle that is unknown or was synchronized before.

    Results on a GPU may not be complete yet: the current stream waits for them, the host does not. So they can be used
    like results of any operation on the GPU.

    Raises:
        HorovodInternalError: The operation failed: the ranks disagree about it, or the job is broken or shut down, or
            a new job has begun since.
        TypeError: `handle` is not an integer.
        ValueError: The operation cannot be carried out with these arguments.
    """
    if _overwritten:
        _mark_overwritten()
    if type(handle) is not int:
        handle = integer(handle, "handle", "synchronize")
    on_fast_path = _on_fast_path.get(handle)
    if on_fast_path is not None:
        tensor, path, _ = on_fast_path
        status = path.take(handle, tensor)
        if status == 0:
            _on_fast_path.pop(handle, None)
            return tensor
        return fast_path.wait(handle, on_fast_path, status)
    operation = _in_flight.get(handle)  # held here before the pop: a signal handler may raise
    if operation is None:
        if handle in _lost:
            raise ShutDownError(f"handle {handle} is of the job before the last init(): its operation is lost")
        return None
    try:
        if _in_flight.pop(handle, None) is None:  # another thread waits for it
            return None
        outputs = ops.wait(handle) if operation.stream is None else _wait_on_stream(handle, operation, operation.stream)
    except BaseException:
        if ops.is_known(handle):
            # A signal handler has raised. The engine still uses the memory, and the handle can be waited for again.
            _in_flight[handle] = _kept(operation)
        raise
    return operation.finish(outputs)


def _kept(operation: _InFlight) -> _InFlight:
    """Return an operation that keeps its memory, though its caller has stopped waiting."""
    return operation._replace(borrowed=[*operation.borrowed, *keep(operation.borrowed)])


def _wait_on_stream(handle: int, operation: _InFlight, started_on: GpuStream) -> list[Output]:
    stream = gpu.current_stream(started_on.device)
    try:
        ops.wait_on_stream(handle, stream)
    except HorovodInternalError as error:
        failure = None if operation.allocation is None else operation.allocation.failure
        raise error if failure is None else type(error)(f"{error}: {failure}") from failure
    finally:  # after an error, too, the GPU may work on them
        if stream != started_on:
            gpu.keep_for(stream, [one for one in operation.borrowed if isinstance(one, torch.Tensor)])
    return []


def poll(handle: int) -> bool:
    """Return whether `synchronize` would return at once. On a GPU the result may not be complete even then.

    Raises:
        TypeError: `handle` is not an integer.
        ValueError: The handle is unknown, or was synchronized before.
    """
    if _overwritten:
        _mark_overwritten()
    handle = integer(handle, "handle", "poll")
    if handle not in _in_flight and handle not in _on_fast_path:
        raise ValueError(f"handle {handle} does not belong to an operation in flight")
    try:
        is_complete = ops.poll(handle)
    except KeyError:  # another thread has synchronized it meanwhile
        raise ValueError(f"handle {handle} was synchronized before") from None
    operation = _in_flight.get(handle)
    if is_complete and operation is not None and operation.stream is None:
        operation.borrowed.clear()  # `finish` has what the result needs
        operation.storages.clear()
    return is_complete


def give_up(handle: int) -> None:
    """Release an operation that a signal handler has interrupted, and that will not be synchronized."""
    operation, on_fast_path = _in_flight.get(handle), _on_fast_path.get(handle)
    kept: list[object] = [] if operation is None else [_kept(operation)]
    if on_fast_path is not None:
        kept += [*on_fast_path, *keep(on_fast_path)]
    ops.give_up(handle, kept)
    _in_flight.pop(handle, None)
    _on_fast_path.pop(handle, None)


def abandon(handles: Sequence[int], borrowed: Sequence[object]) -> None:
    """After an error, keep the memory of operations alive for as long as one of them uses it."""
    operations = [_in_flight[handle] for handle in handles if handle in _in_flight]
    held = _abandoned.setdefault(tuple(handles), [])
    held += [*borrowed, *operations, *keep(borrowed), *map(_kept, operations)]
    for handle in handles:
        _in_flight.pop(handle, None)
    for before in list(_abandoned):
        if _are_over(before):
            _abandoned.pop(before, None)


def _are_over(handles: Iterable[int]) -> bool:
    return all([ops.forget(handle) for handle in handles])  # a list, so that `forget` is called for all
