"""The rate that iperf3 measures between two hosts: what TCP gets out of the link, with one connection per direction."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass

from cluster.hosts import Host
from cluster.tools import find


@dataclass(frozen=True)
class Rates:
    """Payload that has arrived, in bits per second; `backward` is 0 unless both directions were measured at once."""

    forward: float
    backward: float = 0.0

    @property
    def slower(self) -> float:
        return min(self.forward, self.backward) if self.backward else self.forward


def measure(
    sender: Host, receiver: Host, *, seconds: int = 2, bidirectional: bool = False, address: str | None = None
) -> Rates:
    """Measure the rate from one host to another.

    Args:
        sender: Sends `forward`.
        receiver: Runs the server.
        seconds: How long; another one before them does not count.
        bidirectional: Measure both directions at the same time.
        address: Of the receiver; its IPv4 address if None.

    Returns:
        The rates.
    """
    program = find("iperf3") or "iperf3"
    server = receiver.popen(
        [program, "--server", "--one-off", "--forceflush"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert server.stdout is not None
    heard = ""
    while "listening" not in heard:
        line = server.stdout.readline()
        assert line, f"iperf3's server on {receiver.name} ended: {heard}"
        heard += line
    words = [program, "--client", address or receiver.ipv4, "--time", str(seconds), "--omit", "1", "--json"]
    result = json.loads(sender.run([*words, *["--bidir"] * bidirectional], timeout=seconds + 60).stdout)
    server.communicate(timeout=30)
    backward = result["end"]["sum_received_bidir_reverse"]["bits_per_second"] if bidirectional else 0.0
    return Rates(result["end"]["sum_received"]["bits_per_second"], backward)
