"""The output of ranks on its way to the caller, without Spark: both ends of the connection to the driver."""

from __future__ import annotations

import io
import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import psutil
import pytest

from horovodlike._net.secure_channel import JobKey
from horovodlike.launcher.agent.protocol import FrameKind
from horovodlike.launcher.planning.addresses import LOOPBACK
from horovodlike.launcher.supervisor.node_connection import connect_node
from horovodlike.launcher.supervisor.writer import Writer
from horovodlike.spark import _output
from horovodlike.spark._output import CallerOutput, TaskOutput

OUT, ERR = FrameKind.STDOUT, FrameKind.STDERR
MakeTask = Callable[..., TaskOutput]


class Caller:
    """The driver's end, and what it has printed."""

    def __init__(self, size: int = 2, address: tuple[str, str] | None = (LOOPBACK, LOOPBACK)) -> None:
        self.stdout, self.stderr = io.StringIO(), io.StringIO()
        self.output = CallerOutput(self.stdout, self.stderr, size, address)

    def serve_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < deadline
            self.output.serve(0.02)

    def lines(self) -> list[str]:
        return self.stdout.getvalue().splitlines()


@pytest.fixture
def task() -> Iterator[MakeTask]:
    """`task(caller)`: the task's end."""
    with ExitStack() as stack:

        def make(caller: Caller | None = None, size: int = 2, secret: str | None = None) -> TaskOutput:
            writer = Writer(lambda: None)
            secret = caller.output.secret if caller is not None else secret
            made = TaskOutput(writer, size, log=False, wanted=True, secret=secret)
            stack.callback(made.close)
            stack.callback(writer.close)
            return made

        yield make


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before = psutil.Process().num_fds()
    yield
    assert psutil.Process().num_fds() == before


def test_lines_of_all_tasks_arrive_in_their_order(task: MakeTask) -> None:
    caller = Caller()
    tasks = [task(caller), task(caller)]
    for number in range(50):
        for rank, each in enumerate(tasks):
            each.add(rank, OUT, b"%d\n" % number)
    tasks[0].say("horovodlike: a line of the launcher")
    tasks[1].add(1, ERR, b"unfinished")
    caller.serve_until(lambda: len(caller.lines()) == 100 and "launcher" in caller.stderr.getvalue())
    caller.serve_until(lambda: not any(each._writer._bytes for each in tasks))
    assert [list(each.rows()) for each in tasks] == [[], []], "all was taken"
    caller.output.take([])
    caller.output.close()
    for rank in (0, 1):
        mine = [line for line in caller.lines() if line.startswith(f"[{rank}]")]
        assert mine == [f"[{rank}]<stdout>: {number}" for number in range(50)]
    assert caller.stderr.getvalue() == "horovodlike: a line of the launcher\n[1]<stderr>: unfinished\n"


def test_a_driver_that_does_not_read_gets_the_rest_at_the_end_and_nothing_twice(
    task: MakeTask, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_output, "_STUCK_S", 0.3)
    caller = Caller()
    stream = task(caller)
    stream.add(1, OUT, b"a\n")
    caller.serve_until(lambda: bool(caller.lines()) and not stream._writer._bytes)
    begin = time.monotonic()
    for word in (b"b\n", b"c\n"):
        stream.add(1, OUT, word)
    rows = list(stream.rows())
    assert time.monotonic() - begin < 10
    assert [row[3] for row in rows] == [b"b\n", b"c\n"]
    assert "waits for the end of the job" in capsys.readouterr().err
    caller.serve_until(lambda: len(caller.lines()) == 2)  # it was under way when the task gave up
    caller.output.take(rows)
    caller.output.close()
    assert caller.lines() == [f"[1]<stdout>: {word}" for word in "abc"]
    assert re.search(r"output of rank 1 follows only now, .* 127.0.0.1 port \d+", caller.stderr.getvalue())


def test_a_driver_that_cannot_be_reached_delays_output_only(
    task: MakeTask, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_output, "_CONNECT_S", 0.3)
    caller = Caller()
    stream = task(caller)
    caller.output.close()
    stream.add(0, OUT, b"a\n")
    assert [row[3] for row in stream.rows()] == [b"a\n"]
    assert "cannot be reached" in capsys.readouterr().err


def test_what_a_task_has_sent_before_it_died_is_printed(task: MakeTask) -> None:
    caller = Caller()
    stream = task(caller)
    stream.add(0, OUT, b"a\n")
    caller.serve_until(lambda: bool(caller.lines()) and not stream._writer._bytes)
    assert stream._driver is not None
    for word in (b"b\n", b"c\n"):
        stream._driver.send(OUT, 0, bytes(8) + word)
    stream._driver._socket.close()
    caller.output.close(hurried=True)
    assert caller.lines() == [f"[0]<stdout>: {word}" for word in "abc"]


@pytest.mark.parametrize(
    ("kind", "rank", "payload"),
    [(FrameKind.RESULT, 0, bytes(9)), (OUT, 2, bytes(9)), (OUT, -2, bytes(9)), (OUT, 0, bytes(7))],
)
def test_other_frames_end_a_connection_and_no_other_one(
    task: MakeTask, kind: FrameKind, rank: int, payload: bytes
) -> None:
    caller = Caller()
    good, bad = task(caller), task(caller)
    for each in (good, bad):
        each.add(0, OUT, b"a\n")
    caller.serve_until(lambda: len(caller.lines()) == 2 and not (good._writer._bytes or bad._writer._bytes))
    assert bad._driver is not None
    bad._driver.send(kind, rank, payload)
    caller.serve_until(lambda: len(caller.output._connections) == 1)
    good.add(0, OUT, b"b\n")
    caller.serve_until(lambda: len(caller.lines()) == 3)
    caller.output.close()
    assert caller.lines()[2] == "[0]<stdout>: b"


def test_the_driver_takes_nothing_without_the_key() -> None:
    caller = Caller()
    where = json.loads(str(caller.output.secret))
    with pytest.raises(RuntimeError, match="cannot be reached|hung up"):
        connect_node(JobKey.random(), 0, 0, where["host"], where["port"], time.monotonic() + 0.5)
    caller.output.serve(0)
    caller.output.close()
    assert not caller.lines()


def test_only_the_last_output_waits_for_the_end(task: MakeTask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_output, "MOST_OUTPUT", 10)
    stream = task()
    for _ in range(3):
        stream.add(1, OUT, b"123456\n")
    note, *kept = stream.rows()
    assert b"14 bytes of rank 1's output were left out" in note[3]
    assert [row[3] for row in kept] == [b"123456\n"]
    monkeypatch.setattr(_output, "MOST_OUTPUT", 1000)
    monkeypatch.setattr(_output, "_MOST_OF_ALL", 40)
    many = task(size=4)
    for _ in range(3):
        many.add(1, OUT, b"123456\n")
    assert len(list(many.rows())) == 2, "many ranks share what the driver can take"


def test_streams_that_fail_are_named() -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    caller = Caller()
    caller.output.close()
    stderr = io.StringIO()
    output = CallerOutput(Full(), stderr, 1, None)
    output.take([(0, OUT, 0, b"a\n")])
    output.close()
    assert "standard output cannot be written: No space left on device" in stderr.getvalue()


def test_an_address_that_is_not_of_this_host_delays_output_only() -> None:
    caller = Caller(address=("203.0.113.1", "driver"))
    assert caller.output.secret is None
    caller.output.take([(0, OUT, 0, b"a\n")])
    caller.output.close()
    assert caller.lines() == ["[0]<stdout>: a"]
    assert "output comes at the end of the job: spark.driver.bindAddress=203.0.113.1" in caller.stderr.getvalue()
