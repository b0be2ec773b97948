"""The timeline: its files, the names of its events, and the files of all ranks made into one."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.profiles import arrows, check_trace
from support.ranks import RankPool

from horovodlike.timeline import merge, path_of_rank, start_timeline, stop_timeline, summarize

PATIENCE_SECONDS = 30


def _work(name: str, rounds: int) -> None:
    import numpy as np
    from support.collectives import allreduce, enqueue, gathered

    from horovodlike._engine import ops

    for _ in range(rounds):
        allreduce(name, np.ones((2, 3), np.float32))
    gathered(enqueue(ops.Kind.ALLGATHER, 'a "quoted" name', [np.ones(2, np.float32)]), np.float32)


def _write(path: str, mark_cycles: bool) -> None:
    from horovodlike.timeline import start_timeline, stop_timeline

    start_timeline(path, mark_cycles)
    _work("gradients", 3)
    stop_timeline()
    _work("not seen", 1)


def _events(path: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(path.read_text())
    return events


def _row(events: list[dict[str, Any]], name: str) -> int:
    (row,) = [event["pid"] for event in events if event["ph"] == "M" and event["args"].get("name") == name]
    return int(row)


@pytest.mark.parametrize("mark_cycles", [False, True])
def test_each_rank_writes_the_events_that_horovod_names(
    ranks: Callable[[int], RankPool], tmp_path: Path, mark_cycles: bool
) -> None:
    path = tmp_path / "timeline.json"
    for _ in range(2):  # a second one takes the place of the first
        ranks(2).run(_write, str(path), mark_cycles)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["timeline.json", "timeline.rank1.json"]
    for rank in range(2):
        events = _events(path_of_rank(path, rank))
        assert abs(events[0]["args"]["start_time_since_epoch_in_micros"] / 1e6 - time.time()) < PATIENCE_SECONDS
        spans = [event for event in events if event["ph"] == "X" and event["pid"] == _row(events, "gradients")]
        assert [span["name"] for span in spans] == ["NEGOTIATE_ALLREDUCE", "ALLREDUCE"] * 3
        assert all(span["tid"] == rank and span["dur"] >= 0 for span in spans)
        assert spans[0]["ts"] + spans[0]["dur"] == pytest.approx(spans[1]["ts"], abs=0.01)
        assert (spans[1]["args"]["dtype"], spans[1]["args"]["shape"]) == ("float32", "[2, 3]")
        assert spans[1]["args"]["bytes"] == 24 and "device" not in spans[1]["args"]
        others = [event["name"] for event in events if event["pid"] == _row(events, 'a "quoted" name')]
        assert others[-2:] == ["NEGOTIATE_ALLGATHER", "ALLGATHER"]
        assert ("CYCLE_START" in {event["name"] for event in events}) is mark_cycles
        assert "not seen" not in path.read_text()


def test_the_file_can_be_read_while_it_is_written(fresh_ranks: Callable[..., RankPool], tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    pool = fresh_ranks(2, {"HOROVOD_TIMELINE": str(path), "HOROVODLIKE_TIMELINE_MARK_CYCLES": "1"})
    for rounds in (1, 5):
        pool.run(_work, "gradients", rounds)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while path.read_text().count('"ALLGATHER"') < (1 if rounds == 1 else 2):
            assert time.monotonic() < deadline
        assert {"ALLREDUCE", "CYCLE_START"} <= {event["name"] for event in _events(path)}


def test_later_generations_of_an_elastic_job_leave_the_files_of_earlier_ones(
    fresh_ranks: Callable[..., RankPool], tmp_path: Path
) -> None:
    path, log = tmp_path / "timeline.json", tmp_path / "autotune.csv"
    settings = {"HOROVODLIKE_TIMELINE": str(path), "HOROVODLIKE_AUTOTUNE_LOG": str(log), "HOROVODLIKE_AUTOTUNE": "1"}
    for generation in (1, 3):
        fresh_ranks(2, settings | {"HOROVODLIKE_GENERATION": str(generation)}).run(_work, "gradients", 1)
    assert {file.name for file in tmp_path.iterdir()} == {
        *("autotune.csv", "autotune.generation3.csv"),
        *("timeline.json", "timeline.rank1.json", "timeline.generation3.json", "timeline.generation3.rank1.json"),
    }


def test_one_command_merges_the_files_of_all_ranks(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    ranks(3).run(_write, str(path), True)
    command = [sys.executable, "-m", "horovodlike.timeline", str(path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "of 3 files" in done.stdout
    merged = _events(tmp_path / "timeline.merged.json")
    spans = [event for event in merged if event["name"] == "ALLREDUCE" and event["pid"] == _row(merged, "gradients")]
    assert {span["tid"] for span in spans} == {0, 1, 2}
    numbers = {tuple(span["args"]["collective"] for span in spans if span["tid"] == rank) for rank in range(3)}
    assert len(numbers) == 1
    # A collective is under way on all ranks at some time.
    for number in next(iter(numbers)):
        same = [span for span in spans if span["args"]["collective"] == number]
        assert max(span["ts"] for span in same) <= min(span["ts"] + span["dur"] for span in same) + 1000
    threads = {event["args"]["name"] for event in merged if event["name"] == "thread_name"}
    assert threads == {"rank 0", "rank 1", "rank 2"}
    check_trace(merged)
    assert "gradients" in summarize(path) and summarize(path) == summarize(tmp_path / "timeline.merged.json")


def _come_late(path: str) -> None:
    import numpy as np
    from support.collectives import allreduce

    import horovodlike
    from horovodlike.timeline import start_timeline, stop_timeline

    start_timeline(path)
    if horovodlike.rank() == 1:
        time.sleep(0.1)  # work of its own
    allreduce("gradients", np.ones(1000, np.float32))
    allreduce("behind", np.ones(1, np.float32))
    stop_timeline()


def test_an_arrow_leads_from_the_last_request_to_the_collective_on_each_other_rank(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    path = tmp_path / "timeline.json"
    ranks(2).run(_come_late, str(path))
    merged = merge(_events(path_of_rank(path, rank)) for rank in range(2))
    check_trace(merged)
    row = _row(merged, "gradients")
    ((source, target),) = [pair for pair in arrows(merged) if pair[0]["pid"] == row]
    assert (source["name"], source["tid"], target["tid"], target["pid"]) == ("rank 1 was last", 1, 0, row)
    spans = {(span["name"], span["tid"]): span for span in merged if span["ph"] == "X" and span["pid"] == row}
    assert source["ts"] == spans["NEGOTIATE_ALLREDUCE", 1]["ts"]
    assert target["ts"] == pytest.approx(spans["ALLREDUCE", 0]["ts"], abs=100)
    assert spans["NEGOTIATE_ALLREDUCE", 0]["dur"] > 90_000
    late = next(line for line in summarize(path).splitlines() if line.endswith("by rank 0"))
    assert late.split()[:2] == ["1", "1"]


def test_a_request_during_the_reduction_of_its_tensor_has_another_row() -> None:
    head = {"ph": "M", "name": "process_name", "pid": 0, "args": {"start_time_since_epoch_in_micros": 1000}}
    events: list[dict[str, Any]] = [head, {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "a"}}]
    times = [("NEGOTIATE_ALLREDUCE", 1, 2), ("ALLREDUCE", 3, 4), ("NEGOTIATE_ALLREDUCE", 5, 5), ("ALLREDUCE", 10, 1)]
    for number, (name, begin, duration) in enumerate(times):
        events.append({"ph": "X", "name": name, "pid": 1, "tid": 0, "ts": begin, "dur": duration})
        events[-1]["args"] = {"collective": number // 2}
    merged = merge([events])
    check_trace(merged)
    assert {event["args"]["name"] for event in merged if event["name"] == "thread_name"} == {"rank 0", "rank 0 (2)"}


def test_merging_aligns_clocks_and_names() -> None:
    def timeline(start: int, rank: int, rows: list[str]) -> list[dict[str, Any]]:
        head = {"ph": "M", "name": "process_name", "pid": 0, "args": {"start_time_since_epoch_in_micros": start}}
        head["args"]["name"] = "rank"
        events = [head]
        for row, name in enumerate(rows, 1):
            events.append({"ph": "M", "name": "process_name", "pid": row, "args": {"name": name}})
            events.append({"ph": "X", "name": "ALLREDUCE", "pid": row, "tid": rank, "ts": 1.5, "dur": 1.0})
        return events

    merged = merge([timeline(1000, 0, ["a", "b"]), timeline(1010, 1, ["b"])])
    spans = {(event["tid"], event["pid"]): event["ts"] for event in merged if event["ph"] == "X"}
    assert spans == {(0, _row(merged, "a")): 1.5, (0, _row(merged, "b")): 1.5, (1, _row(merged, "b")): 11.5}
    with pytest.raises(ValueError, match="no timeline"):
        merge([[]])


def test_errors(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="initialized"):
        start_timeline(tmp_path / "timeline.json")
    with pytest.raises(ValueError, match="initialized"):
        stop_timeline()

    def start_where_nothing_can_be_written(path: str) -> str:
        from horovodlike.timeline import start_timeline, stop_timeline

        stop_timeline()
        try:
            start_timeline(path)
        except ValueError as problem:
            return str(problem)
        return ""

    for problem in ranks(2).run(start_where_nothing_can_be_written, str(tmp_path / "missing" / "timeline.json")):
        assert "No such file" in problem
    command = [sys.executable, "-m", "horovodlike.timeline", str(tmp_path / "none.json")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "there is no" in done.stderr
