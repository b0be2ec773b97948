"""Clients of the rendezvous server that are slow, silent, hostile or broken, before and after authentication."""

import socket
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from horovodlike._bootstrap import rendezvous_server
from horovodlike._bootstrap.bootstrap import Rendezvous, RendezvousServer
from horovodlike._net.secure_channel import (
    CHALLENGE_BYTES,
    FRAME_LIMIT,
    HELLO_BYTES,
    Identity,
    JobKey,
    answer_challenge,
    job_digest,
)
from horovodlike.errors import RendezvousError

Serve = Callable[..., RendezvousServer]
Connect = Callable[..., Rendezvous]
RunRanks = Callable[..., list[Any]]
GatherAll = Callable[[RendezvousServer, int], None]


def raw(server: RendezvousServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=10)


def read_exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = connection.recv(count - len(data))
        assert piece, f"closed after {len(data)} bytes"
        data += piece
    return data


def is_closed(connection: socket.socket) -> bool:
    """Waits until the other side has closed the connection."""
    try:
        while connection.recv(4096):
            pass
    except ConnectionError:
        pass
    return True


def authenticated(server: RendezvousServer, key: bytes, rank: int, size: int) -> tuple[socket.socket, Any]:
    connection = raw(server)
    challenge = read_exactly(connection, CHALLENGE_BYTES)
    hello, sealer, opener = answer_challenge(JobKey(key), Identity(rank, size, job_digest("test job")), challenge)
    connection.sendall(hello)
    while not opener.feed(connection.recv(4096)):
        pass
    return connection, sealer


def test_strangers_disturb_nobody(serve: Serve, gather_all: GatherAll) -> None:
    server = serve(4)
    strangers = [raw(server) for _ in range(40)]
    for number, stranger in enumerate(strangers):
        greeting = [b"", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", bytes(range(256)) * 4, b"\xff" * 50][number % 4]
        stranger.sendall(greeting)
    gather_all(server, 4)
    for stranger in strangers:
        stranger.close()


def test_more_strangers_than_there_is_room_for(
    serve: Serve, gather_all: GatherAll, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous_server, "HANDSHAKE_TIMEOUT", 60.0)  # so that it is not the deadline that ends them
    server = serve(2)
    strangers = [raw(server) for _ in range(300)]
    gather_all(server, 2)
    assert is_closed(strangers[0])
    for stranger in strangers:
        stranger.close()


def test_a_client_that_trickles(serve: Serve, gather_all: GatherAll, key: bytes) -> None:
    server = serve(2)
    with raw(server) as slow:
        slow.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        challenge = read_exactly(slow, CHALLENGE_BYTES)
        hello, _, opener = answer_challenge(JobKey(key), Identity(1, 2, job_digest("test job")), challenge)
        for position in range(HELLO_BYTES - 1):
            slow.sendall(hello[position : position + 1])
            if position % 40 == 0:
                gather_all(server, 2)
        slow.sendall(hello[-1:])
        assert b"welcome" in opener.feed(slow.recv(4096))[0]


def test_a_member_that_trickles(serve: Serve, connect: Connect, key: bytes) -> None:
    server = serve(2)
    slow, sealer = authenticated(server, key, 1, 2)
    slow.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    question = sealer.seal(b'{"do":"arrive","topic":"join","payload":{"generation":0,"payload":1},"timeout":30}')
    rank_0 = connect(server, 0, 2, start_timeout=30)
    with slow, ThreadPoolExecutor(1) as executor:
        begun = executor.submit(rank_0.begin, 0)
        for position in range(len(question)):
            assert not begun.done()
            slow.sendall(question[position : position + 1])
            with raw(server) as other:
                read_exactly(other, CHALLENGE_BYTES)  # the server has time for others
        assert begun.result(30) == [0, 1]


def test_strangers_have_a_deadline(serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_server, "HANDSHAKE_TIMEOUT", 0.1)
    server = serve(2)
    member = connect(server, 0, 2)
    with raw(server) as silent, raw(server) as slow:
        slow.sendall(b"x" * 10)
        assert is_closed(silent)
        assert is_closed(slow)
    connect(server, 1, 2).close()
    member.close()


def test_a_stranger_cannot_make_the_server_keep_anything(serve: Serve, gather_all: GatherAll) -> None:
    server = serve(1)
    flood = bytes(1 << 16)
    tracemalloc.start()
    try:
        with raw(server) as stranger, pytest.raises(ConnectionError):
            for _ in range(1024):
                stranger.sendall(flood)
        gather_all(server, 1)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize("length", [FRAME_LIMIT + 1, 0xFFFFFFFF])
def test_an_oversized_frame_of_a_member(length: int, serve: Serve, connect: Connect, key: bytes) -> None:
    server = serve(2)
    rank_0 = connect(server, 0, 2)
    connection, _ = authenticated(server, key, 1, 2)
    tracemalloc.start()
    try:
        with connection:
            connection.sendall(length.to_bytes(4, "big"))
            assert is_closed(connection)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20
    with pytest.raises(RendezvousError, match=f"rank 1 was closed: a frame of {length} bytes is over the limit"):
        rank_0.begin()


def test_replayed_and_changed_frames_of_a_member(serve: Serve, connect: Connect, key: bytes) -> None:
    for damage in ("replay", "change"):
        server = serve(2)
        rank_0 = connect(server, 0, 2)
        connection, sealer = authenticated(server, key, 1, 2)
        with connection:
            frame = sealer.seal(b'{"do":"arrive","topic":"join","payload":0,"timeout":9}')
            if damage == "change":
                frame = frame[:20] + bytes([frame[20] ^ 1]) + frame[21:]
            connection.sendall(frame + frame if damage == "replay" else frame)
            assert is_closed(connection)
        with pytest.raises(RendezvousError, match="rank 1 was closed: the MAC of a frame is wrong"):
            rank_0.begin()


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"not JSON",
        b"[" * 100000,
        b"[]",
        b"{}",
        b'{"do":"arrive"}',
        b'{"do":"arrive","topic":"join","payload":0,"timeout":NaN}',
        b'{"do":"arrive","topic":"join","payload":0,"timeout":-1}',
        b"\xff\xfe",
    ],
)
def test_messages_that_make_no_sense(message: bytes, serve: Serve, connect: Connect, key: bytes) -> None:
    server = serve(2)
    rank_0 = connect(server, 0, 2)
    connection, sealer = authenticated(server, key, 1, 2)
    with connection:
        connection.sendall(sealer.seal(message))
        assert is_closed(connection)
    with pytest.raises(RendezvousError, match="rank 1 was closed: it sent a message that makes no sense"):
        rank_0.begin()


def test_a_truncated_frame(serve: Serve, connect: Connect, key: bytes) -> None:
    server = serve(2)
    rank_0 = connect(server, 0, 2)
    connection, sealer = authenticated(server, key, 1, 2)
    connection.sendall(sealer.seal(b"{}")[:-1])
    connection.close()
    with pytest.raises(RendezvousError, match="rank 1 is gone"):
        rank_0.begin()


def test_a_member_that_does_not_read_its_answers(serve: Serve, connect: Connect, key: bytes) -> None:
    server = serve(2)
    connection, sealer = authenticated(server, key, 1, 2)
    connection.sendall(sealer.seal(b'{"do":"abort","group":"5","reason":"%s"}' % (b"x" * 500_000)))
    again = b'{"do":"arrive","topic":"5/x","payload":0,"timeout":9}'
    with connection, pytest.raises(ConnectionError):
        while True:
            connection.sendall(sealer.seal(again))
    with pytest.raises(RendezvousError, match="rank 1 was closed: it does not read its answers"):
        connect(server, 0, 2).begin()
