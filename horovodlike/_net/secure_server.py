"""Accepts connections, authenticates them and cuts what they send into messages: what all servers of a job share.

A connection starts as a *stranger*: it gets a challenge, a few seconds, and a buffer that holds a hello and no more.
With a right hello it becomes a *member*, whose frames are verified before anybody looks at them. No client can be made
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
_MOST_STRANGERS = 128


@dataclass(eq=False)
class Connection:
    """One client. Only :attr:`rank` concerns others than the secure server."""

    socket: socket.socket
    nonce: bytes
    deadline: float
    hello: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)
    rank: int = -1  # of a member: as which it has introduced itself
    sealer: Sealer | None = None
    opener: Opener | None = None
    closing: bool = False  # closes when everything is sent

    @property
    def closed(self) -> bool:
        """Whether it has been closed."""
        return self.socket.fileno() < 0


class ConnectionHandler(Protocol):
    """What the secure server is asked to let people in to."""

    def admit(self, connection: Connection, identity: Identity) -> str | None:
        """Somebody holds the key. Returns why he is refused all the same, or None."""

    def hear(self, connection: Connection, payload: bytes) -> None:
        """A member has said something.

        Raises:
            ProtocolError: It makes no sense; the connection is closed.
        """

    def lose(self, connection: Connection, reason: str) -> None:
        """A member's connection has ended."""


class ProtocolError(Exception):
    """A member does not keep to the protocol."""


_servers: "weakref.WeakSet[SecureServer]" = weakref.WeakSet()


def _close_in_child() -> None:
    """A forked child must not keep the parent's connections open: nobody would notice when the parent dies."""
    for secure_server in _servers:
        secure_server.close()


os.register_at_fork(after_in_child=_close_in_child)


class SecureServer:
    """The connections of one server. Belongs to one thread."""

    def __init__(
        self,
        key: JobKey,
        reception: ConnectionHandler,
        *,
        who: str,
        expected: int = 0,
        handshake_timeout: float = HANDSHAKE_TIMEOUT,
    ) -> None:
        """Starts without a door.

        Args:
            key: What clients must hold.
            reception: Decides about clients that hold it, and hears them.
            who: What a client is called in messages, before its number.
            expected: How many clients may well come at the same time.
            handshake_timeout: How long a client may take to authenticate itself, in seconds.
        """
        self._key = key
        self._reception = reception
        self._who = who
        self._most_strangers = _MOST_STRANGERS + 2 * expected
        self._handshake_timeout = handshake_timeout
        self._strangers: dict[Connection, None] = {}  # in order of arrival
        self._members: dict[Connection, None] = {}
        self._listeners: list[socket.socket] = []
        self._selector = selectors.DefaultSelector()
        _servers.add(self)

    def fileno(self) -> int:
        """Readable when :meth:`attend` has something to do."""
        return self._selector.fileno()

    def listen(self, listeners: Iterable[socket.socket]) -> None:
        """Takes over sockets that listen."""
        for listener in listeners:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ, None)
            self._listeners.append(listener)

    def wake_by(self, descriptor: socket.socket) -> None:
        """Makes :meth:`attend` return when a descriptor is readable."""
        self._selector.register(descriptor, selectors.EVENT_READ, None)

    @property
    def listening(self) -> bool:
        """Whether it has a door."""
        return bool(self._listeners)

    def stop_listening(self) -> None:
        """Lets nobody else in."""
        for listener in self._listeners:
            self._selector.unregister(listener)
            listener.close()
        self._listeners = []
        for stranger in list(self._strangers):
            self.drop(stranger)

    def next_deadline(self) -> float | None:
        """When :meth:`attend` will have something to do, though nobody says anything."""
        return min((stranger.deadline for stranger in self._strangers), default=None)

    def attend(self, patience: float | None = 0.0) -> None:
        """Does what there is to do; waits so many seconds for something, or as long as it takes."""
        for key, events in self._selector.select(patience):
            if key.fileobj in self._listeners:
                self._accept(key.fileobj)
            elif isinstance(key.data, Connection) and not key.data.closed:
                self._attend(key.data, events)
        now = time.monotonic()
        for stranger in [each for each in self._strangers if each.deadline <= now]:
            self.drop(stranger)

    def look_at(self, connection: Connection) -> None:
        """Takes what a member has sent, which may be the news that it has hung up."""
        self._attend(connection, selectors.EVENT_READ)

    def say(self, connection: Connection, message: Any) -> None:
        """Sends a member a JSON value, now or when there is room.

        Raises:
            FrameError: It is too large.
        """
        self.send(connection, encode(message))

    def send(self, connection: Connection, payload: bytes) -> None:
        """The same with a message that is encoded already."""
        assert connection.sealer is not None
        self._send(connection, connection.sealer.seal(payload))

    def flush(self, connection: Connection, deadline: float) -> None:
        """Waits until a member has been sent everything; not for one that has gone."""
        with contextlib.suppress(OSError):
            connection.socket.settimeout(max(0.001, deadline - time.monotonic()))
            connection.socket.sendall(connection.unsent)

    def drop(self, connection: Connection) -> None:
        """Closes a connection; nobody is told."""
        if not connection.closed:
            with contextlib.suppress(KeyError, ValueError, OSError):
                self._selector.unregister(connection.socket)
            connection.socket.close()
        self._strangers.pop(connection, None)
        self._members.pop(connection, None)

    def close(self) -> None:
        """Closes everything. Also runs in a forked child, where it must not touch the parent's epoll set."""
        for connection in [*self._strangers, *self._members]:
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
        if len(self._strangers) >= self._most_strangers:
            self.drop(next(iter(self._strangers)))
        accepted.setblocking(False)
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        nonce = secrets.token_bytes(NONCE_BYTES)
        connection = Connection(accepted, nonce, time.monotonic() + self._handshake_timeout)
        self._strangers[connection] = None
        self._selector.register(accepted, selectors.EVENT_READ, connection)
        self._send(connection, make_challenge(nonce))

    def _make_room(self) -> None:
        """Without a free descriptor the listener stays readable: end a stranger, or at least don't spin."""
        if self._strangers:
            self.drop(next(iter(self._strangers)))
        else:
            time.sleep(0.05)

    def _attend(self, connection: Connection, events: int) -> None:
        who = f"{self._who} {connection.rank}"
        try:
            if events & selectors.EVENT_WRITE:
                self._push(connection)
            if events & selectors.EVENT_READ and not connection.closed:
                self._read(connection)
        except (FrameError, AuthenticationError, ProtocolError) as error:
            self._lose(connection, f"the connection of {who} was closed: {error}")
        except OSError as error:
            self._lose(connection, f"the connection of {who} broke: {error.strerror or error}")

    def _read(self, connection: Connection) -> None:
        most = HELLO_BYTES - len(connection.hello) if connection.opener is None else _READ_BYTES
        try:
            data = connection.socket.recv(most)
        except (BlockingIOError, InterruptedError):
            return
        if not data:
            self._lose(connection, f"{self._who} {connection.rank} is gone: its process has ended or was killed")
        elif connection.opener is None:
            connection.hello += data
            if len(connection.hello) >= HELLO_BYTES:
                self._admit(connection)
        else:
            for payload in connection.opener.feed(data):
                self._hear(connection, payload)

    def _admit(self, connection: Connection) -> None:
        identity, sealer, opener = accept_hello(self._key, connection.nonce, bytes(connection.hello))
        connection.sealer, connection.opener = sealer, opener
        refusal = self._reception.admit(connection, identity)
        if refusal is not None:
            connection.closing = True
            self.say(connection, {"refused": refusal})
            return
        connection.rank = identity.rank
        self._strangers.pop(connection)
        self._members[connection] = None

    def _hear(self, connection: Connection, payload: bytes) -> None:
        if connection.closing or connection.closed:
            return
        if len(connection.unsent) > 2 * FRAME_LIMIT:
            raise ProtocolError("it does not read its answers")
        self._reception.hear(connection, payload)

    def _send(self, connection: Connection, data: bytes) -> None:
        connection.unsent += data
        # A peer that has gone is noticed when its end is read.
        with contextlib.suppress(OSError):
            self._push(connection)

    def _push(self, connection: Connection) -> None:
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

    def _lose(self, connection: Connection, reason: str) -> None:
        member = connection in self._members
        self.drop(connection)
        if member:
            self._reception.lose(connection, reason)


def encode(message: Any) -> bytes:
    """A message as it travels."""
    return json.dumps(message, separators=(",", ":")).encode()
