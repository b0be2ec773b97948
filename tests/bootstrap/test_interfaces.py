"""The choice of the address of a host that the others use."""

import ipaddress

import pytest

from horovodlike._net import interfaces
from horovodlike._net.interfaces import (
    Interface,
    choose_address,
    listening_addresses,
    local_addresses,
    own_address,
    shared_addresses,
)
from horovodlike.errors import ConfigError, RendezvousError

THERE = [
    Interface(name, ipaddress.ip_address(address), prefix)
    for name, address, prefix in (
        ("lo", "127.0.0.1", 8),
        ("lo", "::1", 128),
        ("eth0", "fe80::1", 64),
        ("eth0", "2001:db8::7", 64),
        ("eth0", "10.1.2.3", 16),
        ("ib0", "192.168.7.3", 24),
        ("ib0", "192.168.8.3", 24),
        ("v6", "fd00:1::3", 64),
    )
]


def test_the_loopback_interface_is_there() -> None:
    found = local_addresses()
    assert Interface("lo", ipaddress.ip_address("127.0.0.1"), 8) in found
    assert len(set(found)) == len(found)


@pytest.mark.parametrize(
    ("wanted", "address"),
    [
        ("eth0", "10.1.2.3"),
        ("ib0", "192.168.7.3"),
        ("v6", "fd00:1::3"),
        ("10.0.0.0/8", "10.1.2.3"),
        ("192.168.8.99/24", "192.168.8.3"),
        ("2001:db8::/32", "2001:db8::7"),
        ("nowhere0, 172.16.0.0/12 ,ib0,eth0", "192.168.7.3"),
        ("lo", "127.0.0.1"),
    ],
)
def test_the_first_that_fits(wanted: str, address: str) -> None:
    assert choose_address(wanted, THERE) == address


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ("eth1", ["'eth1'", "eth0 10.1.2.3", "ib0 192.168.7.3"]),
        ("172.16.0.0/12", ["172.16.0.0/12"]),
        ("10.0.0.0/99", ["10.0.0.0/99"]),
        ("fe80::/10", ["fe80::/10"]),
    ],
)
def test_none_fits(wanted: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        choose_address(wanted, THERE)
    for word in ["HOROVODLIKE_NETWORK_INTERFACE", *words]:
        assert word in str(caught.value)


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> None:
    """This host has those interfaces."""
    monkeypatch.setattr(interfaces, "local_addresses", lambda: THERE)


@pytest.mark.parametrize(
    ("host", "resolved", "found"),
    [
        ("node-1", ["10.1.2.3", "192.0.2.9"], ["10.1.2.3"]),
        ("node-1", ["192.0.2.9"], []),
        ("node-1", [], []),
        ("localhost", ["::1", "127.0.0.1"], ["::1", "127.0.0.1"]),
        ("127.0.1.1", ["127.0.1.1"], ["127.0.1.1"]),
        ("node-1", ["127.0.1.1", "10.1.2.3"], ["127.0.1.1", "10.1.2.3"]),
        ("node-1", ["127.0.1.1"], ["2001:db8::7", "10.1.2.3", "192.168.7.3", "192.168.8.3", "fd00:1::3", "127.0.1.1"]),
    ],
)
def test_where_a_server_listens(there: None, host: str, resolved: list[str], found: list[str]) -> None:
    assert listening_addresses(host, resolved) == found


@pytest.mark.usefixtures("there")
def test_the_way_to_the_server_counts() -> None:
    ends = [("10.1.2.3", "10.1.2.3"), ("10.1.2.4", "10.1.2.3")]
    assert own_address(0, ends, "") == "10.1.2.3"
    assert own_address(1, ends, "") == "10.1.2.4"
    assert own_address(1, ends, "ib0") == "192.168.7.3"


@pytest.mark.usefixtures("there")
def test_beside_the_server_it_is_the_servers_address_for_the_others() -> None:
    ends = [("127.0.0.1", "127.0.0.1"), ("10.1.2.4", "10.1.2.3")]
    assert own_address(0, ends, "") == "10.1.2.3"
    assert own_address(0, [("127.0.0.1", "127.0.0.1")] * 2, "") == "127.0.0.1"


@pytest.mark.usefixtures("there")
@pytest.mark.parametrize("ends", [("127.0.0.1", "127.0.0.1"), ("fe80::1", "fe80::2")])
def test_an_address_that_the_others_cannot_use(ends: tuple[str, str]) -> None:
    with pytest.raises(RendezvousError, match=r"--network-interface"):
        own_address(0, [ends, ("10.9.9.4", "10.9.9.3")], "")


@pytest.mark.parametrize(
    ("others", "shared"),
    [
        ([["10.1.9.9", "192.168.7.4"], ["192.168.7.5"]], ["192.168.7.3"]),
        ([["10.1.9.9", "192.168.7.4"]], ["10.1.2.3", "192.168.7.3"]),
        ([["2001:db8::8"], ["2001:db8::9", "fd00:2::1"]], ["2001:db8::7"]),
        ([["192.168.7.3", "10.1.9.9"]], ["10.1.2.3"]),  # 192.168.7.3 is private to each host, as a bridge's is
        ([["172.16.0.1"]], ["2001:db8::7", "10.1.2.3", "192.168.7.3", "192.168.8.3", "fd00:1::3"]),
    ],
)
def test_networks_that_all_hosts_have(others: list[list[str]], shared: list[str]) -> None:
    assert shared_addresses(THERE, others) == shared
