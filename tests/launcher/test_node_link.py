"""The connections between launchers, end by end."""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from collections.abc import Iterator

import pytest

from horovodlike import _dial
from horovodlike._channel import JobKey
from horovodlike._dial import dial
from horovodlike.launcher import node_link
from horovodlike.launcher.errors import HostsError
from horovodlike.launcher.node_link import connect_node

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
    monkeypatch.setattr(_dial, "time", made)
    monkeypatch.setattr(node_link, "time", made)
    return made


@pytest.fixture
def where() -> str:
    """An address of this machine that no other test uses."""
    return "127." + ".".join(str(1 + secrets.randbelow(254)) for _ in range(3))


@pytest.fixture
def silent(where: str) -> Iterator[int]:
    """A port where nobody answers, not even to refuse."""
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
