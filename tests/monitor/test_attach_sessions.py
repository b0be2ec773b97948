"""The server of `hvdrun --attach`, with ranks and clients of the test."""

from __future__ import annotations

import base64
import contextlib
import ctypes
import gc
import json
import os
import platform
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from monitors import LIMIT_S, Reporter, report, running

from horovodlike.monitor import attach
from horovodlike.monitor.board import Board
from horovodlike.monitor.server import Monitor

Answer = Callable[[dict[str, Any]], "dict[str, Any] | None"]
PROFILE = {"do": "profile", "steps": 2, "ranks": None}
STACKS = {"do": "stacks", "ranks": None}
LEFT = "it has left the job, or its connection is lost"
NOBODY = 65534


@pytest.fixture
def clock() -> list[float]:
    """The seconds by which the clock of the monitor is ahead."""
    return [0.0]


@pytest.fixture
def monitor(clock: list[float]) -> Iterator[Monitor]:
    with running(Board(monotonic=lambda: time.monotonic() + clock[0]), is_attachable=True) as started:
        yield started


class Client:
    """An attached hvdrun."""

    def __init__(self, request: Any) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(10 * LIMIT_S)
        self._socket.connect(attach.address_of(os.getpid()))
        self._socket.sendall(request if isinstance(request, bytes) else json.dumps(request).encode() + b"\n")
        self._lines = self._socket.makefile("rb")

    def read(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self._lines.readline())
        return answer

    def rest(self) -> list[dict[str, Any]]:
        """Return all messages up to the end."""
        return [json.loads(line) for line in self._lines]

    def error(self) -> str:
        return str(self.rest()[-1]["error"])

    def close(self) -> None:
        self._lines.close()
        self._socket.close()


class Rank(Reporter):
    """The connection of a rank that is at step 100 of 0.1 s each, and answers requests as a function says."""

    def __init__(self, monitor: Monitor, rank: int, size: int, answer: Answer) -> None:
        super().__init__(monitor, rank, size)
        self.requests: list[dict[str, Any]] = []
        first = report(rank, size, 1.0)
        first["counters"] |= {"steps": 100 + rank, "step_seconds": 0.1 * (99 + rank)}
        self.send(first)
        self._answer = answer
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                message = json.loads(self.channel.receive(time.monotonic() + 10 * LIMIT_S))
                if "ask" in message:
                    self.requests.append(message["ask"])
                    if (answer := self._answer(message["ask"])) is not None:
                        self.send({"answer": {"id": message["ask"]["id"], **answer}})

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.channel.socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(LIMIT_S)
        self.channel.close()


def wait_for(condition: Callable[[], bool], seconds: float = LIMIT_S) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def ranks(monitor: Monitor) -> Iterator[Callable[..., list[Rank]]]:
    """`ranks(function, ...)` connects ranks that answer so, and waits until the monitor knows them."""
    made: list[Rank] = []

    def connect(*answers: Answer) -> list[Rank]:
        made.extend(Rank(monitor, rank, len(answers), answer) for rank, answer in enumerate(answers))
        wait_for(lambda: len(monitor.board.snapshot()["ranks"]) == len(answers))
        return made

    yield connect
    for each in made:
        each.close()


@pytest.fixture
def client() -> Iterator[Callable[[Any], Client]]:
    clients: list[Client] = []

    def connect(request: Any) -> Client:
        clients.append(Client(request))
        return clients[-1]

    yield connect
    for each in clients:
        each.close()


def recorded(size: int = 4, **more: Any) -> dict[str, Any]:
    about = {"framework": "torch", "note": "", "first_step": 8, "marks": [1.0, 2.0, 3.0]}
    return {"recorded": {**about, "sizes": {"trace.json": size, "timeline.json": 0}, **more}}


def records(read: Answer, size: int = 10) -> Answer:
    """Answer as a rank that has recorded a trace of some bytes."""

    def answer(request: dict[str, Any]) -> dict[str, Any] | None:
        return read(request) if request["do"] == "read" else recorded(size) if request["do"] == "profile" else None

    return answer


def part(data: bytes) -> dict[str, Any]:
    return {"part": base64.b64encode(data).decode()}


def is_idle(client: Callable[[Any], Client]) -> bool:
    """Return whether no session is under way."""
    return "another hvdrun" not in client({"do": "profile", "steps": 0, "ranks": None}).error()


def test_all_ranks_record_the_same_steps_and_their_files_are_whole(
    ranks: Callable[..., list[Rank]], client: Callable[[Any], Client]
) -> None:
    text = b"0123456789"
    found = ranks(*[records(lambda request: part(text[request["offset"] :][:4]))] * 3)
    messages = client(PROFILE).rest()
    first = 102 + 30 + 2  # three seconds of steps after the last one of the rank that is ahead
    assert messages[0] == {"say": f"the ranks will record steps {first + 1} to {first + 2}"}
    assert messages[-1] == {"done": True}
    for number, rank in enumerate(found):
        wait_for(lambda rank=rank: rank.requests[-1]["do"] == "cancel")  # type: ignore[misc]
        asked, *read, _ = rank.requests
        assert (asked["first"], asked["steps"], [each["offset"] for each in read]) == (first, 2, [0, 4, 8])
        parts = [each["part"] for each in messages if each.get("file") == f"rank{number}.trace.json"]
        assert b"".join(map(base64.b64decode, parts)) == text
    about = [each["rank"] for each in messages if "rank" in each]
    assert [each["rank"] for each in about] == [0, 1, 2]
    assert about[1] == {
        **{"rank": 1, "size": 3, "host": "node-1", "pid": 101, "framework": "torch", "note": ""},
        **{"first_step": 8, "steps": 2, "marks": [1.0, 2.0, 3.0]},
    }


@pytest.mark.parametrize(
    "answer",
    [
        {"nothing": 1},
        {"failed": 7},
        {"recorded": {}},
        recorded(2**40),
        recorded(marks=[1.0] * 200_000),
        recorded(marks=["x"]),
        recorded(first_step="x"),
        recorded(note=None),
        part(b""),
        part(b"x" * (1 << 19)),
        {"part": "no base64"},
    ],
)
def test_answers_that_make_no_sense_end_the_connection_and_the_session(
    ranks: Callable[..., list[Rank]], client: Callable[[Any], Client], answer: dict[str, Any]
) -> None:
    ranks(lambda request: answer)
    assert client(PROFILE).error() == f"rank 0: {LEFT}"


def test_a_rank_that_fails_or_leaves_fails_the_session(
    ranks: Callable[..., list[Rank]], client: Callable[[Any], Client]
) -> None:
    answers: list[dict[str, Any] | None] = [{"failed": "the disk is broken"}, None]
    found = ranks(
        records(lambda request: part(b"x" * 5) if not request["offset"] else answers.pop(0)),
        lambda request: recorded() if request["do"] == "profile" else None,
    )
    assert client(PROFILE).error() == "rank 0: the disk is broken"
    attached = client(PROFILE)
    while "file" not in attached.read():
        pass
    wait_for(lambda: not answers)
    found[0].close()
    assert attached.error() == f"rank 0: {LEFT}"
    wait_for(lambda: found[1].requests[-1]["do"] == "cancel")


def test_a_rank_that_does_not_report_any_more_is_named(
    clock: list[float], ranks: Callable[..., list[Rank]], client: Callable[[Any], Client]
) -> None:
    ranks(lambda request: recorded(), lambda request: None)
    attached = client(PROFILE)
    attached.read()
    clock[0] = 31.0
    assert attached.error() == "rank 1: silent for 30 s: its process is stopped, or holds the GIL"


@pytest.mark.slow
def test_a_client_that_is_stopped_does_not_hold_the_session(
    ranks: Callable[..., list[Rank]], client: Callable[[Any], Client]
) -> None:
    found = ranks(records(lambda request: part(b"x" * (1 << 18)), size=1 << 27))
    stopped = client(PROFILE)  # it reads nothing
    wait_for(lambda: "cancel" in (each["do"] for each in found[0].requests), 30 + LIMIT_S)
    assert len(found[0].requests) < 100  # it has read little of the file
    wait_for(lambda: is_idle(client))
    assert stopped.error() == "this client has not read for 30 s: was it stopped?"


def test_the_next_client_can_begin_when_one_has_gone(
    ranks: Callable[..., list[Rank]], client: Callable[[Any], Client], caplog: pytest.LogCaptureFixture
) -> None:
    """The log of asyncio goes to the standard error of hvdrun."""
    [rank] = ranks(records(lambda request: part(b"x" * 1000), size=1 << 27))
    first = client(PROFILE)
    wait_for(lambda: len(rank.requests) > 3)
    assert client(STACKS).error() == "another hvdrun is attached to this job: try again when it has ended"
    first.close()  # with data that it has not read
    wait_for(lambda: rank.requests[-1]["do"] == "cancel")
    wait_for(lambda: is_idle(client))
    gc.collect()
    assert not [each.getMessage() for each in caplog.records if each.name == "asyncio"]


@pytest.mark.slow
def test_stacks_of_a_job_that_breaks(ranks: Callable[..., list[Rank]], client: Callable[[Any], Client]) -> None:
    found = ranks(
        lambda request: {"stacks": "in load"},
        lambda request: {"failed": "no memory"},
        lambda request: None,
        lambda request: None,
    )
    found[3].close()
    reasons = ["no memory", "it has not answered within 5 s", "it does not report to the monitor"]
    expected = [[0, "in load"], *([rank, f"    {reason}"] for rank, reason in enumerate(reasons, 1))]
    assert client(STACKS).read() == {"stacks": expected}


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        ({"do": "profile", "steps": 0, "ranks": None}, "give --steps, from 1 to 1000, or --seconds, up to 300"),
        ({"do": "profile", "steps": True, "ranks": None}, "give --steps, from 1 to 1000"),
        ({"do": "profile", "seconds": 301, "ranks": None}, "give --steps, from 1 to 1000"),
        ({"do": "profile", "steps": 1, "ranks": [5]}, "--ranks: the job has no rank 5: it has ranks 0 to 0"),
        ({"do": "profile", "steps": 1, "ranks": ["x"]}, "the monitor has failed: ValueError"),
        ([], "the monitor has failed: AttributeError"),
    ],
)
def test_requests_that_make_no_sense(
    ranks: Callable[..., list[Rank]], client: Callable[[Any], Client], request_: Any, text: str
) -> None:
    ranks(lambda request: {"stacks": "in load"})
    assert client(b"[" * 200_000 + b"\n").rest() == []
    assert client(request_).error().startswith(text)
    assert client(STACKS).read() == {"stacks": [[0, "in load"]]}


def test_the_end_of_the_monitor_is_told(
    monitor: Monitor, ranks: Callable[..., list[Rank]], client: Callable[[Any], Client]
) -> None:
    ranks(lambda request: None)
    attached = client(PROFILE)
    attached.read()
    monitor.close()
    assert attached.error() == "the job has ended"


def test_a_stranger_gets_nothing(ranks: Callable[..., list[Rank]]) -> None:
    if os.geteuid() != 0:
        pytest.skip("to be another user needs root")
    [rank] = ranks(lambda request: {"stacks": "in load"})
    answers: list[bytes] = []

    def ask() -> None:
        number = {"x86_64": 117, "aarch64": 147}[platform.machine()]
        assert ctypes.CDLL(None).syscall(number, -1, NOBODY, -1) == 0  # setresuid() of this thread only
        with socket.socket(socket.AF_UNIX) as connected, contextlib.suppress(ConnectionError):
            connected.connect(attach.address_of(os.getpid()))
            connected.sendall(json.dumps(STACKS).encode() + b"\n")
            while data := connected.recv(100):
                answers.append(data)

    stranger = threading.Thread(target=ask)
    stranger.start()
    stranger.join()
    assert (answers, rank.requests) == ([], [])
