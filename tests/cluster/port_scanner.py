"""Connect to every listening port of this host, again and again: `port_scanner.py EXCEPT_PORT`.

Some connections are silent, some speak HTTP, some send bytes at random. Prints each address and port once, until it is
killed.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from pathlib import Path

SAID = (b"", b"GET / HTTP/1.1\r\nHost: here\r\n\r\n", os.urandom(300))
KEPT = 60  # connections: as many as one user might leave open
PAUSE_S = 0.002
LISTENING = "0A"


def listening() -> set[tuple[int, str, int]]:
    """Family, address and port of all sockets that listen."""
    found = set()
    for family, table in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            _, local, _, state = line.split()[:4]
            address, port = local.split(":")
            if state == LISTENING:
                words = bytes.fromhex(address)  # 32 bits each, in the order of this machine
                swapped = b"".join(words[each : each + 4][::-1] for each in range(0, len(words), 4))
                packed = swapped if sys.byteorder == "little" else words
                found.add((family, socket.inet_ntop(family, packed), int(port, 16)))
    return found


def main() -> None:
    spared = int(sys.argv[1])
    kept: list[socket.socket] = []
    met: set[tuple[str, int]] = set()
    print("ready", flush=True)
    while True:
        for family, address, port in listening():
            if port == spared:
                continue
            for said in SAID:
                stranger = socket.socket(family)
                stranger.settimeout(1.0)
                kept.append(stranger)
                with contextlib.suppress(OSError):  # it has stopped listening, or hung up: both are good answers
                    stranger.connect((address, port))
                    if (address, port) not in met:
                        met.add((address, port))
                        print(address, port, flush=True)
                    stranger.sendall(said)
        for old in kept[:-KEPT]:
            old.close()
        del kept[:-KEPT]
        time.sleep(PAUSE_S)


if __name__ == "__main__":
    main()
