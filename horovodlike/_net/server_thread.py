"""The thread of a server that has nothing else to do than to attend to its connections."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

from horovodlike._net.secure_channel import close_in_child
from horovodlike._net.secure_server import SecureServer

__all__ = ["ServerThread"]


class ServerThread:
    """A thread that attends to a server. Callable from any thread."""

    def __init__(self, server: SecureServer, name: str) -> None:
        """Start the thread.

        Args:
            server: A server that listens; it belongs to the thread from now on, and is closed with it.
            name: The name of the thread.
        """
        self._server = server
        self._wake, self._woken = socket.socketpair()
        server.wake_by(self._woken)
        for each in (self._wake, self._woken):
            close_in_child(each)
        self._stop = False
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, and wait for its end; all connections are closed. May be called again."""
        self._stop = True
        with contextlib.suppress(OSError):
            self._wake.send(b"\0")
        self._thread.join()

    def _serve(self) -> None:
        try:
            while not self._stop:
                deadline = self._server.next_deadline()
                self._server.attend(None if deadline is None else max(0.0, deadline - time.monotonic()))
        finally:
            self._server.close()
            self._wake.close()
            self._woken.close()
