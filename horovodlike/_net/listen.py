"""Listening on some of a host's addresses."""

import os
import socket
from collections.abc import Sequence

from horovodlike.errors import RendezvousError

LOOPBACK = "127.0.0.1"
"""The address of this host for itself."""
BACKLOG = 4096
"""The most connections that wait to be accepted; the kernel may lower it. A full queue delays a client by a second."""


def listen(who: str, hosts: Sequence[str], ports: Sequence[int]) -> list[socket.socket]:
    """Listen on all of the addresses at one port.

    Args:
        who: The party that listens, for the error.
        hosts: The addresses.
        ports: The ports to be tried in turn; 0 stands for any free port.

    Returns:
        A socket for each address, in the order of ``hosts``.

    Raises:
        RendezvousError: None of the ports can be used on all addresses.
    """
    problem: tuple[str, OSError] | None = None
    for wanted in ports:
        listeners: list[socket.socket] = []
        port = wanted
        try:
            for host in hosts:
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                listeners.append(socket.create_server((host, port), family=family, backlog=BACKLOG))
                port = listeners[0].getsockname()[1]
            return listeners
        except OSError as error:
            problem = host, error
            for listener in listeners:
                listener.close()
    assert problem is not None
    named = [str(port) for port in ports if port]
    where = f" port {named[0]}" if len(named) == 1 else f" at any of the ports {', '.join(named)}" if named else ""
    where = f"{problem[0]}{where}"
    cause = problem[1]
    # Without the address, which `create_server` adds; the numbers of a failed look-up of a name are negative.
    is_look_up = cause.errno is not None and cause.errno < 0
    why = str(cause.strerror).partition(" (while ")[0] if is_look_up else os.strerror(cause.errno or 0)
    raise RendezvousError(f"{who} cannot listen on {where}: {why}") from cause


def is_everywhere(host: str) -> bool:
    """Return whether ``host`` is a wildcard address, which stands for every address of this host."""
    return host.strip("[]") in ("0.0.0.0", "::", "0", "::0", "*")
