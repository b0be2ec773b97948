"""Connections between ranks while strangers connect, ranks do not answer, or none listens."""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from horovodlike._bootstrap import mesh_builder
from horovodlike._bootstrap.mesh_builder import Builder
from horovodlike._bootstrap.mesh_handshake import (
    CHALLENGE_BYTES,
    HELLO_BYTES,
    PROOF_BYTES,
    ConnectionId,
    Keys,
    answer_challenge,
)
from horovodlike._net.secure_channel import JobKey

RunRanks = Callable[..., list[Any]]
KEY = JobKey(bytes(range(32)))
WIRES = [ConnectionId(1, 0, 1), ConnectionId(1, 0, 2), ConnectionId(1, 1, 2), ConnectionId(0, 0, 1)]


class Ranks:
    """Listeners of a few ranks, and their builders."""

    def __init__(self, size: int) -> None:
        self.listeners = [socket.create_server(("127.0.0.1", 0), backlog=64) for _ in range(size)]
        self.places: list[tuple[str, int]] = [listener.getsockname() for listener in self.listeners]
        self.builders: list[Builder] = []

    def builder(
        self,
        rank: int,
        connection_ids: list[ConnectionId],
        timeout: float = 30.0,
        key: JobKey = KEY,
        places: Any = None,
    ) -> Builder:
        mine = [each for each in connection_ids if rank in (each.low, each.high)]
        made = Builder(rank, mine, places or self.places, key, self.listeners[rank], timeout)
        self.builders.append(made)
        return made

    def dial(self, rank: int) -> socket.socket:
        return socket.create_connection(self.places[rank], timeout=10)

    def close(self) -> None:
        for builder in self.builders:
            builder.close()
        for listener in self.listeners:
            listener.close()


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks(3)
    yield made
    made.close()


@contextlib.contextmanager
def running(builder: Builder) -> Iterator[None]:
    """The builder runs in a thread; it has ended after the block."""
    thread = threading.Thread(target=builder.run, daemon=True)
    thread.start()
    yield
    thread.join(30)
    assert not thread.is_alive()


def read_exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = connection.recv(count - len(data))
        if not piece:
            raise ConnectionResetError("closed")
        data += piece
    return data


def is_closed(connection: socket.socket) -> bool:
    with contextlib.suppress(ConnectionError):
        while connection.recv(4096):
            pass
    return True


def call(ranks: Ranks, connection_id: ConnectionId, key: JobKey = KEY) -> tuple[socket.socket, bytes, Keys]:
    """Connect by hand, as a rank does; return the proof that it expects."""
    connection = ranks.dial(connection_id.low)
    hello, proof, keys = answer_challenge(key, connection_id, read_exactly(connection, CHALLENGE_BYTES))
    connection.sendall(hello)
    return connection, proof, keys


def build_all(ranks: Ranks, run_ranks: RunRanks, connection_ids: list[ConnectionId] = WIRES) -> None:
    builders = [ranks.builder(rank, connection_ids) for rank in range(3)]
    assert run_ranks(3, lambda rank: builders[rank].run()) == [None] * 3
    check_all(builders, connection_ids)


def check_all(builders: list[Builder], connection_ids: list[ConnectionId]) -> None:
    """Each connection leads to the right builder, and both ends have the same keys."""
    for builder in builders:
        assert builder.problems == {}
    for connection_id in connection_ids:
        (low, low_keys), (high, high_keys) = (
            builders[rank].done[connection_id] for rank in (connection_id.low, connection_id.high)
        )
        assert low.getpeername() == high.getsockname()
        assert low_keys.send.hex() == high_keys.receive.hex()
        high.send(b"x")
        low.settimeout(10)
        assert low.recv(2) == b"x"


def test_all_at_once(ranks: Ranks, run_ranks: RunRanks) -> None:
    build_all(ranks, run_ranks)


def test_strangers_disturb_nobody(ranks: Ranks, run_ranks: RunRanks) -> None:
    greetings = [b"", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", bytes(range(256)) * 4, os.urandom(HELLO_BYTES)]
    strangers = []
    for number in range(40):
        stranger = ranks.dial(number % 3)
        stranger.sendall(greetings[number % 4])
        strangers.append(stranger)
    build_all(ranks, run_ranks)
    for listener in ranks.listeners:
        listener.close()
    for stranger in strangers:
        assert is_closed(stranger)
        stranger.close()


def test_more_strangers_than_there_is_room_for(
    ranks: Ranks, run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mesh_builder, "HANDSHAKE_TIMEOUT", 60.0)  # so that it is not the deadline that ends them
    monkeypatch.setattr(mesh_builder, "_MOST_PENDING", 4)
    connection_ids = [ConnectionId(1, 0, 1)]
    builder = ranks.builder(0, connection_ids)
    with running(builder):
        strangers = [ranks.dial(0) for _ in range(20)]
        for stranger in strangers[:-6]:
            assert is_closed(stranger)
        ranks.builder(1, connection_ids).run()
    check_all(ranks.builders, connection_ids)
    for stranger in strangers:
        stranger.close()


def test_silent_and_slow_strangers_have_a_deadline(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh_builder, "HANDSHAKE_TIMEOUT", 0.1)
    connection_ids = [ConnectionId(1, 0, 1)]
    with running(ranks.builder(0, connection_ids)), ranks.dial(0) as silent, ranks.dial(0) as slow:
        slow.sendall(b"x" * (HELLO_BYTES - 1))
        assert is_closed(silent)
        assert is_closed(slow)
        ranks.builder(1, connection_ids).run()
    check_all(ranks.builders, connection_ids)


def test_a_rank_that_trickles(ranks: Ranks) -> None:
    connection_id = ConnectionId(1, 0, 1)
    builder = ranks.builder(0, [connection_id])
    with running(builder), ranks.dial(0) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        hello, proof, _ = answer_challenge(KEY, connection_id, read_exactly(connection, CHALLENGE_BYTES))
        for position in range(HELLO_BYTES):
            connection.sendall(hello[position : position + 1])
        assert read_exactly(connection, PROOF_BYTES) == proof
        connection.sendall(b"of the engine")
    assert builder.done[connection_id][0].recv(100) == b"of the engine"


@pytest.mark.parametrize("wrong", ["key", "rank", "number"])
def test_a_connection_that_is_not_of_the_mesh(wrong: str, ranks: Ranks) -> None:
    """Without the key, or with it but for a connection that no rank awaits: it is closed, and disturbs no rank."""
    connection_ids = [ConnectionId(1, 0, 1)]
    bad = {"key": connection_ids[0], "rank": ConnectionId(1, 0, 2), "number": ConnectionId(1, 0, 1, 7)}[wrong]
    with running(ranks.builder(0, connection_ids)):
        connection, _, _ = call(ranks, bad, KEY.derive(b"other") if wrong == "key" else KEY)
        with connection:
            assert connection.recv(1) == b""
        ranks.builder(1, connection_ids).run()
    check_all(ranks.builders, connection_ids)


def test_a_replayed_hello(ranks: Ranks) -> None:
    connection_ids = [ConnectionId(1, 0, 1), ConnectionId(1, 0, 2)]
    with running(ranks.builder(0, connection_ids)):
        with ranks.dial(0) as first, ranks.dial(0) as second:
            hello, _, _ = answer_challenge(KEY, connection_ids[0], read_exactly(first, CHALLENGE_BYTES))
            first.sendall(hello)
            read_exactly(first, PROOF_BYTES)
            read_exactly(second, CHALLENGE_BYTES)
            second.sendall(hello)
            assert is_closed(second)
        ranks.builder(1, connection_ids).run()
        ranks.builder(2, connection_ids).run()
    check_all(ranks.builders, connection_ids)


def test_a_rank_that_comes_again_replaces_its_connection(ranks: Ranks) -> None:
    connection_ids = [ConnectionId(1, 0, 1), ConnectionId(1, 0, 2)]
    with running(ranks.builder(0, connection_ids)):
        lost, _, _ = call(ranks, connection_ids[0])
        read_exactly(lost, PROOF_BYTES)
        ranks.builder(1, connection_ids).run()
        assert is_closed(lost)
        lost.close()
        ranks.builder(2, connection_ids).run()
    check_all(ranks.builders, connection_ids)


def test_nobody_listens(ranks: Ranks) -> None:
    ranks.listeners[0].close()
    builder = ranks.builder(1, [ConnectionId(1, 0, 1)], timeout=60)
    started = time.monotonic()
    builder.run()
    assert time.monotonic() - started < 5  # long before the time is over
    assert builder.problems == {ConnectionId(1, 0, 1): f"127.0.0.1 port {ranks.places[0][1]}: Connection refused"}


def test_a_rank_that_listens_late_enough_to_be_refused_first(ranks: Ranks) -> None:
    ranks.listeners[0].close()
    tried = threading.Event()
    connection_ids = [ConnectionId(1, 0, 1)]
    late = ranks.builder(1, connection_ids)
    real = late._fail

    def fail(*arguments: Any, **options: Any) -> None:  # noqa: ANN401
        real(*arguments, **options)
        tried.set()

    late._fail = fail  # type: ignore[method-assign]
    with running(late):
        assert tried.wait(10)
        ranks.listeners[0] = socket.create_server(("127.0.0.1", ranks.places[0][1]))
        early = ranks.builder(0, connection_ids)
        early.run()
    check_all([early, late], connection_ids)


def test_what_listens_is_something_else(ranks: Ranks) -> None:
    builder = ranks.builder(1, [ConnectionId(1, 0, 1)], timeout=60)
    ssh = b"SSH-2.0-OpenSSH_9.2p1 Debian-2+deb12u3\r\n".ljust(CHALLENGE_BYTES)
    with running(builder):
        for _ in range(mesh_builder._TRIES_IF_REFUSED):
            accepted, _ = ranks.listeners[0].accept()
            with accepted:
                accepted.sendall(ssh)
                assert is_closed(accepted)
    assert "what listens there is no rank" in builder.problems[ConnectionId(1, 0, 1)]


def test_what_listens_does_not_have_the_key(ranks: Ranks) -> None:
    connection_id = ConnectionId(1, 0, 1)
    impostor = ranks.builder(0, [connection_id], timeout=2, key=KEY.derive(b"other"))
    builder = ranks.builder(1, [connection_id], timeout=2)
    with running(impostor):
        builder.run()
    assert "it hung up before it had proven" in builder.problems[connection_id]
    assert impostor.problems == {connection_id: "it did not connect within 2 s"}


@pytest.mark.parametrize("answers", [False, True])
def test_a_rank_that_is_stopped(answers: bool, ranks: Ranks) -> None:
    """The kernel connects for it; with a full backlog not even that."""
    queued = []
    if not answers:
        ranks.listeners[0].listen(0)
        for _ in range(4):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(ranks.places[0])
            queued.append(filler)
    builder = ranks.builder(1, [ConnectionId(1, 0, 1)], timeout=0.3)
    builder.run()
    why = "it accepts connections, but does not answer as a rank does" if answers else "no answer for 0.3 s"
    assert builder.problems[ConnectionId(1, 0, 1)].endswith(why)
    for filler in queued:
        filler.close()


def test_nothing_stays_open(ranks: Ranks, run_ranks: RunRanks) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with running(ranks.builder(0, [ConnectionId(1, 0, 1)], timeout=0.2)), ranks.dial(0):
        pass
    build_all(ranks, run_ranks)
    for builder in ranks.builders:
        builder.close()
    assert set(os.listdir("/proc/self/fd")) <= before
