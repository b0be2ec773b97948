"""Which congestion control the connections for data use.

BBR takes each connection down to four packets for 0.2 s every 10 s, to measure the round trip. A collective goes on
when its slowest connection does, so with many connections all ranks would wait again and again: four hosts at 1 Gbit/s
lose 2 to 4 % to that. And it paces what it sends, which on fast links takes half of the processor's time. What BBR does
better, it does on paths that are long or lose packets. On short ones the algorithms that go by loss recover within a
few round trips.
"""

import socket
import struct

from horovodlike.errors import ConfigError

AUTO, SYSTEM = "auto", "system"

_SHORT_PATH = 1000  # microseconds of a round trip
_BY_LOSS = ("cubic", "reno")  # Linux lets any process use the second one
_MIN_RTT = struct.Struct("=148xI")  # tcpi_min_rtt of struct tcp_info; of the kernel's ABI, so it stays where it is


def set_congestion_control(connected: socket.socket, wanted: str) -> None:
    """Chooses the algorithm of a connection.

    Args:
        connected: The connection; some bytes have gone to and fro.
        wanted: ``auto``, ``system`` or the name of an algorithm, see the setting ``tcp_congestion``.

    Raises:
        ConfigError: The kernel does not have it, or does not let this process use it.
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
    """Use the first that the kernel has and this process may use; the connection works with any."""
    for algorithm in algorithms:
        try:
            return _use(connected, algorithm)
        except OSError:
            continue


def _round_trip(connected: socket.socket) -> int:
    """The shortest round trip so far, in microseconds; kernels before 4.6 do not say it: then what is no short path."""
    info = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MIN_RTT.size)
    return int(_MIN_RTT.unpack(info)[0]) if len(info) == _MIN_RTT.size else _SHORT_PATH
