"""The server of `hvdrun --attach`, with ranks and clients of the test."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from monitors import LIMIT_S, Reporter, report, running

from horovodlike.launcher.tools.attach import AttachError, _copy, _folder, _read
from horovodlike.monitor import attach
from horovodlike.monitor.server import Monitor


@pytest.fixture
def monitor(monkeypatch: pytest.MonkeyPatch) -> Iterator[Monitor]:
    monkeypatch.setattr(attach, "_JOIN_S", 0.0)
    with running(is_attachable=True) as started:
        yield started


class Client:
    """An attached hvdrun."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(LIMIT_S)
        self._socket.connect(attach.address_of(os.getpid()))
        self._lines = self._socket.makefile("rb")

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def ask(self, request: Any) -> Client:
        self.send(json.dumps(request).encode() + b"\n")
        return self

    def read_line(self) -> bytes:
        return self._lines.readline()

    def read(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.read_line())
        return answer

    def receive(self, folder: Path | None) -> None:
        """Take files as hvdrun does."""
        for message in _read(self._lines):
            if "done" in message:
                return
            if "file" in message:
                _copy(self._lines, Path(os.devnull) if folder is None else folder / message["file"], message["bytes"])
            elif folder is not None:
                (folder / "rank0.json").write_text(json.dumps(message["rank"]))

    def error(self) -> str:
        while "error" not in (answer := self.read()):
            assert answer, "no error"
        return str(answer["error"])

    def close(self) -> None:
        self._lines.close()
        self._socket.close()


class Rank(Reporter):
    """The connection of a rank, which answers requests as a function says."""

    def __init__(
        self, monitor: Monitor, rank: int, size: int, answer: Callable[[dict[str, Any]], dict[str, Any] | bytes | None]
    ) -> None:
        super().__init__(monitor, rank, size)
        self.requests: list[dict[str, Any]] = []
        self.send(report(rank, size, 1.0))
        self._answer = answer
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                message = json.loads(self.channel.receive(time.monotonic() + 10 * LIMIT_S))
                if "ask" not in message:
                    continue
                request = message["ask"]
                self.requests.append(request)
                answer = self._answer(request)
                if isinstance(answer, dict):
                    self.send({"answer": {"id": request["id"], **answer}})
                elif answer is not None:
                    self.send(answer)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.channel.socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(LIMIT_S)
        self.channel.close()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def wait_for_ranks(monitor: Monitor, count: int) -> None:
    wait_for(lambda: len(monitor.board.snapshot()["ranks"]) >= count)


@pytest.fixture
def ranks(monitor: Monitor) -> Iterator[Callable[..., list[Rank]]]:
    """`ranks(function, ...)` connects ranks that answer so, and waits until the monitor knows them."""
    made: list[Rank] = []

    def connect(*answers: Callable[[dict[str, Any]], dict[str, Any] | bytes | None]) -> list[Rank]:
        made.extend(Rank(monitor, rank, len(answers), answer) for rank, answer in enumerate(answers))
        wait_for_ranks(monitor, len(answers))
        return made

    yield connect
    for each in made:
        each.close()


@pytest.fixture
def client() -> Iterator[Callable[[Any], Client]]:
    clients: list[Client] = []

    def connect(request: Any) -> Client:
        clients.append(Client())
        return clients[-1].ask(request)

    yield connect
    for each in clients:
        each.close()


def armed(step: int, seconds: float = 0.1, ahead: float = 0.0) -> dict[str, Any]:
    return {"armed": {"step": step, "seconds": seconds, "time": time.time() + ahead}}


def recorded(trace: int = 4, **more: Any) -> dict[str, Any]:
    about = {"framework": "torch", "note": "", "first_step": 8, "marks": [1.0, 2.0]}
    return {"recorded": {**about, "sizes": {"trace.json": trace, "timeline.json": 0}, **more}}


def test_ranks_for_which_the_step_is_past_try_again_with_more_time(
    ranks: Callable[..., list[Rank]], client: Callable[[Any], Client]
) -> None:
    def answer(request: dict[str, Any]) -> dict[str, Any] | bytes | None:
        if request["do"] == "begin":
            return {"begun": len(asked(first, "begin")) == 3}
        return armed(100) if request["do"] == "arm" else None

    def asked(rank: Rank, what: str) -> list[dict[str, Any]]:
        return [each for each in rank.requests if each["do"] == what]

    def in_time(request: dict[str, Any]) -> dict[str, Any] | bytes | None:
        return {"begun": True} if request["do"] == "begin" else armed(101) if request["do"] == "arm" else None

    first, second = ranks(answer, in_time)
    attached = client({"do": "profile", "steps": 5, "ranks": None})
    said = ""
    while "will record" not in said:
        said = attached.read()["say"]
    assert said == "the ranks will record steps 224 to 228"  # 101 + 12 s / 0.1 s + 2, and one more
    assert [each["first"] for each in asked(first, "begin")] == [133, 163, 223]
    assert [each["first"] for each in asked(second, "begin")] == [133, 163, 223]
    numbers = [each["id"] for each in asked(second, "arm")]
    assert len(set(numbers)) == 3 and [each["id"] for each in asked(second, "cancel")] == numbers[:2]


@pytest.mark.parametrize(
    "answer",
    [
        {"armed": {"step": "x", "seconds": 1, "time": 1}},
        {"armed": {"step": 1, "seconds": -1, "time": 1}},
        {"armed": {"step": 1, "seconds": 1}},
        b"a part that was not asked for",
        {"nothing": 1},
        {"failed": 7},
        {"recorded": {}},
        recorded(2**40),
        recorded(marks=[1.0] * 200_000),
        recorded(marks=["x"]),
        recorded(first_step="x"),
        recorded(note=None),
    ],
)
def test_answers_that_make_no_sense_end_the_connection_and_the_session(
    monitor: Monitor, ranks: Callable[..., list[Rank]], client: Callable[[Any], Client], answer: dict[str, Any] | bytes
) -> None:
    def send(request: dict[str, Any]) -> dict[str, Any] | bytes | None:
        made = answer if isinstance(answer, dict) else b"\0" + request["id"].to_bytes(8, "big") + answer
        return made if request["do"] == "arm" else None

    ranks(send)
    attached = client({"do": "profile", "steps": 5, "ranks": None})
    assert attached.error() == "rank 0: it has left the job, or its connection is lost"
    assert client({"do": "stacks", "ranks": None}).error().startswith("no rank reports to the monitor yet")


def has_recorded(
    found: list[Rank], fetch: Callable[[dict[str, Any]], dict[str, Any] | bytes | None], **more: Any
) -> Callable[[dict[str, Any]], dict[str, Any] | bytes | None]:
    """Return the answers of the first rank of `found` to the requests for a profile of one step after step 100."""

    def answer(request: dict[str, Any]) -> dict[str, Any] | bytes | None:
        number = request["id"]
        if request["do"] == "begin":
            found[0].send({"answer": {"id": number, "begun": True}})
            return recorded(first_step=request["first"] + 1, **more)
        if request["do"] == "fetch":
            part = fetch(request)
            return b"\0" + number.to_bytes(8, "big") + part if isinstance(part, bytes) else part
        return armed(100) if request["do"] == "arm" else None

    return answer


@pytest.mark.parametrize(
    ("part", "text"),
    [
        (b"", "rank 0 has sent something else than the next part of trace.json"),
        (b"x" * 5, "rank 0 has sent something else than the next part of trace.json"),
        (b"x" * (1 << 19), "rank 0: it has left the job, or its connection is lost"),
    ],
)
def test_parts_of_files_are_as_long_as_they_should_be(
    ranks: Callable[..., list[Rank]], client: Callable[[Any], Client], part: bytes, text: str
) -> None:
    found: list[Rank] = []
    found += ranks(has_recorded(found, lambda request: part))
    assert client({"do": "profile", "steps": 1, "ranks": None}).error() == text


def test_an_error_amid_a_file_reaches_the_client(
    ranks: Callable[..., list[Rank]], client: Callable[[Any], Client], tmp_path: Path
) -> None:
    def fetch(request: dict[str, Any]) -> dict[str, Any] | bytes | None:
        return {"failed": "the disk is broken"} if request["offset"] else b"12345"

    found: list[Rank] = []
    found += ranks(has_recorded(found, fetch, trace=9))
    attached = client({"do": "profile", "steps": 1, "ranks": None})
    with pytest.raises(AttachError, match="^rank 0: the disk is broken$"):
        attached.receive(tmp_path)
    assert (tmp_path / "rank0.trace.json").read_bytes() == b"12345"


def test_a_file_in_parts_is_whole(
    ranks: Callable[..., list[Rank]], client: Callable[[Any], Client], tmp_path: Path
) -> None:
    text = b"0123456789"
    found: list[Rank] = []
    found += ranks(has_recorded(found, lambda request: text[request["offset"] :][:4], trace=len(text)))
    client({"do": "profile", "steps": 1, "ranks": None}).receive(tmp_path)
    assert (tmp_path / "rank0.trace.json").read_bytes() == text
    assert [each["offset"] for each in found[0].requests if each["do"] == "fetch"] == [0, 4, 8]
    assert json.loads((tmp_path / "rank0.json").read_text())["steps"] == 1


@pytest.mark.parametrize("marks", [[1.0], [1.0, 2.0, 3.0]])
def test_ranks_that_record_other_steps_fail_the_session(
    ranks: Callable[..., list[Rank]], client: Callable[[Any], Client], marks: list[float]
) -> None:
    found: list[Rank] = []
    found += ranks(has_recorded(found, lambda request: None, marks=marks))
    error = client({"do": "profile", "steps": 1, "ranks": None}).error()
    assert error == "rank 0 has recorded other steps than it was told: mark each step once"


def test_the_first_steps_of_all_ranks_are_compared() -> None:
    same = {"first_step": 8, "marks": [1.0, 2.0]}
    attach.check_steps({0: same, 3: same}, 7, 1)
    with pytest.raises(Exception, match="rank 3 has recorded other steps"):
        attach.check_steps({0: same, 3: {**same, "first_step": 9}}, 7, 1)


@pytest.mark.parametrize("ahead", [-100.5, 100.5])
def test_clocks_that_differ_do_not_record_the_same_seconds(
    ranks: Callable[..., list[Rank]], client: Callable[[Any], Client], ahead: float
) -> None:
    ranks(
        lambda request: armed(1) if request["do"] == "arm" else None,
        lambda request: armed(1, ahead=ahead) if request["do"] == "arm" else None,
    )
    error = client({"do": "profile", "seconds": 1, "ranks": None}).error()
    assert re.fullmatch(
        r"rank 1: its clock differs by [+-]100\.\d s from that of this host: set the clocks, or profile with --steps",
        error,
    )


def test_a_rank_that_drops_a_request_fails_the_session(
    ranks: Callable[..., list[Rank]], client: Callable[[Any], Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attach, "_ANSWER_S", 0.0)
    found: list[Rank] = []
    found += ranks(has_recorded(found, lambda request: None))
    error = client({"do": "profile", "steps": 1, "ranks": None}).error()
    assert error == "rank 0: no answer within 0 s, although it reports"


def test_a_client_that_is_stopped_does_not_hold_the_session(
    ranks: Callable[..., list[Rank]], client: Callable[[Any], Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attach, "_CLIENT_S", 0.1)
    found: list[Rank] = []
    size = 64 << 20
    found += ranks(has_recorded(found, lambda request: b"x" * (1 << 18), trace=size))
    stopped = client({"do": "profile", "steps": 1, "ranks": None})  # it reads nothing
    wait_for(lambda: any(each["do"] == "cancel" for each in found[0].requests))
    assert sum(each["do"] == "fetch" for each in found[0].requests) < size >> 19
    wait_for(lambda: "another" not in client({"do": "profile", "steps": 0, "ranks": None}).error())
    with pytest.raises(AttachError, match="this client has not read for 0 s: was it stopped"):
        stopped.receive(None)


def test_clients_that_break_off_are_not_reported(
    ranks: Callable[..., list[Rank]], client: Callable[[Any], Client], caplog: pytest.LogCaptureFixture
) -> None:
    """The log of asyncio goes to the standard error of hvdrun."""
    found: list[Rank] = []
    found += ranks(has_recorded(found, lambda request: b"x" * 1000, trace=1 << 27))
    nested = Client()
    nested.send(b"[" * 200_000 + b"\n")
    assert nested.read_line() == b""
    nested.close()
    broken = client({"do": "profile", "steps": 1, "ranks": None})
    wait_for(lambda: sum(each["do"] == "fetch" for each in found[0].requests) > 3)
    broken.close()  # with data that it has not read
    wait_for(lambda: any(each["do"] == "cancel" for each in found[0].requests))
    wait_for(lambda: "another" not in client({"do": "profile", "steps": 0, "ranks": None}).error())
    gc.collect()
    assert not [each.getMessage() for each in caplog.records if each.name == "asyncio"]


def test_the_end_of_a_connection_is_told_however_many_answers_wait() -> None:
    class Ended:
        pass

    connection: Any = Ended()
    unused: Any = None
    session = attach._Session(1, {0: connection}, unused, unused)
    with pytest.raises(ValueError, match="too many answers"):
        for _ in range(100):
            session.take(connection, {"id": 1, "begun": True})
    session.take(connection, None)


def test_the_folder_follows_the_umask_and_may_be_the_current_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    current = tmp_path / "current"
    current.mkdir()
    monkeypatch.chdir(current)
    before = os.umask(0o077)
    try:
        with _folder(Path()) as folder:
            (folder / "file").touch()
    finally:
        os.umask(before)
    assert (current / "file").exists() and current.stat().st_mode & 0o777 == 0o700
    assert [each.name for each in tmp_path.iterdir()] == ["current"]


def test_stacks_of_a_job_that_breaks(
    monitor: Monitor, ranks: Callable[..., list[Rank]], client: Callable[[Any], Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attach, "_STACKS_S", 0.5)
    monkeypatch.setattr(monitor.board, "age", lambda rank: 100.0)
    found: list[Rank] = []
    found += ranks(
        lambda request: {"stacks": "in load"},
        lambda request: {"failed": "no memory"},
        lambda request: None,
        lambda request: {"nothing": 1},
        lambda request: None,
    )
    found[4].close()
    texts: list[str] = []

    def ask() -> bool:
        texts[:] = [text for _, text in client({"do": "stacks", "ranks": None}).read()["stacks"]]
        return texts[3] == texts[4] == "    it does not report to the monitor"

    wait_for(ask)
    assert texts[:3] == ["in load", "    no memory", "    it has not answered within 0 s"]


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        ({"do": "profile", "steps": 0, "ranks": None}, "give --steps, from 1 to 1000"),
        ({"do": "profile", "steps": True, "ranks": None}, "give --steps, from 1 to 1000"),
        ({"do": "profile", "steps": 1, "ranks": [5]}, "--ranks: the job has no rank 5: it has ranks 0 to 0"),
        ({"do": "profile", "steps": 1, "ranks": ["x"]}, "the monitor has failed: ValueError"),
        ([], "the monitor has failed: AttributeError"),
    ],
)
def test_requests_that_make_no_sense(
    ranks: Callable[..., list[Rank]], client: Callable[[Any], Client], request_: Any, text: str
) -> None:
    ranks(lambda request: {"stacks": "in load"})
    assert client(request_).error().startswith(text)
    assert client({"do": "stacks", "ranks": None}).read() == {"stacks": [[0, "in load"]]}


def test_the_next_client_can_begin_when_one_has_gone(
    ranks: Callable[..., list[Rank]], client: Callable[[Any], Client]
) -> None:
    [rank] = ranks(lambda request: {"stacks": "in load"} if request["do"] == "stacks" else None)
    first = client({"do": "profile", "steps": 5, "ranks": None})
    assert "preparing" in first.read()["say"]
    assert "another hvdrun is attached" in client({"do": "stacks", "ranks": None}).error()
    first.close()
    while "error" in (answer := client({"do": "stacks", "ranks": None}).read()):
        assert "another" in answer["error"]  # until the end of the connection is seen
    assert answer == {"stacks": [[0, "in load"]]}
    assert [each["do"] for each in rank.requests][:3] == ["arm", "cancel", "stacks"]


def test_the_end_of_the_monitor_is_told(client: Callable[[Any], Client]) -> None:
    with running(is_attachable=True) as monitor:
        rank = Rank(monitor, 0, 1, lambda request: None)
        wait_for_ranks(monitor, 1)
        attached = client({"do": "profile", "steps": 5, "ranks": None})
        attached.read()
        monitor.close()
        assert attached.error() == "the job has ended"
        rank.close()


def test_a_rank_that_does_not_report_any_more_is_named(
    monitor: Monitor, ranks: Callable[..., list[Rank]], client: Callable[[Any], Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks(lambda request: armed(1), lambda request: None)
    monkeypatch.setattr(monitor.board, "age", lambda rank: 31.0 * rank)
    error = client({"do": "profile", "steps": 5, "ranks": None}).error()
    assert error == "rank 1: silent for 30 s: its process is stopped, or holds the GIL"


def test_only_the_same_user_is_answered(client: Callable[[Any], Client], monkeypatch: pytest.MonkeyPatch) -> None:
    with running(is_attachable=True):
        monkeypatch.setattr(attach, "user_of", lambda connected: os.geteuid() + 1)
        with pytest.raises((json.JSONDecodeError, ConnectionError)):  # it gets nothing
            client({"do": "stacks", "ranks": None}).read()
