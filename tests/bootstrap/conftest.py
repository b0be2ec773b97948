"""Ranks for the tests: threads where an error is to be caught, processes where one is to be killed."""

import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from horovodlike._bootstrap import job_key
from horovodlike._bootstrap.bootstrap import Rendezvous, RendezvousServer
from horovodlike._bootstrap.environment import RankInfo

JOIN_SECONDS = 30.0


@pytest.fixture
def key() -> bytes:
    """A job's key."""
    return bytes(range(32))


@pytest.fixture
def place_of() -> Callable[..., RankInfo]:
    """Makes the place of a rank."""

    def make(rank: int, size: int, job: str = "test job", node_id: str | None = None) -> RankInfo:
        return RankInfo(
            rank=rank, size=size, local_rank=rank, local_size=size, launcher="test", job=job, node_id=node_id
        )

    return make


@pytest.fixture
def serve(key: bytes) -> Iterator[Callable[..., RendezvousServer]]:
    """Starts servers, which are closed after the test."""
    servers = []

    def start(size: int, **options: Any) -> RendezvousServer:  # noqa: ANN401
        server = RendezvousServer(key, size, **options)
        server.start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def connect(key: bytes, place_of: Callable[..., RankInfo]) -> Iterator[Callable[..., Rendezvous]]:
    """Connects ranks to a server; what is still open after the test is closed."""
    clients = []

    def make(server: RendezvousServer, rank: int, size: int, start_timeout: float = 10.0, **options: Any) -> Rendezvous:  # noqa: ANN401
        place = place_of(rank, size, options.pop("job", "test job"))
        client = Rendezvous("127.0.0.1", server.port, options.pop("key", key), place, start_timeout, **options)
        clients.append(client)
        return client

    yield make
    for client in clients:
        client.close()


@pytest.fixture
def run_ranks() -> Callable[..., list[Any]]:
    """Runs ``body(rank)`` for every rank in a thread of its own; gives what it returns or raises, by rank."""

    def run_all(size: int, body: Callable[[int], Any]) -> list[Any]:
        results: list[Any] = [None] * size

        def run(rank: int) -> None:
            try:
                results[rank] = body(rank)
            except BaseException as error:
                results[rank] = error

        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + JOIN_SECONDS
        for rank, thread in enumerate(threads):
            thread.join(max(0.0, deadline - time.monotonic()))
            assert not thread.is_alive(), f"rank {rank} hangs"
        return results

    return run_all


@pytest.fixture
def gather_all(
    connect: Callable[..., Rendezvous], run_ranks: Callable[..., list[Any]]
) -> Callable[[RendezvousServer, int], None]:
    """Has every rank come, exchange and leave; raises what any of them raises."""

    def run(server: RendezvousServer, size: int) -> None:
        def body(rank: int) -> None:
            with connect(server, rank, size) as client:
                assert client.begin(rank) == list(range(size))
                assert client.exchange("twice", {"rank": rank, "text": "\u00fc" * rank}) == [
                    {"rank": each, "text": "\u00fc" * each} for each in range(size)
                ]
                client.barrier("end")

        for result in run_ranks(size, body):
            if result is not None:
                raise result

    return run


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An environment with a runtime directory of its own, in a process that has no job's key yet."""
    monkeypatch.setattr(job_key, "_kept_key", None)
    directory = tmp_path / "run"
    directory.mkdir(mode=0o700)
    return {"XDG_RUNTIME_DIR": str(directory)}


@pytest.fixture
def start_python() -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Starts Python processes, which do not outlive the test."""
    processes: list[subprocess.Popen[str]] = []

    def start(
        code: str, environ: dict[str, str] | None = None, prefix: tuple[str, ...] = ()
    ) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [*prefix, sys.executable, "-c", textwrap.dedent(code)],
            env={**os.environ, **(environ or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()
