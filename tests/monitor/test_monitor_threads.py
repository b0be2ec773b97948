"""The threads of the monitor and of its reporters, when something goes wrong in them or around them."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from monitors import KEY, LIMIT_S, Reporter, about, fetch, port_of, report, running, state_of, wait_for

from horovodlike._bootstrap.environment import GENERATION, RankInfo
from horovodlike._engine import reporter
from horovodlike.launcher.elastic.driver import Driver
from horovodlike.monitor import metrics_file, server, web
from horovodlike.monitor.board import Board
from horovodlike.monitor.server import Monitor


def await_true(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def close_in_time(monitor: Monitor, seconds: float = LIMIT_S) -> None:
    closing = threading.Thread(target=monitor.close, daemon=True)
    closing.start()
    closing.join(seconds)
    assert not closing.is_alive()


class BrokenBoard(Board):
    broken = threading.Event()

    def tick(self) -> None:
        self.broken.set()
        raise OverflowError("too large")


def test_an_error_becomes_an_event_and_the_page_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_TICK_S", 0.01)
    with running(BrokenBoard()) as monitor:
        assert monitor.url is not None
        state = wait_for(monitor.url, lambda found: found["events"])
        assert "too large" in state["events"][0]["text"]
        BrokenBoard.broken.clear()
        assert BrokenBoard.broken.wait(LIMIT_S)
        assert state_of(monitor.url)["event_counts"]["warning"] == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_has_failed_does_not_end_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*given: Any, **named: Any) -> None:
        raise OSError("no server")

    monkeypatch.setattr(asyncio, "start_server", fail)
    monitor = Monitor(Board(), KEY, port=0)
    monitor.start(["127.0.0.1"])
    thread = monitor._thread
    assert thread is not None
    thread.join(LIMIT_S)
    monitor.listen_on(["127.0.0.2"])
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", monitor.port))
    close_in_time(monitor)


def test_a_report_that_nobody_has_thought_of_ends_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(message: Any) -> None:
        raise AttributeError("of None")

    monkeypatch.setattr("horovodlike.monitor.collector.read_report", fail)
    with running() as monitor:
        assert monitor.url is not None
        rank = Reporter(monitor, 0, 1)
        rank.send(report(0, 1, 1.0))
        rank.await_end()
        rank.channel.close()
        assert state_of(monitor.url)["events"] == []


@contextmanager
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A file system that answers nothing; yields an event that is set while a call waits."""
    asked, answers = threading.Event(), threading.Event()

    def replace(source: str, target: str) -> None:
        asked.set()
        answers.wait(LIMIT_S)
        os.rename(source, target)

    monkeypatch.setattr(os, "replace", replace)
    try:
        yield asked
    finally:
        answers.set()


def test_a_file_system_that_hangs_delays_neither_readers_nor_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_file, "PATIENCE_S", 0.2)
    with hanging(monkeypatch) as asked:
        monitor = Monitor(Board("job", "1.0"), KEY, port=0, metrics_file=str(tmp_path / "job.prom"))
        monitor.start(["127.0.0.1"])
        assert asked.wait(LIMIT_S)
        assert monitor.url is not None
        assert state_of(monitor.url)["job"] == "job"
        close_in_time(monitor, LIMIT_S / 2)
    assert monitor._metrics_file is not None
    monitor._metrics_file.join(LIMIT_S)


def test_a_file_with_a_name_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "job.prom"
    with running(metrics_file=str(path)) as monitor:
        assert monitor.url is not None
        rank = Reporter(monitor, 0, 1)
        rank.send({**report(0, 1, 1.0), "rank": about(0, 1, host="node\ud800")})
        wait_for(monitor.url, lambda found: found["ranks"])
        rank.channel.close()
    assert 'host="node?"' in path.read_text()


def test_a_file_that_cannot_be_written_is_an_event(tmp_path: Path) -> None:
    with running(metrics_file=str(tmp_path / "gone" / "job.prom")) as monitor:
        assert monitor.url is not None
        state = wait_for(monitor.url, lambda found: found["events"])
        assert state["events"][0]["text"].endswith("job.prom cannot be written: No such file or directory")


def test_many_readers_cost_one_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_SNAPSHOT_S", 1000.0)
    board, made = Board("job", "1.0"), []
    dumps, compress = json.dumps, gzip.compress
    monkeypatch.setattr(web.json, "dumps", lambda *given, **named: made.append(1) or dumps(*given, **named))
    monkeypatch.setattr(web.gzip, "compress", lambda *given, **named: made.append(2) or compress(*given, **named))
    board.add_event("launcher", "x" * 8000)
    with running(board) as monitor:
        assert monitor.url is not None
        for _ in range(5):
            assert fetch(monitor.url, "/api/state", **{"Accept-Encoding": "gzip"})[0] == 200
    assert made == [1, 2]


@pytest.fixture
def stuffed(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Monitor, Callable[[int], list[socket.socket]]]]:
    """A monitor whose state is longer than the buffers of sockets; a function connects readers that read nothing."""
    board = Board("job", "1.0")
    for _ in range(7):
        board.add_event("launcher", "x" * 8000)
    monitor = Monitor(board, KEY, port=0)
    with ExitStack() as stack:

        def connect(count: int) -> list[socket.socket]:
            readers = []
            for _ in range(count):
                reader = stack.enter_context(socket.socket())
                reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                reader.settimeout(LIMIT_S)
                reader.connect(("127.0.0.1", port_of(str(monitor.url))))
                token = str(monitor.url).partition("?")[2]
                reader.sendall(f"GET /api/state?{token} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
                readers.append(reader)
            return readers

        monitor.start(["127.0.0.1"])
        assert monitor._readers_socket is not None
        monitor._readers_socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        yield monitor, connect
        monitor.close()


def num_tasks(monitor: Monitor) -> int:
    """How many readers are served; some versions of Python wait in a task of its own."""
    return sum("Readers.serve" in repr(task) for task in asyncio.all_tasks(monitor._loop))


def test_readers_that_read_no_answer_are_disconnected(
    stuffed: tuple[Monitor, Callable[[int], list[socket.socket]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monitor, connect = stuffed
    monkeypatch.setattr(web, "ANSWER_S", 0.3)
    for events in (0, 50):  # the answer waits in the buffer of the connection, or is too long for that
        for _ in range(events):
            monitor.board.add_event("launcher", "x" * 8000)
        readers = connect(3)
        assert state_of(str(monitor.url))["job"] == "job"
        await_true(lambda: num_tasks(monitor) == 0)
        for reader in readers:
            got = 0
            while data := reader.recv(65536):
                got += len(data)
            assert 0 < got < 50_000


def test_readers_that_read_no_answer_count_as_connections(
    stuffed: tuple[Monitor, Callable[[int], list[socket.socket]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monitor, connect = stuffed
    monkeypatch.setattr(web, "MOST_CONNECTIONS", 4)
    monkeypatch.setattr(web, "ANSWER_S", 1000.0)
    connect(30)
    assert state_of(str(monitor.url))["job"] == "job"
    await_true(lambda: num_tasks(monitor) <= 4)


def test_a_crowd_of_new_connections_is_no_exception(
    stuffed: tuple[Monitor, Callable[[int], list[socket.socket]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monitor, _ = stuffed
    monkeypatch.setattr(web, "MOST_CONNECTIONS", 4)
    monkeypatch.setattr(web, "REQUEST_S", 1000.0)
    waits, goes = threading.Event(), threading.Event()

    def hold() -> None:
        waits.set()
        goes.wait(LIMIT_S)

    monitor._loop.call_soon_threadsafe(hold)
    assert waits.wait(LIMIT_S)
    with ExitStack() as stack:
        for _ in range(30):
            stack.enter_context(socket.create_connection(("127.0.0.1", port_of(str(monitor.url)))))
        goes.set()
        assert state_of(str(monitor.url))["job"] == "job"
        await_true(lambda: num_tasks(monitor) <= 4)


def test_nothing_is_left_at_the_end(
    stuffed: tuple[Monitor, Callable[[int], list[socket.socket]]], caplog: pytest.LogCaptureFixture
) -> None:
    monitor, connect = stuffed
    connect(10)
    idle = [socket.create_connection(("127.0.0.1", port_of(str(monitor.url)))) for _ in range(10)]
    await_true(lambda: num_tasks(monitor) == 20)
    with caplog.at_level(logging.ERROR):
        close_in_time(monitor)
    assert monitor._loop.is_closed()
    assert not asyncio.all_tasks(monitor._loop)
    assert not caplog.records
    for each in idle:
        each.close()


def test_an_address_that_this_host_lacks_does_not_end_an_elastic_job() -> None:
    said: list[str] = []
    with running() as monitor:
        workers = SimpleNamespace(listen_on=lambda addresses: None, port=7)
        driver: Any = SimpleNamespace(_monitor=monitor, _workers=workers, _connections=set(), _say=said.append)
        assert Driver._take_agent(driver, "connection", ("192.0.2.1",)) == 7  # type: ignore[arg-type]
        assert driver._connections == {"connection"}
    assert said[0].startswith("warning: the monitor cannot listen on 192.0.2.1")


class Channel:
    """The connection of a reporter, as far as it is used."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.is_closed = False

    def send(self, payload: bytes, deadline: float) -> None:
        self.sent.append(json.loads(payload))

    def close(self) -> None:
        self.is_closed = True


def make_reporter() -> reporter._Reporter:
    return reporter._Reporter(reporter.Target("127.0.0.1", 1, KEY), RankInfo(rank=1, size=2))


def test_a_report_has_the_generation_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GENERATION, "3")
    thread, channel = make_reporter(), Channel()
    monkeypatch.setenv(GENERATION, "4")
    thread._stop_event.set()
    thread._report(channel)  # type: ignore[arg-type]
    assert [(each["rank"]["rank"], each["rank"]["generation"], each["end"]) for each in channel.sent] == [(1, 3, True)]


def test_a_reporter_that_connects_after_its_end_reports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporter, "_PATIENCE_S", 0.05)
    thread, channel = make_reporter(), Channel()
    connects, goes = threading.Event(), threading.Event()

    def connect() -> Any:
        connects.set()
        goes.wait(LIMIT_S)
        return channel

    monkeypatch.setattr(thread, "_connect", connect)
    thread.start()
    assert connects.wait(LIMIT_S)
    thread.stop()
    goes.set()
    thread.join(LIMIT_S)
    assert (thread.is_alive(), channel.sent, channel.is_closed) == (False, [], True)


def test_a_reporter_that_fails_warns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    thread = make_reporter()

    def fail() -> Any:
        raise ValueError("no such port")

    monkeypatch.setattr(thread, "_connect", fail)
    thread.start()
    thread.join(LIMIT_S)
    warning = "horovodlike warning: rank 1 does not report to the monitor any more: ValueError('no such port')\n"
    assert capsys.readouterr().err == warning
