"""The connections of a server: it accepts and authenticates them, and cuts what they send into messages.

A connection starts as *pending*: it gets a challenge, a few seconds, and a buffer that holds a hello and no more.
With a right hello it becomes a *member*, whose frames are verified before they are read. No client can be made
to wait for another one.
"""

import contextlib
import errno
import json
import os
import secrets
import selectors
import socket
import time
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from horovodlike._net.secure_channel import (
    FRAME_LIMIT,
    HANDSHAKE_TIMEOUT,
    HELLO_BYTES,
    NONCE_BYTES,
    AuthenticationError,
    FrameError,
    Identity,
    JobKey,
    Opener,
    Sealer,
    accept_hello,
    make_challenge,
)

_READ_BYTES = 1 << 16
_MOST_PENDING = 128


@dataclass(eq=False)
class Connection:
    """One client. Only :attr:`rank` is for others than the secure server."""

    socket: socket.socket
    nonce: bytes
    deadline: float
    hello: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)
    rank: int = -1  # as which an authenticated client has introduced itself
    sealer: Sealer | None = None
    opener: Opener | None = None
    closing: bool = False  # closes when everything is sent

    @property
    def closed(self) -> bool:
        """Whether it has been closed."""
        return self.socket.fileno() < 0


class ConnectionHandler(Protocol):
    """The user of a secure server: decides about clients and gets their messages."""

    def on_connect(self, connection: Connection, identity: Identity) -> str | None:
        """Decide on a client that has authenticated. Return a reason to refuse it, or None."""

    def on_message(self, connection: Connection, payload: bytes) -> None:
        """Handle a message of a client.

        Raises:
            ProtocolError: It makes no sense; the connection is closed.
        """

    def on_disconnect(self, connection: Connection, reason: str) -> None:
        """Handle the end of a client's connection."""


class ProtocolError(Exception):
    """A client does not keep to the protocol."""


_servers: "weakref.WeakSet[SecureServer]" = weakref.WeakSet()


def _close_in_child() -> None:
    """Close the parent's connections in a forked child: open, they would hide the parent's death from its peers."""
    for secure_server in _servers:
        secure_server.close()


os.register_at_fork(after_in_child=_close_in_child)


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
            key: What clients must hold.
            handler: Decides about clients that hold it, and gets their messages.
            who: The word for a client in messages, before its number.
            expected: How many clients may well come at the same time.
            handshake_timeout: How long a client may take to authenticate itself, in seconds.
        """
        self._key = key
        self._handler = handler
        self._who = who
        self._most_pending = _MOST_PENDING + 2 * expected
        self._handshake_timeout = handshake_timeout
        self._pending: dict[Connection, None] = {}  # in order of arrival
        self._members: dict[Connection, None] = {}
        self._listeners: list[socket.socket] = []
        self._selector = selectors.DefaultSelector()
        _servers.add(self)

    def fileno(self) -> int:
        """Return a descriptor that is readable when :meth:`attend` has something to do."""
        return self._selector.fileno()

    def listen(self, listeners: Iterable[socket.socket]) -> None:
        """Take over sockets that listen."""
        for listener in listeners:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ, None)
            self._listeners.append(listener)

    def wake_by(self, descriptor: socket.socket) -> None:
        """Make :meth:`attend` return when a descriptor is readable."""
        self._selector.register(descriptor, selectors.EVENT_READ, None)

    @property
    def listening(self) -> bool:
        """Whether it listens."""
        return bool(self._listeners)

    def stop_listening(self) -> None:
        """Accept no more connections."""
        for listener in self._listeners:
            self._selector.unregister(listener)
            listener.close()
        self._listeners = []
        for pending in list(self._pending):
            self.drop(pending)

    def next_deadline(self) -> float | None:
        """Return when :meth:`attend` will have something to do even without traffic."""
        return min((pending.deadline for pending in self._pending), default=None)

    def attend(self, patience: float | None = 0.0) -> None:
        """Handle what has happened; wait up to ``patience`` seconds for it, or without a limit if that is None."""
        for key, events in self._selector.select(patience):
            if key.fileobj in self._listeners:
                self._accept(key.fileobj)
            elif isinstance(key.data, Connection) and not key.data.closed:
                self._attend(key.data, events)
        now = time.monotonic()
        for pending in [each for each in self._pending if each.deadline <= now]:
            self.drop(pending)

    def look_at(self, connection: Connection) -> None:
        """Read what a client has sent, which may be the end of its connection."""
        self._attend(connection, selectors.EVENT_READ)

    def send(self, connection: Connection, message: Any) -> None:
        """Send a client a JSON value, now or when there is room.

        Raises:
            FrameError: It is too large.
        """
        self.send_encoded(connection, encode(message))

    def send_encoded(self, connection: Connection, payload: bytes) -> None:
        """Send a client a message that is encoded already."""
        assert connection.sealer is not None
        self._send(connection, connection.sealer.seal(payload))

    def flush(self, connection: Connection, deadline: float) -> None:
        """Wait until everything is sent to a client, unless it is gone."""
        with contextlib.suppress(OSError):
            connection.socket.settimeout(max(0.001, deadline - time.monotonic()))
            connection.socket.sendall(connection.unsent)

    def drop(self, connection: Connection) -> None:
        """Close a connection; the handler is not called."""
        if not connection.closed:
            with contextlib.suppress(KeyError, ValueError, OSError):
                self._selector.unregister(connection.socket)
            connection.socket.close()
        self._pending.pop(connection, None)
        self._members.pop(connection, None)

    def close(self) -> None:
        """Close everything. Also runs in a forked child, where it must not touch the parent's epoll set."""
        for connection in [*self._pending, *self._members]:
            connection.socket.close()
        self._selector.close()
        for listener in self._listeners:
            listener.close()

    def _accept(self, listener: socket.socket) -> None:
        try:
            accepted, _ = listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                self._make_room()
            return
        if len(self._pending) >= self._most_pending:
            self.drop(next(iter(self._pending)))
        accepted.setblocking(False)
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        nonce = secrets.token_bytes(NONCE_BYTES)
        connection = Connection(accepted, nonce, time.monotonic() + self._handshake_timeout)
        self._pending[connection] = None
        self._selector.register(accepted, selectors.EVENT_READ, connection)
        self._send(connection, make_challenge(nonce))

    def _make_room(self) -> None:
        """Close the oldest pending connection, or pause: the listener stays readable without a free descriptor."""
        if self._pending:
            self.drop(next(iter(self._pending)))
        else:
            time.sleep(0.05)

    def _attend(self, connection: Connection, events: int) -> None:
        who = f"{self._who} {connection.rank}"
        try:
            if events & selectors.EVENT_WRITE:
                self._flush_some(connection)
            if events & selectors.EVENT_READ and not connection.closed:
                self._read(connection)
        except (FrameError, AuthenticationError, ProtocolError) as error:
            self._disconnect(connection, f"the connection of {who} was closed: {error}")
        except OSError as error:
            self._disconnect(connection, f"the connection of {who} broke: {error.strerror or error}")

    def _read(self, connection: Connection) -> None:
        most = HELLO_BYTES - len(connection.hello) if connection.opener is None else _READ_BYTES
        try:
            data = connection.socket.recv(most)
        except (BlockingIOError, InterruptedError):
            return
        if not data:
            self._disconnect(connection, f"{self._who} {connection.rank} is gone: its process has ended or was killed")
        elif connection.opener is None:
            connection.hello += data
            if len(connection.hello) >= HELLO_BYTES:
                self._authenticate(connection)
        else:
            for payload in connection.opener.feed(data):
                self._deliver(connection, payload)

    def _authenticate(self, connection: Connection) -> None:
        identity, sealer, opener = accept_hello(self._key, connection.nonce, bytes(connection.hello))
        connection.sealer, connection.opener = sealer, opener
        refusal = self._handler.on_connect(connection, identity)
        if refusal is not None:
            connection.closing = True
            self.send(connection, {"refused": refusal})
            return
        connection.rank = identity.rank
        self._pending.pop(connection)
        self._members[connection] = None

    def _deliver(self, connection: Connection, payload: bytes) -> None:
        if connection.closing or connection.closed:
            return
        if len(connection.unsent) > 2 * FRAME_LIMIT:
            raise ProtocolError("it does not read its answers")
        self._handler.on_message(connection, payload)

    def _send(self, connection: Connection, data: bytes) -> None:
        connection.unsent += data
        # A peer that has gone is noticed when its end is read.
        with contextlib.suppress(OSError):
            self._flush_some(connection)

    def _flush_some(self, connection: Connection) -> None:
        if connection.closed:
            return
        if connection.unsent:
            with contextlib.suppress(BlockingIOError, InterruptedError):
                sent = connection.socket.send(connection.unsent)
                del connection.unsent[:sent]
        if connection.closing and not connection.unsent:
            self.drop(connection)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
        self._selector.modify(connection.socket, events, connection)

    def _disconnect(self, connection: Connection, reason: str) -> None:
        member = connection in self._members
        self.drop(connection)
        if member:
            self._handler.on_disconnect(connection, reason)


def encode(message: Any) -> bytes:
    """Encode a message as it is sent."""
    return json.dumps(message, separators=(",", ":")).encode()
