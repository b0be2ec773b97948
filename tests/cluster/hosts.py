"""Hosts on one machine: network namespaces, each with an interface to a switch that is a namespace of its own.

A host has its own interfaces, addresses, ports, name, /etc/hosts, /etc/ssh and /dev/shm. Files, process ids and
processors are the machine's. Nothing of the machine's own network is touched.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv6Address
from pathlib import Path
from typing import Any

from cluster import namespaces
from cluster.links import Connection
from cluster.namespaces import CommandError, command, wait_until

LAUNCHER = "launcher"
# Only files: a name that no host has is unknown at once, as no name server can be asked.
NSSWITCH = "passwd: files\ngroup: files\nshadow: files\nhosts: files\n"


@dataclass(frozen=True)
class Counters:
    """Bytes and packets of an interface. A packet is one unit of the kernel: with segmentation offload, up to 64 KiB
    and one header."""

    sent_bytes: int
    sent_packets: int
    received_bytes: int
    received_packets: int

    def __sub__(self, before: Counters) -> Counters:
        return Counters(
            self.sent_bytes - before.sent_bytes,
            self.sent_packets - before.sent_packets,
            self.received_bytes - before.received_bytes,
            self.received_packets - before.received_packets,
        )


@dataclass
class Host:
    """One host; `cluster.hosts` has them.

    Attributes:
        name: Its name, which all hosts of the cluster resolve.
        namespace: The name of its network namespace.
        shm: What its processes see as /dev/shm.
        folder: For what servers of this host write, removed with the cluster.
        addresses: IPv4 and IPv6 address of each interface, `eth0` first.
    """

    name: str
    namespace: str
    number: int
    shm: Path
    folder: Path
    addresses: dict[str, tuple[str, str]] = field(default_factory=dict)
    _started: list[subprocess.Popen[Any]] = field(default_factory=list)

    @property
    def ipv4(self) -> str:
        return self.addresses["eth0"][0]

    @property
    def ipv6(self) -> str:
        return self.addresses["eth0"][1]

    def inside(self, argv: Sequence[str | Path]) -> list[str]:
        """The command line that runs a program in this host, as root of the machine."""
        return namespaces.enter(self.namespace, self.name, self.shm, [str(word) for word in argv])

    def popen(self, argv: Sequence[str | Path], **options: Any) -> subprocess.Popen[Any]:
        """Start a program in this host; `options` as those of `subprocess.Popen`.

        The process id is the program's. It is killed when the thread ends that has called this, and by `close()`.
        """
        options.setdefault("stdin", subprocess.DEVNULL)
        self._started.append(subprocess.Popen(self.inside(argv), **options))
        return self._started[-1]

    def run(
        self,
        argv: Sequence[str | Path],
        *,
        check: bool = True,
        timeout: float = 60.0,
        input: str | None = None,
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program in this host to its end.

        Args:
            argv: Program and arguments.
            check: Fail unless it exits with 0.
            timeout: Seconds after which it is killed.
            input: Its standard input.
            env: Its whole environment; that of this process if None.
            options: Of `subprocess.Popen`.

        Returns:
            Exit code, output and errors, as text.

        Raises:
            CommandError: It failed or took too long; the message has what it wrote.
        """
        process = self.popen(
            argv,
            stdin=subprocess.DEVNULL if input is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
            **options,
        )
        try:
            output, errors = process.communicate(input, timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            output, errors = process.communicate()
            raise CommandError(f"{self.name}: {argv} took more than {timeout} s: {output}{errors}") from None
        finally:
            self._started.remove(process)
        if check and process.returncode != 0:
            raise CommandError(f"{self.name}: {argv} ended with {process.returncode}: {output}{errors}")
        return subprocess.CompletedProcess(argv, process.returncode, output, errors)

    def counters(self, interface: str = "eth0") -> Counters:
        """Return the bytes and packets that an interface has sent and received so far."""
        [link] = json.loads(command("ip", "-j", "-s", "-n", self.namespace, "link", "show", interface))
        sent, received = link["stats64"]["tx"], link["stats64"]["rx"]
        return Counters(sent["bytes"], sent["packets"], received["bytes"], received["packets"])

    def processes(self) -> dict[int, str]:
        """The processes of this host: their command lines by process id."""
        return namespaces.processes(self.namespace)

    def shm_entries(self) -> set[str]:
        """Return the names in this host's /dev/shm."""
        return {entry.name for entry in self.shm.iterdir()}

    def reap(self) -> None:
        """Take note of the programs that have ended."""
        for process in self._started:
            process.poll()

    def close(self) -> None:
        """Wait for the programs, which have been killed, and close the pipes to them."""
        for process in self._started:
            process.wait(namespaces.KILL_S)
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    with contextlib.suppress(BrokenPipeError):
                        stream.close()
        self._started.clear()


class Cluster:
    """Hosts `h0`, `h1` … and one that launches jobs, `launcher`, all in the networks of one switch.

    Interface i of host n has the addresses 10.77.i.(n+1)/24 and fd77:0:0:i::(n+1)/64. Clusters do not see each other,
    so all have the same ones. A name stands for both addresses of `eth0`; `h0-eth1` for those of the second interface.

    Args:
        hosts: How many, apart from the launcher.
        interfaces: How many each of them has: `eth0`, `eth1` …, each in a network of its own.
        ipv4: Whether names resolve to IPv4 addresses.
        ipv6: Whether names resolve to IPv6 addresses, which come first.
        direct: Two hosts at the ends of one cable, without the switch, which costs a third of an unshaped link's rate.
            The launcher is then `h0`.
    """

    def __init__(
        self, hosts: int, *, interfaces: int = 1, ipv4: bool = True, ipv6: bool = True, direct: bool = False
    ) -> None:
        assert not direct or hosts == 2, "a cable has two ends"
        namespaces.sweep()
        self.name = namespaces.new_name()
        self.folder = namespaces.RUN / self.name
        self.switch = f"{self.name}-switch"
        self.interfaces = [f"eth{index}" for index in range(interfaces)]
        self.closed = False
        self.direct = direct
        self.links: dict[tuple[str, str], Connection] = {}
        names = [f"h{number}" for number in range(hosts)] + [LAUNCHER] * (not direct)
        self.machines = [self._host(name, number) for number, name in enumerate(names)]
        self.hosts = self.machines[:hosts]
        self.launcher = self.machines[0 if direct else -1]
        try:
            self._make_links()
            self._connect()
            self._write_etc(ipv4, ipv6)
            wait_until(self._forwards, "links that are up")
        except BaseException:
            self.close()
            raise

    def _host(self, name: str, number: int) -> Host:
        addresses = {
            interface: (f"10.77.{index}.{number + 1}", str(IPv6Address(f"fd77:0:0:{index:x}::{number + 1:x}")))
            for index, interface in enumerate(self.interfaces)
        }
        namespace = f"{self.name}-{name}"
        return Host(name, namespace, number, namespaces.SHM / namespace, self.folder / name, addresses)

    def _make_links(self) -> None:
        for namespace in (*([] if self.direct else [self.switch]), *(host.namespace for host in self.machines)):
            command("ip", "netns", "add", namespace)
        if not self.direct:
            bridges = [f"br{index}" for index in range(len(self.interfaces))]
            self._batch(self.switch, [f"link add name {bridge} type bridge mcast_snooping 0" for bridge in bridges])
            self._batch(self.switch, [f"link set {bridge} up" for bridge in bridges])
        for host in self.machines[: 1 if self.direct else None]:
            for index, interface in enumerate(self.interfaces):
                ends = (host.namespace, interface), (self.switch, f"{host.name}-{interface}")
                bridge: str | None = f"br{index}"
                if self.direct:
                    ends, bridge = (ends[0], (self.machines[1].namespace, interface)), None
                self.links[host.name, interface] = Connection(*ends, bridge)
                peer = f"peer name {ends[1][1]} netns {ends[1][0]}"
                self._batch(host.namespace, [f"link add name {interface} type veth {peer}"])
                if self.direct:
                    self.links[self.machines[1].name, interface] = Connection(ends[1], ends[0])

    def _connect(self) -> None:
        for host in self.machines:
            host.folder.mkdir(parents=True)
            host.shm.mkdir()
            host.shm.chmod(0o1777)
            lines, ports = ["link set lo up"], []
            for index, interface in enumerate(self.interfaces):
                ipv4, ipv6 = host.addresses[interface]
                lines += [f"address add {ipv4}/24 dev {interface}", f"address add {ipv6}/64 dev {interface} nodad"]
                lines += [f"link set {interface} up"]
                ports += [f"link set {host.name}-{interface} master br{index} up"]
            self._batch(host.namespace, lines)
            if not self.direct:
                self._batch(self.switch, ports)

    def _batch(self, namespace: str, lines: Sequence[str]) -> None:
        command("ip", "-n", namespace, "-batch", "-", input="\n".join(lines))

    def _forwards(self) -> bool:
        """Whether all hosts have a carrier and the switch forwards for all of them."""
        for host in self.machines:
            links = json.loads(command("ip", "-j", "-n", host.namespace, "link"))
            if any(link["operstate"] != "UP" for link in links if link["ifname"] in self.interfaces):
                return False
        if self.direct:
            return True
        links = json.loads(command("ip", "-j", "-d", "-n", self.switch, "link", "show", "type", "veth"))
        ports = [link["linkinfo"]["info_slave_data"] for link in links if "master" in link]
        return all(port["state"] == "forwarding" for port in ports)

    def _write_etc(self, ipv4: bool, ipv6: bool) -> None:
        lines = ["127.0.0.1 localhost", "::1 localhost"]
        for host in self.machines:
            for interface, addresses in host.addresses.items():
                names = f"{host.name}-{interface}" if interface != "eth0" else host.name
                lines += [f"{addresses[0]} {names}"] * ipv4 + [f"{addresses[1]} {names}"] * ipv6
        for host in self.machines:
            self.write_etc(host, "hosts", "\n".join([*lines, ""]))
            self.write_etc(host, "nsswitch.conf", NSSWITCH)

    def write_etc(self, host: Host, name: str, text: str) -> None:
        """Give a host a file of its own in /etc, for programs that start from now on; it must exist on the machine."""
        folder = namespaces.ETC / host.namespace
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)

    def shape(self, host: Host, *, rate: float = 0, delay: float = 0, loss: float = 0, interface: str = "eth0") -> None:
        """Make a host's link slower, in both directions alike. Each call replaces what earlier ones have set.

        Args:
            host: Whose link.
            rate: Bits per second on the wire, headers included; 0 for as fast as it goes.
            delay: Seconds that each packet is late, one way: a round trip takes twice as much more.
            loss: The fraction of packets that get lost.
            interface: Which link of the host.
        """
        self.links[host.name, interface].shape(rate, delay, loss)
        wait_until(self._forwards, f"the link of {host.name}")

    def link_down(self, host: Host, interface: str = "eth0") -> None:
        """Pull a host's cable: the switch's end goes down, so the host has no carrier, but keeps its addresses."""
        assert not self.direct, "without a switch, the other end is a host, which would lose its addresses"
        command("ip", "-n", self.switch, "link", "set", self.links[host.name, interface].other[1], "down")

    def link_up(self, host: Host, interface: str = "eth0") -> None:
        """Put the cable back, and wait until the link is up."""
        command("ip", "-n", self.switch, "link", "set", self.links[host.name, interface].other[1], "up")
        wait_until(self._forwards, f"the link of {host.name}")

    def part(self, first: Host, second: Host) -> None:
        """Let nothing through between two hosts, which both still reach the others, until `unite`."""
        for host, other in ((first, second), (second, first)):
            ipv4, ipv6 = (", ".join(family) for family in zip(*other.addresses.values(), strict=True))
            rules = "add table inet parted\n"
            rules += "add chain inet parted input { type filter hook input priority 0; }\n"
            rules += f"add rule inet parted input ip saddr {{ {ipv4} }} drop\n"
            rules += f"add rule inet parted input ip6 saddr {{ {ipv6} }} drop\n"
            command("ip", "netns", "exec", host.namespace, "nft", "-f", "-", input=rules)

    def unite(self, first: Host, second: Host) -> None:
        """Let through again what `part` has stopped."""
        for host in (first, second):
            command("ip", "netns", "exec", host.namespace, "nft", "delete", "table", "inet", "parted")

    def processes(self) -> dict[int, str]:
        """The processes of all hosts: their command lines by process id."""
        return namespaces.processes_of(self.name)

    def close(self) -> None:
        """End all processes of the hosts and remove the cluster; once is enough, more do no harm.

        Raises:
            AssertionError: Something is left.
        """
        if self.closed:
            return
        self.closed = True
        namespaces.kill_processes(self.name, lambda: [host.reap() for host in self.machines])
        for link in self.links.values():
            link.reap()
        for host in self.machines:
            host.close()
        namespaces.remove(self.name)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def environment(**settings: str) -> dict[str, str]:
    """This process's environment without what launchers have set, and with `settings`."""
    foreign = ("HOROVOD", "OMPI_", "PMI", "PMIX_", "SLURM_", "TORCHELASTIC_", "MASTER_")
    return {**{name: value for name, value in os.environ.items() if not name.startswith(foreign)}, **settings}
