"""Messages from the memory of one rank to the memory of another: the base of the bindings' point-to-point functions.

The memory of a message is read or written by the engine until its handle is complete: the caller keeps it alive and
does not access it. Functions of :mod:`horovodlike._engine.ops` take the handles, too: `poll`, `wait`, `wait_all` and
`give_up`. All functions may be called from any thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from horovodlike._engine.native import ffi, lib
from horovodlike._engine.requests import WAIT_SLICE_SECONDS, check, refuse, until_complete

ANY_SOURCE: int = lib.HVL_ANY_SOURCE  # the peer of a receive that takes a message from any rank


class Received(NamedTuple):
    """The source and the size of a received message.

    Attributes:
        source: The global rank that has sent the message.
        num_bytes: The size of the message.
    """

    source: int
    num_bytes: int


def send(address: int, num_bytes: int, dtype: int, *, peer: int, tag: int, process_set: int = 0) -> int:
    """Start to send memory to a rank, which may be this one, and return at once.

    Args:
        address: The address of the elements.
        num_bytes: The size of all elements; may be 0.
        dtype: The `DType` of the elements.
        peer: The global rank that receives the message.
        tag: From 0 to 2**62. Messages of one tag and process set to one rank are received in the order of the sends.
        process_set: Id of a process set of which both ranks are members.

    Returns:
        A handle. It is complete when the memory is not needed any more: for a large message, when the message has been
        received. A wait for it raises the errors of a wait for a :func:`receive`, except `MismatchError`.

    Raises:
        ValueError: An argument does not fit the job.
        TypeError: An argument is no integer.
        HorovodInternalError: The job is broken or shut down.
    """
    return _post("send", lib.hvl_send, address, num_bytes, dtype, peer, tag, process_set)


def receive(address: int, num_bytes: int, dtype: int, *, peer: int, tag: int, process_set: int = 0) -> int:
    """Start to receive a message from a rank into memory, and return at once.

    Args:
        address: The address of the memory for the elements.
        num_bytes: The size of the message.
        dtype: The `DType` of the message.
        peer: The global rank that sends the message, or `ANY_SOURCE`.
        tag: The tag of the message.
        process_set: The id of the message's process set.

    Returns:
        A handle, also for :func:`wait_message`. A wait for it raises `MismatchError` if the message has another size or
        dtype, `ValueError` if the process set does not have the ranks or is removed, and `HorovodInternalError` if the
        job is broken or shut down.

    Raises:
        ValueError: An argument does not fit the job.
        TypeError: An argument is no integer.
        HorovodInternalError: The job is broken or shut down.
    """
    return _post("receive", lib.hvl_receive, address, num_bytes, dtype, peer, tag, process_set)


def wait_message(handle: int) -> Received:
    """Block until a receive is complete, consume its handle, and return the source and the size of the message.

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
