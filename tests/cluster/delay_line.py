"""Carries frames between two interfaces, each of them late by a fixed time: `delay_line.py DEVICE DEVICE SECONDS`.

For kernels that lack netem. Prints `ready` once it carries; ends when it is killed.
"""

from __future__ import annotations

import collections
import errno
import select
import socket
import sys
import time

ETH_P_ALL = 0x0003
SOL_PACKET = 263
PACKET_VNET_HDR = 15  # frames carry what is left to do about checksums and segments, so large ones stay whole
PACKET_IGNORE_OUTGOING = 23
SO_SNDBUFFORCE, SO_RCVBUFFORCE = 32, 33
BUFFER = 64 << 20  # bytes, whatever the machine's limit is
LARGEST = 10 + 14 + (64 << 10)  # that, Ethernet's header, and what TCP hands down at most


def open_device(device: str) -> socket.socket:
    """A socket that receives all frames that arrive at an interface, and sends what it is given."""
    opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)  # hears nothing before it is bound
    opened.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    opened.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    opened.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, BUFFER)
    opened.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, BUFFER)
    opened.bind((device, ETH_P_ALL))
    opened.setblocking(False)
    return opened


def carry(devices: tuple[str, str], delay: float) -> None:
    """Carry frames both ways, for ever."""
    first, second = map(open_device, devices)
    other = {first: second, second: first}
    late: collections.deque[tuple[float, socket.socket, bytes]] = collections.deque()
    print("ready", flush=True)
    while True:
        pause = max(0.0, late[0][0] - time.monotonic()) if late else None
        ready, _, _ = select.select([first, second], [], [], pause)
        now = time.monotonic()
        for source in ready:
            try:
                late.append((now + delay, other[source], source.recv(LARGEST)))
            except OSError as error:
                if error.errno != errno.ENETDOWN:  # raised once, when the interface is taken down
                    raise
        while late and late[0][0] <= now:
            _, target, frame = late.popleft()
            try:
                target.send(frame)
            except OSError as error:
                # Lost, as on a wire: the queue behind the interface is full, or the interface is down.
                if error.errno not in (errno.ENOBUFS, errno.EAGAIN, errno.ENETDOWN):
                    raise


if __name__ == "__main__":
    carry((sys.argv[1], sys.argv[2]), float(sys.argv[3]))
