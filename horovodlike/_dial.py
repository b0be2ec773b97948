"""Connecting to a server that may have several addresses, not all of which need lead to it."""

import errno
import os
import selectors
import socket
import time
from collections.abc import Iterator


def dial(hosts: str, port: int, deadline: float) -> Iterator[socket.socket]:
    """Connects to all addresses at the same time.

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
    problem: OSError | None = None
    pending: set[socket.socket] = set()
    with selectors.DefaultSelector() as selector:
        try:
            for host in filter(None, (part.strip() for part in hosts.split(","))):
                try:
                    for family, kind, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
                        pending.add(connecting := socket.socket(family, kind))
                        start(connecting, address)
                        selector.register(connecting, selectors.EVENT_WRITE)
                except OSError as error:
                    problem = error
            while selector.get_map():
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise TimeoutError("timed out")
                for key, _ in ready:
                    connected = key.fileobj
                    assert isinstance(connected, socket.socket)
                    selector.unregister(connected)
                    pending.discard(connected)
                    if failure := connected.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                        connected.close()
                        problem = make_error(failure)
                    else:
                        connected.setblocking(True)
                        yield connected
        finally:
            for left in pending:
                left.close()
    if problem is not None:
        raise problem


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
