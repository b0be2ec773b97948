"""The rendezvous server and its clients over real sockets, and ranks that are missing, killed, or there twice."""

import contextlib
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from horovodlike._bootstrap.bootstrap import Rendezvous, RendezvousServer
from horovodlike._net.secure_channel import (
    CHALLENGE_BYTES,
    FRAME_LIMIT,
    AuthenticationError,
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
StartPython = Callable[..., "subprocess.Popen[str]"]

RANK_THAT_WAITS = """
    import sys
    from horovodlike._bootstrap.environment import RankInfo
    from horovodlike._bootstrap.bootstrap import Rendezvous
    port, rank, size = int(sys.stdin.readline()), int(sys.stdin.readline()), int(sys.stdin.readline())
    place = RankInfo(rank, size, rank, size, job="test job")
    rendezvous = Rendezvous("127.0.0.1", port, bytes(range(32)), place)
    rendezvous.begin()
    print("ready", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize("size", range(1, 9))
def test_all_gather(size: int, serve: Serve, gather_all: GatherAll) -> None:
    gather_all(serve(size), size)


def test_generations_on_new_connections_and_on_old_ones(serve: Serve, connect: Connect, run_ranks: RunRanks) -> None:
    server = serve(3)

    def body(rank: int) -> list[int]:
        generations = []
        for _ in range(3):
            with connect(server, rank, 3) as rendezvous:
                for _ in range(2):
                    rendezvous.begin()
                    rendezvous.barrier("x")
                    generations.append(rendezvous.generation)
        return generations

    assert run_ranks(3, body) == [[1, 2, 3, 4, 5, 6]] * 3


def test_a_server_for_one_generation(serve: Serve, connect: Connect, run_ranks: RunRanks) -> None:
    """When all ranks have connected no other process can, not even a rank that is there already."""
    server = serve(2, once=True)

    def body(rank: int) -> None:
        with connect(server, rank, 2) as rendezvous:
            rendezvous.begin()
            rendezvous.barrier("x")
            with pytest.raises(RendezvousError, match="Connection refused"):
                connect(server, rank, 2)
            rendezvous.barrier("y")

    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as stranger:
        assert len(stranger.recv(1000)) == CHALLENGE_BYTES
        assert run_ranks(2, body) == [None, None]
        assert stranger.recv(1) == b""


def test_a_generation_after_one_that_failed(serve: Serve, connect: Connect, run_ranks: RunRanks) -> None:
    server = serve(3)

    def body(rank: int) -> str:
        with connect(server, rank, 3) as rendezvous:
            rendezvous.begin()
            if rank == 1:
                rendezvous.abort("out of luck")
                error = ""
            else:
                with pytest.raises(RendezvousError) as caught:
                    rendezvous.barrier("x")
                error = str(caught.value)
        with connect(server, rank, 3) as rendezvous:
            rendezvous.begin()
            rendezvous.barrier("x")
        return error

    errors = run_ranks(3, body)
    assert errors[1] == ""
    for rank in (0, 2):
        assert "rank 1 failed: out of luck" in errors[rank]


def test_ranks_in_processes(serve: Serve, start_python: StartPython, connect: Connect) -> None:
    server = serve(3)
    processes = [start_python(RANK_THAT_WAITS) for _ in range(2)]
    for rank, process in enumerate(processes, start=1):
        assert process.stdin is not None
        process.stdin.write(f"{server.port}\n{rank}\n3\n")
        process.stdin.flush()
    connect(server, 0, 3).begin()
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"


def test_a_rank_killed_in_the_middle_is_named_at_once(
    serve: Serve, start_python: StartPython, connect: Connect
) -> None:
    server = serve(2)
    process = start_python(RANK_THAT_WAITS)
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{server.port}\n1\n2\n")
    process.stdin.flush()
    rendezvous = connect(server, 0, 2, start_timeout=30)
    rendezvous.begin()
    assert process.stdout.readline() == "ready\n"
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            rendezvous.exchange("x", 0)
        except RendezvousError as error:
            errors.append(error)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    started = time.monotonic()
    process.kill()
    waiting.join(10)
    assert time.monotonic() - started < 2
    assert "rank 1 is gone: its process has ended or was killed" in str(errors[0])


def test_missing_ranks_are_named(serve: Serve, connect: Connect, run_ranks: RunRanks) -> None:
    server = serve(4)
    idle = connect(server, 2, 4)

    def body(rank: int) -> None:
        connect(server, rank, 4, start_timeout=0.3).begin()

    for error in run_ranks(2, body):
        assert isinstance(error, RendezvousError)
        assert "after 0.3 s ranks 2, 3 of 4 had not arrived (rank 3 never connected)" in str(error)
        assert "--start-timeout" in str(error)
    idle.close()


def test_wrong_key(serve: Serve, connect: Connect, gather_all: GatherAll) -> None:
    server = serve(1)
    secret = b"\xaa\x55" * 16
    with pytest.raises(AuthenticationError) as caught:
        connect(server, 0, 1, key=secret)
    assert f"authentication failed between rank 0 and the rendezvous server at 127.0.0.1:{server.port}" in str(
        caught.value
    )
    assert "HOROVODLIKE_SECRET_KEY" in str(caught.value)
    assert secret.hex() not in str(caught.value)
    gather_all(server, 1)


def test_two_processes_claim_one_rank(serve: Serve, connect: Connect) -> None:
    server = serve(3)
    first = connect(server, 1, 3)
    with pytest.raises(RendezvousError, match="two processes claim to be rank 1 of 3"):
        connect(server, 1, 3)
    with pytest.raises(RendezvousError, match="two processes claim to be rank 1 of 3"):
        first.begin()


def test_a_rank_that_comes_late_learns_that_another_was_claimed_twice(serve: Serve, connect: Connect) -> None:
    server = serve(3)
    early, late = connect(server, 1, 3), connect(server, 0, 3)
    with pytest.raises(RendezvousError, match="two processes claim to be rank 1 of 3"):
        connect(server, 1, 3)
    for client in (early, late):
        with pytest.raises(RendezvousError, match="two processes claim to be rank 1 of 3"):
            client.begin()


def test_a_rank_that_waits_learns_that_another_claims_it(serve: Serve, connect: Connect, run_ranks: RunRanks) -> None:
    server = serve(3)
    clients = [connect(server, rank, 3, start_timeout=30) for rank in range(2)]

    def body(rank: int) -> None:
        if rank < 2:
            clients[rank].begin()
        else:
            connect(server, 1, 3)

    for error in run_ranks(3, body):
        assert "two processes claim to be rank 1 of 3" in str(error)


def test_a_rank_that_left_may_come_back_at_once(serve: Serve, connect: Connect) -> None:
    server = serve(1)
    for _ in range(20):
        connect(server, 0, 1).close()


@pytest.mark.parametrize(
    ("rank", "size", "words"), [(5, 3, "no rank 5 in a job of 3"), (1, 4, "has 4 ranks, but it has 3")]
)
def test_a_rank_that_cannot_be(rank: int, size: int, words: str, serve: Serve, connect: Connect) -> None:
    server = serve(3)
    with pytest.raises(RendezvousError, match=words):
        connect(server, rank, size)


def test_another_job_with_the_same_key(serve: Serve, connect: Connect) -> None:
    server = serve(2, job="test job")
    with pytest.raises(RendezvousError, match="another job"):
        connect(server, 1, 2, job="other job")


def test_nobody_listens(serve: Serve, connect: Connect) -> None:
    server = serve(1)
    server.close()
    with pytest.raises(RendezvousError, match=r"cannot reach .* at 127.0.0.1:\d+: Connection refused"):
        connect(server, 0, 1)


def test_the_server_goes_away(serve: Serve, connect: Connect) -> None:
    server = serve(2)
    rendezvous = connect(server, 0, 2, owner="hvdrun")
    server.close()
    with pytest.raises(RendezvousError, match="which hvdrun ran and which has ended"):
        rendezvous.begin()
    with pytest.raises(RendezvousError, match="left the rendezvous"):
        rendezvous.begin()


def test_a_server_that_goes_away_says_why(serve: Serve, connect: Connect, run_ranks: RunRanks) -> None:
    """Rank 0, which runs the server, may fail and end before the others come to learn about it."""
    server = serve(2)
    clients = [connect(server, rank, 2) for rank in range(2)]
    assert run_ranks(2, lambda rank: clients[rank].begin(rank)) == [[0, 1]] * 2
    clients[0].abort("no memory")
    clients[0].close()
    server.close()
    with pytest.raises(RendezvousError, match="rank 0 failed: no memory"):
        clients[1].barrier("x")


def test_a_rank_comes_back_before_the_server_saw_it_go(key: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's turns are taken by hand, so that the new hello is read before the end of the old connection."""
    monkeypatch.setattr(RendezvousServer, "_serve", lambda self: None)
    server = RendezvousServer(key, 2)
    server.start()
    connections: list[socket.socket] = []
    for _ in range(2):
        connection = socket.create_connection(("127.0.0.1", server.port), timeout=10)
        server._turn(10)
        challenge = connection.recv(CHALLENGE_BYTES)
        hello, _, opener = answer_challenge(JobKey(key), Identity(1, 2, job_digest("test job")), challenge)
        connection.sendall(hello)
        for old in connections:
            old.close()
        server._turn(10)
        assert b"welcome" in opener.feed(connection.recv(4096))[0]
        connections.append(connection)
    connections[1].close()
    server.close()
    for each in (server._server, server._wake, server._wakened):
        each.close()


def test_what_listens_is_something_else(serve: Serve, connect: Connect) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            accepted, _ = listener.accept()
            with accepted, contextlib.suppress(ConnectionError):
                accepted.sendall(b"SSH-2.0-OpenSSH_9.2p1 Debian-2+deb12u3\r\n")
                accepted.recv(1)

        threading.Thread(target=answer, daemon=True).start()
        server = serve(1)
        server._port = listener.getsockname()[1]
        with pytest.raises(RendezvousError, match="not a horovodlike rendezvous"):
            connect(server, 0, 1)


def test_payloads_up_to_the_limit(serve: Serve, connect: Connect, run_ranks: RunRanks) -> None:
    server = serve(2)
    text = "x" * (FRAME_LIMIT // 2 - 5000)

    def body(rank: int) -> bool:
        rendezvous = connect(server, rank, 2)
        rendezvous.begin()
        with pytest.raises(ValueError, match="over the limit"):
            rendezvous.exchange("x", text * 2)
        return bool(rendezvous.exchange("x", text) == [text, text])

    assert run_ranks(2, body) == [True, True]


def test_bad_servers(key: bytes) -> None:
    for everywhere in ("0.0.0.0", "127.0.0.1,::", ""):
        with pytest.raises(ValueError, match="addresses that are named"):
            RendezvousServer(key, 2, everywhere)
    with pytest.raises(ValueError, match="at least one rank"):
        RendezvousServer(key, 0)
    with pytest.raises(ValueError, match="32 bytes"):
        RendezvousServer(b"", 2)
    with pytest.raises(RuntimeError, match="not been started"):
        RendezvousServer(key, 2).port  # noqa: B018
    RendezvousServer(key, 2).close()


def test_close_leaves_no_thread_and_no_descriptor(key: bytes, connect: Connect) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with RendezvousServer(key, 2) as server:
        connect(server, 0, 2).close()
        with socket.create_connection(("127.0.0.1", server.port)):
            assert server._thread is not None and server._thread.is_alive()
        thread = server._thread
    server.close()
    assert not thread.is_alive()
    assert set(os.listdir("/proc/self/fd")) <= before


def test_the_key_is_not_shown(key: bytes, serve: Serve, connect: Connect) -> None:
    server = serve(1)
    rendezvous = connect(server, 0, 1)
    assert rendezvous._channel is not None
    for thing in (
        server,
        rendezvous,
        vars(server),
        vars(rendezvous),
        vars(rendezvous._channel),
        vars(rendezvous._channel._sealer),
    ):
        assert key.hex() not in repr(thing)
        assert repr(key)[2:-1] not in repr(thing)


def test_a_forked_child_does_not_keep_the_connection_open(
    serve: Serve, start_python: StartPython, connect: Connect
) -> None:
    """A rank that dies is noticed although a process that it forked lives on."""
    server = serve(2)
    process = start_python(
        RANK_THAT_WAITS.replace(
            'print("ready"',
            'import os; child = os.fork()\n    if not child: sys.stdin.readline()\n    else: print("ready"',
        )
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{server.port}\n1\n2\n")
    process.stdin.flush()
    rendezvous = connect(server, 0, 2)
    rendezvous.begin()
    assert process.stdout.readline() == "ready\n"
    process.kill()
    with pytest.raises(RendezvousError, match="rank 1 is gone"):
        rendezvous.exchange("x", 0)
