"""The choice of the address at which other hosts reach this one."""

import contextlib
import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from horovodlike.config import SETTINGS
from horovodlike.errors import ConfigError, RendezvousError

_UNUSABLE = 0x08 | 0x40  # flags of an IPv6 address: it is a duplicate, or the check for duplicates is not over

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True)
class Interface:
    """An address of this host, the name of the interface that has it, and the length of its network prefix in bits."""

    name: str
    address: Address
    prefix: int

    @property
    def is_reachable(self) -> bool:
        """True if other hosts may be able to use the address: it is neither loopback nor link-local."""
        # To use a link-local address, each host would need to add the name of its interface.
        return not (self.address.is_loopback or self.address.is_link_local)


def local_addresses() -> list[Interface]:
    """Return every usable address of this process's network namespace, IPv4 first, else in the kernel's order."""
    import psutil  # imported here, because it takes as long to import as the whole package

    unusable = _unusable_addresses()
    found = []
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family in (socket.AF_INET, socket.AF_INET6):
                address = ipaddress.ip_address(entry.address.partition("%")[0])
                mask = entry.netmask and int(ipaddress.ip_address(entry.netmask)).bit_count()
                if address not in unusable:
                    device = name.partition(":")[0]  # eth0:1 is a label of an address of eth0
                    found.append(Interface(device, address, mask or address.max_prefixlen))
    return sorted(found, key=lambda each: each.address.version)


def listening_addresses(host: str, resolved: Sequence[str]) -> list[str]:
    """Return the addresses at which a server of this host listens for other hosts that were given a name of this host.

    Debian and Ubuntu let a host's own name stand for 127.0.1.1 on that host only. So if the name stands for loopback
    addresses, the host's other addresses come before them.

    Args:
        host: The name that the user gave, or an address.
        resolved: Its addresses, as this host sees them.

    Returns:
        Those addresses that this host has; an empty list if it has none of them.
    """
    local = local_addresses()
    known = {str(each.address) for each in local}
    own = [text for text in resolved if text in known or _is_loopback(text)]
    is_mapped = not (_is_loopback(host) or host.partition(".")[0] in ("localhost", "ip6-localhost", "ip6-loopback"))
    if own and is_mapped and all(map(_is_loopback, own)):
        return [str(each.address) for each in local if each.is_reachable] + own
    return own


def _is_loopback(text: str) -> bool:
    with contextlib.suppress(ValueError):  # a name
        return ipaddress.ip_address(text.partition("%")[0]).is_loopback
    return False


def _unusable_addresses() -> set[Address]:
    """Return the IPv6 addresses that the kernel has not (yet) found to be unique."""
    with contextlib.suppress(OSError), open("/proc/net/if_inet6", encoding="ascii") as file:
        rows = [line.split() for line in file]
        return {ipaddress.IPv6Address(bytes.fromhex(row[0])) for row in rows if int(row[4], 16) & _UNUSABLE}
    return set()


def choose_address(wanted: str, interfaces: Sequence[Interface]) -> str:
    """Return the first address that the setting ``network_interface`` allows.

    Args:
        wanted: Names of interfaces and networks, separated by commas; the first of them that fits counts.
        interfaces: The addresses of this host.

    Raises:
        ConfigError: None of them fits (the message lists the addresses that there are), or a network is malformed.
    """
    source = SETTINGS["network_interface"].variable
    for part in filter(None, (each.strip() for each in wanted.split(","))):
        if "/" in part:
            try:
                network = ipaddress.ip_network(part, strict=False)
            except ValueError as error:
                raise ConfigError(f"{source}={wanted!r} cannot be used: {error}") from None
            fitting = [each.address for each in interfaces if each.address in network]
        else:
            fitting = [each.address for each in interfaces if each.name == part]
        fitting = [address for address in fitting if not address.is_link_local]
        if fitting:
            return str(min(fitting, key=lambda address: address.version))
    there = ", ".join(f"{each.name} {each.address}" for each in interfaces) or "nothing"
    raise ConfigError(
        f"{source}={wanted!r} names no network that host {socket.gethostname()} has: it has {there}. Give the name of "
        "an interface, or a network such as 10.0.0.0/8"
    )


def shared_addresses(mine: Sequence[Interface], others: Sequence[Sequence[str]]) -> list[str]:
    """Return the addresses of this host in networks in which every other host has an address, too.

    Args:
        mine: The addresses of this host.
        others: The addresses of each other host, or of each process there.

    Returns:
        The addresses; if there is no such network, all addresses that other hosts may be able to use.
    """
    candidates = [each for each in mine if each.is_reachable]
    found = []
    for each in candidates:
        network = ipaddress.ip_network((each.address, each.prefix), strict=False)
        # A network inside each host, such as a bridge for containers, may have the same addresses on all hosts. So
        # an address of another host counts only if it differs from this host's.
        if all(
            any(address in network and address != each.address for address in map(ipaddress.ip_address, other))
            for other in others
        ):
            found.append(each)
    return [str(each.address) for each in found or candidates]


def own_address(rank: int, ends: Sequence[tuple[str, str]], network_interface: str) -> str:
    """Return the address at which this rank must listen for ranks of other hosts.

    Args:
        rank: This rank.
        ends: The rank's address and the server's address in each rank's connection to the rendezvous server, by rank.
        network_interface: The setting of this name; may be empty.

    Raises:
        ConfigError: The setting cannot be used on this host.
        RendezvousError: This host's address is not known.
    """
    if network_interface.strip():
        return choose_address(network_interface, local_addresses())
    local = ipaddress.ip_address(ends[rank][0])
    if not local.is_loopback and not local.is_link_local:
        return str(local)
    outside = [server for _, server in ends if not ipaddress.ip_address(server).is_loopback]
    if not outside:
        return str(local)  # all ranks are on this machine
    # The server is on this host, and the others know how to reach it.
    here = {str(each.address) for each in local_addresses() if not each.address.is_link_local}
    for address in outside:
        if address in here:
            return address
    raise RendezvousError(
        f"rank {rank} reaches the rendezvous server through {local} and does not know under which address other hosts "
        "reach it: set --network-interface (HOROVODLIKE_NETWORK_INTERFACE) to the interface or network to use"
    )
