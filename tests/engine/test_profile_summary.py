"""The summary of profiles of which the right answers are known."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.profiles import EPOCH, MS, STEP, MadeJob

from horovodlike.timeline import path_of_rank, summarize


def _table(text: str, head: str) -> dict[str, list[str]]:
    """Return the cells of a table by the first one of each row."""
    lines = text.splitlines()
    first = next(number for number, line in enumerate(lines) if line.lstrip().startswith(head))
    rows = {}
    for line in lines[first + 1 :]:
        if not line or line.startswith(("hidden", "No operators")):
            break
        name, *cells = line.replace(" %", "%").split()
        rows[name] = cells
    return rows


def _write(job: MadeJob, folder: Path) -> str:
    return summarize(job.write(folder))


def test_shares_of_time(tmp_path: Path) -> None:
    text = _write(MadeJob(["a", "a"], delays={1: 20 * MS}), tmp_path)
    assert text.splitlines()[0] == "2 ranks, torch, steps 1204 to 1207"
    # An operator of 20 ms, which calls no other one, and 5 ms of communicating in a step of 100 ms; the other rank
    # comes 20 ms later.
    assert _table(text, "rank  host") == {
        "0": ["a", "100.0", "100.0", "100.0", "20%", "0%", "5%", "20%", "55%"],
        "1": ["a", "100.0", "100.0", "100.0", "20%", "0%", "5%", "0%", "75%"],
    }
    assert _table(text, "late rank") == {"1": ["4", "of", "4", "20.00", "20.00", "ms", "by", "rank", "0"]}
    assert "Batches: 1.0 a step, of 3.0 tensors each; median size 3.0 KiB, 100 % below 64 KiB; 0.00 GB/s" in text
    # A third of 5 ms each.
    assert _table(text, "tensor")["grad.1"] == ["1.0", "KiB", "4", "1.667"]
    # 40 and 60 ms of it, less the 20 ms of the operator within.
    assert _table(text, "self time of") == {"aten::linear": ["30.000", "30.0%"], "aten::mm": ["20.000", "20.0%"]}


def test_what_computation_hides(tmp_path: Path) -> None:
    job = MadeJob(["a", "a"])
    job.write(tmp_path)
    for rank in range(2):
        trace = job.trace(rank)
        for step in range(job.num_steps):  # begins with the batch, and ends 1 ms before it
            begin = (job.begun(step) - EPOCH) / 1000
            events = trace["traceEvents"]
            events.append({"ph": "X", "cat": "cpu_op", "name": "next", "pid": 77, "tid": 5, "ts": begin, "dur": 4000})
        (tmp_path / f"rank{rank}.trace.json").write_text(json.dumps(trace))
    rows = _table(summarize(tmp_path), "rank  host")
    assert rows["0"][4:] == ["24%", "4%", "1%", "0%", "75%"]


@pytest.mark.parametrize("name", ["SyncBatchNorm", "_Collective", "_AlltoallBackward", "horovodlike::allreduce"])
def test_an_operator_that_waits_for_a_collective_does_not_compute(tmp_path: Path, name: str) -> None:
    job = MadeJob(["a", "a"], delays={1: 20 * MS})
    job.write(tmp_path)
    for rank in range(2):
        trace = job.trace(rank)
        for step in range(job.num_steps):  # from the request to the end of the batch
            event = {"ph": "X", "cat": "cpu_op", "pid": 77, "tid": 5, "ts": step * STEP / 1000 + 40_000}
            trace["traceEvents"].append({**event, "name": name, "dur": 26_000})
            if name == "SyncBatchNorm":
                trace["traceEvents"].append({**event, "name": "aten::empty", "dur": 0.0})
                trace["traceEvents"].append({**event, "name": "aten::add", "dur": 10.0})
        (tmp_path / f"rank{rank}.trace.json").write_text(json.dumps(trace))
    assert _table(summarize(tmp_path), "rank  host")["0"][4:] == ["20%", "0%", "5%", "20%", "55%"]


def test_two_late_ranks(tmp_path: Path) -> None:
    text = _write(MadeJob(["a"] * 4, delays={2: 20 * MS, 3: 20 * MS + MS // 2}), tmp_path)
    # Ranks 0 and 1 wait 20.5 ms, and rank 2 the half of one.
    row = ["4", "of", "4", f"{(2 * 20.5 + 0.5) / 3:.2f}", "20.50", "ms", "by", "rank", "0"]
    assert _table(text, "late rank") == {"3": row}


def test_gpus_have_no_rates(tmp_path: Path) -> None:
    job = MadeJob(["a", "a"], delays={1: 20 * MS})
    job.write(tmp_path)
    for rank in range(2):
        events = job.timeline(rank)
        for event in events:
            if "collective" in event.get("args", {}):
                event["args"]["device"] = "gpu"
        (tmp_path / f"rank{rank}.timeline.json").write_text(json.dumps(events))
    text = summarize(tmp_path)
    assert "On GPUs it is not known when a collective is done" in text
    assert "GB/s" not in text and "grad.1" not in text


def test_samples_of_stacks_do_not_tell_what_computes(tmp_path: Path) -> None:
    text = _write(MadeJob(["a", "a"], framework="stacks"), tmp_path)
    assert _table(text, "rank  host")["0"][4:] == ["95%", "-", "5%", "0%", "-"]
    assert "No operators were recorded" in text.replace("\n", " ") and "aten::linear" in text


def test_some_ranks_only(tmp_path: Path) -> None:
    job = MadeJob(["a"] * 4, delays={3: 10 * MS})
    text = summarize(job.write(tmp_path, [0, 1]))
    assert text.startswith("2 of 4 ranks, torch")
    assert _table(text, "rank  host")["0"][7] == "10%" and "late rank" not in text
    assert "Of 4 of 4 batches a rank was not recorded" in text


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


def test_a_recording_without_steps(tmp_path: Path) -> None:
    job = MadeJob(["a"], framework="stacks")
    job.write(tmp_path)
    (tmp_path / "rank0.timeline.json").unlink()
    about = {**job.about(0), "marks": [EPOCH / 1e9, EPOCH / 1e9 + 0.34], "first_step": None}
    (tmp_path / "rank0.json").write_text(json.dumps(about))
    text = summarize(tmp_path)
    assert text.startswith("1 rank, stacks, 0.340 s; no steps are marked")
    assert _table(text, "self time of")["aten::linear"] == ["80.000", "23.5%"]
    (tmp_path / "rank0.json").write_text(json.dumps({**about, "marks": []}))
    with pytest.raises(ValueError, match="neither steps nor collectives") as caught:
        summarize(tmp_path)
    assert str(tmp_path) in str(caught.value)


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
    assert _table(text, "rank  host")["0"] == ["a", f"{whole:.1f}", *("69%", "-", "6%", waits, "-")]
    assert _table(text, "late rank")["1"][:3] == ["4", "of", "4"]
    command = [sys.executable, "-m", "horovodlike.timeline", "summary", str(path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and done.stdout == text + "\n"


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_timelines_of_which_one_is_missing(tmp_path: Path, missing: int) -> None:
    job = MadeJob(["a"] * 3, delays={1: 20 * MS})
    paths = {rank: path_of_rank(tmp_path / "timeline.json", rank) for rank in range(3) if rank != missing}
    for rank, path in paths.items():
        path.write_text(json.dumps(job.timeline(rank)))
    text = summarize(paths[min(paths)])
    assert "late rank" not in text
    assert text.startswith("2 of 3 ranks" if missing else "1 of 3 ranks")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[", "damaged"),
        ("3", "no list of events"),
        ('{"traceEvents": []}', "of a profile, give the folder"),
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
