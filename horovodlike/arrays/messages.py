"""Messages of arrays from one rank to another, for any library, in the host's memory. The function names are mpi4py's.

* `tag` distinguishes the messages between two ranks. Messages of the same tag and process set arrive in the order in
  which they were sent; several may be in flight at once, in both directions.
* A receive writes the message into an array, which must have the same dtype and number of bytes as the message. Else
  the receive raises `MismatchError`, and the message is lost. Shapes may differ.
* Ranks are global ones, as in all other functions.
* A large message is not sent before it is received: two ranks that send to each other use `isend` or `sendrecv`.
* `synchronize` and `poll` take the handles of `isend` and `irecv`. Leave the arrays alone until `synchronize` returns.
* Any thread may call these functions. An interrupted call, as by Ctrl-C, counts as sent, or as received.

All raise `TypeError` for an object that is not an array, `ValueError` for arguments that cannot be used, and
`HorovodInternalError` if the job is broken or shut down.
"""

from __future__ import annotations

from typing import Any

from horovodlike import basics
from horovodlike._engine import messages, ops
from horovodlike._engine.arguments import integer
from horovodlike._engine.messages import ANY_SOURCE, Received
from horovodlike.arrays.memory import HostArray, check_distinct, check_no_overlap, describe
from horovodlike.arrays.operations import result, start_message
from horovodlike.process_set import ProcessSet, global_process_set, registered_id

__all__ = ["ANY_SOURCE", "irecv", "isend", "recv", "send", "sendrecv"]


def send(array: Any, dest: int, tag: int = 0, process_set: ProcessSet = global_process_set) -> None:
    """Send an array to a rank, and return when its memory may be used again: for a large array, when it is received.

    Args:
        array: Of any shape.
        dest: The rank that receives it.
        tag: From 0 to 2**62.
        process_set: A set of which both ranks are members.

    Raises:
        HorovodInternalError: The job is broken or shut down.
        TypeError: `array` is not an array.
        ValueError: An argument cannot be used.
    """
    result(isend(array, dest, tag, process_set))


def isend(array: Any, dest: int, tag: int = 0, process_set: ProcessSet = global_process_set) -> int:
    """Start what `send` does and return a handle for `poll` and `synchronize`."""
    sent = _on_host(array, "send")
    work, _ = sent.in_memory(allows_columns=False)
    memory = sent.memory_of(work)
    options = _options("send", "dest", dest, tag, process_set)

    def post() -> int:
        return messages.send(memory.address, work.nbytes, sent.dtype, **options)

    return start_message(post, ops.wait_done, lambda _: None, (sent, work, memory))


def recv(array: Any, source: int = ANY_SOURCE, tag: int = 0, process_set: ProcessSet = global_process_set) -> int:
    """Receive a message into an array, and return the sender's rank.

    Args:
        array: The array for the message: writable, with the message's dtype and number of bytes.
        source: The sender's rank; with `ANY_SOURCE`, the first message from any rank is received.
        tag: The tag of the message.
        process_set: The process set of the message.

    Raises:
        MismatchError: The message has another size or dtype.
        HorovodInternalError: The job is broken or shut down.
        TypeError: `array` is not an array.
        ValueError: An argument cannot be used.
    """
    sender: int = result(irecv(array, source, tag, process_set))
    return sender


def irecv(array: Any, source: int = ANY_SOURCE, tag: int = 0, process_set: ProcessSet = global_process_set) -> int:
    """Start what `recv` does and return a handle for `poll` and `synchronize`. Its result is the sender's rank."""
    received = _on_host(array, "recv")
    check_distinct([received], "recv")
    work, _ = received.in_memory(allows_columns=False)
    memory = received.memory_of(work)
    options = _options("recv", "source", source, tag, process_set)

    def post() -> int:
        return messages.receive(memory.address, work.nbytes, received.dtype, **options)

    def finish(message: Received) -> int:
        if work is not received.array:
            received.write(work)
        return message.source

    return start_message(post, messages.wait_message, finish, (received, work, memory))


def sendrecv(
    array: Any,
    dest: int,
    recvbuf: Any = None,
    source: int = ANY_SOURCE,
    sendtag: int = 0,
    recvtag: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send an array and receive a message at the same time.

    Args:
        array: The array, or the number, to send; it must share no memory with `recvbuf`.
        dest: See `send`.
        recvbuf: See `array` of `recv`. None: the message has the shape and dtype of `array`.
        source: See `recv`.
        sendtag: The tag of the message that is sent.
        recvtag: The tag of the message that is received.
        process_set: A set of which all three ranks are members.

    Returns:
        The rank that has sent the message; without `recvbuf`, the message, as a new array or number like `array`.

    Raises:
        MismatchError: The message has another size or dtype.
        HorovodInternalError: The job is broken or shut down.
        TypeError: `array` or `recvbuf` is not an array.
        ValueError: An argument cannot be used.
    """
    described = _on_host(array, "sendrecv")
    target = described.empty(described.shape) if recvbuf is None else recvbuf
    check_no_overlap([described, _on_host(target, "sendrecv")], "sendrecv")
    # Checked before the receive is posted: an invalid send must not leave a receive in flight.
    sent = _options("sendrecv", "dest", dest, sendtag, process_set)
    if not 0 <= sent["peer"] < basics.size() or sent["tag"] < 0:
        raise ValueError(f"sendrecv: dest must be one of the ranks 0 to {basics.size() - 1}, sendtag 0 or more")
    receiving = irecv(target, source, recvtag, process_set)
    send(array, dest, sendtag, process_set)
    sender: int = result(receiving)
    return described.wrap(target) if recvbuf is None else sender


def _on_host(array: Any, what: str) -> HostArray:
    described = describe(array, what)
    if not isinstance(described, HostArray):
        raise ValueError(f"{what}: messages are in the host's memory; copy the array there first")
    return described


def _options(what: str, argument: str, peer: Any, tag: Any, process_set: ProcessSet) -> dict[str, int]:
    """Return the arguments of `messages` that sends and receives have in common."""
    set_id = registered_id(process_set)
    return {"peer": integer(peer, argument, what), "tag": integer(tag, "tag", what), "process_set": set_id}
