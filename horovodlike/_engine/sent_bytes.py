"""The kernel's numbers of this process's TCP connections: how many bytes arrived, and how long that took."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
from zlib import crc32

# tcpi_bytes_acked, tcpi_busy_time and tcpi_rwnd_limited of struct tcp_info; kernels before 4.10 lack the last two.
_INFO = struct.Struct("=120xQ40xQQ")
_MOST = 1024
_MOST_PAIRS = 16
_FEWEST_BYTES = 1 << 20


def measure() -> list[tuple[str, str, int, float]]:
    """Return, for each pair of addresses of this host and another one, the bytes that the open connections have sent.

    Returns:
        The own address and the other one; the bytes that the other host has acknowledged; and the seconds in which the
        network had some of them, summed over the connections: not those in which the other process did not read. So
        bytes divided by seconds is the rate of a connection, however seldom it is used. Connections with much less than
        the others of their pair are left out, as those for control messages: a small message takes a round trip. Of
        many pairs some are chosen, the same ones by all ranks of two hosts.
    """
    found: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for name in os.listdir("/proc/self/fd")[:_MOST]:
        with contextlib.suppress(OSError):  # it has been closed, or is no connection
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            connected = socket.socket(fileno=int(name))
            try:
                if connected.family not in (socket.AF_INET, socket.AF_INET6) or connected.type != socket.SOCK_STREAM:
                    continue
                here, there = connected.getsockname()[0], connected.getpeername()[0]
                info = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
            finally:
                connected.detach()  # it is another's; a copy would be one more descriptor that a fork inherits
            if len(info) == _INFO.size and here != there:
                num_bytes, busy, unread = _INFO.unpack(info)
                found.setdefault((here, there), []).append((num_bytes, max(0, busy - unread)))
    sums = []
    for pair, those in found.items():
        most = max(num_bytes for num_bytes, _ in those)
        if most >= _FEWEST_BYTES:
            chosen = [each for each in those if each[0] >= most / 2]
            sums.append((*pair, sum(sent for sent, _ in chosen), sum(busy for _, busy in chosen) / 1e6))
    return sorted(sums, key=lambda each: crc32(" ".join(sorted(each[:2])).encode()))[:_MOST_PAIRS]
