"""`hvdrun --nnodes MIN:MAX`: a launcher of its own on each node, and nodes that come and go."""

from __future__ import annotations

import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import textwrap
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
        self._launch, self._folder, self._program = launch, folder, program
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
        (self._folder / "finish").touch()
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
