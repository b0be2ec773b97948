"""Socket options of connections: congestion control, keep-alive, and the limit of open files."""

import os
import resource
import socket
import struct

from horovodlike.errors import ConfigError, RendezvousError

AUTO, SYSTEM = "auto", "system"

_SHORT_PATH = 1000  # microseconds of a round trip
_BY_LOSS = ("cubic", "reno")  # Linux lets any process use reno
_MIN_RTT = struct.Struct("=148xI")  # tcpi_min_rtt of struct tcp_info; its offset is part of the kernel's ABI

_OTHERS = 256
"""Other files that may be opened, for which the limit is raised: pending connections, and the script's files."""
_FEWEST_OTHERS = 16
"""Other files without room for which it is an error."""


def set_congestion_control(connected: socket.socket, wanted: str) -> None:
    """Choose the congestion control of a connection for data.

    BBR reduces each connection to four packets in flight for 0.2 s every 10 s, to measure the round trip. A collective
    waits for its slowest connection, so with many connections all ranks would wait again and again: four hosts at
    1 Gbit/s lose 2 to 4 % by this. BBR also paces its packets, which on fast links takes half of the processor's time.
    BBR is better on paths that are long or lose packets. On short paths, algorithms that react to loss recover within a
    few round trips.

    Args:
        connected: The connection, over which both sides have sent some bytes: the kernel knows the round trip.
        wanted: ``auto``, ``system`` or the name of an algorithm, see the setting ``tcp_congestion``.

    Raises:
        ConfigError: The kernel does not have the algorithm, or does not let this process use it.
    """
    if wanted == AUTO:
        if _algorithm(connected).startswith("bbr") and _round_trip(connected) < _SHORT_PATH:
            _use_first(connected, _BY_LOSS)
    elif wanted != SYSTEM:
        try:
            _use(connected, wanted)
        except OSError as error:
            raise ConfigError(
                f"HOROVODLIKE_TCP_CONGESTION={wanted}: the kernel refuses it ({error.strerror}); "
                "`sysctl net.ipv4.tcp_allowed_congestion_control` lists what can be used"
            ) from error


def _algorithm(connected: socket.socket) -> str:
    return connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()


def _use(connected: socket.socket, algorithm: str) -> None:
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, algorithm.encode())


def _use_first(connected: socket.socket, algorithms: tuple[str, ...]) -> None:
    """Use the first algorithm that the kernel has and this process may use; without any, keep the present one."""
    for algorithm in algorithms:
        try:
            return _use(connected, algorithm)
        except OSError:
            continue


def _round_trip(connected: socket.socket) -> int:
    """Return the shortest round trip so far, in microseconds; `_SHORT_PATH` on kernels before 4.6, which lack it."""
    info = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MIN_RTT.size)
    return int(_MIN_RTT.unpack(info)[0]) if len(info) == _MIN_RTT.size else _SHORT_PATH


def set_keepalive(connected: socket.socket, idle: int, interval: int, probes: int) -> None:
    """Have the kernel close a connection whose other end does not answer any more.

    Args:
        connected: The connection.
        idle: Seconds without traffic until the first probe.
        interval: Seconds between probes.
        probes: How many probes may stay unanswered.
    """
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, probes)


def ensure_descriptors(count: int, purpose: str) -> None:
    """Raise the soft limit of open files to the hard limit, if the soft one leaves no room for ``count`` more.

    Args:
        count: The number of files that will be opened.
        purpose: The use of these files, for the error.

    Raises:
        RendezvousError: The hard limit leaves too little room, too.
    """
    needed = len(os.listdir("/proc/self/fd")) + count + _FEWEST_OTHERS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed + _OTHERS:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise RendezvousError(
            f"this process may have {hard} open files, but {purpose} and its other files need {needed}: raise the "
            "limit (ulimit -Hn; nofile in /etc/security/limits.conf; LimitNOFILE of the service that starts the "
            "ranks), or start fewer ranks"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
