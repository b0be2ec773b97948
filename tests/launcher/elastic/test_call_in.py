"""Hosts that call in from Python: `CalledHosts` as the discovery of `horovodlike.run`, and `CallIn`."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import horovodlike
from horovodlike._net.secure_channel import JobKey
from horovodlike.launcher.agent.host_probe import describe, encode_needs, installed_version
from horovodlike.launcher.agent.protocol import FrameKind, encode_text
from horovodlike.launcher.elastic.call_in import CallIn, call_in
from horovodlike.launcher.elastic.called_hosts import CalledHosts
from horovodlike.launcher.errors import HostsError
from horovodlike.launcher.supervisor.node_connection import NodeConnection, connect_node

HERE = "127.0.0.1"
SLACK_S = 20.0


@pytest.fixture
def called() -> Iterator[CalledHosts]:
    others = psutil.Process().children(recursive=True)  # of other tests
    made = CalledHosts([HERE])
    yield made
    made.close()
    left = [child for child in psutil.Process().children(recursive=True) if child not in others]
    assert not [child for child in left if child.status() != "zombie"]


class Callers:
    """Callers in threads, and how they have ended."""

    def __init__(self, called: CalledHosts) -> None:
        self._called = called
        self._threads: list[threading.Thread] = []
        self.codes: dict[str, int | Exception] = {}

    def add(self, name: str, slots: int = 1, **options: Any) -> CallIn:
        caller = CallIn(self._called.key.hex(), name, HERE, self._called.port, slots, **options)

        def run() -> None:
            try:
                self.codes[name] = caller.run()
            except HostsError as error:
                self.codes[name] = error

        self._threads.append(threading.Thread(target=run))
        self._threads[-1].start()
        return caller

    def join(self) -> dict[str, int | Exception]:
        for thread in self._threads:
            thread.join(SLACK_S)
            assert not thread.is_alive()
        return self.codes


@pytest.fixture
def callers(called: CalledHosts) -> Iterator[Callers]:
    made = Callers(called)
    yield made
    made.join()


def gather() -> Any:
    import horovodlike as hvd

    hvd.init()
    found = hvd.allgather_object((hvd.local_rank(), os.environ["HOROVODLIKE_NODE_ID"], os.environ.get("OWN")))
    rank = hvd.rank()
    hvd.shutdown()
    return rank, found


def test_a_function_on_hosts_that_call_in(called: CalledHosts, callers: Callers) -> None:
    callers.add("a", 2, environ={**os.environ, "OWN": "first"})
    callers.add("b", 1)
    results = horovodlike.run(gather, num_proc=3, host_discovery=called)
    assert [rank for rank, _ in results] == [0, 1, 2]
    assert sorted(results[0][1]) == [(0, "a", "first"), (0, "b", None), (1, "a", "first")]
    assert callers.join() == {"a": 0, "b": 0}


def test_the_search_path_of_the_caller_comes_first(
    called: CalledHosts, callers: Callers, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.syspath_prepend("/of/the/caller")
        callers.add("a", 1)
    monkeypatch.syspath_prepend("/of/the/driver")

    def search_path() -> list[str]:
        import sys

        return sys.path

    (found,) = horovodlike.run(search_path, num_proc=1, host_discovery=called)
    assert found[0] == "/of/the/caller" and found[-1] == "/of/the/driver"


def test_workers_send_values_to_the_driver() -> None:
    class Taking(CalledHosts):
        taken: list[bytes] = []

        def on_log(self, data: bytes) -> None:
            self.taken.append(data)

    def log() -> None:
        import horovodlike as hvd
        from horovodlike._bootstrap import driver_client
        from horovodlike._net.secure_channel import FrameError

        hvd.init()
        worker = driver_client.current()
        assert worker is not None
        with pytest.raises(FrameError, match="over the limit"):
            worker.log(bytes(1 << 22))
        for size in (0, 1, 100_000):
            worker.log(bytes(size))

    called = Taking([HERE])
    callers = Callers(called)
    callers.add("a", 1)
    horovodlike.run(log, num_proc=1, host_discovery=called, reset_limit=0)
    assert [len(each) for each in Taking.taken] == [0, 1, 100_000]
    assert callers.join() == {"a": 0}


def test_output_goes_where_it_is_wanted(
    called: CalledHosts, callers: Callers, capfd: pytest.CaptureFixture[str]
) -> None:
    callers.add("a", 1)
    horovodlike.run(lambda: print("words"), num_proc=1, host_discovery=called)
    assert capfd.readouterr().out == "[0]<stdout>: words\n"


def test_an_exception_of_the_function(called: CalledHosts, callers: Callers) -> None:
    def fail() -> None:
        raise KeyError("no such thing")

    callers.add("a", 1)
    with pytest.raises(KeyError, match="no such thing"):
        horovodlike.run(fail, num_proc=1, host_discovery=called, reset_limit=0)
    assert callers.join() == {"a": 1}


def test_a_host_that_leaves(
    called: CalledHosts, callers: Callers, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def train() -> list[int]:
        import horovodlike as hvd
        import horovodlike.elastic as elastic

        hvd.init()
        state = elastic.ObjectState(sizes=[])

        @elastic.run
        def loop(state: Any) -> list[int]:
            while len(set(state.sizes)) < 2 or not Path("left").exists():
                if state.sizes[-1:] != [hvd.size()]:
                    state.sizes = [*state.sizes, hvd.size()]
                if hvd.size() == 2 and hvd.rank() == 0:
                    Path("both").touch()
                time.sleep(0.005)
                state.commit()
            return list(state.sizes)

        found: list[int] = loop(state)
        return found

    os.chdir(tmp_path)
    callers.add("a", 1)
    second = callers.add("b", 1)

    def leave() -> None:
        deadline = time.monotonic() + SLACK_S
        while not Path("both").exists() and time.monotonic() < deadline:
            time.sleep(0.005)
        second.leave(40.0)
        while "b" not in callers.codes and time.monotonic() < deadline:
            time.sleep(0.005)
        Path("left").touch()

    threading.Thread(target=leave).start()
    [sizes] = horovodlike.run(train, num_proc=2, min_np=1, host_discovery=called)
    assert sizes == [2, 1] and called.is_over
    assert callers.join() == {"a": 0, "b": 143}
    assert "its workers may take 40 s to commit and exit" in capfd.readouterr().err


def test_a_name_that_is_taken(called: CalledHosts, callers: Callers, capfd: pytest.CaptureFixture[str]) -> None:
    def refused() -> None:
        callers.add("a", 1)
        deadline = time.monotonic() + SLACK_S
        while "a" not in called.find():
            assert time.monotonic() < deadline
            time.sleep(0.005)
        with pytest.raises(HostsError, match="two hosts claim to be a; give each a name of its own"):
            call_in(called.key.hex(), "a", HERE, called.port, 1)
        callers.add("b", 1)

    other = threading.Thread(target=refused)
    other.start()
    results = horovodlike.run(gather, num_proc=2, host_discovery=called)
    other.join()
    assert len(results) == 2
    assert "is refused: two hosts claim to be a" in capfd.readouterr().err


def refuse(called: CalledHosts, until: Callable[[], bool]) -> None:
    """Plays the driver's part until something is true."""
    deadline = time.monotonic() + SLACK_S
    while not until():
        assert time.monotonic() < deadline
        assert called.attend() == []
        time.sleep(0.005)


@pytest.mark.parametrize(
    ("join", "message"),
    [
        ({"version": "0.0.1", "host": "h", "num_proc": 1}, r"horovodlike 0\.0\.1 is installed on a node \(h\), but"),
        ({"version": None, "host": "h"}, "a node cannot be understood"),
        ({"version": None, "host": "h", "num_proc": 0}, "a node cannot be understood.*it has 0 ranks"),
        ({"version": None, "host": "h", "num_proc": 1, "name": "a\nb"}, "cannot be the name of a host"),
    ],
)
def test_a_caller_that_is_refused(called: CalledHosts, join: dict[str, Any], message: str) -> None:
    said: list[str] = []
    called.set_say(said.append)
    answers: list[str] = []

    def call() -> None:
        connection = connect_node(called.key, 0, 0, HERE, called.port, time.monotonic() + SLACK_S)
        connection.send(FrameKind.JOIN, 0, encode_text({**join, "version": join["version"] or installed_version()}))
        frame, *_ = connection.await_frame(time.monotonic() + SLACK_S, FrameKind.OUTCOME)
        answers.append(frame.payload.decode())
        connection.hang_up()

    caller = threading.Thread(target=call)
    caller.start()
    refuse(called, lambda: bool(answers))
    caller.join()
    with pytest.raises(HostsError, match=message):
        raise HostsError(answers[0])
    assert said == [f"127.0.0.1 is refused: {answers[0]}"]


def test_more_hosts_than_there_may_be() -> None:
    called = CalledHosts([HERE], nodes=2, own={"here": 1})
    answers: dict[str, FrameKind] = {}

    def call(name: str) -> None:
        connection = connect_node(called.key, 0, 0, HERE, called.port, time.monotonic() + SLACK_S)
        join = {"version": installed_version(), "host": "h", "name": name, "num_proc": 3}
        connection.send(FrameKind.JOIN, 0, encode_text(join))
        frame, *_ = connection.await_frame(time.monotonic() + SLACK_S, FrameKind.PLACE, FrameKind.OUTCOME)
        answers[name] = frame.kind
        if name == "b":
            assert frame.payload == b"--nnodes ends with 2, all there; for spares, raise it with --max-np"
        connection.hang_up()

    for name, expected in (("a", ["a"]), ("b", [])):
        caller = threading.Thread(target=call, args=(name,))
        caller.start()
        found = []
        while name not in answers:
            found += [each.name for each in called.attend()]
            time.sleep(0.005)
        caller.join()
        assert found == expected
    assert answers == {"a": FrameKind.PLACE, "b": FrameKind.OUTCOME}
    assert called.find() == {"here": 1, "a": 3}
    called.close()


def test_another_key(called: CalledHosts) -> None:
    ended: list[str] = []

    def call() -> None:
        with pytest.raises(HostsError) as error:
            call_in(JobKey.random().hex(), "a", HERE, called.port, 1)
        ended.append(str(error.value))

    caller = threading.Thread(target=call)
    caller.start()
    refuse(called, lambda: bool(ended))
    caller.join()
    assert ended[0].endswith("hung up on this node: give all nodes the same key")


@pytest.mark.slow
def test_a_program_that_is_not_there(called: CalledHosts, callers: Callers) -> None:
    caller = callers.add("a", 1, command=("/no/such/program",))
    callers.add("b", 1)
    assert len(horovodlike.run(gather, num_proc=1, host_discovery=called)) == 1
    assert callers.join() == {"a": 1, "b": 0}
    assert caller.reason == (
        "node 0 says: this host cannot be used: there is no program /no/such/program, which the ranks are to "
        "execute; install it there too"
    )


@pytest.mark.parametrize("described", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_host_that_makes_no_sense(
    called: CalledHosts, callers: Callers, described: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    ends: list[str] = []

    def call() -> None:
        connection = connect_node(called.key, 0, 0, HERE, called.port, time.monotonic() + SLACK_S)
        join = {"version": installed_version(), "host": "h", "name": "nonsense", "num_proc": 1}
        connection.send(FrameKind.JOIN, 0, encode_text(join))
        connection.await_frame(time.monotonic() + SLACK_S, FrameKind.PLACE)
        if described:
            connection.send(FrameKind.DESCRIPTION, 0, encode_text(describe(encode_needs("/", "/bin/sh"))))
            connection.send(FrameKind.STARTED, 77, b"1")
        else:
            connection.send(FrameKind.DESCRIPTION, 0, b"[]")
        frame, *_ = connection.await_frame(time.monotonic() + SLACK_S, FrameKind.OUTCOME)
        ends.append(frame.payload.decode())
        connection.hang_up()
        callers.add("b", 1)

    caller = threading.Thread(target=call)
    caller.start()
    results = horovodlike.run(gather, num_proc=1, host_discovery=called)
    caller.join()
    assert len(results) == 1
    why = "which it does not have" if described else "is not understood"
    assert why in capfd.readouterr().err
    assert why in ends[0]


@pytest.mark.parametrize("connects", [True, False])
def test_a_host_that_leaves_before_it_has_workers(called: CalledHosts, callers: Callers, connects: bool) -> None:
    joined = []
    if not connects:
        called.close()
    caller = callers.add("a", 1)
    deadline = time.monotonic() + SLACK_S
    while connects and not joined and time.monotonic() < deadline:  # it is not answered before the job begins
        joined = called._listener.attend()
        time.sleep(0.01)
    caller.leave()
    assert callers.join() == {"a": 143}
    for connection, *_ in joined:
        connection.hang_up()


def test_a_host_that_gives_up_makes_room(called: CalledHosts) -> None:
    def call(name: str) -> NodeConnection:
        connection = connect_node(called.key, 0, 0, HERE, called.port, time.monotonic() + SLACK_S)
        join = {"version": installed_version(), "host": "h", "name": name, "num_proc": 1}
        connection.send(FrameKind.JOIN, 0, encode_text(join))
        return connection

    said: list[str] = []
    called.set_say(said.append)
    names: list[str] = []
    ended = threading.Event()

    def serve() -> None:
        while not ended.is_set():
            names.extend(caller.name for caller in called.attend())
            time.sleep(0.01)

    server = threading.Thread(target=serve)
    server.start()
    try:
        older = call("a")
        older.await_frame(time.monotonic() + SLACK_S, FrameKind.PLACE)
        newer = call("a")  # the older one never answers
        other = call("b")  # so that the newer one is known
        other.await_frame(time.monotonic() + SLACK_S, FrameKind.PLACE)
        newer.hang_up()
        older.hang_up()
        deadline = time.monotonic() + SLACK_S
        while called._contenders and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        ended.set()
        server.join()
    assert not called._contenders and names == ["a", "b"]
    other.hang_up()


def test_a_job_that_is_not_there(called: CalledHosts) -> None:
    called.close()
    with pytest.raises(
        HostsError, match=r"the job at 127\.0\.0\.1 port \d+ cannot be reached .*does it run there still"
    ):
        call_in(called.key.hex(), "a", HERE, called.port, 1, start_timeout=0.5)
