"""Metrics of ranks: counters, stragglers, the last collectives."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from support.ranks import RankPool

import horovodlike

PATIENCE_SECONDS = 30


def _reduce_late(rounds: int, late_rank: int, seconds: float) -> horovodlike._engine.metrics.Metrics:
    import numpy as np
    from support.collectives import allreduce

    import horovodlike
    from horovodlike import basics

    before = horovodlike.metrics()
    array = np.ones(1000, np.float32)
    for _ in range(rounds):
        allreduce("ready", array)
        if basics.rank() == late_rank:
            time.sleep(seconds)  # this is what is measured
        allreduce("late", array)
    allreduce("ready", array)  # what the coordinator has counted by then is what all ranks read
    after = horovodlike.metrics()
    for key in ("batches", "requests", "executed", "bytes", "negotiation_seconds", "execution_seconds"):
        after[key] -= before[key]
    for key in ("times_late", "seconds_waited_for"):
        for rank in range(basics.size()):
            after["stragglers"][rank][key] -= before["stragglers"][rank][key]
    return after


def test_metrics_count_and_name_the_straggler(ranks: Callable[[int], RankPool]) -> None:
    rounds, seconds = 5, 0.05
    at_least = rounds * seconds / 2  # the others come at once, or, where processors are busy, somewhat later
    for late_rank in (0, 1, 2):
        results = ranks(3).run(_reduce_late, rounds, late_rank, seconds)
        for rank, metrics in enumerate(results):
            assert (metrics["requests"], metrics["executed"], metrics["bytes"]) == (11, 11, 44000)
            assert metrics["batches"] == 11
            assert metrics["execution_seconds"] > 0
            late = metrics["stragglers"][late_rank]
            assert late["times_late"] > rounds / 2
            assert late["seconds_waited_for"] >= at_least
            assert late["seconds_waited_for"] == max(each["seconds_waited_for"] for each in metrics["stragglers"])
            if rank != late_rank:
                assert metrics["negotiation_seconds"] >= at_least


def _carried(hosts: int) -> dict[str, float]:
    """Reduce on some hosts, which are hosts in name; return the bytes by transport, without those of the start."""
    import numpy as np
    from support.collectives import allreduce

    import horovodlike
    from horovodlike import basics

    rank = basics.rank()
    basics.shutdown()
    os.environ["HOROVODLIKE_HOSTID"] = f"host {rank % hosts}"
    basics.init()
    allreduce("x", np.ones(1000, np.float32))
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:  # a thread that waits may go on before the engine notes the end of a batch
        metrics = horovodlike.metrics()
        found = {name: value for name, value in metrics.items() if name.startswith("bytes_by_") and value}
        if sum(found.values()) == metrics["bytes"]:
            return found
        assert time.monotonic() < deadline, metrics


def _sampled() -> None:
    import numpy as np
    from support.collectives import allreduce

    from horovodlike._engine.metrics import sample_collectives

    begun, newest, number = time.monotonic(), 0.0, 0
    deadline = begun + PATIENCE_SECONDS
    while newest < begun:  # a sample leaves most of them out
        allreduce("x", np.ones(10, np.float32))
        records, number = sample_collectives(number, 32)
        newest = max([newest, *(each["enqueued"] for each in records)])
        assert newest <= time.monotonic() < deadline


def test_the_sample_for_the_monitor_has_times_of_the_monotonic_clock(ranks: Callable[[int], RankPool]) -> None:
    ranks(1).run(_sampled)


def test_bytes_are_counted_by_what_carries_them(fresh_ranks: Callable[..., RankPool]) -> None:
    pool = fresh_ranks(3)
    assert pool.run(_carried, 1) == [{"bytes_by_shared_memory": 4000}] * 3
    assert pool.run(_carried, 2) == [{"bytes_by_tcp": 4000}] * 3
    assert fresh_ranks(1).run(_reduced_alone) == [{}]


def _reduced_alone() -> dict[str, float]:
    import numpy as np
    from support.collectives import allreduce

    import horovodlike

    allreduce("x", np.ones(1000, np.float32))
    return {name: value for name, value in horovodlike.metrics().items() if name.startswith("bytes_by_") and value}


def _in_flight(folder: str) -> list[int]:
    import numpy as np
    from support.collectives import enqueue

    import horovodlike
    from horovodlike import basics
    from horovodlike._engine import ops

    before = horovodlike.metrics()["in_flight"]
    go_on = Path(folder) / "go on"
    deadline = time.monotonic() + PATIENCE_SECONDS
    while basics.rank() == 1 and not go_on.exists():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    handles = [enqueue(ops.Kind.ALLREDUCE, f"x{i}", [np.ones(10, np.float32)]) for i in range(5)]
    between = horovodlike.metrics()["in_flight"]
    go_on.touch()
    ops.wait_all(handles)
    return [before, between, horovodlike.metrics()["in_flight"]] if basics.rank() == 0 else []


def test_requests_in_flight_are_counted(fresh_ranks: Callable[..., RankPool], tmp_path: Path) -> None:
    assert fresh_ranks(2).run(_in_flight, str(tmp_path)) == [[0, 5, 0], []]


def test_metrics_without_an_engine_are_zeros() -> None:
    metrics = horovodlike.metrics()
    assert metrics["stragglers"] == []
    assert not any(metrics.values())
    assert horovodlike.flight_recorder() == []


def _flights() -> list[horovodlike._engine.metrics.CollectiveRecord]:
    import numpy as np
    from support.collectives import allreduce, enqueue

    import horovodlike
    from horovodlike._engine import ops

    for _ in range(300):
        allreduce("many", np.ones(10, np.float32))
    ops.wait(enqueue(ops.Kind.BARRIER, "the last", []))
    return horovodlike.flight_recorder()


def test_the_flight_recorder_has_the_last_collectives_with_the_same_numbers_on_all_ranks(
    ranks: Callable[[int], RankPool],
) -> None:
    recorded = ranks(2).run(_flights)
    for flights in recorded:
        assert len(flights) == 256
        assert [flight["number"] for flight in flights] == [flight["number"] for flight in recorded[0]]
        assert (flights[-1]["kind"], flights[-1]["name"]) == ("barrier", "the last")
        assert (flights[0]["kind"], flights[0]["name"], flights[0]["bytes"]) == ("allreduce", "many", 40)
        for flight in flights[:-1]:  # who waits may go on before the engine notes the end
            ended = flight["ended"]
            assert ended is not None
            assert flight["enqueued"] <= flight["begun"] <= ended
        assert abs(flights[-1]["begun"] - time.time()) < PATIENCE_SECONDS


def _reduce_until_it_fails() -> None:
    import numpy as np
    from support.collectives import allreduce

    from horovodlike import basics

    array = np.ones(10, np.float32)
    allreduce("before", array)
    print("reduced", flush=True)
    if basics.rank() == 1:
        signal.pause()
    allreduce("after", array)


def test_the_flight_recorder_is_written_when_the_job_breaks(
    fresh_ranks: Callable[..., RankPool], tmp_path: Path
) -> None:
    folder = tmp_path / "flights"
    settings = {"HOROVODLIKE_FLIGHT_RECORDER": str(folder), "HOROVODLIKE_FLIGHT_RECORDER_SIZE": "10"}
    pool = fresh_ranks(3, settings)
    pool.start(_reduce_until_it_fails)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not all("reduced" in pool.output(rank) for rank in range(3)):
        assert time.monotonic() < deadline
        os.sched_yield()
    pool.kill(1)
    pool.collect(PATIENCE_SECONDS)
    assert sorted(path.name for path in folder.iterdir()) == ["rank0.json", "rank2.json"]
    for rank in (0, 2):
        record = json.loads((folder / f"rank{rank}.json").read_text())
        assert (record["rank"], record["size"], record["pid"]) == (rank, 3, pool.processes[rank].pid)
        assert "rank 1" in record["reason"]
        assert [flight["name"] for flight in record["collectives"]] == ["before"]
        assert {waiting["name"] for waiting in record["in_flight"]} <= {"after"}
