"""Which of this host's addresses other hosts are to use."""

import errno
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from horovodlike.config import SETTINGS
from horovodlike.errors import ConfigError, RendezvousError

_HEADER = struct.Struct("=IHHII")  # nlmsghdr of netlink(7): length, type, flags, sequence, port
_ADDRESS = struct.Struct("=BBBBI")  # ifaddrmsg of rtnetlink(7): family, prefix length, flags, scope, index
_ATTRIBUTE = struct.Struct("=HH")  # rtattr: length, type
_NLMSG_ERROR, _NLMSG_DONE, _RTM_NEWADDR, _RTM_GETADDR = 2, 3, 20, 22
_REQUEST_DUMP = 0x301
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_IFA_F_UNUSABLE = 0x08 | 0x40  # duplicate, or not yet known not to be one

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True)
class Interface:
    """An address of this host, the name of the interface that has it, and how much of it is the network's."""

    name: str
    address: Address
    prefix: int

    @property
    def is_reachable(self) -> bool:
        """Whether other hosts may be able to use it, as far as the address tells."""
        # An address that is valid on one link only would need the name of each host's interface.
        return not (self.address.is_loopback or self.address.is_link_local)


def local_addresses() -> list[Interface]:
    """Every usable address of this process's network namespace, in the kernel's order."""
    found = []
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE) as netlink:
        netlink.sendto(
            _HEADER.pack(_HEADER.size + _ADDRESS.size, _RTM_GETADDR, _REQUEST_DUMP, 1, 0)
            + _ADDRESS.pack(socket.AF_UNSPEC, 0, 0, 0, 0),
            (0, 0),
        )
        done = False
        while not done:
            for kind, body in _messages(netlink.recv(1 << 16)):
                if kind == _NLMSG_DONE:
                    done = True
                elif kind == _NLMSG_ERROR:
                    number = -struct.unpack_from("=i", body)[0]
                    raise OSError(number, os.strerror(number))
                elif kind == _RTM_NEWADDR and (interface := _parse(body)) is not None:
                    found.append(interface)
    return found


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    position = 0
    while position + _HEADER.size <= len(data):
        length, kind, _, _, _ = _HEADER.unpack_from(data, position)
        yield kind, data[position + _HEADER.size : position + length]
        position += (length + 3) & ~3


def _parse(body: bytes) -> Interface | None:
    family, prefix, flags, _, index = _ADDRESS.unpack_from(body)
    position = _ADDRESS.size
    attributes = {}
    while position + _ATTRIBUTE.size <= len(body):
        length, kind = _ATTRIBUTE.unpack_from(body, position)
        attributes[kind] = body[position + _ATTRIBUTE.size : position + length]
        position += (length + 3) & ~3
    # Of a point-to-point link IFA_ADDRESS is the other end's.
    packed = attributes.get(_IFA_LOCAL) or attributes.get(_IFA_ADDRESS)
    if packed is None or flags & _IFA_F_UNUSABLE or family not in (socket.AF_INET, socket.AF_INET6):
        return None
    try:
        return Interface(socket.if_indextoname(index), ipaddress.ip_address(packed), prefix)
    except OSError as error:
        if error.errno != errno.ENXIO:  # it has gone since
            raise
        return None


def choose_address(wanted: str, interfaces: Sequence[Interface]) -> str:
    """The first address that the setting ``network_interface`` allows.

    Args:
        wanted: Names of interfaces and networks, separated by commas; the first of them that fits counts.
        interfaces: What this host has.

    Raises:
        ConfigError: None of them fits, or one of them is not possible; the message says what there is.
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
    """Those of this host's addresses that are in a network which all other hosts have an address in, too.

    Args:
        mine: What this host has.
        others: The addresses of each of the other hosts, or of any process there.

    Returns:
        The addresses; where there is no such network, all that other hosts may be able to use.
    """
    candidates = [each for each in mine if each.is_reachable]
    found = []
    for each in candidates:
        network = ipaddress.ip_network((each.address, each.prefix), strict=False)
        # Networks that are a host's own affair look alike on all hosts: this host's address is then theirs as well.
        if all(
            any(address in network and address != each.address for address in map(ipaddress.ip_address, other))
            for other in others
        ):
            found.append(each)
    return [str(each.address) for each in found or candidates]


def own_address(rank: int, ends: Sequence[tuple[str, str]], network_interface: str) -> str:
    """Where this rank is to listen for ranks of other hosts.

    Args:
        rank: This rank.
        ends: By rank, its own address and the server's in its connection to the rendezvous server.
        network_interface: The setting.

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
