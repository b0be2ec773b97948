"""How long a host may be silent: measured while the launcher itself runs."""

from __future__ import annotations

import selectors
from types import SimpleNamespace

import pytest

from horovodlike.launcher.agent.protocol import FrameKind, FrameReader, encode
from horovodlike.launcher.supervisor import connection
from horovodlike.launcher.supervisor.connection import AgentConnections, FrameConnection

TIMEOUT = 30.0  # a host is given up after two thirds of it, and gets a heartbeat five times in that time


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(connection, "time", SimpleNamespace(monotonic=lambda: self.now))


class Host(FrameConnection):
    """A host that answers heartbeats if `answers` is true."""

    def __init__(self, host: str | None) -> None:
        super().__init__(host)
        self.heartbeats = 0
        self.is_killed = False
        self.answers = True
        self._received = FrameReader()

    def watch(self, *_: object) -> None:
        pass

    def kill(self) -> None:
        self.is_killed = True

    def _write(self, data: bytearray) -> int:
        self.heartbeats += [frame.kind for frame in self._received.feed(bytes(data))].count(FrameKind.ALIVE)
        return len(data)

    def _read(self) -> bytes:
        if not self.answers:
            raise BlockingIOError
        return encode(FrameKind.ALIVE, 0, b"")


class Handler:
    def __init__(self) -> None:
        self.silent: list[tuple[str | None, float]] = []

    def on_silence(self, connection: FrameConnection, seconds: float) -> None:
        self.silent.append((connection.host, seconds))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def job(clock: Clock) -> SimpleNamespace:
    hosts, handler = [Host("a"), Host("b"), Host(None)], Handler()
    connections = AgentConnections(hosts, handler, SimpleNamespace(full=False), TIMEOUT)  # type: ignore[arg-type]

    def run(seconds: float) -> None:
        """Let the launcher's loop wake at each of its deadlines, and when a host answers."""
        end = clock.now + seconds
        with selectors.DefaultSelector() as selector:
            while clock.now < end:
                connections.watch(selector, abandoned=False)
                for host in hosts:
                    host.receive()
                clock.now = min(end, connections.next_deadline())
            connections.watch(selector, abandoned=False)

    return SimpleNamespace(run=run, hosts=hosts, handler=handler)


def test_a_host_that_does_not_answer_is_given_up(job: SimpleNamespace) -> None:
    job.run(100.0)
    assert not job.handler.silent
    job.hosts[0].answers = False
    job.run(18.0)
    assert not job.handler.silent
    job.run(7.0)
    host, seconds = job.handler.silent[0]
    assert host == "a" and 20.0 < seconds <= 25.0
    assert [each.is_killed for each in job.hosts] == [True, False, False]
    assert job.hosts[2].heartbeats == 0


def test_a_launcher_that_was_stopped_blames_no_host(job: SimpleNamespace, clock: Clock) -> None:
    job.run(9.0)
    sent = job.hosts[0].heartbeats
    job.hosts[0].answers = False
    clock.now += 3600.0
    job.run(0.0)
    assert not job.handler.silent
    assert job.hosts[0].heartbeats == sent + 1
    job.run(26.0)
    host, seconds = job.handler.silent[0]
    assert host == "a" and 20.0 < seconds <= 26.0
