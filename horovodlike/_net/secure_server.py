"""The connections of a server: it accepts and authenticates them, and divides the bytes received into messages.

A connection starts as *pending* (:mod:`horovodlike._net.pending`). With a correct hello it becomes a *member*, whose
frames are verified before they are read. No client can make another one wait.
"""

import contextlib
import json
import math
import selectors
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from horovodlike._net.pending import PendingConnection, PendingConnections
from horovodlike._net.secure_channel import (
    FRAME_LIMIT,
    HANDSHAKE_TIMEOUT,
    HELLO_BYTES,
    AuthenticationError,
    FrameError,
    Identity,
    JobKey,
    Opener,
    Sealer,
    accept_hello,
    close_in_child,
    make_challenge,
)

_READ_BYTES = 1 << 16
_MOST_PENDING = 128
_PAUSE_SECONDS = 0.05


@dataclass(eq=False)
class Connection:
    """A client that has authenticated itself. Handlers may use :attr:`rank`; the rest is for the secure server."""

    socket: socket.socket
    sealer: Sealer
    opener: Opener
    rank: int = -1  # the rank that the client has claimed
    unsent: bytearray = field(default_factory=bytearray)

    @property
    def closed(self) -> bool:
        """True if the connection has been closed."""
        return self.socket.fileno() < 0


class ConnectionHandler(Protocol):
    """The user of a secure server: decides about clients and receives their messages."""

    def on_connect(self, connection: Connection, identity: Identity) -> str | None:
        """Decide on a client that has authenticated. Return a reason to refuse it, or None."""

    def on_message(self, connection: Connection, payload: bytes) -> None:
        """Handle a message of a client.

        Raises:
            ProtocolError: The message is invalid; the connection is then closed.
        """

    def on_disconnect(self, connection: Connection, reason: str) -> None:
        """Handle the end of a client's connection."""


class ProtocolError(Exception):
    """A client violates the protocol."""


class SecureServer:
    """The connections of one server. Used by one thread."""

    def __init__(
        self,
        key: JobKey,
        handler: ConnectionHandler,
        *,
        who: str,
        expected: int = 0,
        handshake_timeout: float = HANDSHAKE_TIMEOUT,
    ) -> None:
        """Start without a listening socket.

        Args:
            key: The key that clients must hold.
            handler: Decides about clients that hold the key, and receives their messages.
            who: The word for a client in messages, before its number.
            expected: The number of clients that may connect at the same time.
            handshake_timeout: How long a client may take to authenticate itself, in seconds.
        """
        self._key = key
        self._handler = handler
        self._who = who
        self._members: dict[Connection, None] = {}
        self._listeners: list[socket.socket] = []
        self._selector = selectors.DefaultSelector()
        most = _MOST_PENDING + 2 * expected
        self._pending = PendingConnections(self._selector, make_challenge, HELLO_BYTES, most, handshake_timeout)
        close_in_child(self)

    def fileno(self) -> int:
        """Return a descriptor that is readable when :meth:`attend` has something to do."""
        return self._selector.fileno()

    def listen(self, listeners: Iterable[socket.socket]) -> None:
        """Take over listening sockets, to accept their connections and to close them."""
        for listener in listeners:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ, None)
            self._listeners.append(listener)

    def wake_by(self, descriptor: socket.socket) -> None:
        """Make :meth:`attend` return when a descriptor is readable."""
        self._selector.register(descriptor, selectors.EVENT_READ, None)

    @property
    def listening(self) -> bool:
        """True if the server listens."""
        return bool(self._listeners)

    def stop_listening(self) -> None:
        """Accept no more connections."""
        for listener in self._listeners:
            self._selector.unregister(listener)
            listener.close()
        self._listeners = []
        self._pending.drop_late(math.inf)

    def next_deadline(self) -> float | None:
        """Return the time at which :meth:`attend` has something to do even without traffic; None if there is none."""
        return self._pending.next_deadline()

    def attend(self, patience: float | None = 0.0) -> None:
        """Handle all events; wait up to ``patience`` seconds for the first one, or without a limit if that is None."""
        for key, events in self._selector.select(patience):
            if key.fileobj in self._listeners:
                self._accept(key.fileobj)
            elif isinstance(key.data, PendingConnection) and key.data in self._pending:
                hello = self._pending.read(key.data)
                if hello is not None:
                    self._authenticate(key.data, hello)
            elif isinstance(key.data, Connection) and not key.data.closed:
                self._attend(key.data, events)
        self._pending.drop_late(time.monotonic())

    def look_at(self, connection: Connection) -> None:
        """Read the bytes that a client has sent; this also notices the end of its connection."""
        self._attend(connection, selectors.EVENT_READ)

    def send(self, connection: Connection, message: Any) -> None:
        """Send a client a JSON value, now or when its socket has room.

        Raises:
            FrameError: The value is too large.
        """
        self.send_encoded(connection, encode(message))

    def send_encoded(self, connection: Connection, payload: bytes) -> None:
        """Send a client a message that is encoded already."""
        connection.unsent += connection.sealer.seal(payload)
        # The loss of the client is noticed when its socket is read.
        with contextlib.suppress(OSError):
            self._flush_some(connection)

    def flush(self, connection: Connection, deadline: float) -> None:
        """Wait until everything is sent to a client, until the deadline at most; ignore the loss of the client."""
        with contextlib.suppress(OSError):
            connection.socket.settimeout(max(0.001, deadline - time.monotonic()))
            connection.socket.sendall(connection.unsent)

    def drop(self, connection: Connection) -> None:
        """Close a connection; the handler is not called."""
        if not connection.closed:
            with contextlib.suppress(KeyError, ValueError, OSError):
                self._selector.unregister(connection.socket)
            connection.socket.close()
        self._members.pop(connection, None)

    def close(self) -> None:
        """Close everything. Also runs in a forked child, where it must not touch the parent's epoll set."""
        self._pending.close()
        for connection in self._members:
            connection.socket.close()
        self._selector.close()
        for listener in self._listeners:
            listener.close()

    def _accept(self, listener: socket.socket) -> None:
        try:
            self._pending.accept(listener)
        except OSError:  # without a free descriptor the listener stays readable: do not spin
            time.sleep(_PAUSE_SECONDS)

    def _authenticate(self, pending: PendingConnection, hello: bytes) -> None:
        try:
            identity, sealer, opener = accept_hello(self._key, pending.challenge, hello)
        except AuthenticationError:
            self._pending.drop(pending)
            return
        connection = Connection(self._pending.release(pending), sealer, opener)
        try:
            self._selector.register(connection.socket, selectors.EVENT_READ, connection)
        except OSError:  # the kernel cannot watch more sockets
            connection.socket.close()
            return
        refusal = self._handler.on_connect(connection, identity)
        if refusal is not None:
            self.send(connection, {"refused": refusal})
            self.drop(connection)
            return
        connection.rank = identity.rank
        self._members[connection] = None

    def _attend(self, connection: Connection, events: int) -> None:
        who = f"{self._who} {connection.rank}"
        try:
            if events & selectors.EVENT_WRITE:
                self._flush_some(connection)
            if events & selectors.EVENT_READ and not connection.closed:
                self._read(connection)
        except (FrameError, ProtocolError) as error:
            self._disconnect(connection, f"the connection of {who} was closed: {error}")
        except OSError as error:
            self._disconnect(connection, f"the connection of {who} broke: {error.strerror or error}")

    def _read(self, connection: Connection) -> None:
        try:
            data = connection.socket.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        if not data:
            self._disconnect(connection, f"{self._who} {connection.rank} is gone: its process has ended or was killed")
            return
        for payload in connection.opener.feed(data):
            self._deliver(connection, payload)

    def _deliver(self, connection: Connection, payload: bytes) -> None:
        if connection.closed:
            return
        if len(connection.unsent) > 2 * FRAME_LIMIT:
            raise ProtocolError("it does not read its answers")
        self._handler.on_message(connection, payload)

    def _flush_some(self, connection: Connection) -> None:
        if connection.closed:
            return
        if connection.unsent:
            with contextlib.suppress(BlockingIOError, InterruptedError):
                sent = connection.socket.send(connection.unsent)
                del connection.unsent[:sent]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
        self._selector.modify(connection.socket, events, connection)

    def _disconnect(self, connection: Connection, reason: str) -> None:
        member = connection in self._members
        self.drop(connection)
        if member:
            self._handler.on_disconnect(connection, reason)


def encode(message: Any) -> bytes:
    """Return a message in the encoding in which it is sent: compact JSON."""
    return json.dumps(message, separators=(",", ":")).encode()
