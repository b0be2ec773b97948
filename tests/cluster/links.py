"""A host's link: the rate, the delay and the loss that it has in both directions."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from cluster.namespaces import KILL_S, command
from cluster.tools import find, missing

BURST = 128 << 10  # bytes that a shaped link lets pass at once: more than the largest segment that TCP hands down
QUEUE_S = 0.01  # what a shaped link keeps waiting before it drops
QUEUE_MIN = 256 << 10  # bytes
DELAY_LINE = Path(__file__).with_name("delay_line.py")


@dataclass
class Connection:
    """Two interfaces at the ends of a cable: the host's, and the switch's or that of another host.

    Attributes:
        host: Namespace and name of the host's interface.
        other: Of the one at the other end.
        bridge: The bridge that the other one belongs to, if it is a switch's.
    """

    host: tuple[str, str]
    other: tuple[str, str]
    bridge: str | None = None
    _delay_line: subprocess.Popen[str] | None = None

    def shape(self, rate: float, delay: float, loss: float) -> None:
        """Set rate (bits per second), delay (seconds, one way) and loss (fraction) of both directions."""
        self._lose(0.0)
        self._end_delay_line()
        for end in (self.host, self.other):
            self._clear(end)
            if rate:
                limit = max(QUEUE_MIN, int(rate / 8 * (QUEUE_S + delay)))
                self._add(end, "tbf", "rate", f"{int(rate)}bit", "burst", f"{BURST}b", "limit", f"{limit}b")
            if delay and not missing("netem"):
                self._add(end, "netem", "delay", f"{delay * 1e6:.0f}us", "limit", "100000", inside=bool(rate))
        if delay and missing("netem"):
            assert self.bridge is not None, f"without a switch, delay needs netem: {missing('netem')}"
            self.insert(DELAY_LINE, str(delay))
        if loss:
            self._lose(loss)

    def _clear(self, end: tuple[str, str]) -> None:
        if "qdisc noqueue" not in command("tc", "-n", end[0], "qdisc", "show", "dev", end[1]):
            command("tc", "-n", end[0], "qdisc", "delete", "dev", end[1], "root")

    def _add(self, end: tuple[str, str], *words: str, inside: bool = False) -> None:
        """Put a queue at an interface, or inside the one that is there."""
        place = ["parent", "1:1", "handle", "10:"] if inside else ["root", "handle", "1:"]
        command("tc", "-n", end[0], "qdisc", "add", "dev", end[1], *place, *words)

    def _lose(self, fraction: float) -> None:
        """Drop packets where they arrive: dropped where they are sent, TCP would be told."""
        for namespace, device in (self.host, self._entry()):
            # What gets lost are packets of the wire's size, not the 64 KiB that TCP hands down.
            command("ip", "-n", namespace, "link", "set", device, "gso_max_segs", "1" if fraction else "65535")
            if not fraction and not find("nft"):
                continue  # nothing can have been lost
            table = f"netdev loss_{device.replace('-', '_')}"
            rules = f"add table {table}\ndelete table {table}\n"
            if fraction:
                rules += f"add table {table}\n"
                rules += f'add chain {table} arriving {{ type filter hook ingress device "{device}" priority 0; }}\n'
                rules += f"add rule {table} arriving numgen random mod 1000000 < {int(fraction * 1e6)} drop\n"
            command("ip", "netns", "exec", namespace, "nft", "-f", "-", input=rules)

    def _entry(self) -> tuple[str, str]:
        """Return the namespace and interface through which the host's packets enter the switch."""
        return self.other if self._delay_line is None else (self.other[0], f"b-{self.other[1]}")

    def insert(self, program: Path, *words: str) -> subprocess.Popen[str]:
        """Put a program between the switch and its end of the cable, until the link is shaped again.

        Args:
            program: Gets the names of the two interfaces first; it prints `ready` when it carries frames between them.
            words: What else it gets.
        """
        assert self.bridge is not None, "there is no switch"
        namespace, port = self.other
        wire, entry = f"w-{port}", f"b-{port}"
        lines = [
            f"link set {port} nomaster addrgenmode none",
            f"link add name {wire} type veth peer name {entry}",
            f"link set {entry} master {self.bridge} up",
            f"link set {wire} addrgenmode none up",
        ]
        command("ip", "-n", namespace, "-batch", "-", input="\n".join(lines))
        argv = [sys.executable, str(program), port, wire, *words]
        self._delay_line = subprocess.Popen(
            [find("ip") or "ip", "netns", "exec", namespace, "setpriv", "--pdeathsig", "KILL", "--", *argv],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._delay_line.stdout is not None
        assert self._delay_line.stdout.readline() == "ready\n", f"{program.name} has not started"
        return self._delay_line

    def _end_delay_line(self) -> None:
        if self._delay_line is not None:
            self.reap(kill=True)
            namespace, port = self.other
            lines = [f"link delete w-{port}", f"link set {port} master {self.bridge}"]
            command("ip", "-n", namespace, "-batch", "-", input="\n".join(lines))

    def reap(self, kill: bool = False) -> None:
        """Wait for the program between switch and cable, if there is one, which is about to end."""
        if self._delay_line is not None:
            if kill:
                self._delay_line.kill()
            self._delay_line.wait(KILL_S)
            assert self._delay_line.stdout is not None
            self._delay_line.stdout.close()
            self._delay_line = None
