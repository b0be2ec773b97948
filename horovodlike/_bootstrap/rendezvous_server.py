"""The rendezvous server: one thread, in which no client can make another one wait.

:class:`horovodlike._net.secure_server.SecureServer` accepts the ranks; their replies come from
:class:`horovodlike._bootstrap.rendezvous_state.RendezvousState`.
"""

import contextlib
import json
import socket
import threading
import time
from collections import deque
from typing import Any

from horovodlike._bootstrap.rendezvous_state import RendezvousState, Reply
from horovodlike._net.listen import is_everywhere, listen
from horovodlike._net.secure_channel import (
    HANDSHAKE_TIMEOUT,
    FrameError,
    Identity,
    JobKey,
    close_in_child,
    job_digest,
)
from horovodlike._net.secure_server import Connection, ProtocolError, SecureServer, encode
from horovodlike._net.socket_options import ensure_descriptors

SERVERS = "servers"
"""The topic of the answers that have the addresses of the servers of parameters."""
_FLUSH_SECONDS = 1.0
_EXITS_AT_ONCE = 4096
_FREE_PORT_ATTEMPTS = 8
LONGEST_TIMEOUT = 1_000_000.0
"""The most seconds that a rank may ask to wait for the others."""


class RendezvousServer:
    """The server of a job's all-gathers. :meth:`start` and :meth:`close` may be called from any thread."""

    def __init__(
        self,
        key: bytes | JobKey,
        size: int,
        host: str = "127.0.0.1",
        job: str | None = None,
        port: int = 0,
        once: bool = False,
        servers: int = 0,
    ) -> None:
        """Prepare a server; it listens after :meth:`start`.

        Args:
            key: The job's key, 32 bytes.
            size: The number of ranks of the job.
            host: The address to listen on, or several separated by commas; never a wildcard address.
            job: The job's name; None: the key alone distinguishes the job from others.
            port: The port to listen on; 0: a free one.
            once: Serve one generation: stop listening when all ranks have connected.
            servers: The number of servers of parameters, which connect as the ranks from ``size`` on, to publish their
                addresses. Any rank may ask for these.

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
        self._num_servers = servers
        self._addresses: dict[int, Any] = {}  # addresses of the parameter servers
        self._asking: list[Connection] = []  # ranks that wait for these addresses, until all are known
        self._job = None if job is None else job_digest(job)
        self._state = RendezvousState(size)
        self._members: dict[int, Connection] = {}
        self._rejected: dict[Connection, str] = {}  # the reason why a member's next topic fails
        self._thread: threading.Thread | None = None
        self._stop = False
        self._exits: deque[tuple[int, str]] = deque()  # from other threads

    @property
    def port(self) -> int:
        """The port on which the server listens.

        Raises:
            RuntimeError: The server has not been started.
        """
        if not self._port:
            raise RuntimeError("the rendezvous server has not been started")
        return self._port

    @property
    def generation(self) -> int:
        """How often all ranks have met; 0 if they never did. From any thread."""
        return self._state.generation

    def start(self) -> None:
        """Listen on the given or a free port, and start the thread.

        Raises:
            RendezvousError: The server cannot listen.
        """
        ensure_descriptors(self._size, f"connections of {self._size} ranks")
        # A port that is free on one address may be in use on another.
        ports = [self._wanted_port] if self._wanted_port else [0] * _FREE_PORT_ATTEMPTS
        listeners = listen("the rendezvous", self._hosts, ports)
        self._port = listeners[0].getsockname()[1]
        self._server = SecureServer(
            self._key, self, who="rank", expected=self._size, handshake_timeout=HANDSHAKE_TIMEOUT
        )
        self._server.listen(listeners)
        self._wake, self._wakened = socket.socketpair()
        self._server.wake_by(self._wakened)
        close_in_child(self._wake)
        close_in_child(self._wakened)
        self._thread = threading.Thread(target=self._serve, name="horovodlike-rendezvous", daemon=True)
        self._thread.start()

    def exited(self, rank: int, reason: str) -> None:
        """Note that the process of a rank has exited: ranks that wait for it now or later receive an error at once.

        Callable from any thread while the server runs; does nothing once it has been closed.

        Args:
            rank: The rank.
            reason: How the process has exited, such as ``rank 1 exited with code 0``.
        """
        if self._thread is not None:
            self._exits.append((rank, reason))
            with contextlib.suppress(OSError):  # the thread is awake already, or has ended
                self._wake.send(b"\0", socket.MSG_DONTWAIT)

    def close(self) -> None:
        """Send the pending replies, close every connection and end the thread. May be called again."""
        if self._thread is None:
            return
        self._stop = True
        with contextlib.suppress(OSError):
            self._wake.send(b"\0")
        self._thread.join()
        self._thread = None

    def __enter__(self) -> "RendezvousServer":
        """Start the server."""
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Close the server."""
        self.close()

    def _serve(self) -> None:
        try:
            while not self._stop:
                self._turn(self._patience())
            self._send_last_replies(time.monotonic() + _FLUSH_SECONDS)
        finally:
            self._server.close()
            self._wake.close()
            self._wakened.close()

    def _patience(self) -> float | None:
        deadlines = [each for each in (self._server.next_deadline(), self._state.next_deadline()) if each is not None]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _turn(self, patience: float | None) -> None:
        self._server.attend(patience)
        self._take_exits()
        self._reply(self._state.expire(time.monotonic()))
        if self._once and self._state.generation and self._server.listening:
            self._server.stop_listening()

    def _take_exits(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wakened.recv(_EXITS_AT_ONCE, socket.MSG_DONTWAIT)
        while self._exits:
            rank, reason = self._exits.popleft()
            member = self._members.get(rank)
            if member is not None:
                self._server.look_at(member)  # the rank may have sent that it leaves, or have disconnected
            if rank not in self._members:  # else a descendant of the process holds the connection, and acts as the rank
                self._reply(self._state.exited(rank, reason))

    def _send_last_replies(self, deadline: float) -> None:
        """Send every rank its pending replies, and then the reason why the server closes."""
        for connection in list(self._members.values()):
            self._server.send(connection, {"closed": self._state.last_failure()})
            self._server.flush(connection, deadline)

    # Methods that the secure server calls.

    def on_connect(self, connection: Connection, identity: Identity) -> str | None:
        """Implement :class:`horovodlike._net.secure_server.ConnectionHandler`."""
        refusal = self._reason_to_refuse(identity)
        if refusal is None and identity.rank in self._members:
            self._server.look_at(self._members[identity.rank])  # its process may just have disconnected
            if identity.rank in self._members:
                refusal = self._reject_claimants(identity.rank)
        if refusal is None:
            self._members[identity.rank] = connection
            if identity.rank < self._size:
                self._state.connected(identity.rank)
            self._server.send(connection, {"welcome": identity.rank, "generation": self._state.generation})
        return refusal

    def _reason_to_refuse(self, identity: Identity) -> str | None:
        if identity.size != self._size:
            return f"rank {identity.rank} says that its job has {identity.size} ranks, but it has {self._size}"
        if identity.rank >= self._size + self._num_servers:
            return f"there is no rank {identity.rank} in a job of {self._size}"
        if self._job is not None and identity.job != self._job:
            return f"rank {identity.rank} belongs to another job, although it has the key of this one"
        return None

    def _reject_claimants(self, rank: int) -> str:
        """Fail all ranks, now or at their next topic: two processes claim one rank, and either may be the right one."""
        reason = f"two processes claim to be rank {rank} of {self._size}; every rank must be started exactly once"
        replies = self._state.fail_all(reason)
        told = {reply.rank for reply in replies}
        for member in self._members.values():
            if member.rank not in told:
                self._rejected[member] = reason
        self._reply(replies)
        return reason

    def on_message(self, connection: Connection, payload: bytes) -> None:
        """Implement :class:`horovodlike._net.secure_server.ConnectionHandler`."""
        rank = connection.rank
        try:
            message = json.loads(payload)
            verb = message["do"]
            if verb == "publish" and rank >= self._size:
                self._addresses[rank] = message["payload"]
                self._server.send(connection, {"topic": SERVERS, "result": None})
                self._tell_addresses()
            elif rank >= self._size and verb != "leave":
                raise ValueError(verb)
            elif verb == "find":
                self._asking.append(connection)
                self._tell_addresses()
            elif verb == "arrive":
                topic, timeout = str(message["topic"]), float(message["timeout"])
                if not 0 < timeout <= LONGEST_TIMEOUT:
                    raise ValueError("timeout")
                reason = self._rejected.pop(connection, None)
                if reason is not None:
                    self._reply([Reply(rank, topic, error=reason), *self._state.fail_all(reason)])
                else:
                    self._reply(self._state.arrive(rank, topic, message["payload"], time.monotonic(), timeout))
            elif verb == "abort":
                self._reply(self._state.abort(rank, str(message["group"]), str(message["reason"])))
                self._server.send(connection, {"aborted": True})
            elif verb == "leave":
                self._server.drop(connection)
                self._forget(connection)
                self._reply(self._state.left(rank))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ProtocolError(f"it sent a message that makes no sense ({type(error).__name__})") from None

    def on_disconnect(self, connection: Connection, reason: str) -> None:
        """Implement :class:`horovodlike._net.secure_server.ConnectionHandler`."""
        self._forget(connection)
        if connection.rank < self._size:
            self._reply(self._state.lost(connection.rank, reason))

    def _tell_addresses(self) -> None:
        if len(self._addresses) == self._num_servers:
            answer = {"topic": SERVERS, "result": [self._addresses[rank] for rank in sorted(self._addresses)]}
            while self._asking:
                connection = self._asking.pop()
                if not connection.closed:
                    self._server.send(connection, answer)

    def _forget(self, connection: Connection) -> None:
        self._rejected.pop(connection, None)
        if self._members.get(connection.rank) is connection:
            del self._members[connection.rank]

    def _reply(self, replies: list[Reply]) -> None:
        encoded: dict[int, bytes] = {}  # many ranks receive the same reply
        for reply in replies:
            member = self._members.get(reply.rank)
            if member is None:
                continue
            if reply.error is not None:
                self._server.send(member, {"topic": reply.topic, "error": reply.error})
                continue
            if id(reply.result) not in encoded:
                encoded[id(reply.result)] = encode({"topic": reply.topic, "result": reply.result})
            self._send_result(member, reply.topic, encoded[id(reply.result)])

    def _send_result(self, member: Connection, topic: str, payload: bytes) -> None:
        try:
            self._server.send_encoded(member, payload)
        except FrameError as error:
            text = f"the payloads of all ranks together are too large: {error}"
            self._server.send(member, {"topic": topic, "error": text})
