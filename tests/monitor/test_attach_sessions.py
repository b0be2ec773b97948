"""The server of `hvdrun --attach`, with ranks and clients of the test; and the hook in the steps of a rank."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from monitors import LIMIT_S, Reporter, report, running

from horovodlike._engine import profile, profilers, steps
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

    def ask(self, request: Any) -> Client:
        self._socket.sendall(json.dumps(request).encode() + b"\n")
        return self

    def read(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self._lines.readline())
        return answer

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


@pytest.fixture
def ranks(monitor: Monitor) -> Iterator[Callable[..., list[Rank]]]:
    """`ranks(function, ...)` connects ranks that answer so, and waits until the monitor knows them."""
    made: list[Rank] = []

    def connect(*answers: Callable[[dict[str, Any]], dict[str, Any] | bytes | None]) -> list[Rank]:
        made.extend(Rank(monitor, rank, len(answers), answer) for rank, answer in enumerate(answers))
        while len(monitor.board.snapshot()["ranks"]) < len(answers):
            pass
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


def armed(step: int, seconds: float = 0.1) -> dict[str, Any]:
    return {"armed": {"step": step, "seconds": seconds}}


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
    while "recording" not in said:
        said = attached.read()["say"]
    assert said == "recording steps 224 to 228"  # 101 + 12 s / 0.1 s + 2, and one more
    assert [each["first"] for each in asked(first, "begin")] == [133, 163, 223]
    assert [each["first"] for each in asked(second, "begin")] == [133, 163, 223]
    numbers = [each["id"] for each in asked(second, "arm")]
    assert len(set(numbers)) == 3 and [each["id"] for each in asked(second, "cancel")] == numbers[:2]


@pytest.mark.parametrize(
    "answer",
    [
        {"armed": {"step": "x", "seconds": 1}},
        {"armed": {"step": 1, "seconds": -1}},
        {"armed": {"step": 1}},
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
    monitor: Monitor, ranks: Callable[..., list[Rank]], client: Callable[[Any], Client], answer: dict[str, Any]
) -> None:
    ranks(lambda request: answer if request["do"] == "arm" else None)
    attached = client({"do": "profile", "steps": 5, "ranks": None})
    assert attached.error() == "rank 0: it has left the job, or its connection is lost"
    assert client({"do": "stacks", "ranks": None}).error().startswith("no rank reports to the monitor yet")


@pytest.mark.parametrize("part", [b"", b"x" * 5, b"x" * (1 << 19)])
def test_parts_of_files_are_as_long_as_they_should_be(
    ranks: Callable[..., list[Rank]], client: Callable[[Any], Client], part: bytes
) -> None:
    def answer(request: dict[str, Any]) -> dict[str, Any] | bytes | None:
        number = request["id"].to_bytes(8, "big")
        return {
            "arm": armed(1),
            "begin": recorded(),
            "fetch": b"\0" + number + part,
            "cancel": None,
        }[request["do"]]

    def both(request: dict[str, Any]) -> dict[str, Any] | bytes | None:
        if request["do"] == "begin":
            found.send({"answer": {"id": request["id"], "begun": True}})
        return answer(request)

    [found] = ranks(both)
    attached = client({"do": "profile", "steps": 5, "ranks": None})
    assert attached.error() == "rank 0 has sent something else than the next part of trace.json"


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
        while not monitor.board.snapshot()["ranks"]:
            pass
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


def test_a_version_of_pytorch_that_profiles_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def config(**options: Any) -> None:
        raise TypeError(*options)

    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    monkeypatch.setitem(sys.modules, "torch._C", ModuleType("torch._C"))
    of_c = ModuleType("torch._C._profiler")
    monkeypatch.setattr(of_c, "_ExperimentalConfig", config, raising=False)
    monkeypatch.setitem(sys.modules, "torch._C._profiler", of_c)
    assert profilers.choose(tmp_path, all_threads=False).framework == "torch"
    chosen = profilers.choose(tmp_path, all_threads=True)
    assert chosen.framework == "stacks" and "with --steps" in chosen.note


class Fake:
    """A profiler that writes down what it does, and in which thread."""

    framework, note, is_bound = "fake", "", True

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def _call(self, name: str) -> None:
        self.calls.append((name, threading.get_ident()))

    def warm_up(self) -> None:
        self._call("warm_up")

    def start(self) -> None:
        self._call("start")

    def stop(self) -> None:
        self._call("stop")

    def export(self, path: Any) -> None:
        path.write_text("{}")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Fake]:
    made = Fake()
    engine = SimpleNamespace(
        hvl_start_profile_timeline=lambda path: Path(os.fsdecode(path)).touch(),
        hvl_stop_profile_timeline=lambda: None,
    )
    monkeypatch.setattr(profilers, "choose", lambda folder, all_threads: made)
    monkeypatch.setattr(profile, "lib", engine)
    monkeypatch.setattr(profile, "ops", SimpleNamespace(check=lambda status: None))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    steps.reset()
    yield made
    steps.reset()
    assert steps.hook is None
    assert list(tmp_path.iterdir()) == []


def answers(attachment: profile.Attachment) -> list[dict[str, Any]]:
    return [json.loads(each)["answer"] for each in attachment.answers()]


def arm(attachment: profile.Attachment, number: int, count: int) -> None:
    """Arm a profile, and begin to record in the next step."""
    attachment.take({"id": number, "do": "arm", "steps": count})
    assert answers(attachment) == []
    steps.mark()
    steps.mark()
    [answer] = answers(attachment)
    attachment.take({"id": number, "do": "begin", "first": answer["armed"]["step"] + 1})
    assert answers(attachment) == [{"id": number, "begun": True}]


def names(fake: Fake) -> list[str]:
    return [name for name, _ in fake.calls]


def test_the_steps_of_the_first_thread_that_marks_are_recorded(fake: Fake) -> None:
    attachment = profile.Attachment()
    arm(attachment, 1, 2)
    for _ in range(2):
        steps.mark()
        other = threading.Thread(target=steps.mark)
        other.start()
        other.join()
    assert names(fake) == ["warm_up", "start"]
    steps.mark()
    assert names(fake) == ["warm_up", "start", "stop"]
    assert steps.hook is None
    [answer] = answers(attachment)
    assert answer["recorded"]["first_step"] == 4 and len(answer["recorded"]["marks"]) == 3
    attachment.cancel()


def test_a_begin_that_is_past_is_not_taken(fake: Fake) -> None:
    attachment = profile.Attachment()
    attachment.take({"id": 1, "do": "arm", "steps": 1})
    assert answers(attachment) == []
    for _ in range(3):
        steps.mark()
    [answer] = answers(attachment)
    attachment.take({"id": 1, "do": "begin", "first": answer["armed"]["step"]})
    assert answers(attachment) == [{"id": 1, "begun": False}]
    attachment.take({"id": 7, "do": "begin", "first": 100})  # of another session
    attachment.take({"id": 7, "do": "cancel"})
    assert answers(attachment) == []
    attachment.cancel()
    assert names(fake) == ["warm_up"]


def test_a_profile_waits_for_the_end_of_the_one_before(fake: Fake) -> None:
    attachment = profile.Attachment()
    arm(attachment, 1, 100)
    steps.mark()
    attachment.take({"id": 2, "do": "arm", "steps": 1})
    assert answers(attachment) == []  # this thread has not marked a step, so the first profiler runs
    assert names(fake) == ["warm_up", "start"]
    steps.mark()
    assert names(fake) == ["warm_up", "start", "stop"]
    assert answers(attachment) == []
    steps.mark()
    assert [each.keys() for each in answers(attachment)] == [{"id", "armed"}]
    attachment.cancel()


def test_a_profile_does_not_wait_for_ever(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(profile.time, "monotonic", lambda: now[0])
    attachment = profile.Attachment()
    arm(attachment, 1, 100)
    steps.mark()
    for number in (2, 3):  # the first one would be ended by the next step, which does not come
        attachment.take({"id": number, "do": "arm", "steps": 1})
        assert answers(attachment) == []
        now[0] += 11.0
        [answer] = answers(attachment)
        assert "it has marked no step within 10 s" in answer["failed"]
    steps.mark()
    assert names(fake) == ["warm_up", "start", "stop"]


def test_shutdown_stops_the_profiler_that_its_thread_has_started(fake: Fake) -> None:
    attachment = profile.Attachment()
    arm(attachment, 1, 100)
    steps.mark()
    reporter = threading.Thread(target=attachment.cancel)
    reporter.start()
    reporter.join()
    assert names(fake) == ["warm_up", "start"]
    attachment.close()
    assert names(fake) == ["warm_up", "start", "stop"]


def test_a_signal_in_the_profiler_reaches_the_thread(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    attachment = profile.Attachment()
    arm(attachment, 1, 100)

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(fake, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        steps.mark()
    assert answers(attachment) == [{"id": 1, "failed": "a signal has interrupted the profiler"}]
    assert names(fake) == ["warm_up", "stop"]
    steps.mark()


def test_threads_that_arm_cancel_and_mark_as_they_like(fake: Fake) -> None:
    """The profiler is started and stopped in turn, by the thread that marks."""
    ends = threading.Event()

    def train() -> None:
        while not ends.is_set():
            steps.mark()
            time.sleep(0)  # the other thread may run
        attachment.close()

    attachment = profile.Attachment()
    trainer = threading.Thread(target=train)
    trainer.start()
    choices = random.Random(1)
    while names(fake).count("start") < 50:
        number = choices.randrange(10**6)
        attachment.take({"id": number, "do": "arm", "steps": choices.randrange(1, 100)})
        for _ in range(choices.randrange(200)):
            time.sleep(0)
            for answer in answers(attachment):
                if "armed" in answer:
                    first = answer["armed"]["step"] + choices.randrange(20)
                    attachment.take({"id": number, "do": "begin", "first": first})
        if choices.random() < 0.5:
            attachment.take({"id": number, "do": "cancel"})
    attachment.cancel()
    ends.set()
    trainer.join()
    running = [name for name in names(fake) if name != "warm_up"]
    assert running == ["start", "stop"] * (len(running) // 2)
    assert {thread for _, thread in fake.calls} == {trainer.ident}


def test_a_profile_that_is_too_large(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "_MOST_BYTES", 1)
    attachment = profile.Attachment()
    arm(attachment, 1, 1)
    steps.mark()
    steps.mark()
    assert answers(attachment) == [{"id": 1, "failed": "ValueError: its profile has 0 MiB, of at most 0"}]
    attachment.cancel()
