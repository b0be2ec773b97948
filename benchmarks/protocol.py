"""How the driver talks to the ranks: JSON lines over a Unix socket.

A rank connects, says who it is, and then does nothing but answer: it is blocked in a read whenever it is not measuring.
The socket's path comes in the environment, because launchers keep standard input and output for themselves.
"""

from __future__ import annotations

import json
import os
import socket
from typing import Any

SOCKET_VARIABLE = "BENCHMARK_SOCKET"

Message = dict[str, Any]


class ConnectionLost(RuntimeError):
    """The other side closed the connection."""


class Channel:
    """One end of a connection; for one thread."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._received = b""

    def send(self, message: Message) -> None:
        """Send one message."""
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> Message:
        """Blocks until a message is there; raises ConnectionLost, or TimeoutError if the socket has a time limit."""
        while b"\n" not in self._received:
            data = self._connection.recv(65536)
            if not data:
                raise ConnectionLost("the connection was closed")
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        message: Message = json.loads(line)
        return message

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def connect() -> Channel:
    """Return a rank's channel to the driver that started it."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(os.environ[SOCKET_VARIABLE])
    return Channel(connection)
