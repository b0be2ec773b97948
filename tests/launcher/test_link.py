"""The launcher's end of connections to agents that do not do what they should."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import pytest

from horovodlike.launcher.supervisor import connection
from horovodlike.launcher.supervisor.connection import AgentConnection, start_remote_agent

SLACK_S = 15.0  # what a busy machine may add
SPEAK = "printf '\\0horovodlike agent\\0'"


@pytest.fixture
def start() -> Iterator[Callable[[str], AgentConnection]]:
    """`start(script)` starts a shell in the place of ssh; it has said what it says first."""
    with contextlib.ExitStack() as stack:

        def launch(script: str) -> AgentConnection:
            started = start_remote_agent(["sh", "-c", script], "host")
            stack.callback(started.close)
            stack.callback(started.kill)
            deadline = time.monotonic() + SLACK_S
            while SPEAK in script and started.receive() == [] and not started._heard:
                assert time.monotonic() < deadline
            return started

        yield launch


def close_all(links: list[AgentConnection]) -> float:
    """Cuts and closes; returns how long it has taken."""
    begun = time.monotonic()
    for each in links:
        each.cut()
    for each in links:
        each.close()
    return time.monotonic() - begun


def test_hosts_that_do_not_end_have_one_time_for_all(
    start: Callable[[str], AgentConnection], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_CLOSE_S", 3.0)
    seconds = close_all([start(f"{SPEAK}; exec sleep 1000") for _ in range(10)])
    assert 3 <= seconds < 3 + SLACK_S


def test_hosts_that_have_never_answered_are_not_waited_for(start: Callable[[str], AgentConnection]) -> None:
    assert close_all([start("exec sleep 1000") for _ in range(3)]) < connection._CLOSE_S - 1


def test_ssh_that_stays_after_its_agent_is_not_waited_for_long(start: Callable[[str], AgentConnection]) -> None:
    lingering = start(f"{SPEAK}; exec sleep 1000 >&-")
    deadline = time.monotonic() + SLACK_S
    while lingering.receive() is not None:
        assert time.monotonic() < deadline
    assert close_all([lingering]) < connection._CLOSE_S - 1
