"""Connection to a server that may have several addresses, some of which may not lead to it."""

import errno
import os
import selectors
import socket
import time
from collections.abc import Generator
from typing import Any

_Target = tuple[int, Any]  # address family, address

_HEAD_START = 0.2
_PAUSE = 0.05
_LONGEST_WAIT = 60.0  # epoll counts milliseconds in 32 bits


def dial(hosts: str, port: int, patience: float) -> Generator[socket.socket, None, None]:
    """Connect to addresses in their order. Each has a short head start over the next, and the first that answers wins.

    So processes with the same list use the same network if they can. An address that refuses is tried again as long as
    another one has not answered.

    Args:
        hosts: Addresses or names, separated by commas.
        port: The port.
        patience: Seconds until it gives up, not counting the time in which the caller uses a socket.

    Yields:
        A blocking socket for each address that answers; the caller closes it. Closing the generator closes all others.

    Raises:
        OSError: After the last socket, the last failure of an address, if any failed.
    """
    attempts = _Attempts(hosts, port)
    happened = True
    deadline = time.monotonic() + patience
    try:
        while attempts.untried or attempts.pending:
            if attempts.untried:
                attempts.begin(attempts.untried.pop(0))
            elif not happened:
                attempts.begin_again()
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("timed out")
            pause = _HEAD_START if attempts.untried else _PAUSE if attempts.refused else left
            happened = attempts.wait(min(left, pause))
            while attempts.connected:
                paused = time.monotonic()
                yield attempts.connected.pop(0)
                deadline += time.monotonic() - paused
    finally:
        attempts.close()
    if attempts.problem is not None:
        raise attempts.problem


class _Attempts:
    """Connections that are being made.

    Attributes:
        untried: Addresses to which no connection has been tried.
        pending: The connections that have neither succeeded nor failed, with their addresses.
        connected: The connections that have succeeded.
        refused: Addresses to which a connection has failed.
        problem: The last failure.
    """

    def __init__(self, hosts: str, port: int) -> None:
        self.untried: list[_Target] = []
        self.pending: dict[socket.socket, _Target] = {}
        self.connected: list[socket.socket] = []
        self.refused: list[_Target] = []
        self.problem: OSError | None = None
        self._selector = selectors.DefaultSelector()
        for host in filter(None, (part.strip() for part in hosts.split(","))):
            try:
                self.untried += resolve(host, port)
            except OSError as error:
                self.problem = error

    def begin(self, target: _Target) -> None:
        try:
            connecting = socket.socket(target[0], socket.SOCK_STREAM)  # the kernel may not know the family
        except OSError as error:
            self.problem = error
            return
        try:
            start(connecting, target[1])
        except OSError as error:
            connecting.close()
            self.problem = error
        else:
            self.pending[connecting] = target
            self._selector.register(connecting, selectors.EVENT_WRITE)

    def begin_again(self) -> None:
        targets, self.refused = self.refused, []
        for target in targets:
            self.begin(target)

    def wait(self, seconds: float) -> bool:
        """Wait until a connection succeeds or fails; return False if none did in that time."""
        ready = self._selector.select(min(seconds, _LONGEST_WAIT)) if self.pending else []
        for key, _ in ready:
            answered = key.fileobj
            assert isinstance(answered, socket.socket)
            self._selector.unregister(answered)
            target = self.pending.pop(answered)
            if failure := answered.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                answered.close()
                self.problem = make_error(failure)
                self.refused.append(target)
            else:
                answered.setblocking(True)
                self.connected.append(answered)
        return bool(ready)

    def close(self) -> None:
        for left in [*self.pending, *self.connected]:
            left.close()
        self._selector.close()


def resolve(host: str, port: int | None = None) -> list[_Target]:
    """Return the addresses of a host name for TCP: the family of each, and the argument of ``socket.connect()``.

    Raises:
        OSError: The name cannot be resolved on this host.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [(family, address) for family, _, _, _, address in found]


def start(connecting: socket.socket, address: tuple[object, ...]) -> None:
    """Begin to connect; the socket becomes writable when the connection has succeeded or failed.

    Raises:
        OSError: The connection failed at once.
    """
    connecting.setblocking(False)
    failure = connecting.connect_ex(address)
    if failure not in (0, errno.EINPROGRESS):
        raise make_error(failure)


def make_error(number: int) -> OSError:
    """Return the exception of the right class for an error number."""
    return OSError(number, os.strerror(number))
