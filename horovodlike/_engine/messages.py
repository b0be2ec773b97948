"""Messages from one rank to another, on memory: what point-to-point functions of the bindings are built on.

The memory of a message is read or written by the engine until its handle is complete: the caller keeps it alive and
leaves it alone. Handles are those of :mod:`horovodlike._engine.ops`, whose `poll`, `wait`, `wait_all` and `give_up`
take them, too. All functions may be called from any thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from horovodlike._engine.native import ffi, lib
from horovodlike._engine.requests import WAIT_SLICE_SECONDS, check, refuse, until_complete

ANY_SOURCE: int = lib.HVL_ANY_SOURCE  # the peer of a receive that takes a message from any rank


class Received(NamedTuple):
    """The message that a receive has got.

    Attributes:
        source: The global rank that has sent it.
        num_bytes: Its size.
    """

    source: int
    num_bytes: int


def send(address: int, num_bytes: int, dtype: int, *, peer: int, tag: int, process_set: int = 0) -> int:
    """Send memory to a rank, which may be this one, and return at once.

    Args:
        address: Where the elements begin.
        num_bytes: Their size; may be 0.
        dtype: Their `DType`.
        peer: The global rank that receives them.
        tag: From 0 to 2**62. Messages of one tag and process set to one rank are received in their order.
        process_set: Id of a process set of which both ranks are members.

    Returns:
        A handle. It is complete when the memory is not needed any more: for a large message that is when it has been
        received. Its wait raises what :func:`receive` lists, except `MismatchError`.

    Raises:
        ValueError: An argument does not fit the job.
        TypeError: An argument is no integer.
        HorovodInternalError: The job is broken or shut down.
    """
    return _post("send", lib.hvl_send, address, num_bytes, dtype, peer, tag, process_set)


def receive(address: int, num_bytes: int, dtype: int, *, peer: int, tag: int, process_set: int = 0) -> int:
    """Receive a message of a rank into memory, and return at once.

    Args:
        address: Where the elements go.
        num_bytes: Their size, which is that of the message.
        dtype: Their `DType`, which is that of the message.
        peer: The global rank that sends them, or `ANY_SOURCE`.
        tag: That of the message.
        process_set: That of the message.

    Returns:
        A handle, for :func:`wait_message` too. Its wait raises `MismatchError` if the message has another size or
        dtype, `ValueError` if the process set does not have the ranks or is removed, and `HorovodInternalError` if the
        job is broken or shut down.

    Raises:
        ValueError: An argument does not fit the job.
        TypeError: An argument is no integer.
        HorovodInternalError: The job is broken or shut down.
    """
    return _post("receive", lib.hvl_receive, address, num_bytes, dtype, peer, tag, process_set)


def wait_message(handle: int) -> Received:
    """Block until a receive is complete, consume its handle, and return which message it has got.

    Raises:
        MismatchError: The message has another size or dtype than the receive.
        ValueError: The process set does not have the ranks, or has been removed.
        HorovodInternalError: The job is broken or shut down.
        KeyError: The handle is unknown.
    """
    received = ffi.new("hvl_received *")
    status = until_complete(lib.hvl_wait_message, handle, WAIT_SLICE_SECONDS, received)
    if status:
        check(status)
    return Received(received.source, received.num_bytes)


def _post(what: str, native: Callable[..., int], *arguments: int) -> int:
    try:
        handle = native(*arguments)
    except (TypeError, OverflowError):
        names = ("address", "num_bytes", "dtype", "peer", "tag", "process_set")
        for name, value, ctype in zip(names, arguments, ffi.typeof(native).args, strict=True):
            refuse(what, name, value, ctype)
        raise
    if handle < 0:
        check(-handle)
    return handle
