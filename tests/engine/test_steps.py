"""Steps that scripts, optimizers and callbacks mark, and what the kernel says of a process."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator

import pytest
from support.ranks import RankPool

import horovodlike as hvd
from horovodlike._engine import processor, sent_bytes, steps


@pytest.fixture(autouse=True)
def no_steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The time that a mark sees: the test appends to the list."""
    steps.reset()
    times = [100.0]
    monkeypatch.setattr(steps, "perf_counter", lambda: times[-1])
    yield times
    steps.reset()


def test_steps_are_counted_with_their_time_and_samples(no_steps: list[float]) -> None:
    for samples in (8, 8, 4):
        hvd.step(samples)
        no_steps.append(no_steps[-1] + 0.5)
    metrics = hvd.metrics()
    assert (metrics["steps"], metrics["samples"], metrics["step_seconds"]) == (3, 20, 1.0)


def test_the_most_certain_source_counts_alone() -> None:
    for _ in range(3):
        steps.mark()
        steps.mark(steps.BY_CALLBACK)
    assert hvd.metrics()["steps"] == 3
    for _ in range(3):
        steps.mark()
        steps.mark(steps.BY_CALLBACK)
        hvd.step(2)
    assert (hvd.metrics()["steps"], hvd.metrics()["samples"]) == (6, 6)


def test_steps_of_graphs_are_those_of_an_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [0, 0.0]
    monkeypatch.setattr(steps, "_of_graphs", lambda: tuple(found))
    steps.mark()
    found[:] = [3, 1.5]
    assert (hvd.metrics()["steps"], hvd.metrics()["step_seconds"]) == (4, 1.5)
    steps.mark(steps.BY_CALLBACK)  # of the same step: the number never falls
    assert (hvd.metrics()["steps"], hvd.metrics()["step_seconds"]) == (4, 1.5)
    found[:] = [4, 2.0]
    assert hvd.metrics()["steps"] == 4
    steps.mark(steps.BY_CALLBACK)
    assert hvd.metrics()["steps"] == 5


def test_who_reads_while_another_source_begins_to_count_sees_no_step_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(steps, "_of_graphs", lambda: (3, 1.5))
    monkeypatch.setattr(steps, "perf_counter", lambda: seen.append(steps.counted()) or 100.0)
    steps.mark(steps.BY_CALLBACK)
    assert [*seen, steps.counted()] == [(3, 0.0, 1.5)] * 2


def _blocked(late_rank: int) -> tuple[float, int]:
    import time

    import numpy as np

    import horovodlike as hvd

    hvd.step()
    hvd.barrier()
    before = hvd.metrics()
    for _ in range(5):
        if hvd.rank() == late_rank:
            time.sleep(0.2)  # this is what is measured
        hvd.allreduce(np.ones(4, np.float32), name="x")
        hvd.step()
    after = hvd.metrics()
    return after["blocked_seconds"] - before["blocked_seconds"], after["steps"] - before["steps"]


def test_ranks_know_how_long_they_were_blocked(ranks: Callable[[int], RankPool]) -> None:
    results = ranks(3).run(_blocked, 1)
    assert [steps for _, steps in results] == [5, 5, 5]
    assert min(results[0][0], results[2][0]) > 0.6
    assert results[1][0] < min(results[0][0], results[2][0]) / 2


def test_the_processor_time_of_this_process() -> None:
    watched = processor.Processor()
    before = watched.measure()
    ends = threading.Event()
    thread = threading.Thread(target=ends.wait)
    thread.start()
    while watched.measure()["cpu_seconds"] < before["cpu_seconds"] + 0.05:
        pass
    ends.set()
    thread.join()
    after = watched.measure()
    assert all(after[name] >= value for name, value in before.items() if name != "frequency_hertz")
    assert before.keys() == after.keys()


def test_kernels_that_tell_less(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(path: str, *arguments: object, **options: object) -> None:
        raise FileNotFoundError(path)

    monkeypatch.setattr(processor, "open", missing, raising=False)
    monkeypatch.setattr(processor.Path, "read_text", missing)
    found = processor.Processor().measure()
    assert found.keys() == {"cpu_seconds"}


def test_the_bytes_that_connections_have_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sent_bytes, "_FEWEST_BYTES", 1)
    before = len(os.listdir("/proc/self/fd"))
    with (
        socket.create_server(("127.0.0.2", 0)) as server,
        socket.create_connection(server.getsockname(), source_address=("127.0.0.3", 0)) as connected,
        server.accept()[0] as accepted,
    ):
        connected.sendall(b"x" * 100_000)
        left = 100_000
        while left:
            left -= len(accepted.recv(left))
        found = {(here, there): (sent, busy) for here, there, sent, busy in sent_bytes.measure()}
    assert found["127.0.0.3", "127.0.0.2"][0] in (100_000, 100_001)  # the kernel counts the first packet
    assert found["127.0.0.3", "127.0.0.2"][1] >= 0
    assert len(os.listdir("/proc/self/fd")) == before
