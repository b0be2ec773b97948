"""The connections between launchers, end by end."""

from __future__ import annotations

import contextlib
import secrets
import select
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from horovodlike._net import connect, pending, secure_channel
from horovodlike._net.connect import dial
from horovodlike._net.secure_channel import (
    CHALLENGE_BYTES,
    HANDSHAKE_TIMEOUT,
    HELLO_BYTES,
    Identity,
    JobKey,
    accept_hello,
    answer_challenge,
    job_digest,
    make_challenge,
)
from horovodlike.launcher.agent.protocol import FrameKind, encode, encode_seconds
from horovodlike.launcher.errors import HostsError
from horovodlike.launcher.supervisor import node_connection
from horovodlike.launcher.supervisor.node_connection import NodeListener, connect_node

SLACK_S = 15.0  # what a busy machine may add
KEY = JobKey(bytes(32))


class Clock:
    """The clock of a machine that has been up for years; it can be set forward."""

    def __init__(self) -> None:
        self.ahead = 1e8

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in (connect, node_connection, pending, secure_channel):
        monkeypatch.setattr(module, "time", made)
    return made


@pytest.fixture
def where() -> str:
    """An address of this machine that no other test uses."""
    return "127." + ".".join(str(1 + secrets.randbelow(254)) for _ in range(3))


@pytest.fixture
def silent(where: str) -> Iterator[int]:
    """A port without an answer, not even a refusal."""
    with contextlib.ExitStack() as stack:
        port: int = stack.enter_context(socket.create_server((where, 0), backlog=0)).getsockname()[1]
        for _ in range(4):  # a full backlog
            filler = stack.enter_context(contextlib.closing(socket.socket()))
            filler.setblocking(False)
            filler.connect_ex((where, port))
        yield port


def test_node_0_that_does_not_answer_is_given_up_in_time(clock: Clock, where: str, silent: int) -> None:
    started = time.monotonic()
    with pytest.raises(HostsError, match=r"cannot be reached \(timed out\): does hvdrun run there"):
        connect_node(KEY, 1, 2, where, silent, clock.monotonic() + 0.5)
    assert time.monotonic() - started < 0.5 + SLACK_S


def test_patience_has_no_limit() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        contextlib.closing(dial(*server.getsockname(), 1e9)) as calls,
    ):
        next(calls).close()


PORT = 29400


class Node:
    """A launcher of another node that goes on step by step."""

    def __init__(self, connected: socket.socket, identity: Identity) -> None:
        self.socket = connected
        self._identity = identity

    def say_hello(self) -> None:
        challenge = self.socket.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)
        hello, self._sealer, _ = answer_challenge(KEY, self._identity, challenge)
        self.socket.sendall(hello)

    def join(self) -> None:
        self.socket.sendall(self._sealer.seal(encode(FrameKind.JOIN, 0, b"{}")))


class Lobby:
    """Node 0 of four, which waits for the others, and they."""

    def __init__(self, listener: NodeListener, clock: Clock, where: str, stack: contextlib.ExitStack) -> None:
        self._listener, self._clock, self._where, self._stack = listener, clock, where, stack

    def come(self, rank: int, job: bytes = node_connection._JOB) -> Node:
        """Connects a node; returns when it has its challenge."""
        connected = self._stack.enter_context(socket.create_connection((self._where, PORT), SLACK_S))
        node = Node(connected, Identity(rank, 4, job))
        self.attend(node)
        return node

    def attend(self, node: Node) -> None:
        """Has node 0 attend to what has come until there is something for a node to read; no node joins meanwhile."""
        deadline = time.monotonic() + SLACK_S
        while not select.select([node.socket], [], [], 0)[0]:
            assert self.accept(0.01) is None
            assert time.monotonic() < deadline

    def is_dropped(self, node: Node) -> bool:
        """Whether node 0 hangs up on a node."""
        with contextlib.suppress(ConnectionResetError):
            self.attend(node)
            while node.socket.recv(1024):
                self.attend(node)
        return True

    def accept(self, seconds: float = SLACK_S) -> int | None:
        """The number of the next node that joins."""
        accepted = self._listener.accept(self._clock.monotonic() + seconds)
        if accepted is None:
            return None
        link, count, join = accepted
        assert (count, join) == (4, (FrameKind.JOIN, 0, b"{}"))
        link.hang_up()
        return link.node


@pytest.fixture
def lobby(clock: Clock, where: str) -> Iterator[Lobby]:
    with NodeListener(KEY, 4, [where], PORT) as listener, contextlib.ExitStack() as stack:
        yield Lobby(listener, clock, where, stack)


def test_nobody_waits_for_a_node_that_is_slow(lobby: Lobby) -> None:
    slow, quick = lobby.come(2), lobby.come(1)
    for node in (slow, quick):
        node.say_hello()
        lobby.attend(node)
    quick.join()
    assert lobby.accept() == 1
    slow.join()
    assert lobby.accept() == 2


def test_what_was_said_in_time_counts_though_nobody_listened(lobby: Lobby, clock: Clock) -> None:
    node = lobby.come(3)
    node.say_hello()
    node.join()
    clock.ahead += 2 * HANDSHAKE_TIMEOUT
    assert lobby.accept() == 3


def test_a_node_that_goes_or_says_nothing_is_forgotten(lobby: Lobby, clock: Clock) -> None:
    gone, mute = lobby.come(1), lobby.come(2)
    for node in (gone, mute):
        node.say_hello()
        lobby.attend(node)
    gone.socket.shutdown(socket.SHUT_WR)
    assert lobby.is_dropped(gone)
    clock.ahead += node_connection._JOIN_S
    assert lobby.is_dropped(mute)
    again = lobby.come(1)
    again.say_hello()
    again.join()
    assert lobby.accept() == 1


def test_strangers_do_not_displace_a_node(lobby: Lobby) -> None:
    node = lobby.come(1)
    node.say_hello()
    lobby.attend(node)
    strangers = [lobby.come(2) for _ in range(node_connection._MOST_STRANGERS + 8)]
    assert lobby.is_dropped(strangers[0])
    node.join()
    assert lobby.accept() == 1


def test_a_node_tries_again_when_its_hello_is_not_answered(where: str) -> None:
    with socket.create_server((where, PORT)) as server, ThreadPoolExecutor() as pool:
        node = pool.submit(connect_node, KEY, 1, 2, where, PORT, time.monotonic() + SLACK_S)
        for answers in (False, True):
            connected, _ = server.accept()
            with connected:
                challenge = make_challenge()
                connected.sendall(challenge)
                hello = connected.recv(HELLO_BYTES, socket.MSG_WAITALL)
                if answers:
                    _, sealer, _ = accept_hello(KEY, challenge, hello)
                    connected.sendall(sealer.seal(encode(FrameKind.ALIVE, 0, encode_seconds(1.0))))
                    node.result(SLACK_S).hang_up()


@pytest.mark.parametrize(
    ("rank", "job"),
    [(1, job_digest("a job of ranks")), (0, node_connection._JOB), (4, node_connection._JOB)],
    ids=["a rank", "node 0", "beyond"],
)
def test_who_holds_the_key_but_is_no_other_node_is_sent_away(lobby: Lobby, rank: int, job: bytes) -> None:
    other = lobby.come(rank, job)
    other.say_hello()
    other.join()
    assert lobby.is_dropped(other)
