"""The summary of profiles of which the right answers are known, and what it suggests."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.profiles import MS, STEP, MadeJob

from horovodlike.timeline import merge_profile, path_of_rank, summarize


def _table(text: str, head: str) -> dict[str, list[str]]:
    """Return the cells of a table by the first one of each row."""
    lines = text.splitlines()
    first = next(number for number, line in enumerate(lines) if line.lstrip().startswith(head))
    rows = {}
    for line in lines[first + 1 :]:
        if not line or line.startswith(("hidden", "exposed")):
            break
        name, *cells = line.replace(" %", "%").split()
        rows[name] = cells
    return rows


def _write(job: MadeJob, folder: Path) -> str:
    return summarize(job.write(folder))


def test_shares_of_time(tmp_path: Path) -> None:
    text = _write(MadeJob(["a", "a"], delays={1: 20 * MS}), tmp_path)
    assert text.splitlines()[0] == "2 ranks, torch, steps 1204 to 1207"
    # 40 ms of computing and 5 ms of communicating in a step of 100 ms; the other rank computes 20 ms longer.
    assert _table(text, "rank  host") == {
        "0": ["a", "100.0", "100.0", "100.0", "40%", "0%", "5%", "20%", "35%"],
        "1": ["a", "100.0", "100.0", "100.0", "60%", "0%", "5%", "0%", "35%"],
    }
    assert _table(text, "late rank") == {"1": ["4", "of", "4", "20.00", "20.00", "ms", "by", "rank", "0"]}
    assert "Rank 1 holds up the others" in text and "docs/users/monitor.md" in text
    assert "Batches: 1.0 a step, of 3.0 tensors each; median size 3.0 KiB, 100 % below 64 KiB" in text
    # A third of 5 ms each.
    assert _table(text, "tensor")["grad.1"] == ["1.0", "KiB", "4", "1.667", "0.00"]
    # 40 and 60 ms of it, less the 20 ms of the operator within.
    assert _table(text, "self time of") == {"aten::linear": ["30.000", "30.0%"], "aten::mm": ["20.000", "20.0%"]}


def test_what_computation_hides(tmp_path: Path) -> None:
    job = MadeJob(["a", "a"])
    job.write(tmp_path)
    for rank in range(2):
        trace = job.trace(rank)
        for step in range(job.num_steps):  # begins with the batch, and ends 1 ms before it
            begin = job.begun(step) - job.begun(0) + 40_000 + 20 + 50
            ends = {"ts": step * STEP / 1000 + 40_070, "dur": 4000}
            assert begin >= 40_070
            trace["traceEvents"].append({"ph": "X", "cat": "cpu_op", "name": "next", "pid": 77, "tid": 5, **ends})
        (tmp_path / f"rank{rank}.trace.json").write_text(json.dumps(trace))
    rows = _table(summarize(tmp_path), "rank  host")
    assert rows["0"][4:] == ["44%", "4%", "1%", "0%", "55%"]


def test_the_trace_of_a_profile_tells_the_same_as_its_folder(tmp_path: Path) -> None:
    job = MadeJob(["a", "b", "b"], delays={2: 9 * MS}, offsets={"b": 500 * MS}, skipped={1: (1, 0)})
    text = _write(job, tmp_path)
    assert summarize(merge_profile(tmp_path)) == text
    assert "clocks corrected: b -" in text


def test_samples_of_stacks_do_not_tell_what_computes(tmp_path: Path) -> None:
    text = _write(MadeJob(["a", "a"], framework="stacks"), tmp_path)
    assert _table(text, "rank  host")["0"][4:] == ["95%", "-", "5%", "0%", "-"]
    assert "No operators were recorded" in text.replace("\n", " ") and "aten::linear" in text


def test_some_ranks_only(tmp_path: Path) -> None:
    job = MadeJob(["a"] * 4, delays={3: 10 * MS})
    text = summarize(job.write(tmp_path, [0, 1]))
    assert text.startswith("2 of 4 ranks, torch")
    assert _table(text, "rank  host")["0"][7] == "10%" and "late rank" not in text
    assert "Not all ranks have a timeline" in text


def test_files_that_are_missing(tmp_path: Path) -> None:
    job = MadeJob(["a", "a"])
    job.write(tmp_path)
    for path in tmp_path.glob("*.t*.json"):
        path.unlink()
    assert _table(summarize(tmp_path), "rank  host")["1"] == [
        "a",
        "100.0",
        "100.0",
        "100.0",
        "100%",
        "-",
        "0%",
        "0%",
        "-",
    ]
    (tmp_path / "rank0.trace.json").write_text('{"traceEvents": [], "epoch_us": 0}')
    assert _table(summarize(tmp_path), "rank  host")["0"][4:] == ["0%", "0%", "0%", "0%", "100%"]


def test_neither_steps_nor_collectives(tmp_path: Path) -> None:
    job = MadeJob(["a"], framework="stacks")
    job.write(tmp_path)
    (tmp_path / "rank0.timeline.json").unlink()
    (tmp_path / "rank0.json").write_text(json.dumps({**job.about(0), "marks": [], "first_step": None}))
    text = summarize(tmp_path)
    assert text.startswith("1 rank, stacks, 0.340 s; no steps are marked")
    assert _table(text, "self time of")["aten::linear"] == ["80.000", "23.5%"]


def test_timelines(tmp_path: Path) -> None:
    job = MadeJob(["a", "a"], delays={1: 20 * MS})
    path = tmp_path / "timeline.json"
    for rank in range(2):
        path_of_rank(path, rank).write_text(json.dumps(job.timeline(rank)))
    text = summarize(path)
    assert "no steps are marked" in text
    # From the first request to the end of the last batch: 3 steps, 20 ms of waiting in each of 4, and 5 ms of reducing.
    whole = 3 * 100 + 20 + 0.07 + 5
    waits = f"{100 * 4 * 20 / whole:.0f}%"
    assert _table(text, "rank  host")["0"] == ["-", f"{whole:.1f}", *("69%", "-", "6%", waits, "-")]
    command = [sys.executable, "-m", "horovodlike.timeline"]
    for words in ([str(path)], ["summary", str(tmp_path / "timeline.merged.json")]):
        done = subprocess.run([*command, *words], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
    assert done.stdout == text + "\n"


def test_nothing_is_suggested_without_a_reason(tmp_path: Path) -> None:
    job = MadeJob(["a", "a"], tensors=1)
    job.write(tmp_path)
    for rank in range(2):
        trace = job.trace(rank)
        steps = {"ts": 0, "dur": STEP * job.num_steps / 1000}
        trace["traceEvents"].append({"ph": "X", "cat": "cpu_op", "name": "busy", "pid": 77, "tid": 5, **steps})
        (tmp_path / f"rank{rank}.trace.json").write_text(json.dumps(trace))
    assert "Nothing to try follows from these numbers." in summarize(tmp_path)


def test_suggestions_for_small_batches_for_input_and_for_taking_turns(tmp_path: Path) -> None:
    job = MadeJob(["a", "a"])
    job.write(tmp_path)
    for rank in range(2):
        events = job.timeline(rank)[:4]
        for number in range(job.num_steps * 5):  # each of 5 batches a step takes 6 ms; who is last changes
            at = 1000 + number // 5 * 100_000 + 45_000 + number % 5 * 10_000
            late = 3000 if number % 2 == rank else 0
            row = {"ph": "X", "pid": 1, "tid": rank}
            events.append({**row, "name": "NEGOTIATE_ALLREDUCE", "ts": at + late, "dur": 3050 - late})
            arguments = {"collective": number + 1, "bytes": 4}
            events.append({**row, "name": "ALLREDUCE", "args": arguments, "ts": at + 3050, "dur": 6000.0})
        (tmp_path / f"rank{rank}.timeline.json").write_text(json.dumps(events))
    text = " ".join(summarize(tmp_path).split())
    assert "1. In 30 % of the time ranks are in collectives" in text and "HOROVODLIKE_OVERLAP=always" in text
    assert "5 batches a step are smaller than 64 KiB" in text and "HOROVODLIKE_CYCLE_TIME=1" in text
    assert "4." not in text.partition("late rank")[0].partition("What to try")[2]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[", "damaged"),
        ("3", "no list of events"),
        ("{}", "was not made of a profile by this version"),
        ('{"horovodlike": {"version": 2}, "traceEvents": []}', "was not made of a profile by this version"),
        ('{"horovodlike": {"version": 1, "ranks": [{}]}, "traceEvents": []}', "lacks something"),
        (
            '{"horovodlike": {"version": 1, "ranks": [], "origin_ns": 0}, "traceEvents": []}',
            "no steps, no collectives and no operators",
        ),
        ("[]", "does not say when it began"),
    ],
)
def test_errors_name_the_file(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "some.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message) as caught:
        summarize(path)
    assert str(path) in str(caught.value)
    command = [sys.executable, "-m", "horovodlike.timeline", "summary", str(path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "") and str(path) in done.stderr
    assert "Traceback" not in done.stderr


def test_the_command_merges_a_profile(tmp_path: Path) -> None:
    MadeJob(["a", "a"]).write(tmp_path)
    command = [sys.executable, "-m", "horovodlike.timeline", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and done.stdout.startswith(f"{tmp_path / 'trace.json'}: open it at")
    done = subprocess.run([*command, "-o", "x"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and "leave --output out" in done.stderr
