"""The connections of a server that have not authenticated themselves yet.

Each is sent a challenge, has a few seconds to answer, and has a buffer for a hello and no more. If there are more
of them than the server admits, the oldest is closed: no client can make another one wait.
"""

import errno
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from horovodlike._net.connect import make_error

OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@dataclass(eq=False)
class PendingConnection:
    """A connection that has not authenticated itself yet; it is the data of its socket in the server's selector."""

    socket: socket.socket
    challenge: bytes
    deadline: float
    hello: bytearray = field(default_factory=bytearray)


class PendingConnections:
    """All pending connections of one server, in their order of arrival."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        make_challenge: Callable[[], bytes],
        hello_bytes: int,
        most: int,
        timeout: float,
    ) -> None:
        """Start without any pending connection.

        Args:
            selector: The server's selector.
            make_challenge: Makes the challenge, the first message on a connection.
            hello_bytes: The length of a hello, the answer to a challenge.
            most: The most connections that may be pending.
            timeout: Seconds that each may take to send its hello.
        """
        self._selector = selector
        self._make_challenge = make_challenge
        self._hello_bytes = hello_bytes
        self._most = most
        self._timeout = timeout
        self._all: dict[PendingConnection, None] = {}

    def __contains__(self, pending: object) -> bool:
        """Return whether a connection is still pending."""
        return pending in self._all

    def accept(self, listener: socket.socket) -> None:
        """Accept a connection, if it has not ended meanwhile.

        Raises:
            OSError: There is no free descriptor or memory, and no other pending connection to close in its place.
        """
        try:
            accepted, _ = listener.accept()
        except OSError as error:
            if error.errno in OUT_OF_RESOURCES and not self._drop_oldest():
                raise
            return
        if len(self._all) >= self._most:
            self._drop_oldest()
        pending = PendingConnection(accepted, self._make_challenge(), time.monotonic() + self._timeout)
        try:
            accepted.setblocking(False)
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._selector.register(accepted, selectors.EVENT_READ, pending)
        except OSError:  # it has ended, or the kernel cannot watch more sockets
            accepted.close()
            return
        self._all[pending] = None
        try:
            send_whole(accepted, pending.challenge)
        except OSError:
            self.drop(pending)

    def read(self, pending: PendingConnection) -> bytes | None:
        """Read the bytes that have arrived; return the hello once complete. Closes a connection that has ended."""
        try:
            data = pending.socket.recv(self._hello_bytes - len(pending.hello))
        except (BlockingIOError, InterruptedError):
            return None
        except OSError:
            data = b""
        if not data:
            self.drop(pending)
        pending.hello += data
        return bytes(pending.hello) if len(pending.hello) == self._hello_bytes else None

    def release(self, pending: PendingConnection) -> socket.socket:
        """Return the socket of a connection whose hello is right; the selector does not watch it any more."""
        del self._all[pending]
        self._selector.unregister(pending.socket)
        return pending.socket

    def drop(self, pending: PendingConnection) -> None:
        """Close a connection; do nothing if it is not pending any more."""
        if pending in self._all:
            self.release(pending).close()

    def drop_late(self, now: float) -> None:
        """Close the connections whose deadline has passed."""
        for pending in [each for each in self._all if each.deadline <= now]:
            self.drop(pending)

    def next_deadline(self) -> float | None:
        """Return the earliest deadline of a pending connection; None if there is none."""
        return min((pending.deadline for pending in self._all), default=None)

    def close(self) -> None:
        """Close all sockets, but do not change the selector: a forked child shares it with its parent."""
        for pending in self._all:
            pending.socket.close()

    def _drop_oldest(self) -> bool:
        oldest = next(iter(self._all), None)
        if oldest is not None:
            self.drop(oldest)
        return oldest is not None


def send_whole(connected: socket.socket, data: bytes) -> None:
    """Send a short message at once: the send buffer of a connection that has sent little has room for all of it.

    Raises:
        OSError: The connection has ended, or the message did not fit.
    """
    if connected.send(data) != len(data):
        raise make_error(errno.ENOBUFS)
