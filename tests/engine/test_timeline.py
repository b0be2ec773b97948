"""The timeline: its files, the names of its events, and the files of all ranks made into one."""

from __future__ import annotations

import json
import socket
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
        assert (spans[1]["args"]["bytes"], spans[1]["args"]["ranks"]) == (24, 2)
        assert (events[0]["args"]["rank"], events[0]["args"]["size"]) == (rank, 2)
        assert events[0]["args"]["host"] == socket.gethostname()
        assert "device" not in spans[1]["args"]
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
    assert {span["tid"] % 3 for span in spans} == {0, 1, 2}
    numbers = {tuple(span["args"]["collective"] for span in spans if span["tid"] % 3 == rank) for rank in range(3)}
    assert len(numbers) == 1
    # A collective is under way on all ranks at some time.
    for number in next(iter(numbers)):
        same = [span for span in spans if span["args"]["collective"] == number]
        assert max(span["ts"] for span in same) <= min(span["ts"] + span["dur"] for span in same) + 1000
    threads = {event["args"]["name"] for event in merged if event["name"] == "thread_name"}
    # A slice may end after the next request of its tensor, which then is in a row behind: "rank 0 (2)".
    assert {name.partition(" (")[0] for name in threads} == {"rank 0", "rank 1", "rank 2"}
    check_trace(merged)
    assert "gradients" in summarize(path)
    with pytest.raises(ValueError, match="give the files of which it was merged"):
        summarize(tmp_path / "timeline.merged.json")


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
    assert spans["ALLREDUCE", 0]["ts"] <= target["ts"] <= spans["ALLREDUCE", 0]["ts"] + spans["ALLREDUCE", 0]["dur"]
    assert spans["NEGOTIATE_ALLREDUCE", 0]["dur"] > 90_000
    late = next(line for line in summarize(path).splitlines() if line.endswith("by rank 0"))
    assert late.split()[0] == "1" and int(late.split()[1]) >= 1


def _timeline(rank: int, tensors: list[str], start: int = 1000, **head: Any) -> list[dict[str, Any]]:
    about = {"rank": rank, "size": 2, "host": "a", "start_time_since_epoch_in_micros": start} | head
    events = [{"ph": "M", "name": "process_name", "pid": 0, "args": about}]
    names = [
        {"ph": "M", "name": "process_name", "pid": row, "args": {"name": name}} for row, name in enumerate(tensors, 1)
    ]
    return events + names


def _collective(rank: int, row: int, number: int, begin: float, duration: float) -> dict[str, Any]:
    arguments = {"collective": number, "ranks": 1, "bytes": 4}
    times = {"ts": begin, "dur": duration}
    return {"ph": "X", "name": "ALLREDUCE", "pid": row, "tid": rank, "args": arguments, **times}


def test_a_request_during_the_reduction_of_its_tensor_has_another_row() -> None:
    events = _timeline(0, ["a"])
    for number, (begin, duration) in enumerate([(1, 2), (5, 5)]):
        events.append({"ph": "X", "name": "NEGOTIATE_ALLREDUCE", "pid": 1, "tid": 0, "ts": begin, "dur": duration})
        events.append(_collective(0, 1, number, begin + duration, 4))
    merged = merge([events])
    check_trace(merged)
    assert {event["args"]["name"] for event in merged if event["name"] == "thread_name"} == {"rank 0", "rank 0 (2)"}


def test_merging_aligns_clocks_and_names() -> None:
    first, second = _timeline(0, ["a", "b"]), _timeline(1, ["b"], 1010)
    first += [_collective(0, 1, 1, 1.5, 1), _collective(0, 2, 2, 1.5, 1)]
    merged = merge([first, [*second, _collective(1, 1, 2, 1.5, 1)]])
    spans = {(event["tid"], event["pid"]): event["ts"] for event in merged if event["ph"] == "X"}
    assert spans == {(0, _row(merged, "a")): 1.5, (0, _row(merged, "b")): 1.5, (1, _row(merged, "b")): 11.5}


def _many(rank: int, rows: int, numbers: int) -> list[dict[str, Any]]:
    """Return the timeline of a rank whose batches have a tensor in each row; rank 1 requests each 2 ms later."""
    events = _timeline(rank, [f"grad.{row}" for row in range(rows)])
    for number in range(numbers):
        begin, end = 10_000 * number + 2000 * rank + 1, 10_000 * number + 2100
        for row in range(1, rows + 1):
            wait = {"ts": begin + row / 1000, "dur": end - begin - row / 1000}
            events.append({"ph": "X", "name": "NEGOTIATE_ALLREDUCE", "pid": row, "tid": rank, **wait})
        events += [_collective(rank, row, number, end, 50) for row in range(1, rows + 1)]
    for event in events:
        if "collective" in event.get("args", {}):
            event["args"]["ranks"] = 2
    return events


def test_one_arrow_for_each_batch_and_rank_that_waited() -> None:
    merged = merge(_many(rank, 20, 3) for rank in range(2))
    check_trace(merged)
    found = arrows(merged)
    assert len(found) == 3 and {source["name"] for source, _ in found} == {"rank 1 was last"}
    assert {source["pid"] for source, _ in found} == {_row(merged, "grad.19")}  # the tensor requested last


@pytest.mark.timeout(60)
def test_merging_takes_time_in_proportion_to_the_events() -> None:
    merged = merge(_many(rank, 500, 100) for rank in range(2))
    assert sum(event["ph"] == "X" for event in merged) == 200_000 and len(arrows(merged)) == 100


@pytest.mark.parametrize(
    ("timelines", "message"),
    [
        ([[]], "does not say when it began"),
        ([_timeline(0, [], size=None)], "another version of horovodlike has written it"),
        ([[*_timeline(0, ["a"]), {**_collective(0, 1, 1, 0, 1), "args": {}}]], "event 2 lacks something"),
        ([[*_timeline(0, ["a"]), _collective(0, 1, 1, float("inf"), 1)]], "event 2 has no valid time as its ts"),
        ([_timeline(0, []), _timeline(1, [], size=3)], "files of several jobs, remove those of earlier ones"),
        ([_timeline(0, []), _timeline(0, [])], "rank 0 of 2, rank 0 of 2"),
    ],
)
def test_what_is_no_timeline(timelines: list[list[dict[str, Any]]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        merge(timelines)


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
