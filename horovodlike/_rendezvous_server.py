"""The rendezvous server: one thread, one selector, and no client that another client could be made to wait for.

A connection starts as a *stranger*: it gets a challenge, a few seconds, and a buffer that holds a hello and no more.
With a right hello it becomes a *member*, whose frames are verified before they are parsed. What the members are told is
decided by :class:`horovodlike._roll_call.RollCall`.
"""

import contextlib
import errno
import json
import os
import secrets
import selectors
import socket
import threading
import time
import weakref
from dataclasses import dataclass, field
from typing import Any

from horovodlike._channel import (
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
    job_digest,
    make_challenge,
)
from horovodlike._descriptors import ensure_descriptors
from horovodlike._listening import is_everywhere, listen
from horovodlike._roll_call import Reply, RollCall

_READ_BYTES = 1 << 16
_MOST_STRANGERS = 128
_FLUSH_SECONDS = 1.0
_FREE_PORT_ATTEMPTS = 8
LONGEST_TIMEOUT = 30 * 24 * 3600.0
"""Seconds that a rank may ask to wait for the others."""


@dataclass(eq=False)
class _Connection:
    socket: socket.socket
    nonce: bytes
    deadline: float
    hello: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)
    rank: int = -1  # of a member
    sealer: Sealer | None = None
    opener: Opener | None = None
    closing: bool = False  # closes when everything is sent
    spurned: str = ""  # why this member's next topic fails


_servers: "weakref.WeakSet[RendezvousServer]" = weakref.WeakSet()


def _close_in_child() -> None:
    """A forked child must not keep the parent's connections open: nobody would notice when the parent dies."""
    for server in _servers:
        server._close_sockets()


os.register_at_fork(after_in_child=_close_in_child)


class RendezvousServer:
    """Runs the all-gathers of a job's rendezvous. :meth:`start` and :meth:`close` may be called from any thread."""

    def __init__(
        self,
        key: bytes | JobKey,
        size: int,
        host: str = "127.0.0.1",
        job: str | None = None,
        port: int = 0,
        once: bool = False,
    ) -> None:
        """Prepares a server; it listens after :meth:`start`.

        Args:
            key: The job's key, 32 bytes.
            size: How many ranks the job has.
            host: The address to listen on, or several separated by commas; never all that the host has.
            job: The job's name; None lets the key alone tell this job from another.
            port: The port to listen on; 0: a free one.
            once: For one generation: it listens no more when all ranks have come.

        Raises:
            ValueError: The key, the size or the address cannot be used.
        """
        self._hosts = [part for part in (each.strip() for each in host.split(",")) if part]
        if not self._hosts or any(is_everywhere(part) for part in self._hosts):
            raise ValueError(f"the rendezvous listens on addresses that are named, not on {host!r}")
        if size < 1:
            raise ValueError(f"a job must have at least one rank, not {size}")
        self._key = key if isinstance(key, JobKey) else JobKey(key)
        self._size = size
        self._wanted_port = port
        self._port = 0
        self._once = once
        self._job = None if job is None else job_digest(job)
        self._roll = RollCall(size)
        self._members: dict[int, _Connection] = {}
        self._strangers: dict[_Connection, None] = {}  # in order of arrival
        self._listeners: list[socket.socket] = []
        self._thread: threading.Thread | None = None
        self._stop = False

    @property
    def port(self) -> int:
        """The port that it listens on.

        Raises:
            RuntimeError: It has not been started.
        """
        if not self._port:
            raise RuntimeError("the rendezvous server has not been started")
        return self._port

    def start(self) -> None:
        """Listens on a free port and starts the thread.

        Raises:
            RendezvousError: It cannot listen.
        """
        ensure_descriptors(self._size, f"connections of {self._size} ranks")
        # What is free on one address need not be free on another.
        ports = [self._wanted_port] if self._wanted_port else [0] * _FREE_PORT_ATTEMPTS
        self._listeners = listen("the rendezvous", self._hosts, ports)
        self._port = self._listeners[0].getsockname()[1]
        self._selector = selectors.DefaultSelector()
        for listener in self._listeners:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ, None)
        self._wake, wakened = socket.socketpair()
        self._wakened = wakened
        self._selector.register(wakened, selectors.EVENT_READ, None)
        _servers.add(self)
        self._thread = threading.Thread(target=self._serve, name="horovodlike-rendezvous", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Sends what is still to be sent, closes every connection and ends the thread. May be called again."""
        if self._thread is None:
            return
        self._stop = True
        with contextlib.suppress(OSError):
            self._wake.send(b"\0")
        self._thread.join()
        self._thread = None
        _servers.discard(self)

    def __enter__(self) -> "RendezvousServer":
        """Starts it."""
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Closes it."""
        self.close()

    def _serve(self) -> None:
        try:
            while not self._stop:
                self._turn(self._patience())
            self._bid_farewell(time.monotonic() + _FLUSH_SECONDS)
        finally:
            self._close_sockets()

    def _patience(self) -> float | None:
        deadlines = [stranger.deadline for stranger in self._strangers]
        if (topic_deadline := self._roll.next_deadline()) is not None:
            deadlines.append(topic_deadline)
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _turn(self, patience: float | None) -> None:
        for key, events in self._selector.select(patience):
            if key.fileobj in self._listeners:
                self._accept(key.fileobj)
            elif isinstance(key.data, _Connection) and key.data.socket.fileno() >= 0:
                self._attend(key.data, events)
        now = time.monotonic()
        for stranger in [each for each in self._strangers if each.deadline <= now]:
            self._drop(stranger)
        self._tell(self._roll.expire(now))
        if self._once and self._roll.generation and self._listeners:
            self._stop_listening()

    def _stop_listening(self) -> None:
        for listener in self._listeners:
            self._selector.unregister(listener)
            listener.close()
        self._listeners = []
        for stranger in list(self._strangers):
            self._drop(stranger)

    def _bid_farewell(self, deadline: float) -> None:
        """Sends the last answers, and to those that still wait or will come why nobody is here any more."""
        for connection in list(self._members.values()):
            self._say(connection, {"closed": self._roll.last_failure()})
            with contextlib.suppress(OSError):
                connection.socket.settimeout(max(0.001, deadline - time.monotonic()))
                connection.socket.sendall(connection.unsent)

    def _close_sockets(self) -> None:
        """Closes everything. Also runs in a forked child, where it must not touch the parent's epoll set."""
        for connection in [*self._strangers, *self._members.values()]:
            connection.socket.close()
        self._selector.close()
        self._wake.close()
        self._wakened.close()
        for listener in self._listeners:
            listener.close()

    def _accept(self, listener: socket.socket) -> None:
        try:
            accepted, _ = listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                self._make_room()
            return
        if len(self._strangers) >= _MOST_STRANGERS + 2 * self._size:
            self._drop(next(iter(self._strangers)))
        accepted.setblocking(False)
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        nonce = secrets.token_bytes(NONCE_BYTES)
        connection = _Connection(accepted, nonce, time.monotonic() + HANDSHAKE_TIMEOUT)
        self._strangers[connection] = None
        self._selector.register(accepted, selectors.EVENT_READ, connection)
        self._send(connection, make_challenge(nonce))

    def _make_room(self) -> None:
        """Without a free descriptor the listener stays readable: end a stranger, or at least don't spin."""
        if self._strangers:
            self._drop(next(iter(self._strangers)))
        else:
            time.sleep(0.05)

    def _attend(self, connection: _Connection, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._push(connection)
            if events & selectors.EVENT_READ and connection.socket.fileno() >= 0:
                self._read(connection)
        except (FrameError, AuthenticationError, _ProtocolError) as error:
            self._lose(connection, f"the connection of rank {connection.rank} was closed: {error}")
        except OSError as error:
            self._lose(connection, f"the connection of rank {connection.rank} broke: {error.strerror or error}")

    def _read(self, connection: _Connection) -> None:
        most = HELLO_BYTES + 1 - len(connection.hello) if connection.opener is None else _READ_BYTES
        try:
            data = connection.socket.recv(most)
        except (BlockingIOError, InterruptedError):
            return
        if not data:
            self._lose(connection, f"rank {connection.rank} is gone: its process has ended or was killed")
        elif connection.opener is None:
            connection.hello += data
            if len(connection.hello) >= HELLO_BYTES:
                self._admit(connection)
        else:
            for payload in connection.opener.feed(data):
                self._obey(connection, payload)

    def _admit(self, connection: _Connection) -> None:
        identity, sealer, opener = accept_hello(self._key, connection.nonce, bytes(connection.hello))
        connection.sealer, connection.opener = sealer, opener
        refusal = self._refusal(identity)
        if refusal is None and identity.rank in self._members:
            self._attend(self._members[identity.rank], selectors.EVENT_READ)  # it may just have hung up
            if identity.rank in self._members:
                refusal = self._spurn(identity.rank)
        if refusal is not None:
            connection.closing = True
            self._say(connection, {"refused": refusal})
            return
        connection.rank = identity.rank
        self._strangers.pop(connection)
        self._members[identity.rank] = connection
        self._roll.connected(identity.rank)
        self._say(connection, {"welcome": identity.rank, "generation": self._roll.generation})

    def _refusal(self, identity: Identity) -> str | None:
        if identity.size != self._size:
            return f"rank {identity.rank} says that its job has {identity.size} ranks, but it has {self._size}"
        if identity.rank >= self._size:
            return f"there is no rank {identity.rank} in a job of {self._size}"
        if self._job is not None and identity.job != self._job:
            return f"rank {identity.rank} belongs to another job, although it has the key of this one"
        return None

    def _spurn(self, rank: int) -> str:
        """Two processes claim one rank, and nobody can tell which one is right: all learn of it, now or on arrival."""
        reason = f"two processes claim to be rank {rank} of {self._size}; every rank must be started exactly once"
        replies = self._roll.fail_all(reason)
        told = {reply.rank for reply in replies}
        for member in self._members.values():
            if member.rank not in told:
                member.spurned = reason
        self._tell(replies)
        return reason

    def _obey(self, connection: _Connection, payload: bytes) -> None:
        if connection.closing or connection.socket.fileno() < 0:
            return
        if len(connection.unsent) > 2 * FRAME_LIMIT:
            raise _ProtocolError("it does not read its answers")
        rank = connection.rank
        try:
            message = json.loads(payload)
            verb = message["do"]
            if verb == "arrive":
                topic, timeout = str(message["topic"]), float(message["timeout"])
                if not 0 < timeout <= LONGEST_TIMEOUT:
                    raise ValueError("timeout")
                if connection.spurned:
                    reason, connection.spurned = connection.spurned, ""
                    self._tell([Reply(rank, topic, error=reason), *self._roll.fail_all(reason)])
                else:
                    self._tell(self._roll.arrive(rank, topic, message["payload"], time.monotonic(), timeout))
            elif verb == "abort":
                self._tell(self._roll.abort(rank, str(message["group"]), str(message["reason"])))
                self._say(connection, {"aborted": True})
            elif verb == "leave":
                self._drop(connection)
                self._tell(self._roll.left(rank))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise _ProtocolError(f"it sent a message that makes no sense ({type(error).__name__})") from None

    def _tell(self, replies: list[Reply]) -> None:
        encoded: dict[int, bytes] = {}  # many ranks are told the same
        for reply in replies:
            member = self._members.get(reply.rank)
            if member is None:
                continue
            if reply.error is not None:
                self._say(member, {"topic": reply.topic, "error": reply.error})
                continue
            if id(reply.result) not in encoded:
                encoded[id(reply.result)] = _encode({"topic": reply.topic, "result": reply.result})
            self._pass_on(member, reply.topic, encoded[id(reply.result)])

    def _say(self, connection: _Connection, message: dict[str, Any]) -> None:
        self._pass_on(connection, message.get("topic", ""), _encode(message))

    def _pass_on(self, connection: _Connection, topic: str, payload: bytes) -> None:
        assert connection.sealer is not None
        try:
            frame = connection.sealer.seal(payload)
        except FrameError as error:
            text = f"the payloads of all ranks together are too large: {error}"
            frame = connection.sealer.seal(_encode({"topic": topic, "error": text}))
        self._send(connection, frame)

    def _send(self, connection: _Connection, data: bytes) -> None:
        connection.unsent += data
        # A peer that has gone is noticed when its end is read.
        with contextlib.suppress(OSError):
            self._push(connection)

    def _push(self, connection: _Connection) -> None:
        if connection.socket.fileno() < 0:
            return
        if connection.unsent:
            with contextlib.suppress(BlockingIOError, InterruptedError):
                sent = connection.socket.send(connection.unsent)
                del connection.unsent[:sent]
        if connection.closing and not connection.unsent:
            self._drop(connection)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
        self._selector.modify(connection.socket, events, connection)

    def _lose(self, connection: _Connection, reason: str) -> None:
        member = self._members.get(connection.rank) is connection
        self._drop(connection)
        if member:
            self._tell(self._roll.lost(connection.rank, reason))

    def _drop(self, connection: _Connection) -> None:
        if connection.socket.fileno() >= 0:
            with contextlib.suppress(KeyError, ValueError, OSError):
                self._selector.unregister(connection.socket)
            connection.socket.close()
        self._strangers.pop(connection, None)
        if self._members.get(connection.rank) is connection:
            del self._members[connection.rank]


def _encode(message: dict[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode()


class _ProtocolError(Exception):
    """A member does not keep to the protocol."""
