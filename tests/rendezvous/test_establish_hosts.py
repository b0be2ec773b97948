"""Jobs of several hosts: hosts of their own in name, on one machine. What flows where, and what remains."""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from horovodlike._mesh import CONTROL, DATA
from horovodlike.config import load
from horovodlike.place import Place
from horovodlike.rendezvous import Membership, RendezvousServer, establish

RunRanks = Callable[..., list[Any]]
StartHosts = Callable[..., list[Any]]

SEGMENT = 1 << 16


def segment_bytes(place: Place) -> int:
    return SEGMENT * place.local_size


def environ_of(rank: int, nodes: Sequence[str], server: RendezvousServer, key: bytes, **more: str) -> dict[str, str]:
    beside = [other for other, node in enumerate(nodes) if node == nodes[rank]]
    across = list(dict.fromkeys(nodes))
    variables = {
        "RANK": rank,
        "SIZE": len(nodes),
        "LOCAL_RANK": beside.index(rank),
        "LOCAL_SIZE": len(beside),
        "CROSS_RANK": across.index(nodes[rank]),
        "CROSS_SIZE": len(across),
        "NODE_ID": nodes[rank],
        "RENDEZVOUS_ADDR": "127.0.0.1",
        "RENDEZVOUS_PORT": server.port,
        "SECRET_KEY": key.hex(),
        "JOB_ID": "j",
        **more,
    }
    return {f"HOROVODLIKE_{name}": str(value) for name, value in variables.items()}


@pytest.fixture
def on_hosts(run_ranks: RunRanks, key: bytes, runtime: dict[str, str]) -> StartHosts:
    """Has the ranks of some nodes join, and calls ``body(membership)``; gives what it returns or raises, by rank."""

    def run(
        nodes: Sequence[str],
        body: Callable[[Membership], Any] = lambda membership: None,
        each: Callable[[int], dict[str, str]] = lambda rank: {},
        **settings: str,
    ) -> list[Any]:
        def rank_body(rank: int) -> Any:  # noqa: ANN401
            environ = environ_of(rank, nodes, server, key, **settings, **each(rank))
            with establish(load(environ), segment_bytes, environ) as membership:
                result = body(membership)
                membership.confirm()
                return result

        with RendezvousServer(key, len(nodes)) as server:
            return run_ranks(len(nodes), rank_body)

    return run


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """No descriptor, thread or file in /dev/shm remains."""
    before = set(os.listdir("/proc/self/fd")), set(threading.enumerate())
    yield
    assert set(os.listdir("/proc/self/fd")) <= before[0]
    assert set(threading.enumerate()) <= before[1]


def raise_errors(results: Sequence[Any]) -> list[Any]:
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return list(results)


def greet_over(membership: Membership) -> list[tuple[int, int, str]]:
    """Sends over every connection who this is and what for; returns the use, the rank and what came over each."""
    rank = membership.place.rank
    for connection in membership.connections:
        assert not connection.socket.getblocking()
        assert not connection.socket.get_inheritable()
        text = f"{rank} to {connection.rank} use {connection.use} keys {connection.keys.send.hex()[:8]}"
        connection.socket.send(text.ljust(64).encode())
    found = []
    for connection in membership.connections:
        connection.socket.settimeout(10)
        data = b""
        while len(data) < 64:
            data += connection.socket.recv(64 - len(data))
        expected = f"{connection.rank} to {rank} use {connection.use} keys {connection.keys.receive.hex()[:8]}"
        found.append((connection.use, connection.rank, data.decode().strip() == expected))
    return found


def control_partners(rank: int, hosts: Sequence[int], fan_out: int) -> list[int]:
    leaders = [hosts.index(host) for host in range(max(hosts) + 1)]
    if rank not in leaders:
        return []
    host = hosts[rank]
    pairs = [(other, (other - 1) // fan_out) for other in range(1, len(leaders))]
    return [leaders[parent] for child, parent in pairs if child == host] + [
        leaders[child] for child, parent in pairs if parent == host
    ]


SHAPES = [("a", "b"), ("a", "a", "b", "b"), ("a", "a", "b", "c"), ("a", "b", "a", "b", "b"), tuple("abcdefgh")]


@pytest.mark.parametrize("nodes", SHAPES, ids=lambda nodes: "".join(nodes))
@pytest.mark.parametrize(("streams", "fan_out"), [(1, 16), (2, 2)])
def test_who_is_at_the_other_end(nodes: tuple[str, ...], streams: int, fan_out: int, on_hosts: StartHosts) -> None:
    with nothing_left():
        results = raise_errors(on_hosts(nodes, greet_over, TCP_STREAMS=str(streams), FAN_OUT=str(fan_out)))
    hosts = [list(dict.fromkeys(nodes)).index(node) for node in nodes]
    for rank, found in enumerate(results):
        data = [(DATA, other, True) for other in range(len(nodes)) if hosts[other] != hosts[rank]]
        control = [(CONTROL, other, True) for other in control_partners(rank, hosts, fan_out)]
        assert found == [each for each in data for _ in range(streams)] + control
