"""The cost of the monitor's readers for a training step: a scrape of `/metrics` each second, and a crowd of readers.

The ranks of one job, which `hvdrun --monitor` watches, train all the time and note when each step ends. Meanwhile
readers come and go: windows of a few seconds with them and without them, in the order ABBA. Each ratio is between the
mean step times of two adjacent windows, so that slower drift cancels out. Beside it stands the processor time that the
launcher, in which the monitor is, takes for them: a step that fills all processors cannot lose a larger share, and this
is known however busy the machine is.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import socket
import statistics
import tempfile
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import driver, launch

MODEL = "resnet18"
IDLE, SLOW = 200, 20
"""Connections that send nothing, and readers that take a byte of the page four times a second."""
SCRAPED, CROWDED = "scraped", "crowded"
PAIRS = 4
"""Pairs of windows in a round."""
CONFIDENCE = 0.95
_SETTLE_S = 0.5  # before each window: readers connect, and readers of the window before are gone
_SCRAPE_S = 1.0
_SLOW_READ_S = 0.25
_TIMEOUT_S = 10.0

Readers = Callable[[], AbstractContextManager[object]]


class Window(NamedTuple):
    """Start and end of a window, by the monotonic clock, which all processes of a host have in common.

    `processor`: the share of one processor that the launcher had.
    """

    begin: float
    end: float
    processor: float


class Pair(NamedTuple):
    """The slowest rank's step times in two adjacent windows, in seconds, and the additional processor time."""

    without_readers: float
    with_readers: float
    more_processor: float


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
    """Return the monitor's answer; takes little of the processor time that the ranks need.

    Raises:
        BenchmarkError: The answer is wrong.
    """
    with socket.create_connection(("127.0.0.1", port), _TIMEOUT_S) as connection:
        connection.sendall(f"GET {path}?token={token} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        answer = b"".join(iter(lambda: connection.recv(1 << 20), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200 "):
        raise driver.BenchmarkError(f"the monitor answers to {path}: {head[:200]!r}")
    return body


@contextlib.contextmanager
def scraping(port: int, token: str) -> Iterator[None]:
    """Read the metrics each second, as Prometheus does."""
    over, failures = threading.Event(), []

    def scrape() -> None:
        try:
            while not over.wait(_SCRAPE_S):
                read(port, token)
        except (OSError, driver.BenchmarkError) as error:
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
    """Scrape while other readers are idle or slow."""
    over = threading.Event()

    def dawdle(slow: Sequence[socket.socket]) -> None:
        while not over.wait(_SLOW_READ_S):
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


def alternate(
    readers: Readers, pairs: int, seconds: float, processor_seconds: Callable[[], float]
) -> list[tuple[Window, Window]]:
    """Have readers come and go; return pairs of windows of this length, without them and with them."""

    def window(present: Readers) -> Window:
        with present():
            time.sleep(_SETTLE_S)
            begin, used = time.perf_counter(), processor_seconds()
            time.sleep(seconds)
            end = time.perf_counter()
            return Window(begin, end, (processor_seconds() - used) / (end - begin))

    found = []
    for number in range(pairs):
        if number % 2 == 0:
            without_readers, with_readers = window(contextlib.nullcontext), window(readers)
        else:
            with_readers, without_readers = window(readers), window(contextlib.nullcontext)
        found.append((without_readers, with_readers))
    return found


def step_seconds(ends: Sequence[float], window: Window) -> float | None:
    """Return the mean time of the steps in a window; None if not all of it is known, or no step lies in it.

    Args:
        ends: When steps ended, in ascending order.
        window: The window.
    """
    first, last = bisect_left(ends, window.begin), bisect_right(ends, window.end) - 1
    if first == 0 or last == len(ends) - 1 or last <= first:
        return None
    return (ends[last] - ends[first]) / (last - first)


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return an interval in which the median of a distribution lies with :data:`CONFIDENCE`, by the sign test.

    Args:
        values: A sample of it. The interval of very few values is their range, whose confidence is lower.
    """
    ordered, count = sorted(values), len(values)
    below, outside = math.comb(count, 0) / 2**count, 0
    while 2 * below <= 1 - CONFIDENCE:
        outside += 1
        below += math.comb(count, outside) / 2**count
    return ordered[max(0, outside - 1)], ordered[-max(1, outside)]


class _Job:
    """Ranks that train while readers come and go."""

    def __init__(self, group: driver.Group, model: str, folder: Path) -> None:
        self._group = group
        self._model = model
        self._until = folder / "until"
        self._until.touch()
        self._train()

    def _train(self) -> list[list[float]]:
        """Return when the steps of each rank ended: one, and more while there is no file."""
        answers = self._group.call({"do": "step_ends", "model": self._model, "until": str(self._until)})
        return [answer["ends"] for answer in answers]

    def measure(self, readers: Readers, pairs: int, seconds: float) -> list[Pair]:
        """Train through pairs of windows; those in which not enough steps lie are left out."""
        self._until.unlink()
        with ThreadPoolExecutor(1) as executor:
            training = executor.submit(self._train)
            try:
                windows = alternate(readers, pairs, seconds, self._group.processor_seconds)
                time.sleep(_SETTLE_S)  # the step that the last window ends in is not the last one
            finally:
                self._until.touch()
            ends = training.result()
        found = []
        for windows_of_pair in windows:
            times = [[step_seconds(of_rank, window) for of_rank in ends] for window in windows_of_pair]
            slowest = [None if None in of_window else max(filter(None, of_window)) for of_window in times]
            more_processor = windows_of_pair[1].processor - windows_of_pair[0].processor
            if slowest[0] is not None and slowest[1] is not None:
                found.append(Pair(slowest[0], slowest[1], more_processor))
        return found


def measure(size: int, *, rounds: int, seconds: float, model: str = MODEL) -> list[dict[str, Any]]:
    """Return the rows of the results for `size` ranks, one for each crowd of readers.

    Args:
        size: The number of ranks.
        rounds: How often :data:`PAIRS` pairs of windows are measured.
        seconds: The length of a window, at least the time between two scrapes.
        model: The model that the ranks train.
    """
    token, port = secrets.token_hex(32), launch.free_port()
    crowds: dict[str, Readers] = {SCRAPED: lambda: scraping(port, token), CROWDED: lambda: crowd(port, token)}
    found: dict[str, list[Pair]] = {name: [] for name in crowds}
    with driver.started([launcher(token, port)], size) as (group,), tempfile.TemporaryDirectory() as folder:
        job = _Job(group, model, Path(folder))
        for _ in range(rounds):
            for name, readers in crowds.items():
                found[name] += job.measure(readers, PAIRS, seconds)
    return [row(name, size, model, pairs) for name, pairs in found.items()]


def row(readers: str, size: int, model: str, pairs: Sequence[Pair]) -> dict[str, Any]:
    """Return a row of the results.

    Raises:
        BenchmarkError: There are no pairs.
    """
    if not pairs:
        raise driver.BenchmarkError("no step lies in the windows: make them longer")
    ratios = [each.with_readers / each.without_readers for each in pairs]
    return {
        **{"readers": readers, "np": size, "model": model, "pairs": list(pairs)},
        **{"without": statistics.median(each.without_readers for each in pairs)},
        **{"seconds": statistics.median(each.with_readers for each in pairs)},
        **{"more_processor": statistics.median(each.more_processor for each in pairs)},
        **{"ratio": statistics.median(ratios), "interval": median_interval(ratios)},
    }
