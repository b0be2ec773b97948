"""Parameter servers in the core: connections, arrays and handles, as `hvl_parameters.h` has them.

The thread of the core moves the bytes and applies the rules. Calls here return at once, or wait for a handle. The
memory that is given to a call is kept until the call is complete, even if its handle is gone.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

from horovodlike._engine.native import ffi, lib
from horovodlike._engine.requests import WAIT_SLICE_SECONDS, check, text_of
from horovodlike._engine.types import DType

BLOCK = int(lib.HVL_PARAMETERS_BLOCK)
MOST_ARGUMENTS = int(lib.HVL_PARAMETERS_ARGUMENTS)
NAME_BYTES = int(lib.HVL_PARAMETERS_NAME_BYTES)


class Payload(IntEnum):
    """The forms in which elements are sent."""

    FULL = lib.HVL_PAYLOAD_FULL
    BFLOAT16 = lib.HVL_PAYLOAD_BFLOAT16
    INT8 = lib.HVL_PAYLOAD_INT8


class Remembered(IntEnum):
    """The things that servers remember of an array besides its elements."""

    SLOT_0 = lib.HVL_SLOT_0
    SLOT_1 = lib.HVL_SLOT_1
    COUNTERS = lib.HVL_COUNTERS
    UPDATES = lib.HVL_UPDATES  # only received


class Peer(NamedTuple):
    """A connection for the core, over which both ends have authenticated themselves.

    Attributes:
        fd: The socket; the core duplicates it, and also `memory_fd`.
        name: The other end, for errors and the log.
        keys: The keys of the MACs of both directions: send, receive.
        seal_data: Whether all bytes have MACs.
        memory_fd: Shared memory of `segment_bytes()` zeros; -1 without.
        pid: If there is such memory, the process at the other end if that has a process id here; else 0.
        is_own: Whether the server at the other end is this process. Only `name` is used then.
    """

    fd: int
    name: str
    keys: tuple[bytes, bytes]
    seal_data: bool
    memory_fd: int = -1
    pid: int = 0
    is_own: bool = False


class Update:
    """A rule with its arguments, and how the elements are sent."""

    __slots__ = ("_kept", "native")

    def __init__(
        self,
        rule: str,
        arguments: Sequence[float] = (),
        payload: Payload = Payload.FULL,
        feeds_errors_back: bool = False,
    ) -> None:
        """Describe an update, for any number of calls."""
        self.native = native = ffi.new("hvl_parameters_update *")
        self._kept = name, given = ffi.new("char[]", rule.encode()), ffi.new("double[]", list(arguments))
        native.rule, native.arguments, native.num_arguments = name, given, len(given)
        native.payload, native.feeds_errors_back = payload, feeds_errors_back


def segment_bytes() -> int:
    """Return the size of the memory that the two ends of a connection on one host share."""
    return int(lib.hvl_parameters_segment_bytes())


def _described(peer: Peer) -> tuple[Any, Any]:
    """Return an hvl_parameters_connection, and an object to be kept as long as it is used."""
    name = ffi.new("char[]", peer.name.encode(errors="replace"))
    native = ffi.new("hvl_parameters_connection *")
    native.is_own, native.fd, native.peer = peer.is_own, peer.fd, name
    native.memory_fd, native.peer_pid = peer.memory_fd, peer.pid
    if peer.memory_fd < 0:
        native.has_keys, native.seal_data = 1, peer.seal_data
        ffi.memmove(native.send_key, peer.keys[0], len(peer.keys[0]))
        ffi.memmove(native.receive_key, peer.keys[1], len(peer.keys[1]))
    return native, name


def add_client(peer: Peer) -> None:
    """Serve a client from now on."""
    native, _name = _described(peer)
    check(lib.hvl_parameters_add_client(native))


def add_server(peer: Peer) -> int:
    """Become a client of a server; return its number in this process."""
    native, _name = _described(peer)
    return _accepted(lib.hvl_parameters_add_server(native))


def remove_server(server: int) -> None:
    """End the connection to a server."""
    lib.hvl_parameters_remove_server(server)  # an error would say that it has ended already


def stop() -> None:
    """End all connections and the thread, and free all shards of this process."""
    check(lib.hvl_parameters_stop())
    _forget_abandoned()


Apply = Callable[[str, tuple[float, ...], DType, Callable[[int], Any], Callable[[int], Any], int], None]
_apply: Apply | None = None


def set_rules(apply: Apply) -> None:
    """Have the user's rules carried out by a function.

    Args:
        apply: Takes the name, the arguments, the element type, two functions that return the memory of the values and
            of the pushed elements, given its number of bytes, and the number of elements. The core's thread calls it;
            its exception becomes the error of the client's call.
    """
    global _apply
    _apply = apply
    check(lib.hvl_parameters_set_rule(lib.hvl_apply_rule, ffi.NULL))


@ffi.def_extern(error=1)  # type: ignore[untyped-decorator]
def hvl_apply_rule(
    _: Any, name: Any, arguments: Any, num_arguments: int, dtype: int, values: Any, pushed: Any, count: int, error: Any
) -> int:
    """Carry out a rule of the user: see `hvl_parameters_rule` in `hvl_parameters.h`."""
    try:
        assert _apply is not None
        given = tuple(arguments[index] for index in range(num_arguments))
        memory = (functools.partial(ffi.buffer, values), functools.partial(ffi.buffer, pushed))
        _apply(ffi.string(name).decode(), given, DType(dtype), *memory, count)
    except BaseException as raised:
        text = f"{type(raised).__name__}: {raised}".encode(errors="replace")[: lib.HVL_PARAMETERS_ERROR_BYTES - 1]
        ffi.memmove(error, text + b"\0", len(text) + 1)
        return 1
    return 0


class Array:
    """An array that servers have, as a client sees it.

    A call that moves elements takes the address of their memory, and the object that keeps this memory, and returns a
    handle.
    """

    def __init__(self, number: int, dtype: int, shards: Sequence[tuple[int, int]], num_clients: int) -> None:
        """Describe the array; nothing is sent.

        Args:
            number: Unique among the arrays of all clients of the servers.
            dtype: The element type.
            shards: The server of each shard, as :func:`add_server` numbers it, and the shard's number of elements.
            num_clients: How many clients tick; 0: none does.
        """
        native = ffi.new("hvl_parameters_array_config *")
        native.id, native.dtype, native.num_clients = number, dtype, num_clients
        native.shards = listed = ffi.new("hvl_parameters_shard[]", list(shards))
        native.num_shards = len(shards)
        self.num_blocks = sum((count + BLOCK - 1) // BLOCK for _, count in shards)
        opened = lib.hvl_parameters_open(native)
        del listed
        if opened == ffi.NULL:
            raise ValueError(text_of(lib.hvl_last_error()))
        self._native = ffi.gc(opened, lib.hvl_parameters_close)

    def create(self) -> int:
        """Create the shards, with zeros, unless they exist."""
        return _accepted(lib.hvl_parameters_create(self._native))

    def remove(self) -> int:
        """Free the shards at the servers."""
        return _accepted(lib.hvl_parameters_remove(self._native))

    def send(self, update: Update, offset: int, count: int, address: int, keeper: object) -> int:
        """Update a range of elements."""
        memory = ffi.cast("void *", address)
        return _borrow(lib.hvl_parameters_send(self._native, update.native, offset, count, memory), keeper)

    def receive(self, offset: int, count: int, address: int, keeper: object) -> int:
        """Copy a range of elements to memory."""
        memory = ffi.cast("void *", address)
        return _borrow(lib.hvl_parameters_receive(self._native, offset, count, memory), keeper)

    def send_rows(self, update: Update, indices: Rows, length: int, address: int, keeper: object) -> int:
        """Update rows of `length` elements."""
        chosen, memory = ffi.cast("int64_t *", indices.address), ffi.cast("void *", address)
        arguments = (update.native, chosen, indices.size, length, memory)
        return _borrow(lib.hvl_parameters_send_rows(self._native, *arguments), keeper)

    def receive_rows(self, indices: Rows, length: int, address: int, keeper: object) -> int:
        """Copy rows of `length` elements to memory."""
        chosen, memory = ffi.cast("int64_t *", indices.address), ffi.cast("void *", address)
        return _borrow(lib.hvl_parameters_receive_rows(self._native, chosen, indices.size, length, memory), keeper)

    def send_state(self, state: Remembered, address: int, keeper: object) -> int:
        """Replace the state that the servers remember."""
        return _borrow(lib.hvl_parameters_send_state(self._native, state, ffi.cast("void *", address)), keeper)

    def receive_state(self, state: Remembered, address: int, keeper: object) -> int:
        """Copy the state that the servers remember to memory."""
        return _borrow(lib.hvl_parameters_receive_state(self._native, state, ffi.cast("void *", address)), keeper)

    def tick(self, staleness: int) -> int:
        """Advance this client's clock; complete when it is at most `staleness` ahead of the slowest one."""
        return _accepted(lib.hvl_parameters_tick(self._native, staleness))

    def leave_clocks(self) -> int:
        """Take this client's clock out of those that others wait for."""
        return _accepted(lib.hvl_parameters_tick(self._native, -1))


class Rows(NamedTuple):
    """The numbers of rows: an address of int64 numbers, which are copied by a call."""

    address: int
    size: int


# By handle of each call that is not known to be complete: the object that keeps its memory.
_borrowed: dict[int, object] = {}
# Those that no thread will wait for, the oldest first. No lock: the garbage collector may abandon one at any point.
_abandoned: deque[int] = deque()
_MOST_ABANDONED = 1024  # with more, a further call waits for the oldest one


def _accepted(number: int) -> int:
    if number < 0:
        check(-number)
    return number


def _borrow(handle: int, keeper: object) -> int:
    if handle < 0:
        check(-handle)
    _borrowed[handle] = keeper
    _forget_abandoned()
    while len(_abandoned) > _MOST_ABANDONED:
        _forget_abandoned(WAIT_SLICE_SECONDS)
    return handle


def _forget_abandoned(patience: float = 0.0) -> None:
    """Free those that are complete up to the first that is not; wait for the oldest one up to `patience` seconds."""
    while _abandoned:
        try:
            handle = _abandoned.popleft()
        except IndexError:  # another thread has taken the last one
            return
        if lib.hvl_parameters_wait(handle, patience) == lib.HVL_IN_PROGRESS:
            _abandoned.appendleft(handle)
            return
        _borrowed.pop(handle, None)
        patience = 0.0


def abandon(handles: Sequence[int]) -> None:
    """Give up the results of these handles. Their memory is kept until the calls are complete."""
    _abandoned.extend(handles)
    _forget_abandoned()


def are_complete(handles: Sequence[int]) -> bool:
    """Return whether all calls are complete, successful or not."""
    return all(lib.hvl_parameters_poll(handle) for handle in handles)


def wait(handles: Sequence[int], timeout: float | None) -> bool:
    """Wait for calls; return False if they are not all complete in time: then the handles stay valid.

    Args:
        handles: Their handles.
        timeout: Seconds; None: no limit.

    Raises:
        HorovodInternalError: A call has failed; the handles are consumed.
        ValueError: A server has rejected a call; the handles are consumed.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    native = ffi.new("int64_t[]", handles)
    left = WAIT_SLICE_SECONDS
    while True:
        if deadline is not None:
            left = min(max(0.0, deadline - time.monotonic()), WAIT_SLICE_SECONDS)
        status = lib.hvl_parameters_wait_all(native, len(handles), left)
        if status != lib.HVL_IN_PROGRESS:
            for handle in handles:
                _borrowed.pop(handle, None)
            if status != 0:
                check(status)
            return True
        if deadline is not None and time.monotonic() >= deadline:
            return False
