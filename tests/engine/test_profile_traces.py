"""One trace of the profiles of all ranks: its rows, clocks and arrows; and files that are missing or damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.profiles import EPOCH, FIRST_STEP, LATENCY, MS, STEP, MadeJob, arrows, check_trace

from horovodlike.timeline import merge_profile, summarize

Event = dict[str, Any]


def _merged(folder: Path) -> list[Event]:
    path = merge_profile(folder)
    assert path == folder / "trace.json"
    events: list[Event] = json.loads(path.read_text())["traceEvents"]
    check_trace(events)
    return events


def _rows(events: list[Event]) -> dict[tuple[str, str], tuple[int, int]]:
    """Return the numbers of each thread, by the names of its process and its own."""
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    names = [event for event in events if event["name"] == "thread_name"]
    assert len({event["tid"] for event in names}) == len(names)
    rows = {(processes[event["pid"]], event["args"]["name"]): (event["pid"], event["tid"]) for event in names}
    assert len(rows) == len(names) and len({*processes.values()}) == len(processes)
    return rows


def _slices(events: list[Event], row: tuple[int, int]) -> list[Event]:
    return [event for event in events if event["ph"] == "X" and (event["pid"], event["tid"]) == row]


def test_each_rank_has_its_steps_collectives_and_operators(tmp_path: Path) -> None:
    MadeJob(["a", "b"], delays={1: 10 * MS}).write(tmp_path)
    events = _merged(tmp_path)
    rows = _rows(events)
    ranks = ("rank 0 \u00b7 a \u00b7 77", "rank 1 \u00b7 b \u00b7 77")
    assert {*rows} == {(rank, row) for rank in ranks for row in ("steps", "collectives", "negotiation", "main")}
    for rank in ranks:
        steps = _slices(events, rows[rank, "steps"])
        assert [step["name"] for step in steps] == [f"step {FIRST_STEP + number}" for number in range(4)]
        assert all(step["dur"] == pytest.approx(STEP / 1000, abs=1) for step in steps)
        batches = _slices(events, rows[rank, "collectives"])
        assert [batch["name"] for batch in batches] == ["ALLREDUCE grad.0 + 2 more"] * 4
        assert [batch["args"]["collective"] for batch in batches] == [7, 8, 9, 10]
        waited = LATENCY / 1000 + (0 if rank == ranks[1] else 10_000)
        assert batches[0]["args"]["bytes"] == 3072
        assert batches[0]["args"]["tensors"]["grad.2"] == {"bytes": 1024, "waited_us": pytest.approx(waited)}
        negotiations = _slices(events, rows[rank, "negotiation"])
        assert [each["dur"] for each in negotiations] == pytest.approx([waited + 20] * 4)
        operators = _slices(events, rows[rank, "main"])
        assert [each["name"] for each in operators] == ["aten::linear", "aten::mm"] * 4
        assert operators[0]["ts"] == pytest.approx(steps[0]["ts"], abs=1)


def test_an_arrow_leads_from_the_rank_that_came_last_to_each_other_one(tmp_path: Path) -> None:
    MadeJob(["a", "a", "b", "b"], delays={2: 3 * MS}).write(tmp_path)
    events = _merged(tmp_path)
    rows = _rows(events)
    found = arrows(events)
    assert len(found) == 4 * 3
    targets = {
        rows[f"rank {rank} \u00b7 {host} \u00b7 77", "collectives"] for rank, host in ((0, "a"), (1, "a"), (3, "b"))
    }
    for source, target in found:
        assert (source["pid"], source["tid"]) == rows["rank 2 \u00b7 b \u00b7 77", "negotiation"]
        assert (target["pid"], target["tid"]) in targets
        assert target["ts"] - source["ts"] == pytest.approx(LATENCY / 1000)
        assert source["name"] == "rank 2 was last"


@pytest.mark.parametrize("offset", [5_000 * MS, -30 * MS, 7 * MS])
def test_clocks_that_differ_are_aligned(tmp_path: Path, offset: int) -> None:
    MadeJob(["a", "b", "b", "c"], delays={1: 2 * MS}, offsets={"b": offset}).write(tmp_path)
    events = _merged(tmp_path)
    # Known to the time of a reduction, or of a wait: that is how far the bounds are apart.
    starts = _starts_of_first_step(events)
    assert max(starts) - min(starts) < 4000 and starts[0] == starts[3] and starts[1] == starts[2]
    operators = [event for event in events if event.get("name") == "aten::linear" and event["ts"] < starts[0] + 5e4]
    assert len(operators) == 4 and max(each["ts"] for each in operators) - min(each["ts"] for each in operators) < 4000


def _starts_of_first_step(events: list[Event]) -> list[float]:
    return [event["ts"] for event in events if event.get("name") == f"step {FIRST_STEP}"]


def test_clocks_that_may_be_right_stay(tmp_path: Path) -> None:
    MadeJob(["a", "b"], offsets={"b": LATENCY}).write(tmp_path)
    starts = _starts_of_first_step(_merged(tmp_path))
    assert starts[1] - starts[0] == pytest.approx(LATENCY / 1000, abs=1)


def test_numbers_of_ranks_do_not_collide(tmp_path: Path) -> None:
    MadeJob(["a", "b", "c"]).write(tmp_path)  # all have the same pid, thread and flows
    events = _merged(tmp_path)
    flows = [event for event in events if event.get("cat") == "fwdbwd"]
    assert len(flows) == 3 * 4 * 2 and len({event["id"] for event in flows}) == 3 * 4
    assert len({event["pid"] for event in flows}) == 3
    processes = [event["pid"] for event in events if event["name"] == "process_name"]
    threads = [event["tid"] for event in events if event["name"] == "thread_name"]
    assert not {*processes} & {*threads}


def test_sixteen_ranks(tmp_path: Path) -> None:
    job = MadeJob([f"host-{rank // 4}" for rank in range(16)], delays={9: 4 * MS}, tensors=200)
    job.offsets = {"host-2": 80 * MS, "host-3": -80 * MS}
    events = _merged(job.write(tmp_path))
    assert len(arrows(events)) == 4 * 15
    assert {source["name"] for source, _ in arrows(events)} == {"rank 9 was last"}
    order = {event["pid"]: event["args"]["sort_index"] for event in events if event["name"] == "process_sort_index"}
    assert sorted(order.values()) == [*range(16)]


def test_files_of_a_rank_may_be_missing(tmp_path: Path) -> None:
    MadeJob(["a", "a", "a", "a"]).write(tmp_path)
    (tmp_path / "rank1.timeline.json").unlink()
    (tmp_path / "rank2.trace.json").unlink()
    (tmp_path / "rank3.trace.json").write_text('{"traceEvents": [], "epoch_us": 0}')
    (tmp_path / "rank3.timeline.json").write_text(json.dumps(MadeJob(["a"] * 4).timeline(3)[:1]))
    events = _merged(tmp_path)
    rows = {process.partition(" \u00b7")[0]: set[str]() for process, _ in _rows(events)}
    for process, row in _rows(events):
        rows[process.partition(" \u00b7")[0]].add(row)
    assert rows == {
        "rank 0": {"steps", "collectives", "negotiation", "main"},
        "rank 1": {"steps", "main"},
        "rank 2": {"steps", "collectives", "negotiation"},
        "rank 3": {"steps"},
    }
    assert not arrows(events)  # rank 1 or 3 may have been the last


@pytest.mark.parametrize("recorded", [[0, 3], [0, 1, 2], [1, 2, 3]])
def test_some_ranks_have_no_arrows_as_another_one_may_have_been_last(tmp_path: Path, recorded: list[int]) -> None:
    events = _merged(MadeJob(["a"] * 4, delays={2: 3 * MS, 3: MS}).write(tmp_path, recorded))
    assert {process for process, _ in _rows(events)} == {f"rank {rank} \u00b7 a \u00b7 77" for rank in recorded}
    assert not arrows(events)


def test_a_process_set_has_arrows_if_all_of_it_was_recorded(tmp_path: Path) -> None:
    job = MadeJob(["a"] * 4, delays={1: 3 * MS})
    job.write(tmp_path, [0, 1])
    for rank in (0, 1):
        events = job.timeline(rank)
        for event in events:
            if event.get("args", {}).get("collective") == 8:
                event["args"]["ranks"] = 2
        (tmp_path / f"rank{rank}.timeline.json").write_text(json.dumps(events))
    assert len(arrows(_merged(tmp_path))) == 1


def test_a_rank_that_is_in_one_collective_only_takes_no_arrows_from_the_others(tmp_path: Path) -> None:
    job = MadeJob(["a"] * 3, delays={1: 3 * MS})
    job.write(tmp_path)
    for rank in range(3):
        events = job.timeline(rank)
        if rank == 2:
            events = [each for each in events if each["ph"] == "M" or 100_000 < each["ts"] < 200_000]
        for event in events:
            if "collective" in event.get("args", {}):
                event["args"]["ranks"] = 3 if event["args"]["collective"] == 8 else 2
        (tmp_path / f"rank{rank}.timeline.json").write_text(json.dumps(events))
    assert len(arrows(_merged(tmp_path))) == 3 + 2


def test_a_batch_of_which_a_file_lacks_a_tensor_has_no_arrow(tmp_path: Path) -> None:
    job = MadeJob(["a", "a"], delays={1: 3 * MS})
    job.write(tmp_path)
    events = job.timeline(1)
    (lost,) = [
        each
        for each in events
        if each["ph"] == "X" and each["pid"] == 3 and each.get("args", {}).get("collective") == 8
    ]
    events.remove(lost)  # as when they come faster than they can be written
    (tmp_path / "rank1.timeline.json").write_text(json.dumps(events))
    assert len(arrows(_merged(tmp_path))) == 3


def test_a_rank_that_is_last_by_less_than_the_threshold_has_no_arrow(tmp_path: Path) -> None:
    assert not arrows(_merged(MadeJob(["a", "a"], delays={1: MS - 1000}).write(tmp_path)))


def test_clocks_of_which_the_difference_is_not_known(tmp_path: Path) -> None:
    job = MadeJob(["a", "b", "c"], delays={1: 3 * MS})
    job.write(tmp_path)
    events = job.timeline(1)
    for event in events:
        if event["ph"] == "X" and event["ts"] > 200_000:  # the clock of host b is set between two steps
            event["ts"] += 50_000
    (tmp_path / "rank1.timeline.json").write_text(json.dumps(events))
    assert not arrows(_merged(tmp_path))
    text = summarize(tmp_path)
    assert "not known: by how much the clocks of b differ" in text and "late rank" not in text


def test_timelines_that_begin_and_end_at_different_steps(tmp_path: Path) -> None:
    job = MadeJob(["a", "a", "b"], delays={1: 3 * MS}, num_steps=6, skipped={0: (2, 0), 1: (1, 1), 2: (0, 1)})
    events = _merged(job.write(tmp_path))
    # Of the batches 7 to 12, all ranks have 9 to 11.
    assert len(arrows(events)) == 3 * 2
    rows = _rows(events)
    last = _slices(events, rows["rank 1 \u00b7 a \u00b7 77", "negotiation"])
    expected = [each["ts"] + 20 for each in last if each["args"]["collective"] in (9, 10, 11)]
    assert sorted({source["ts"] for source, _ in arrows(events)}) == pytest.approx(expected)


def test_a_file_of_an_earlier_job_gets_no_arrows(tmp_path: Path) -> None:
    job = MadeJob(["a", "a"], delays={1: 3 * MS})
    job.write(tmp_path)
    old = job.timeline(1)
    old[0]["args"]["start_time_since_epoch_in_micros"] -= 3600 * 1000 * MS // 1000
    (tmp_path / "rank1.timeline.json").write_text(json.dumps(old))
    assert not arrows(_merged(tmp_path))


def test_steps_that_are_not_marked(tmp_path: Path) -> None:
    job = MadeJob(["a", "a"])
    job.write(tmp_path)
    for rank, marks in ((0, [EPOCH / 1e9, EPOCH / 1e9 + 2]), (1, [])):
        about = {**job.about(rank), "first_step": None, "steps": 0, "marks": marks}
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(about))
    events = _merged(tmp_path)
    rows = _rows(events)
    (recorded,) = _slices(events, rows["rank 0 \u00b7 a \u00b7 77", "steps"])
    assert (recorded["name"], recorded["dur"]) == ("recorded", pytest.approx(2e6, abs=1))
    assert ("rank 1 \u00b7 a \u00b7 77", "steps") not in rows


def test_batches_in_flight_have_rows_of_their_own(tmp_path: Path) -> None:
    job = MadeJob(["a", "a"], num_steps=2)
    job.write(tmp_path)
    for rank in range(2):
        events = job.timeline(rank)
        # The tensors of the second batch are requested while the first one is negotiated.
        for event in events:
            if event["ph"] == "X" and event["ts"] > 100_000 and event["name"].startswith("NEGOTIATE"):
                event["dur"] += 100_010
                event["ts"] -= 100_010
        (tmp_path / f"rank{rank}.timeline.json").write_text(json.dumps(events))
    rows = _rows(_merged(tmp_path))
    assert ("rank 0 \u00b7 a \u00b7 77", "negotiation 2") in rows


def test_gpus_and_names_of_processes_of_the_framework(tmp_path: Path) -> None:
    job = MadeJob(["a"])
    job.write(tmp_path)
    trace = job.trace(0)
    trace["traceEvents"] += [
        {"ph": "M", "name": "process_labels", "pid": 0, "args": {"labels": "GPU 0"}},
        {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 5.0, "dur": 2.5},
        {"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", "pid": "Spans", "tid": "P", "ts": 0, "dur": 9.5},
        {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": 12.5},
        {"ph": "X", "name": "b", "pid": 77, "tid": 78, "ts": 1, "dur": 10, "args": {"value": float("nan")}},
        {"ph": "X", "name": "overlaps", "pid": 77, "tid": 78, "ts": 5, "dur": 10},
        {"ph": "i", "s": "t", "name": "instant", "pid": 77, "tid": 79, "ts": 5},
    ]
    (tmp_path / "rank0.trace.json").write_text(json.dumps(trace))
    events = _merged(tmp_path)
    rows = _rows(events)
    main = "rank 0 \u00b7 a \u00b7 77"
    assert _slices(events, rows["rank 0 \u00b7 GPU 0", "thread 7"])[0]["name"] == "gemm"
    assert [each["name"] for each in _slices(events, rows[main, "thread 78 (2)"])] == ["overlaps"]
    assert _slices(events, rows[main, "thread 78"])[0]["args"] == {"value": None}
    assert not {"PyTorch Profiler (0)", "Record Window End"} & {event["name"] for event in events}
    assert [event["tid"] for event in events if event["name"] == "instant"] == [rows[main, "thread 79"][1]]


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("rank0.json", "{", "rank0.json is damaged, or was not written to its end"),
        ("rank0.json", "[]", "rank0.json: it is not the profile of a rank"),
        ("rank0.json", '{"rank": 0, "size": 2, "host": "a"}', "rank0.json: its 'pid' is None"),
        ("rank0.json", None, "rank0.json is of rank 1"),
        ("rank1.json", "size", "rank1.timeline.json is of rank 1 of 2, which rank1.json is not"),
        ("rank1.json", "marks", "rank1.json: its 'marks' are not the times"),
        ("rank1.json", "infinite", "rank1.json: its 'marks' are not the times"),
        ("rank1.timeline.json", '[{"ph": "M"', "rank1.timeline.json is damaged, or was not written to its end"),
        ("rank1.timeline.json", "{}", "rank1.timeline.json: it is not a timeline"),
        ("rank1.timeline.json", "[]", "rank1.timeline.json: it does not say when it began"),
        ("rank1.timeline.json", '[{"ph": "X", "ts": 1}]', "rank1.timeline.json: event 0 has no valid time as its dur"),
        ("rank1.timeline.json", '[{"ph": "i", "ts": 1}]', "rank1.timeline.json: event 0 is not one of a timeline"),
        ("rank1.timeline.json", '[{"ph": "X", "ts": 1e999}]', "timeline.json: event 0 has no valid time as its ts"),
        ("rank1.trace.json", '{"epoch_us": 1, "traceEvents": [{"ph"', "rank1.trace.json is damaged"),
        ("rank1.trace.json", '{"traceEvents": []}', "rank1.trace.json: it has no valid 'epoch_us'"),
        ("rank1.trace.json", '{"traceEvents": [], "epoch_us": 1e999}', "rank1.trace.json: it has no valid 'epoch_us'"),
        ("rank1.trace.json", '{"epoch_us": 1}', "rank1.trace.json: it has no list of events"),
        ("rank1.trace.json", [3], "rank1.trace.json: event 0 has no phase"),
        ("rank1.trace.json", [{"ph": "X", "ts": "1"}], "rank1.trace.json: event 0 has no valid time as its ts"),
        ("rank1.trace.json", [{"ph": "X", "ts": 1, "dur": 1e306}], "event 0 has no valid time as its dur"),
        ("rank1.trace.json", [{"ph": "i", "ts": 1, "pid": []}], "rank1.trace.json: event 0 is not a valid event"),
        ("rank1.trace.json", [{"ph": "i", "ts": 1, "tid": {}}], "rank1.trace.json: event 0 is not a valid event"),
        ("rank1.trace.json", [{"ph": "M", "args": 3}], "rank1.trace.json: event 0 is not a valid event"),
        ("rank1.trace.json", [{"ph": "M", "cat": []}], "rank1.trace.json: event 0 is not a valid event"),
    ],
)
def test_errors_name_the_file(tmp_path: Path, file: str, content: str | list[Any] | None, message: str) -> None:
    job = MadeJob(["a", "b"])
    job.write(tmp_path)
    (tmp_path / "trace.json").write_text("of before")
    about = job.about(1)
    changed = {"size": {**about, "size": 3}, "marks": {**about, "marks": [2, 1]}}
    changed |= {"infinite": {**about, "marks": [1, float("inf")]}}
    text = (
        content
        if isinstance(content, str)
        else json.dumps({"epoch_us": 1, "traceEvents": content} if content else about)
    )
    (tmp_path / file).write_text(json.dumps(changed[text]) if text in changed else text)
    before = {path.name for path in tmp_path.iterdir()}
    for reads in (merge_profile, summarize):
        with pytest.raises(ValueError) as caught:
            reads(tmp_path)
        assert message in str(caught.value) and str(tmp_path) in str(caught.value)
    assert {path.name for path in tmp_path.iterdir()} == before
    assert (tmp_path / "trace.json").read_text() == "of before"


def test_files_of_several_jobs(tmp_path: Path) -> None:
    MadeJob(["a", "b"]).write(tmp_path)
    MadeJob(["a", "b", "c"]).write(tmp_path, [2])
    with pytest.raises(ValueError, match="files of several jobs, remove those of earlier ones") as caught:
        merge_profile(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_events_that_name_a_thread_may_lack_the_name(tmp_path: Path) -> None:
    job = MadeJob(["a"])
    job.write(tmp_path)
    trace = job.trace(0)
    trace["traceEvents"] += [{"ph": "M", "name": "thread_name"}, {"ph": "M", "name": "process_name", "pid": 7}]
    (tmp_path / "rank0.trace.json").write_text(json.dumps(trace))
    (tmp_path / "rank0.timeline.json").write_text(json.dumps([*job.timeline(0), {"ph": "M", "name": "x", "pid": 9}]))
    assert ("rank 0 \u00b7 a \u00b7 77", "main") in _rows(_merged(tmp_path))


def test_a_folder_that_is_no_profile(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no rank0.json or the like"):
        merge_profile(tmp_path)
    with pytest.raises(FileNotFoundError):
        merge_profile(tmp_path / "missing")
