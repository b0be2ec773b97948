"""The connections of one rank's mesh, made all at the same time, in one thread and with one selector."""

import contextlib
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
from horovodlike._net.pending import OUT_OF_RESOURCES, PendingConnection, PendingConnections, send_whole
from horovodlike._net.secure_channel import HANDSHAKE_TIMEOUT, AuthenticationError, JobKey, VersionError

_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 1.0
_TRIES_IF_REFUSED = 6  # within two seconds, in case the network is still coming up
_MOST_PENDING = 64


@dataclass(eq=False)
class _Attempt:
    """A connection that this rank opens, and the state of its handshake."""

    connection_id: ConnectionId
    connection: socket | None = None
    connected: bool = False
    received: bytearray = field(default_factory=bytearray)
    proof: bytes = b""  # the proof to expect; empty until this rank has answered the challenge
    keys: Keys | None = None
    tries: int = 0
    refusals: int = 0
    again_at: float = 0.0
    problem: str = ""


class Builder:
    """One rank's part of the mesh.

    Attributes:
        done: The connections that both sides have authenticated, by id: the non-blocking sockets, and the keys.
        problems: After :meth:`run`, the reasons why the other connections are missing, by id.
    """

    def __init__(
        self,
        rank: int,
        connection_ids: Sequence[ConnectionId],
        addresses: Sequence[tuple[str, int]],
        key: JobKey,
        listener: socket,
        timeout: float,
    ) -> None:
        """Prepare the connections; :meth:`run` makes them.

        Args:
            rank: This rank.
            connection_ids: The connections that this rank must have.
            addresses: The address and port at which each rank listens, by rank.
            key: The mesh's key.
            listener: The socket on which this rank listens; the caller closes it.
            timeout: Seconds until :meth:`run` gives up the connections that are still missing.
        """
        self.done: dict[ConnectionId, tuple[socket, Keys]] = {}
        self.problems: dict[ConnectionId, str] = {}
        self._rank = rank
        self._addresses = addresses
        self._key = key
        self._listener = listener
        self._timeout = timeout
        self._expected = {each for each in connection_ids if each.low == rank}
        self._awaited = set(self._expected)
        self._attempts = {
            connection_id: _Attempt(connection_id) for connection_id in connection_ids if connection_id.high == rank
        }
        self._resting = set(self._attempts.values())  # attempts without a socket, until their next try

    def run(self) -> None:
        """Make the connections; return when each one is made or has failed, or after the time-out."""
        deadline = time.monotonic() + self._timeout
        most = _MOST_PENDING + 2 * len(self._expected)
        with selectors.DefaultSelector() as self._selector:
            self._pending = PendingConnections(self._selector, make_challenge, HELLO_BYTES, most, HANDSHAKE_TIMEOUT)
            self._listener.setblocking(False)
            self._selector.register(self._listener, selectors.EVENT_READ, None)
            try:
                while (self._attempts or self._awaited) and (now := time.monotonic()) < deadline:
                    self._pending.drop_late(now)
                    self._begin_attempts(now)
                    for key, _ in self._selector.select(self._seconds_left(deadline)):
                        self._handle(key.data)
            finally:
                self._pending.close()
        self._give_up()

    def close(self) -> None:
        """Close every connection."""
        for connected, _ in self.done.values():
            connected.close()
        for attempt in self._attempts.values():
            if attempt.connection is not None:
                attempt.connection.close()
        self.done.clear()

    def _seconds_left(self, deadline: float) -> float:
        times = [deadline, self._pending.next_deadline() or deadline, *(attempt.again_at for attempt in self._resting)]
        return max(0.0, min(times) - time.monotonic())

    def _handle(self, data: PendingConnection | _Attempt | None) -> None:
        if data is None:
            self._pending.accept(self._listener)
        elif isinstance(data, PendingConnection):
            if data in self._pending and (hello := self._pending.read(data)) is not None:
                self._answer_hello(data, hello)
        elif data.connection is not None:
            self._continue(data)

    # Connections that other ranks open.

    def _answer_hello(self, pending: PendingConnection, hello: bytes) -> None:
        try:
            connection_id, proof, keys = accept_hello(self._key, pending.challenge, hello)
            if connection_id not in self._expected:
                raise AuthenticationError(f"rank {self._rank} expects no such connection")
            send_whole(pending.socket, proof)
        except (OSError, AuthenticationError):
            self._pending.drop(pending)
            return
        if connection_id in self.done:  # the other rank lost the connection, and has connected again
            self.done[connection_id][0].close()
        self.done[connection_id] = (self._pending.release(pending), keys)
        self._awaited.discard(connection_id)

    # Connections that this rank opens.

    def _begin_attempts(self, now: float) -> None:
        for attempt in [each for each in self._resting if each.again_at <= now]:
            self._resting.discard(attempt)
            self._begin(attempt)

    def _begin(self, attempt: _Attempt) -> None:
        address, port = self._addresses[attempt.connection_id.low]
        family = AF_INET6 if ":" in address else AF_INET
        attempt.tries += 1
        attempt.connected, attempt.proof = False, b""
        attempt.received.clear()
        try:
            attempt.connection = socket(family, SOCK_STREAM)
            start(attempt.connection, (address, port))
            self._selector.register(attempt.connection, selectors.EVENT_WRITE, attempt)
        except OSError as error:
            if error.errno in OUT_OF_RESOURCES:
                raise
            self._fail(attempt, str(error.strerror), refused=True)

    def _continue(self, attempt: _Attempt) -> None:
        assert attempt.connection is not None
        try:
            if not attempt.connected:
                if failure := attempt.connection.getsockopt(SOL_SOCKET, SO_ERROR):
                    raise make_error(failure)
                attempt.connected = True
                self._selector.modify(attempt.connection, selectors.EVENT_READ, attempt)
                return
            wanted = PROOF_BYTES if attempt.proof else CHALLENGE_BYTES
            data = attempt.connection.recv(wanted - len(attempt.received))
            if not data:
                self._fail(attempt, "it hung up before it had proven that it is this rank")
                return
            attempt.received += data
            if len(attempt.received) == wanted:
                self._answer(attempt, bytes(attempt.received))
        except (BlockingIOError, InterruptedError):
            return
        except (VersionError, AuthenticationError) as error:
            self._fail(attempt, str(error), refused=True)
        except OSError as error:
            self._fail(attempt, error.strerror or str(error), refused=not attempt.connected)

    def _answer(self, attempt: _Attempt, message: bytes) -> None:
        assert attempt.connection is not None
        attempt.received.clear()
        if not attempt.proof:
            hello, attempt.proof, attempt.keys = answer_challenge(self._key, attempt.connection_id, message)
            send_whole(attempt.connection, hello)
            return
        if not is_proof(attempt.proof, message):
            raise AuthenticationError("it does not hold the key of this job")
        assert attempt.keys is not None
        self._selector.unregister(attempt.connection)
        self.done[attempt.connection_id] = (attempt.connection, attempt.keys)
        attempt.connection = None
        del self._attempts[attempt.connection_id]

    def _fail(self, attempt: _Attempt, problem: str, *, refused: bool = False) -> None:
        """Schedule the next attempt, or give the connection up if it has been refused too often in a row."""
        if attempt.connection is not None:
            with contextlib.suppress(KeyError):
                self._selector.unregister(attempt.connection)
            attempt.connection.close()
            attempt.connection = None
        attempt.problem = problem
        attempt.refusals = attempt.refusals + 1 if refused else 0
        if attempt.refusals >= _TRIES_IF_REFUSED:
            self._give_up_attempt(attempt)
        else:
            self._resting.add(attempt)
            attempt.again_at = time.monotonic() + min(_FIRST_PAUSE * 2 ** (attempt.tries - 1), _LONGEST_PAUSE)

    def _give_up_attempt(self, attempt: _Attempt) -> None:
        del self._attempts[attempt.connection_id]
        address, port = self._addresses[attempt.connection_id.low]
        self.problems[attempt.connection_id] = f"{address} port {port}: {attempt.problem}"

    def _give_up(self) -> None:
        for attempt in list(self._attempts.values()):
            if attempt.connection is not None:
                attempt.connection.close()
                if attempt.connected:
                    attempt.problem = "it accepts connections, but does not answer as a rank does"
                attempt.problem = attempt.problem or f"no answer for {self._timeout:g} s"
            self._give_up_attempt(attempt)
        for connection_id in self._awaited:
            self.problems[connection_id] = f"it did not connect within {self._timeout:g} s"
