"""The names and addresses of this host, and the addresses by which hosts reach each other."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from horovodlike._net.interfaces import choose_address, listening_addresses, local_addresses
from horovodlike._net.listen import LOOPBACK as LOOPBACK
from horovodlike.errors import ConfigError
from horovodlike.launcher.errors import HostsError, UsageError
from horovodlike.launcher.planning.hosts import HostSlots, merge_hosts

if TYPE_CHECKING:  # it takes time to import, and the options are read without it
    from horovodlike.launcher.agent.host_probe import HostDescription

_DISCARD = 9
_RESOLVERS = 32


def resolve(host: str) -> list[str]:
    """Return the addresses of a host name; an empty list if it has none, as an alias in ssh's configuration."""
    try:
        found = socket.getaddrinfo(host, _DISCARD, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def _route(address: str) -> str | None:
    """Return this host's own address on the route to another address. Nothing is sent."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, _DISCARD))
            return str(probe.getsockname()[0])
    except OSError:
        return None


def _own(addresses: Iterable[str]) -> list[str]:
    """Return those addresses that belong to this host, loopback addresses included."""
    known = {str(each.address) for each in local_addresses()}
    return [text for text in addresses if text in known or ipaddress.ip_address(text.partition("%")[0]).is_loopback]


def addresses_towards(host: str, seen_from: tuple[str, str] | None) -> list[str]:
    """Return this host's addresses at which another host can reach it, the likeliest first.

    Args:
        host: The other host.
        seen_from: The addresses of this host and of the other one, as the other host sees the ssh connection; None if
            there is no such connection.
    """
    found: list[str | None] = []
    if seen_from is not None:
        client, server = seen_from
        found = [*_own([client]), _route(server)]
    if not any(found):
        found += [_route(address) for address in resolve(host)]
    return list(dict.fromkeys(address for address in found if address is not None))


def _chosen(network_interface: str) -> list[str]:
    try:
        return [choose_address(network_interface, local_addresses())]
    except ConfigError as error:
        raise UsageError(str(error)) from None


def reachable_addresses(described: Mapping[str, HostDescription | None], network_interface: str = "") -> list[str]:
    """Return this host's addresses at which the other hosts can reach it. Some hosts may reach only some of them.

    Args:
        described: The other hosts; for each, its description if there is one.
        network_interface: The setting: the network to use, or an empty string.

    Raises:
        HostsError: No address is known at which one of the hosts can reach this host.
        UsageError: This host is not in the network.
    """
    if network_interface:
        return _chosen(network_interface)
    found: dict[str, None] = {}
    for host, description in described.items():
        addresses = addresses_towards(host, None if description is None else description.seen_from)
        if not addresses:
            raise HostsError(
                f"it is not known at which address {host} can reach this machine; say over which network, with "
                "--network-interface"
            )
        found.update(dict.fromkeys(addresses))
    return list(found)


def bindable_addresses(host: str, network_interface: str) -> list[str]:
    """Return this host's address in the network of the setting; without a setting, the addresses of its name.

    Raises:
        UsageError: This host is not in that network.
    """
    return _chosen(network_interface) if network_interface else listening_addresses(host, resolve(host))


def find_this_machine(hosts: Sequence[HostSlots], names: Iterable[str]) -> tuple[tuple[HostSlots, ...], str | None]:
    """Find out which of the hosts this machine is, by its names and addresses.

    Args:
        hosts: The hosts.
        names: Names that certainly are this machine's.

    Returns:
        The hosts, with all entries of this machine merged into one; and its name among them, or None.
    """
    own = set(names)
    others = [entry.host for entry in hosts if entry.host not in own]
    if others:
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(min(len(others), _RESOLVERS)) as pool:
            for host, addresses in zip(others, pool.map(resolve, others), strict=True):
                if _own(addresses):
                    own.add(host)
    here = next((entry.host for entry in hosts if entry.host in own), None)
    renamed = (HostSlots(here, entry.slots) if here and entry.host in own else entry for entry in hosts)
    return merge_hosts(renamed), here


def local_names() -> frozenset[str]:
    """Return the names by which a user may call this host, whatever they resolve to."""
    name = socket.gethostname()
    return frozenset({"localhost", "127.0.0.1", "::1", name, name.partition(".")[0]})
