"""Connecting to a server that may have several addresses, not all of which need lead to it."""

import errno
import os
import selectors
import socket
import time
from collections.abc import Generator
from typing import Any

_Target = tuple[int, Any]  # address family, address

_PAUSE = 0.05


def dial(hosts: str, port: int, deadline: float) -> Generator[socket.socket, None, None]:
    """Connects to all addresses at the same time. One that refuses is tried again for as long as another is silent.

    Args:
        hosts: Addresses or names, separated by commas.
        port: The port.
        deadline: When to give up, as ``time.monotonic()``.

    Yields:
        A blocking socket for each address that answers, in the order in which they do; it is the caller's. What is not
        asked for any more is closed.

    Raises:
        OSError: After the last socket, if an address did not answer: the reason of the last one.
    """
    calls = _Calls(hosts, port)
    try:
        calls.begin()
        while calls.pending:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("timed out")
            if not calls.wait(min(left, _PAUSE) if calls.resting else left):
                calls.begin()
            while calls.connected:
                yield calls.connected.pop(0)
    finally:
        calls.close()
    if calls.problem is not None:
        raise calls.problem


class _Calls:
    """Connections that are being made.

    Attributes:
        pending: Those that have not been answered.
        connected: Those that have been.
        resting: What is to be tried, for the first time or again.
        problem: The last one.
    """

    def __init__(self, hosts: str, port: int) -> None:
        self.pending: dict[socket.socket, _Target] = {}
        self.connected: list[socket.socket] = []
        self.resting: list[_Target] = []
        self.problem: OSError | None = None
        self._selector = selectors.DefaultSelector()
        for host in filter(None, (part.strip() for part in hosts.split(","))):
            try:
                found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                self.resting += [(family, address) for family, _, _, _, address in found]
            except OSError as error:
                self.problem = error

    def begin(self) -> None:
        targets, self.resting = self.resting, []
        for family, address in targets:
            connecting = socket.socket(family, socket.SOCK_STREAM)
            try:
                start(connecting, address)
            except OSError as error:
                connecting.close()
                self.problem = error
                continue
            self.pending[connecting] = family, address
            self._selector.register(connecting, selectors.EVENT_WRITE)

    def wait(self, seconds: float) -> bool:
        """Returns when something has happened, or False after some time."""
        ready = self._selector.select(seconds)
        for key, _ in ready:
            answered = key.fileobj
            assert isinstance(answered, socket.socket)
            self._selector.unregister(answered)
            target = self.pending.pop(answered)
            if failure := answered.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                answered.close()
                self.problem = make_error(failure)
                self.resting.append(target)
            else:
                answered.setblocking(True)
                self.connected.append(answered)
        return bool(ready)

    def close(self) -> None:
        for left in [*self.pending, *self.connected]:
            left.close()
        self._selector.close()


def start(connecting: socket.socket, address: tuple[object, ...]) -> None:
    """Begins to connect; the socket becomes writable when that has succeeded or failed.

    Raises:
        OSError: It failed at once.
    """
    connecting.setblocking(False)
    failure = connecting.connect_ex(address)
    if failure not in (0, errno.EINPROGRESS):
        raise make_error(failure)


def make_error(number: int) -> OSError:
    """The exception of the right class for an error number."""
    return OSError(number, os.strerror(number))
