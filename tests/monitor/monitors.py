"""Monitors without a job, and ranks that only report."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

from horovodlike._net.secure_channel import ClientChannel, Identity, JobKey, job_digest
from horovodlike.monitor.board import Board
from horovodlike.monitor.server import Monitor

KEY = JobKey(bytes(range(32)))
LIMIT_S = 20.0


@contextlib.contextmanager
def running(board: Board | None = None, **options: Any) -> Iterator[Monitor]:
    monitor = Monitor(board or Board("job", "1.0"), KEY, port=0, **options)
    monitor.start(["127.0.0.1"])
    try:
        yield monitor
    finally:
        monitor.close()


def port_of(url: str) -> int:
    port = urlsplit(url).port
    assert port is not None
    return port


def token_of(url: str) -> str:
    return parse_qs(urlsplit(url).query)["token"][0]


def fetch(
    url: str, path: str = "/", *, token: str | None = None, method: str = "GET", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    """Send a request with the token in the URL, or with another one; an empty one is left out."""
    given = token_of(url) if token is None else token
    connection = http.client.HTTPConnection("127.0.0.1", port_of(url), timeout=LIMIT_S)
    with contextlib.closing(connection):
        query = f"{'&' if '?' in path else '?'}token={given}" if given else ""
        connection.request(method, path + query, headers=headers)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()


def state_of(url: str, path: str = "/api/state") -> dict[str, Any]:
    status, _, body = fetch(url, path)
    assert status == 200, body
    state: dict[str, Any] = json.loads(body)
    return state


def wait_for(url: str, accept: Callable[[dict[str, Any]], Any], seconds: float = LIMIT_S) -> dict[str, Any]:
    """Poll the state until it is accepted; return it."""
    deadline = time.monotonic() + seconds
    while not accept(state := state_of(url)):
        assert time.monotonic() < deadline, state
        time.sleep(0.05)
    return state


def about(rank: int, size: int, **more: Any) -> dict[str, Any]:
    return {
        **{"rank": rank, "size": size, "generation": 1, "pid": 100 + rank, "local_rank": rank, "worker": rank},
        **{"host": "node-1", "boot": "1", **more},
    }


def report(rank: int, size: int, sent: float, **more: Any) -> dict[str, Any]:
    counters = {"bytes": 1000, "requests": 10, "batches": 5, "waiting_seconds": 0.5, "communicating_seconds": 0.1}
    return {"rank": about(rank, size), "sent": sent, "idle": 0.0, "counters": counters, **more}


class Reporter:
    """The connection of a rank to the collector."""

    def __init__(self, monitor: Monitor, rank: int, size: int, key: JobKey = KEY) -> None:
        connected = socket.create_connection(("127.0.0.1", monitor.port))
        deadline = time.monotonic() + LIMIT_S
        self.channel = ClientChannel(connected, key, Identity(rank, size, job_digest("monitor")), deadline)
        try:
            self.channel.receive(deadline)
        except BaseException:
            self.channel.close()
            raise

    def send(self, message: Any) -> None:
        text = message if isinstance(message, bytes) else json.dumps(message).encode()
        self.channel.send(text, time.monotonic() + LIMIT_S)

    def await_end(self) -> None:
        """Wait until the server closes the connection."""
        with contextlib.suppress(ConnectionError):
            self.channel.receive(time.monotonic() + LIMIT_S)
