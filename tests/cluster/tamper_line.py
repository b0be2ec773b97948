"""Carries frames and changes one byte of one TCP stream: `tamper_line.py DEVICE DEVICE KIND WAY AT`.

KIND says which connection: `control`, `data` or `messages` of the mesh, `mesh` (any), `rendezvous0` (the first to a
server of this protocol, of the rendezvous or of an elastic driver), `rendezvous1` … or `ssh`. WAY is `up` (what the
side sends that has connected) or `down`. AT is the offset of the byte, or hexadecimal digits after an `x`: then the
first byte of their first occurrence is changed. A retransmission is changed alike. Prints `ready` once it carries, and
`changed` when it has; ends when it is killed.
"""

from __future__ import annotations

import errno
import select
import struct
import sys
from dataclasses import dataclass, field

from delay_line import LARGEST, open_device

VNET_HEADER = 10
NEEDS_CHECKSUM = 1  # the header of the frame says so: the receiver computes the sum of the payload if it needs it
HELLO_USE = 40  # offset of the connection's use in the hello of the mesh
USES = {0: "control", 1: "data", 2: "messages"}
SSH = 22

Key = tuple[bytes, int, bytes, int]


@dataclass
class Connection:
    """A connection, from its SYN on.

    Attributes:
        port: The one that was connected to.
        begins: The sequence number of the first byte of each way.
        magic: The first bytes of the side that listens.
        use: Of the mesh.
        number: How many servers of the rendezvous's protocol were connected to before.
    """

    port: int
    begins: dict[str, int] = field(default_factory=dict)
    magic: bytes = b""
    use: str = ""
    number: int = -1

    def is_of(self, kind: str) -> bool:
        if kind == "ssh":
            return self.port == SSH
        if kind == "mesh":
            return self.magic == b"HVLM"
        if kind.startswith("rendezvous"):
            return self.magic == b"HVLR" and f"rendezvous{self.number}" == kind
        return self.use == kind


class Line:
    """The state of the connections, and the change to make."""

    def __init__(self, kind: str, way: str, at: str) -> None:
        self._kind, self._way = kind, way
        self._offset = -1 if at.startswith("x") else int(at)
        self._marker = bytes.fromhex(at[1:]) if at.startswith("x") else b""
        self._connections: dict[Key, Connection] = {}
        self._target: Connection | None = None
        self._servers = 0

    def change(self, frame: bytearray) -> None:
        """Look at a frame, and change the byte if it is in it."""
        ip = VNET_HEADER + 14
        if frame[ip - 2 : ip] != b"\x08\x00" or frame[ip + 9] != 6:
            return
        tcp = ip + 4 * (frame[ip] & 15)
        end = ip + int.from_bytes(frame[ip + 2 : ip + 4], "big")
        source, target, sequence = struct.unpack_from(">HHI", frame, tcp)
        sender, receiver = bytes(frame[ip + 12 : ip + 16]), bytes(frame[ip + 16 : ip + 20])
        data = tcp + 4 * (frame[tcp + 12] >> 4)
        up, down = (sender, source, receiver, target), (receiver, target, sender, source)
        if frame[tcp + 13] & 2:  # SYN
            if not frame[tcp + 13] & 16:
                self._connections[up] = Connection(target)
            way = "up" if up in self._connections else "down"
            if found := self._connections.get(up if way == "up" else down):
                found.begins[way] = sequence + 1 & 0xFFFFFFFF
            return
        way = "up" if up in self._connections else "down"
        found = self._connections.get(up if way == "up" else down)
        if found is None or data >= end:
            return
        offset = sequence - found.begins[way] & 0xFFFFFFFF
        self._learn(found, way, offset, frame[data:end])
        if way == self._way and (found is self._target or self._target is None and found.is_of(self._kind)):
            self._flip(found, frame, tcp, data, end, offset)

    def _learn(self, found: Connection, way: str, offset: int, payload: bytearray) -> None:
        if offset == 0 and way == "down" and not found.magic:
            found.magic = bytes(payload[:4])
            if found.magic == b"HVLR":
                found.number, self._servers = self._servers, self._servers + 1
        elif offset == 0 and found.magic == b"HVLM" and len(payload) >= HELLO_USE + 4:
            found.use = USES.get(int.from_bytes(payload[HELLO_USE : HELLO_USE + 4], "big"), "")

    def _flip(self, found: Connection, frame: bytearray, tcp: int, data: int, end: int, offset: int) -> None:
        if self._offset < 0:
            start = frame.find(self._marker, data, end)
            if start < 0:
                return
            self._offset = offset + start - data
        position = data + self._offset - offset
        if not data <= position < end:
            return
        if self._target is None:
            print("changed", flush=True)
        self._target = found
        before, after = frame[position], frame[position] ^ 1
        frame[position] = after
        if not frame[0] & NEEDS_CHECKSUM:  # RFC 1624, for one byte of a word
            shift = 0 if (position - tcp) % 2 else 8
            total = (~int.from_bytes(frame[tcp + 16 : tcp + 18], "big") & 0xFFFF) + (~(before << shift) & 0xFFFF)
            total += after << shift
            while total >> 16:
                total = (total & 0xFFFF) + (total >> 16)
            frame[tcp + 16 : tcp + 18] = (~total & 0xFFFF).to_bytes(2, "big")


def carry(devices: tuple[str, str], line: Line) -> None:
    """Carry frames both ways, for ever."""
    first, second = map(open_device, devices)
    other = {first: second, second: first}
    print("ready", flush=True)
    while True:
        for source in select.select([first, second], [], [])[0]:
            try:
                frame = bytearray(source.recv(LARGEST))
                line.change(frame)
                other[source].send(frame)
            except OSError as error:  # lost, as on a wire
                if error.errno not in (errno.ENETDOWN, errno.ENOBUFS, errno.EAGAIN):
                    raise


if __name__ == "__main__":
    carry((sys.argv[1], sys.argv[2]), Line(*sys.argv[3:6]))
