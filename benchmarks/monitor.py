"""The cost of the monitor's readers for a training step: a scrape of `/metrics` each second, and a crowd of readers.

The turns are those of the same ranks, which are watched by `hvdrun --monitor` all the time, so a ratio is of processes
that compute at the same speed: each turn with readers has one without beside it. Ranks without a monitor, which are
other processes, take turns too: what that ratio says is less exact.
"""

from __future__ import annotations

import contextlib
import http.client
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import driver, launch
from benchmarks.protocol import Message
from benchmarks.training import TrainingCase

MODEL = "resnet18"
IDLE, SLOW = 200, 20
"""Connections that send nothing, and readers that take a byte of the page each 50 milliseconds."""
UNREAD, SCRAPED, CROWDED = "unread", "scraped", "crowded"
_TIMEOUT_S = 10.0


class Watched:
    """The ranks of one group, with readers of their monitor while they measure."""

    def __init__(self, name: str, group: driver.Group, readers: Callable[[], AbstractContextManager[object]]) -> None:
        self.name = name
        self._group = group
        self._readers = readers

    def call(self, command: Message) -> list[Message]:
        """See driver.Participant."""
        with self._readers():
            return self._group.call(command)


class _TurnCase(TrainingCase):
    """The same for all readers."""

    def supports(self, peer: str) -> bool:
        """See driver.Case."""
        return True


def launcher(token: str, port: int) -> launch.Launcher:
    """Return ranks whose monitor answers at a port, with a token of 64 hexadecimal digits."""
    plain = launch.with_memory_of_hvdrun(launch.horovodlike())

    def commands(size: int, scratch: Path) -> list[launch.Command]:
        file = scratch / "token"
        file.touch(mode=0o600)
        file.write_text(token)
        (command,) = plain.commands(size, scratch)
        program, *words = command.argv
        environment = command.environment | {"HOROVODLIKE_MONITOR_TOKEN_FILE": str(file)}
        return [replace(command, argv=[program, f"--monitor={port}", *words], environment=environment)]

    return replace(plain, commands=commands)


def read(port: int, token: str, path: str = "/metrics") -> bytes:
    """Return what the monitor answers.

    Raises:
        BenchmarkError: It is not what it should be.
    """
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S)) as connection:
        connection.request("GET", path, headers={"Authorization": f"Bearer {token}"})
        answer = connection.getresponse()
        body = answer.read()
    if answer.status != 200:
        raise driver.BenchmarkError(f"the monitor answers {answer.status} to {path}: {body[:200]!r}")
    return body


@contextlib.contextmanager
def scraping(port: int, token: str) -> Iterator[None]:
    """Read the metrics each second, as Prometheus does."""
    over, failures = threading.Event(), []

    def scrape() -> None:
        try:
            while not over.wait(1.0):
                read(port, token)
        except (OSError, http.client.HTTPException, driver.BenchmarkError) as error:
            failures.append(error)

    thread = threading.Thread(target=scrape)
    read(port, token)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    if failures:
        raise driver.BenchmarkError(f"a scrape has failed: {failures[0]}")


@contextlib.contextmanager
def crowd(port: int, token: str) -> Iterator[None]:
    """Scrape among readers that are idle, and others that are slow."""
    over = threading.Event()

    def dawdle(slow: Sequence[socket.socket]) -> None:
        while not over.wait(0.05):
            for each in slow:
                with contextlib.suppress(OSError):  # the monitor has closed it: it was too slow
                    each.recv(1)

    with contextlib.ExitStack() as stack:
        opened = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), _TIMEOUT_S)) for _ in range(IDLE + SLOW)
        ]
        for each in opened[IDLE:]:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            each.sendall(f"GET /?token={token} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            each.setblocking(False)
        thread = threading.Thread(target=dawdle, args=(opened[IDLE:],))
        thread.start()
        try:
            with scraping(port, token):
                yield
        finally:
            over.set()
            thread.join()


def measure(size: int, *, rounds: int, budget: float, model: str = MODEL) -> list[dict[str, Any]]:
    """Return the rows of the results for `size` ranks."""
    token, port = secrets.token_hex(32), launch.free_port()
    unwatched = launch.with_memory_of_hvdrun(replace(launch.horovodlike(), name="unwatched"))
    with driver.started([launcher(token, port), unwatched], size) as (group, other):
        turns: list[driver.Participant] = [
            other,
            Watched(UNREAD, group, contextlib.nullcontext),
            Watched(SCRAPED, group, lambda: scraping(port, token)),
            Watched(CROWDED, group, lambda: crowd(port, token)),
        ]
        samples = driver.interleave(turns, [_TurnCase(model)], rounds, budget, fewest=5)
    return [
        {"readers": readers, "np": size, "model": model, **driver.summary(seconds), "samples": seconds}
        for (readers, _), seconds in samples.items()
    ]
