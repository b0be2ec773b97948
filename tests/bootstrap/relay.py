"""An attacker between a rank and the rendezvous server, which reads everything and changes what it likes."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from enum import Enum
from types import TracebackType

from horovodlike._net.secure_channel import MAC_BYTES

Change = Callable[[bytes], bytes]
"""A function that changes some bytes of one direction; called for each piece in turn."""


class Way(Enum):
    """The directions of a connection."""

    TO_SERVER = "to server"
    TO_CLIENT = "to client"


class Relay:
    """Listens in place of a server. For one connection at a time.

    Attributes:
        port: Where it listens.
        heard: What has come from either side, before it was changed.
    """

    def __init__(self, server_port: int, changes: dict[Way, Change] | None = None) -> None:
        self.heard: dict[Way, bytes] = dict.fromkeys(Way, b"")
        self._changes = changes or {}
        self._server_port = server_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Relay:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Hangs up on both sides, unless they have."""
        for each in [self._listener, *self._sockets]:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._thread.join(30)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        with self._listener:
            try:
                client, _ = self._listener.accept()
            except OSError:  # no connection came
                return
        with client, socket.create_connection(("127.0.0.1", self._server_port), timeout=30) as server:
            self._sockets += [client, server]
            back = threading.Thread(target=self._pass_on, args=(Way.TO_CLIENT, server, client), daemon=True)
            back.start()
            self._pass_on(Way.TO_SERVER, client, server)
            back.join()

    def _pass_on(self, way: Way, source: socket.socket, target: socket.socket) -> None:
        change = self._changes.get(way, lambda data: data)
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self.heard[way] += data
                target.sendall(change(data))
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


class Impostor:
    """Listens in place of a server, and says what a server has once said. For one connection.

    Attributes:
        port: Where it listens.
    """

    def __init__(self, recorded: bytes) -> None:
        self._recorded = recorded
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Impostor:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Waits until the client has hung up."""
        self._thread.join(30)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        with self._listener:
            client, _ = self._listener.accept()
        with client, contextlib.suppress(ConnectionError):
            client.sendall(self._recorded)
            while client.recv(4096):
                pass


def flip(position: int) -> Change:
    """Changes one bit of the byte that comes so many bytes after the first."""
    passed = 0

    def change(data: bytes) -> bytes:
        nonlocal passed
        start, passed = passed, passed + len(data)
        if not start <= position < passed:
            return data
        changed = bytearray(data)
        changed[position - start] ^= 1 << position % 8
        return bytes(changed)

    return change


def by_frame(skipped: int, replace: Callable[[int, bytes], bytes]) -> Change:
    """Cuts what comes after some bytes into frames.

    Args:
        skipped: The bytes of the handshake, which pass as they are.
        replace: Gets the number of a frame, from 0, and the frame; returns what is passed on in its place.
    """
    left, pending, number = skipped, b"", 0

    def change(data: bytes) -> bytes:
        nonlocal left, pending, number
        through, pending = data[:left], pending + data[left:]
        left -= len(through)
        while len(pending) >= (end := 4 + int.from_bytes(pending[:4], "big") + MAC_BYTES):
            through += replace(number, pending[:end])
            number, pending = number + 1, pending[end:]
        return through

    return change
