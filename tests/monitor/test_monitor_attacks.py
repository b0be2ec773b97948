"""Readers and reporters of the monitor that attack it, or are slow."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from monitors import KEY, LIMIT_S, Reporter, fetch, port_of, report, running, state_of, token_of, wait_for

from horovodlike._net.secure_channel import AuthenticationError, JobKey
from horovodlike.monitor import web
from horovodlike.monitor.server import Monitor


@pytest.fixture(scope="module")
def monitor() -> Iterator[Monitor]:
    with running(names=["train.example.org"]) as started:
        yield started


@pytest.fixture
def url(monitor: Monitor) -> str:
    assert monitor.url is not None
    return monitor.url


def ask(url: str, text: bytes) -> bytes:
    """Send bytes to the server; return all that it answers."""
    with socket.create_connection(("127.0.0.1", port_of(url)), timeout=LIMIT_S) as connection:
        with contextlib.suppress(OSError):
            connection.sendall(text)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while data := connection.recv(65536):
                answer += data
        return answer


@pytest.mark.parametrize("path", ["/", "/metrics", "/api/state"])
def test_pages_need_the_token(url: str, path: str) -> None:
    assert fetch(url, path)[0] == 200
    assert fetch(url, path, token="", Authorization=f"Bearer {token_of(url)}")[0] == 200
    for token in ("", "wrong", token_of(url)[:-1], token_of(url) + "x", "%00", "%C3%A4"):
        status, headers, body = fetch(url, path, token=token)
        assert (status, headers["WWW-Authenticate"]) == (401, "Bearer")
        assert token_of(url).encode() not in body
    assert fetch(url, path, Authorization="Bearer wrong")[0] == 401
    assert fetch(url, path, token="", Authorization="Basic eDp5")[0] == 401


def test_a_monitor_at_all_addresses_names_this_host() -> None:
    """Neither a browser nor Prometheus elsewhere can call 0.0.0.0."""
    with running(host="0.0.0.0") as everywhere:
        assert everywhere.url is not None
        assert urlsplit(everywhere.url).netloc == f"{socket.gethostname()}:{port_of(everywhere.url)}"
        for name, status in ((socket.gethostname(), 200), ("attacker.example", 403)):
            assert fetch(everywhere.url, "/api/state", Host=name)[0] == status


def test_health_needs_no_token(url: str) -> None:
    assert fetch(url, "/health", token="")[::2] == (200, b"ok\n")


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *[(good, 200) for good in ("127.0.0.1", "127.0.0.1:80", "localhost:1", "[::1]:9", "[::1]", "::1", "10.1.2.3")],
        *[(good, 200) for good in ("train.example.org", "TRAIN.example.org.:80")],
        *[(bad, 403) for bad in ("evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "", "[::1", "1")],
        *[(bad, 403) for bad in ("[::1]x", "train.example.org@evil", "127.0.0.1:80:80.evil")],
    ],
)
def test_the_host_must_be_one_of_its_own(url: str, host: str, status: int) -> None:
    assert fetch(url, "/api/state", Host=host)[0] == status
    assert fetch(url, "/health", Host=host)[0] == status


def test_no_other_origin_can_read(url: str) -> None:
    for path in ("/", "/metrics", "/api/state", "/health"):
        status, headers, _ = fetch(url, path, Origin="http://evil.example")
        assert status == 200
        assert not any(name.lower().startswith("access-control") for name in headers)
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cache-Control"] == "no-store"
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert "unsafe" not in headers["Content-Security-Policy"]
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT"):
        status, headers, _ = fetch(url, "/", method=method, Origin="http://evil.example")
        assert (status, headers["Allow"]) == (405, "GET, HEAD")
    status, _, body = fetch(url, "/", method="HEAD")
    assert (status, body) == (200, b"")


@pytest.mark.parametrize("path", ["/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd", "/page.html"])
def test_there_are_no_files(url: str, path: str) -> None:
    status, _, body = fetch(url, path)
    assert (status, b"root:" in body) == (404, False)


@pytest.mark.parametrize(
    "text",
    [
        *(b"\r\n\r\n", b"GET /\r\n\r\n", b"GET / HTTP/1.1\r\nHost localhost\r\n\r\n", b"\x16\x03\x01\x00\r\n\r\n"),
        *(b"GET http://x/ HTTP/1.1\r\nHost: x\r\n\r\n", b"GET / HTTP/2\r\nHost: localhost\r\n\r\n"),
        b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n evil\r\n\r\n",
        b"GET /?" + b"a=1&" * 50 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
)
def test_nonsense(url: str, text: bytes) -> None:
    assert ask(url, text).startswith(b"HTTP/1.1 400 ")


def test_a_header_of_a_megabyte(url: str) -> None:
    answer = ask(url, b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * (1 << 20) + b"\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert state_of(url)["job"] == "job"


def test_the_output_of_a_rank(monitor: Monitor, url: str) -> None:
    monitor.board.take_output(3, b"<script>\xff", is_error=False)
    status, headers, body = fetch(url, "/api/output?of=3")
    assert (status, headers["Content-Type"], body) == (200, "text/plain; charset=utf-8", b"<script>\xff")
    assert fetch(url, "/api/output?of=2")[::2] == (200, b"")
    assert fetch(url, "/api/output?of=3", token="wrong")[0] == 401
    for bad in ("", "?of=", "?of=x", "?of=" + "9" * 5000):
        assert fetch(url, "/api/output" + bad)[0] == 400


def test_slow_readers_and_idle_ones_delay_nobody(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "REQUEST_S", 10 * LIMIT_S)  # no reader waits for the end of another one
    with contextlib.ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(socket.create_connection(("127.0.0.1", port_of(url))))
        for _ in range(20):
            slow = stack.enter_context(socket.create_connection(("127.0.0.1", port_of(url))))
            slow.sendall(b"GET /metrics?token=x HTTP/1.1\r\nHost: loc")
        assert state_of(url)["job"] == "job"


def test_idle_readers_are_told_to_go(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "REQUEST_S", 0.2)
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(socket.create_connection(("127.0.0.1", port_of(url)))) for _ in range(3)]
        for each in idle:
            each.settimeout(LIMIT_S)
            assert each.recv(65536).startswith(b"HTTP/1.1 408 ")


def test_more_connections_than_allowed_close_the_oldest_idle_one(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "MOST_CONNECTIONS", 10)
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(socket.create_connection(("127.0.0.1", port_of(url)))) for _ in range(12)]
        assert state_of(url)["job"] == "job"
        idle[0].settimeout(LIMIT_S)
        with contextlib.suppress(ConnectionError):
            assert idle[0].recv(1) == b""


def test_reports_need_the_key(monitor: Monitor, url: str) -> None:
    for _ in range(3):
        with pytest.raises((AuthenticationError, ConnectionError)):
            Reporter(monitor, 0, 2, JobKey(bytes(32)))
    with socket.create_connection(("127.0.0.1", monitor.port), timeout=LIMIT_S) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n\r\n" * 20)
        with contextlib.suppress(ConnectionError):
            while connection.recv(65536):
                pass
    assert state_of(url)["ranks"] == []


@pytest.mark.parametrize(
    "message",
    [
        b"\x80\x04}.",
        b"[" * 100000,
        json.dumps({"sent": 1.0, "idle": 0.0}).encode(),
        json.dumps({**report(1, 2, 1.0), "sent": "x"}).encode(),
        json.dumps(report(0, 2, 1.0)).encode(),  # of another rank
        json.dumps(report(1, 1, 1.0)).encode(),
    ],
)
def test_a_rank_that_reports_nonsense_is_disconnected(message: bytes) -> None:
    with running() as own:
        rank = Reporter(own, 1, 2)
        rank.send(message)
        rank.await_end()
        assert own.url is not None
        assert all(not each["counters"] for each in state_of(own.url)["ranks"])
        rank.channel.close()


def test_reports_arrive_while_readers_read(monitor: Monitor) -> None:
    with running() as own:
        assert own.url is not None
        url, stop = own.url, threading.Event()

        def read() -> None:
            while not stop.is_set():
                fetch(url, "/metrics")

        thread = threading.Thread(target=read)
        thread.start()
        ranks = [Reporter(own, rank, 2) for rank in range(2)]
        for number in range(20):
            for rank, each in enumerate(ranks):
                each.send(report(rank, 2, time.time(), counters={"requests": number}))
        wait_for(url, lambda state: [each["counters"].get("requests") for each in state["ranks"]] == [19, 19])
        stop.set()
        thread.join()
        for each in ranks:
            each.channel.close()
        assert KEY.hex() not in str(state_of(url))
