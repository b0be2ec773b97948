"""`hvdrun --nnodes MIN:MAX`: a launcher of its own on each node, and nodes that come and go."""

from __future__ import annotations

import re
import secrets
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.hvdrun_process import GRACE_S, SLACK_S, Launch

PYTHON = sys.executable
PORT = 29400
HEARTBEAT_S = 2.0
HOST = socket.gethostname()


class Nodes:
    """The launchers of a job's nodes; `logs` in the workers' folder says which worker has which rank."""

    def __init__(self, launch: Callable[..., Launch], folder: Path, program: Path) -> None:
        self._launch, self.folder, self._program = launch, folder, program
        self._where = "127." + ".".join(str(1 + secrets.randbelow(254)) for _ in range(3))
        self.key = secrets.token_hex(32)

    def start(self, number: int | None, *words: Any, nodes: str = "1:4", slots: int = 1, **options: Any) -> Launch:
        flags = ["--nnodes", nodes, "--rendezvous", f"{self._where}:{PORT}", "-np", slots]
        flags += [] if number is None else ["--node-rank", number]
        flags += ["--heartbeat-timeout", HEARTBEAT_S, *words]
        env = {"HOROVODLIKE_SECRET_KEY": self.key, **options.pop("env", {})}
        return self._launch(*flags, PYTHON, self._program, env=env, stderr=subprocess.STDOUT, **options)

    def finish(self, *jobs: Launch) -> list[tuple[int, str]]:
        """Lets the workers end, and waits for that; nothing may be left."""
        (self.folder / "finish").touch()
        ended = [job.finish() for job in jobs]
        return [(each.code, each.out.decode()) for each in ended]


@pytest.fixture
def nodes(launch: Callable[..., Launch], worker: Callable[..., Path], tmp_path: Path) -> Callable[..., Nodes]:
    """`nodes(text)` makes nodes whose workers run a program; see `worker` for the text."""

    def make(program: str = "") -> Nodes:
        path = worker("print('pid', os.getpid(), flush=True)\n" + textwrap.dedent(program))
        return Nodes(launch, tmp_path, path)

    return make


def at(job: Launch, generation: int, size: int) -> None:
    """Waits until a worker of this node is in a generation of this size."""
    job.expect_match(rb"at (\d+): rank \d+ of %d\n" % size, lambda found: int(found[1]) == generation)


def at_size(job: Launch, size: int, after: int = 0) -> int:
    """Waits until a worker of this node is in a later generation of this size; returns its number."""
    return int(job.expect_match(rb"at (\d+): rank \d+ of %d\n" % size, lambda found: int(found[1]) > after)[1])


def wait_until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + SLACK_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_nodes_come_and_go(nodes: Callable[..., Nodes]) -> None:
    job = nodes()
    first = job.start(0)
    at(first, 1, 1)
    second = job.start(1, slots=2)
    at(second, 2, 3)
    first.expect(f"hvdrun: node 1, {HOST}#1 at 127.0.0.1 has called in with 2 slots".encode())
    second.signal(signal.SIGTERM)
    first.expect(f"hvdrun: {HOST}#1 leaves: ".encode())
    generation = at_size(first, 1, after=2)
    left = second.finish()
    assert left.code == 143
    assert b"hvdrun: SIGTERM: this node leaves the job; its workers may take 5 s to commit and exit" in left.out
    again = job.start(1)
    at_size(again, 2, after=generation)
    ended = job.finish(first, again)
    assert [code for code, _ in ended] == [0, 0], ended
    assert "failed" not in ended[0][1]


def test_the_job_begins_with_the_least_number_of_nodes(nodes: Callable[..., Nodes]) -> None:
    job = nodes("print('has', os.environ.get('OWN'), os.environ['HOROVODLIKE_SECRET_KEY'] == os.environ['NODES'])")
    own = {"OWN": "first", "NODES": job.key, "OMP_NUM_THREADS": None}
    first = job.start(0, nodes="2:3", slots=2, env=own)
    second = job.start(1, nodes="2:3", slots=2, env={**own, "OWN": "second"})
    third = job.start(2, "--output-filename", "logs", nodes="2:3", env={**own, "OWN": "third"})
    for each in (first, second, third):
        at_size(each, 5)
    (code, out), *others = job.finish(first, second, third)
    assert (code, [each[0] for each in others]) == (0, [0, 0])
    assert out.count("has first False") == 2
    assert [text.count(f"has {own} False") for (_, text), own in zip(others, ("second", "third"), strict=True)] == [
        2,
        1,
    ]
    assert "worker" not in others[0][1]
    assert "OMP_NUM_THREADS=1 for each of 2 ranks" in out
    [(worker, copy)] = [(each.name, (each / "stdout").read_text()) for each in (job.folder / "logs").iterdir()]
    assert re.fullmatch(r"rank\.\d", worker)
    assert "has third False" in copy


def test_nodes_that_wait_as_spares(nodes: Callable[..., Nodes]) -> None:
    job = nodes()
    first = job.start(0, "--max-np", 2, nodes="2:3")
    second = job.start(1, nodes="2:3")
    at_size(first, 2)
    spare = job.start(2, nodes="2:3")
    first.expect(b"has called in with 1 slot", 2)
    beyond = job.start(None, nodes="2:3").finish()
    assert beyond.code == 1
    assert b"node 0 says: --nnodes ends with 3, all there; for spares, raise it with --max-np" in beyond.out
    assert b"--node-rank 0" not in beyond.out
    second.signal(signal.SIGKILL)
    at_size(spare, 2)
    second.wait_gone(GRACE_S + SLACK_S)
    assert [code for code, _ in job.finish(first, spare)] == [0, 0]


def test_a_killed_node(nodes: Callable[..., Nodes]) -> None:
    job = nodes()
    first, second = job.start(0), job.start(1, slots=2)
    at_size(first, 3)
    second.signal(signal.SIGKILL)
    generation = at_size(first, 1)
    second.wait_gone(GRACE_S + SLACK_S)
    first.expect(f"hvdrun: {HOST}#1 cannot be used: hvdrun on {HOST}#1 has gone".encode())
    again = job.start(1)  # at once: nothing waits for a back-off
    at_size(again, 2, after=generation)
    assert [code for code, _ in job.finish(first, again)] == [0, 0]


def test_a_node_that_is_stopped(nodes: Callable[..., Nodes]) -> None:
    job = nodes()
    first, second = job.start(0), job.start(1)
    at_size(second, 2)
    second.signal(signal.SIGSTOP)
    try:
        generation = at_size(first, 1)
        first.expect(f"hvdrun: {HOST}#1 cannot be used: it has been silent for ".encode())
        replacement = job.start(1)
        at_size(replacement, 2, after=generation)
    finally:
        second.signal(signal.SIGCONT)
    ended = second.finish()
    assert ended.code == 1
    assert re.search(b"hvdrun: node 0 has (gone|been silent)", ended.out)
    assert [code for code, _ in job.finish(first, replacement)] == [0, 0]


@pytest.mark.slow
def test_the_workers_of_a_stopped_node_end(nodes: Callable[..., Nodes]) -> None:
    job = nodes()
    first, second = job.start(0), job.start(1)
    at_size(second, 2)
    pid = int(re.findall(rb"pid (\d+)", second.expect(b"pid "))[0])
    second.signal(signal.SIGSTOP)
    psutil.Process(pid).wait(HEARTBEAT_S + GRACE_S + SLACK_S)
    second.signal(signal.SIGCONT)
    assert second.finish().code == 1
    assert job.finish(first)[0][0] == 0


@pytest.mark.parametrize("signum", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_node_0_is_lost(nodes: Callable[..., Nodes], signum: signal.Signals) -> None:
    job = nodes()
    first, second = job.start(0), job.start(1)
    at_size(second, 2)
    first.signal(signum)
    try:
        ended = second.finish(HEARTBEAT_S + GRACE_S + SLACK_S)
    finally:
        first.signal(signal.SIGCONT) if signum == signal.SIGSTOP else None
    assert ended.code == 1
    why = "has gone" if signum == signal.SIGKILL else "has been silent for too long; is it up, and reachable?"
    assert f"hvdrun: node 0 {why}; the ranks of this node are ended" in ended.out.decode()
    if signum == signal.SIGKILL:
        first.wait_gone(GRACE_S + SLACK_S)
    else:
        assert job.finish(first)[0][0] == 0  # it goes on without the other


def test_two_live_nodes_with_one_number(nodes: Callable[..., Nodes]) -> None:
    job = nodes()
    first, second = job.start(0), job.start(1)
    at_size(second, 2)
    message = "two nodes claim to be --node-rank 1; give each its own"
    ended = job.start(1).finish()
    assert (ended.code, ended.out.decode()) == (1, f"hvdrun: node 0 says: {message}\n")
    first.expect(f"hvdrun: 127.0.0.1 is refused: {message}".encode())
    assert [code for code, _ in job.finish(first, second)] == [0, 0]


@pytest.mark.slow
def test_a_node_replaces_one_that_does_not_live_any_more(nodes: Callable[..., Nodes]) -> None:
    job = nodes()
    first, second = job.start(0), job.start(1)
    at_size(second, 2)
    second.signal(signal.SIGSTOP)  # as if its machine had lost its power: it neither answers nor ends
    again = job.start(1)
    generation = at_size(first, 1)
    at_size(again, 2, after=generation)
    first.expect(b"node 1, ", 2)
    second.signal(signal.SIGCONT)
    assert second.finish().code == 1
    assert [code for code, _ in job.finish(first, again)] == [0, 0]


@pytest.mark.slow
def test_a_node_waits_for_one_that_leaves(nodes: Callable[..., Nodes]) -> None:
    job = nodes("""
        def at_step(worker, generation, step):
            while worker == 1 and not os.path.exists("go"):
                pass
    """)
    first = job.start(0)
    at_size(first, 1)
    second = job.start(1, "--grace-period", 60)
    at_size(second, 2)
    second.signal(signal.SIGTERM)
    first.expect(b" leaves: ")
    again = job.start(1)
    contending = psutil.Process(again.process.pid)
    wait_until(lambda: [each for each in contending.net_connections("tcp") if each.status == "ESTABLISHED"])
    (job.folder / "go").touch()
    assert second.finish().code == 143
    at_size(again, 2)
    assert [code for code, _ in job.finish(first, again)] == [0, 0]


def test_a_failing_worker_of_another_node(nodes: Callable[..., Nodes]) -> None:
    job = nodes("""
        if os.environ["HOROVODLIKE_WORKER"] == "1":
            sys.exit("the cause")
    """)
    first = job.start(0)
    at_size(first, 1)
    second = job.start(1)
    at_size(second, 2)  # another one takes its place
    text = first.expect(b"    the cause").decode()
    assert re.search(rf"hvdrun: worker 1 \(pid \d+ on {HOST}#1\) exited with code 1; its last lines:\n", text)
    assert [code for code, _ in job.finish(first, second)] == [0, 0]


@pytest.mark.slow
def test_all_nodes_end_with_the_same_code(nodes: Callable[..., Nodes]) -> None:
    job = nodes("""
        def at_step(worker, generation, step):
            sys.exit("all of them")
    """)
    jobs = [job.start(number, nodes="2:2") for number in (0, 1)]
    for ended in [each.finish() for each in jobs]:
        assert ended.code == 1
        assert re.search(rb"hvdrun: worker \d \(pid \d+.*\) exited with code 1; its last lines:\n    all of", ended.out)


@pytest.mark.slow
def test_sigterm_to_node_0_ends_the_job(nodes: Callable[..., Nodes]) -> None:
    job = nodes()
    jobs = [job.start(number, nodes="2:2") for number in (0, 1)]
    for each in jobs:
        at_size(each, 2)
    jobs[0].signal(signal.SIGTERM)
    ended = [each.finish() for each in jobs]
    assert [each.code for each in ended] == [143, 143]
    assert f"hvdrun: the job was ended from outside, on {HOST}".encode() in ended[1].out


# Worker 1 does not react to SIGTERM.
STUCK = """
    def at_step(worker, generation, step):
        if worker == 1:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            print("stuck", flush=True)
            while True:
                signal.pause()
"""


@pytest.mark.slow
def test_a_worker_that_does_not_leave_in_time(nodes: Callable[..., Nodes]) -> None:
    job = nodes(STUCK)
    first = job.start(0, "--heartbeat-timeout", 5)
    at_size(first, 1)
    second = job.start(1, "--grace-period", 1)
    second.expect(b"stuck")
    second.signal(signal.SIGTERM)
    assert second.finish().code == 143
    at_size(first, 1, after=2)
    assert job.finish(first)[0][0] == 0


@pytest.mark.slow
def test_a_second_signal_kills_at_once(nodes: Callable[..., Nodes]) -> None:
    job = nodes(STUCK)
    first = job.start(0)
    at_size(first, 1)
    second = job.start(1, "--grace-period", 600)
    second.expect(b"stuck")
    second.signal(signal.SIGTERM)
    second.expect(b"this node leaves")
    second.signal(signal.SIGINT)
    assert second.finish(SLACK_S).code == 143
    assert job.finish(first)[0][0] == 0


@pytest.mark.slow
def test_a_node_on_which_the_job_does_not_fit(nodes: Callable[..., Nodes]) -> None:
    job = nodes()
    first = job.start(0, "--bind-to", "core")
    at_size(first, 1)
    ended = job.start(1, slots=9999).finish()
    assert ended.code == 1
    message = b"cannot be used: --bind-to core: 9999 ranks, but this process may use only"
    assert message in ended.out
    first.expect(message)
    assert job.finish(first)[0][0] == 0


@pytest.mark.slow
def test_another_key(nodes: Callable[..., Nodes]) -> None:
    job = nodes()
    first = job.start(0)
    at_size(first, 1)
    ended = job.start(1, env={"HOROVODLIKE_SECRET_KEY": "cd" * 32}).finish()
    assert ended.code == 1
    assert b"give all nodes the same --nnodes and the same key (--secret-key-file)" in ended.out
    named = job.start(None, env={"HOROVODLIKE_SECRET_KEY": "cd" * 32}).finish()
    assert b"hung up on this node: give all nodes the same key" in named.out
    assert job.finish(first)[0][0] == 0


@pytest.mark.slow
def test_another_number_of_nodes(nodes: Callable[..., Nodes]) -> None:
    job = nodes()
    first = job.start(0)
    at_size(first, 1)
    ended = job.start(1, nodes="1:3").finish()
    assert (ended.code, ended.out) == (
        1,
        b"hvdrun: node 0 says: --nnodes ends with 3 on node 1 but 4 on node 0; give the same everywhere\n",
    )
    assert job.finish(first)[0][0] == 0


@pytest.mark.slow
def test_too_few_nodes(nodes: Callable[..., Nodes]) -> None:
    job = nodes()
    ended = job.start(0, "--elastic-timeout", 1, nodes="3:4").finish()
    assert ended.code == 1
    assert b"Please check that you have enough resources to run at least 3 Horovod processes" in ended.out
