"""Makes the connections of one rank's mesh, all at the same time, in one thread and with one selector."""

import contextlib
import errno
import selectors
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from socket import AF_INET, AF_INET6, SO_ERROR, SOCK_STREAM, SOL_SOCKET, socket

from horovodlike._bootstrap.mesh_handshake import (
    CHALLENGE_BYTES,
    HELLO_BYTES,
    PROOF_BYTES,
    ConnectionId,
    Keys,
    accept_hello,
    answer_challenge,
    is_proof,
    make_challenge,
)
from horovodlike._net.connect import make_error, start
from horovodlike._net.secure_channel import HANDSHAKE_TIMEOUT, AuthenticationError, JobKey, VersionError

_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 1.0
_TRIES_IF_REFUSED = 6  # within two seconds; a network that only now comes up gets a chance
_STRANGERS = 64
_OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@dataclass(eq=False)
class _PendingConnection:
    """A connection that this rank has accepted and that has not said yet which one it is."""

    link: socket
    challenge: bytes
    deadline: float
    hello: bytearray = field(default_factory=bytearray)


@dataclass(eq=False)
class _Call:
    """A connection that this rank makes."""

    wire: ConnectionId
    link: socket | None = None
    connected: bool = False
    received: bytearray = field(default_factory=bytearray)
    proof: bytes = b""  # expected; empty until the challenge is answered
    keys: Keys | None = None
    tries: int = 0
    refusals: int = 0
    again_at: float = 0.0
    problem: str = ""


class Builder:
    """One rank's part of the mesh.

    Attributes:
        done: The connections that both sides have authenticated; sockets that do not block, and their keys.
        problems: After :meth:`run`, why the others are not there.
    """

    def __init__(
        self,
        rank: int,
        wires: Sequence[ConnectionId],
        places: Sequence[tuple[str, int]],
        key: JobKey,
        listener: socket,
        timeout: float,
    ) -> None:
        """Prepares it.

        Args:
            rank: This rank.
            wires: Its connections.
            places: By rank, the address and port where it listens.
            key: The mesh's key.
            listener: Where this rank listens; it is the caller's.
            timeout: Seconds until :meth:`run` gives up what is still missing.
        """
        self.done: dict[ConnectionId, tuple[socket, Keys]] = {}
        self.problems: dict[ConnectionId, str] = {}
        self._rank = rank
        self._places = places
        self._key = key
        self._listener = listener
        self._timeout = timeout
        self._expected = {wire for wire in wires if wire.low == rank}
        self._awaited = set(self._expected)
        self._calls = {wire: _Call(wire) for wire in wires if wire.high == rank}
        self._resting = set(self._calls.values())  # without a socket, until it is time to try again
        self._guests: dict[_PendingConnection, None] = {}  # in order of arrival
        self._most_guests = _STRANGERS + 2 * len(self._expected)

    def run(self) -> None:
        """Returns when every connection is there or has a problem, at the latest when the time is over."""
        deadline = time.monotonic() + self._timeout
        with selectors.DefaultSelector() as self._selector:
            self._listener.setblocking(False)
            self._selector.register(self._listener, selectors.EVENT_READ, None)
            try:
                while (self._calls or self._awaited) and (now := time.monotonic()) < deadline:
                    self._end_late_guests(now)
                    self._begin_calls(now)
                    for key, events in self._selector.select(self._patience(deadline)):
                        self._attend(key.data, events)
            finally:
                for guest in list(self._guests):
                    self._drop(guest)
        self._give_up()

    def close(self) -> None:
        """Closes every connection."""
        for connected, _ in self.done.values():
            connected.close()
        for call in self._calls.values():
            if call.link is not None:
                call.link.close()
        self.done.clear()

    def _patience(self, deadline: float) -> float:
        times = [deadline, *(call.again_at for call in self._resting)]
        if self._guests:
            times.append(next(iter(self._guests)).deadline)
        return max(0.0, min(times) - time.monotonic())

    def _attend(self, data: _PendingConnection | _Call | None, events: int) -> None:
        if data is None:
            self._accept()
        elif isinstance(data, _PendingConnection):
            if data.link.fileno() >= 0:
                self._hear(data)
        elif data.link is not None:
            self._pursue(data)

    # What others begin.

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except OSError as error:
            if error.errno in _OUT_OF_RESOURCES:
                if not self._guests:
                    raise
                self._drop(next(iter(self._guests)))
            return
        if len(self._guests) >= self._most_guests:
            self._drop(next(iter(self._guests)))
        accepted.setblocking(False)
        guest = _PendingConnection(accepted, make_challenge(), time.monotonic() + HANDSHAKE_TIMEOUT)
        self._guests[guest] = None
        self._selector.register(accepted, selectors.EVENT_READ, guest)
        try:
            _send_whole(accepted, guest.challenge)
        except OSError:
            self._drop(guest)

    def _hear(self, guest: _PendingConnection) -> None:
        try:
            data = guest.link.recv(HELLO_BYTES - len(guest.hello))
            guest.hello += data
            if not data:
                self._drop(guest)
            elif len(guest.hello) == HELLO_BYTES:
                wire, proof, keys = accept_hello(self._key, guest.challenge, bytes(guest.hello))
                if wire not in self._expected:
                    raise AuthenticationError(f"rank {self._rank} expects no such connection")
                _send_whole(guest.link, proof)
                self._admit(guest, wire, keys)
        except (BlockingIOError, InterruptedError):
            return
        except (OSError, AuthenticationError):
            self._drop(guest)

    def _admit(self, guest: _PendingConnection, wire: ConnectionId, keys: Keys) -> None:
        self._guests.pop(guest)
        self._selector.unregister(guest.link)
        if wire in self.done:  # the other side lost it, and has come again
            self.done[wire][0].close()
        self.done[wire] = (guest.link, keys)
        self._awaited.discard(wire)

    def _end_late_guests(self, now: float) -> None:
        while self._guests and (oldest := next(iter(self._guests))).deadline <= now:
            self._drop(oldest)

    def _drop(self, guest: _PendingConnection) -> None:
        self._guests.pop(guest, None)
        with contextlib.suppress(KeyError):
            self._selector.unregister(guest.link)
        guest.link.close()

    # What this rank begins.

    def _begin_calls(self, now: float) -> None:
        for call in [each for each in self._resting if each.again_at <= now]:
            self._resting.discard(call)
            self._begin(call)

    def _begin(self, call: _Call) -> None:
        address, port = self._places[call.wire.low]
        family = AF_INET6 if ":" in address else AF_INET
        call.tries += 1
        call.connected, call.proof = False, b""
        call.received.clear()
        try:
            call.link = socket(family, SOCK_STREAM)
            start(call.link, (address, port))
            self._selector.register(call.link, selectors.EVENT_WRITE, call)
        except OSError as error:
            if error.errno in _OUT_OF_RESOURCES:
                raise
            self._fail(call, str(error.strerror), refused=True)

    def _pursue(self, call: _Call) -> None:
        assert call.link is not None
        try:
            if not call.connected:
                if failure := call.link.getsockopt(SOL_SOCKET, SO_ERROR):
                    raise make_error(failure)
                call.connected = True
                self._selector.modify(call.link, selectors.EVENT_READ, call)
                return
            wanted = PROOF_BYTES if call.proof else CHALLENGE_BYTES
            data = call.link.recv(wanted - len(call.received))
            if not data:
                self._fail(call, "it hung up before it had proven that it is this rank")
                return
            call.received += data
            if len(call.received) == wanted:
                self._answer(call, bytes(call.received))
        except (BlockingIOError, InterruptedError):
            return
        except (VersionError, AuthenticationError) as error:
            self._fail(call, str(error), refused=True)
        except OSError as error:
            self._fail(call, error.strerror or str(error), refused=not call.connected)

    def _answer(self, call: _Call, message: bytes) -> None:
        assert call.link is not None
        call.received.clear()
        if not call.proof:
            hello, call.proof, call.keys = answer_challenge(self._key, call.wire, message)
            _send_whole(call.link, hello)
            return
        if not is_proof(call.proof, message):
            raise AuthenticationError("it does not hold the key of this job")
        assert call.keys is not None
        self._selector.unregister(call.link)
        self.done[call.wire] = (call.link, call.keys)
        call.link = None
        del self._calls[call.wire]

    def _fail(self, call: _Call, problem: str, *, refused: bool = False) -> None:
        """Tries again soon; what is refused again and again will not change."""
        if call.link is not None:
            with contextlib.suppress(KeyError):
                self._selector.unregister(call.link)
            call.link.close()
            call.link = None
        call.problem = problem
        call.refusals = call.refusals + 1 if refused else 0
        if call.refusals >= _TRIES_IF_REFUSED:
            self._lose(call)
        else:
            self._resting.add(call)
            call.again_at = time.monotonic() + min(_FIRST_PAUSE * 2 ** (call.tries - 1), _LONGEST_PAUSE)

    def _lose(self, call: _Call) -> None:
        del self._calls[call.wire]
        address, port = self._places[call.wire.low]
        self.problems[call.wire] = f"{address} port {port}: {call.problem}"

    def _give_up(self) -> None:
        for call in list(self._calls.values()):
            if call.link is not None:
                call.link.close()
                if call.connected:
                    call.problem = "it accepts connections, but does not answer as a rank does"
                call.problem = call.problem or f"no answer for {self._timeout:g} s"
            self._lose(call)
        for wire in self._awaited:
            self.problems[wire] = f"it did not connect within {self._timeout:g} s"


def _send_whole(connected: socket, data: bytes) -> None:
    """On a connection on which little has been sent, all of a short message fits into the kernel's buffer."""
    if connected.send(data) != len(data):
        raise make_error(errno.ENOBUFS)
