"""The congestion control of connections between hosts."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from horovodlike._net import socket_options
from horovodlike._net.socket_options import set_congestion_control
from horovodlike.errors import ConfigError

AVAILABLE = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()


@pytest.fixture
def connected() -> Iterator[socket.socket]:
    """One end of a connection over the loopback interface, over which something has been sent."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as end:
        other, _ = server.accept()
        with other:
            end.sendall(b"there")
            other.sendall(other.recv(5))
            end.recv(5)
            yield end


def use(connected: socket.socket, algorithm: str) -> None:
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, algorithm.encode())


def used(connected: socket.socket) -> str:
    return connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()


def test_the_one_that_is_asked_for(connected: socket.socket) -> None:
    set_congestion_control(connected, "reno")
    assert used(connected) == "reno"


def test_the_systems_own_is_left_alone(connected: socket.socket) -> None:
    before = used(connected)
    set_congestion_control(connected, "system")
    assert used(connected) == before


def test_one_that_the_kernel_does_not_have(connected: socket.socket) -> None:
    with pytest.raises(ConfigError, match="HOROVODLIKE_TCP_CONGESTION=fastest: the kernel refuses it"):
        set_congestion_control(connected, "fastest")


def test_what_goes_by_loss_stays(connected: socket.socket) -> None:
    use(connected, "reno")
    set_congestion_control(connected, "auto")
    assert used(connected) == "reno"


@pytest.mark.skipif("bbr" not in AVAILABLE, reason="this kernel has no BBR")
def test_bbr_is_replaced_on_short_paths(connected: socket.socket) -> None:
    use(connected, "bbr")
    set_congestion_control(connected, "auto")
    assert used(connected) in ("cubic", "reno")


@pytest.mark.skipif("bbr" not in AVAILABLE, reason="this kernel has no BBR")
def test_bbr_stays_on_long_paths(connected: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_options, "_SHORT_PATH", 0)
    use(connected, "bbr")
    set_congestion_control(connected, "auto")
    assert used(connected) == "bbr"


def test_the_round_trip_is_known(connected: socket.socket) -> None:
    """In microseconds: where the layout of struct tcp_info is another one, this is some other number, or 0."""
    assert 0 < socket_options._round_trip(connected) < 1_000_000
