"""Profiles of running jobs, and the stacks of their ranks, by `hvdrun --attach`."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.hvdrun_process import LIMIT_S, Launch

from horovodlike.launcher import cli

TRAIN = """
        import os, sys, threading, time
        import numpy as np
        import horovodlike as hvd

        def train():
            step, is_sampled = 0, False
            while not hvd.allreduce(np.array([os.path.exists("stop")], np.float32), op=hvd.Max, name="stop")[0]:
                hvd.allreduce(np.ones(1000, np.float32), name="gradient")
                if hvd.rank() == 1:
                    compute()
                hvd.step()
                step += 1
                if is_sampled != any(each.name == "horovodlike-samples" for each in threading.enumerate()):
                    is_sampled = not is_sampled
                    print("recording" if is_sampled else "recorded", flush=True)
            return step

        def compute():
            time.sleep(0.02)

        hvd.init()
        steps = train()
        print("done", hvd.rank(), hvd.metrics()["steps"] == steps, flush=True)
        hvd.shutdown()
        print("threads", [each.name for each in threading.enumerate() if "horovodlike-" in each.name], flush=True)
"""


@pytest.fixture
def job(
    watched: Callable[..., tuple[Launch, str]], program: Callable[[str], Path], tmp_path: Path
) -> Callable[..., Launch]:
    """`job(text)` starts the program, with a monitor, and waits until the ranks have called `init()`."""

    def start(text: str, size: int = 2, **options: Any) -> Launch:
        script = program(text.replace("hvd.init()\n", 'hvd.init()\n        print("begun", flush=True)\n'))
        launch, _ = watched("-np", size, sys.executable, script, **options)
        launch.expect(b"begun", size)
        return launch

    return start


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Callable[..., Launch]]:
    """`client(job, "stacks")` starts `hvdrun --attach`."""
    launches: list[Launch] = []

    def start(attached: Launch | int, *words: str) -> Launch:
        pid = attached if isinstance(attached, int) else attached.process.pid
        launches.append(Launch(["--attach", str(pid), *words], cwd=tmp_path))
        return launches[-1]

    yield start
    for each in launches:
        each.close()


def stop(job: Launch, folder: Path) -> list[str]:
    """End the training; check that it was not disturbed; return what the ranks have printed."""
    (folder / "stop").touch()
    ended = job.finish()
    assert ended.code == 0, ended.err
    assert "USDT:" not in ended.err  # what PyTorch's profiler writes of itself
    done = sorted(re.findall(rb"done (\d) True", ended.out))
    assert done in ([b"0", b"1"], [b"0", b"1", b"2"])
    assert re.findall(rb"threads (.*)", ended.out) == [b"[]"] * len(done)
    return ended.out.decode().splitlines()


def read(folder: Path, rank: int) -> tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]:
    """Return the description, the trace and the timeline of a rank."""
    about, trace, timeline = (
        json.loads((folder / f"rank{rank}{kind}.json").read_text()) for kind in ("", ".trace", ".timeline")
    )
    return about, trace, timeline


def check_times(folder: Path, steps: int, size: int = 2) -> list[dict[str, Any]]:
    """Check that the ranks have recorded the same steps, and that all events are of these; return the traces."""
    traces, firsts = [], set()
    for rank in range(size):
        about, trace, timeline = read(folder, rank)
        assert (about["rank"], about["size"], about["steps"], len(about["marks"])) == (rank, size, steps, steps + 1)
        assert about["marks"] == sorted(about["marks"])
        firsts.add(about["first_step"])
        began, ended = about["marks"][0] - 0.5, about["marks"][-1] + 0.5  # a crowded machine delays the first mark
        times = [trace["epoch_us"] + event["ts"] for event in trace["traceEvents"] if event["ph"] == "X"]
        assert times and began * 1e6 < min(times) <= max(times) < ended * 1e6
        [start] = [each["args"]["start_time_since_epoch_in_micros"] for each in timeline if each["pid"] == 0][:1]
        batches = [start + each["ts"] for each in timeline if each["name"] == "ALLREDUCE"]
        assert len(batches) >= steps and began * 1e6 < min(batches) <= max(batches) < ended * 1e6
        traces.append(trace)
    assert len(firsts) == 1
    return traces


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_job_without_a_framework(
    job: Callable[..., Launch], client: Callable[..., Launch], tmp_path: Path, size: int
) -> None:
    running = job(TRAIN, size, env={"HOROVODLIKE_TIMELINE": str(tmp_path / "own.json")})
    ended = client(running, "stacks").finish()
    assert ended.code == 0, ended.err
    assert re.search(rb"^ranks? .*\b1.*:$", ended.out, re.MULTILINE) and b"in train" in ended.out
    ended = client(running, "profile", "--steps", "5", "--output", "deep/er").finish()
    assert ended.code == 0, ended.err
    sampled = check_times(tmp_path / "deep/er", 5, size)[1]
    assert any(event["name"].startswith("compute (") for event in sampled["traceEvents"])
    assert b"deep/er/trace.json" in ended.out
    ended = client(running, "profile", "--seconds", "0.5", "--ranks", "1", "--output", "one").finish()
    assert ended.code == 0, ended.err
    about, trace, _ = read(tmp_path / "one", 1)
    assert about["framework"] == "stacks" and about["steps"] > 1
    assert not (tmp_path / "one" / "rank0.json").exists()
    stop(running, tmp_path)
    own = json.loads((tmp_path / "own.json").read_text())  # this timeline has gone on
    assert sum(event["name"] == "ALLREDUCE" for event in own) > 20


@pytest.mark.slow
def test_clients_that_go_or_come_together(
    job: Callable[..., Launch], client: Callable[..., Launch], tmp_path: Path
) -> None:
    running = job(TRAIN)
    first = client(running, "profile", "--steps", "1000", "--output", "first")
    first.expect_error("(will record)")
    running.expect(b"recording", 2)
    second = client(running, "profile", "--steps", "2", "--output", "second").finish()
    assert second.code == 1 and "another hvdrun is attached to this job" in second.err
    first.signal(signal.SIGINT)
    assert first.finish().code == 130
    third = client(running, "profile", "--seconds", "200", "--output", "third")
    running.expect(b"recording", 4)
    third.signal(signal.SIGKILL)
    third.process.wait(LIMIT_S)
    fourth = client(running, "profile", "--steps", "2", "--output", "fourth").finish()
    assert fourth.code == 0, fourth.err
    check_times(tmp_path / "fourth", 2)
    stop(running, tmp_path)
    folders = {each.name.split(".")[1] if each.name[0] == "." else each.name for each in tmp_path.iterdir()}
    assert folders & {"first", "second", "third", "fourth"} == {"third", "fourth"}  # the third client was killed


REPEATED = TRAIN.replace(
    "        hvd.init()\n",
    """        hvd.init()
        while True:
            hvd.allreduce(np.ones(4, np.float32), name="x")
            hvd.step()
            if any(each.name == "horovodlike-samples" for each in threading.enumerate()):
                print("first", flush=True)
            if hvd.allreduce(np.array([os.path.exists("again")], np.float32), op=hvd.Max, name="end")[0]:
                break
        began = time.monotonic()
        hvd.shutdown()
        print("shutdown took", time.monotonic() - began, flush=True)
        hvd.init()
""",
)


@pytest.mark.parametrize("amount", [("--steps", "1000"), pytest.param(("--seconds", "200"), marks=pytest.mark.slow)])
def test_the_ranks_leave_amid_a_profile(
    job: Callable[..., Launch], client: Callable[..., Launch], tmp_path: Path, amount: tuple[str, str]
) -> None:
    slow = REPEATED.replace('name="x")\n', 'name="x")\n            time.sleep(0.05)\n')
    running = job(slow, env={"TMPDIR": str(tmp_path)})
    first = client(running, "profile", *amount, "--output", "first")
    for rank in (b"0", b"1"):
        running.expect(rank + b"]<stdout>: first")
    (tmp_path / "again").touch()
    ended = first.finish()
    assert ended.code == 1
    assert re.search(r"rank \d: it has left the job, or its connection is lost", ended.err), ended.err
    running.expect(b"begun", 4)
    second = client(running, "profile", "--steps", "2", "--output", "second").finish()
    assert second.code == 0, second.err
    check_times(tmp_path / "second", 2)
    third = client(running, "profile", *amount, "--output", "third")
    running.expect(b"recording", 4)  # the second, and the third
    took = [float(line.rpartition(" ")[2]) for line in stop(running, tmp_path) if "shutdown took" in line]
    assert len(took) == 2 and max(took) < LIMIT_S / 4
    ended = third.finish()
    assert ended.code == 1
    assert re.search("the job has ended|has left the job", ended.err), ended.err
    assert not list(tmp_path.glob("horovodlike-profile-*"))
    assert [each.name for each in tmp_path.iterdir() if each.is_dir() and "third" in each.name] == []


@pytest.mark.slow
@pytest.mark.parametrize("marks", ["pass", "hvd.step() if step < 5 else None"], ids=["never", "no more"])
def test_steps_that_nobody_marks(
    job: Callable[..., Launch], client: Callable[..., Launch], tmp_path: Path, marks: str
) -> None:
    running = job(TRAIN.replace("hvd.step()", marks).replace('hvd.metrics()["steps"] == steps', "True"))
    ended = client(running, "profile", "--steps", "2").finish()
    assert ended.code == 1
    assert "it has marked no step within 10 s: call horovodlike.step() once in each step" in ended.err
    ended = client(running, "profile", "--seconds", "0.5", "--output", "profile").finish()
    assert ended.code == 0, ended.err
    stop(running, tmp_path)


def test_what_cannot_be_asked(job: Callable[..., Launch], client: Callable[..., Launch], tmp_path: Path) -> None:
    running = job(TRAIN)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    cases = [
        (["profile", "--steps", "0"], "give --steps, from 1 to 1000, or --seconds, up to 300"),
        (["profile", "--steps", "1", "--ranks", "1,2"], "the job has no rank 2: it has ranks 0 to 1"),
        (["profile", "--steps", "1", "--output", "full"], "--output full exists already: name a new folder"),
        (["profile", "--steps", "1", "--output", "full/file/x"], "--output full/file/x cannot be written"),
    ]
    for words, text in cases:
        ended = client(running, *words).finish()
        assert ended.code in (1, 2) and text in ended.err, ended.err
    launch = Launch(["-np", "2", "--attach", str(running.process.pid), "stacks"], cwd=tmp_path)
    ended = launch.finish()
    launch.close()
    assert ended.code == 2 and "leave out the other options of hvdrun" in ended.err
    stop(running, tmp_path)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["profile", "--steps", "x"], "argument --steps: invalid int value: 'x'"),
        (["profile"], "one of the arguments --steps --seconds is required"),
        (["profile", "--steps", "1", "--ranks", "0,x"], "0,x: give numbers of ranks"),
        (["watch"], "invalid choice: 'watch'"),
        ([], "the following arguments are required: profile|stacks"),
    ],
)
def test_words_that_make_no_sense(capsys: pytest.CaptureFixture[str], words: list[str], text: str) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--attach", "1", *words])
    assert ended.value.code == 2
    assert text in capsys.readouterr().err


def test_what_is_no_job(client: Callable[..., Launch], tmp_path: Path) -> None:
    other = subprocess.Popen(["sleep", "1000"])
    plain = Launch(["-np", "1", "sh", "-c", "echo ready; exec sleep 1000"], cwd=tmp_path)
    try:
        plain.expect(b"ready")
        gone = subprocess.Popen(["true"])
        gone.wait()
        for pid, text in (
            (other.pid, "no monitor of a job answers in 'sleep 1000': give the process id of an hvdrun"),
            (plain.process.pid, "give the process id of an hvdrun that was started with --monitor or --metrics-file"),
            (gone.pid, "there is no such process on this host"),
        ):
            ended = client(pid, "stacks").finish()
            assert ended.code == 2 and text in ended.err, ended.err
        launch = Launch(["--attach", "train.py", "stacks"], cwd=tmp_path)
        assert "--attach train.py: give the process id of the hvdrun" in launch.finish().err
        launch.close()
    finally:
        other.kill()
        other.wait()
        plain.signal(signal.SIGTERM)
        plain.finish()
        plain.close()


def test_a_job_that_nobody_asks_imports_nothing_of_it(
    watched: Callable[..., tuple[Launch, str]], program: Callable[[str], Path], tmp_path: Path
) -> None:
    script = program("""
        import os, sys, time
        import horovodlike as hvd

        hvd.init()
        while "horovodlike_requests" not in (open("job.prom").read() if os.path.exists("job.prom") else ""):
            time.sleep(0.05)
        print([name for name in sys.modules if "horovodlike" in name and "profile" in name])
    """)
    launch, _ = watched("--metrics-file", "job.prom", "-np", 1, sys.executable, script)
    ended = launch.finish()
    assert (ended.code, ended.lines_of(0)) == (0, [b"[]"]), ended.err


TORCH = """
        import os, threading, time
        import torch
        import horovodlike.torch as hvd

        hvd.init()
        model = torch.nn.Linear(50, 50)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters()
        )
        steps, own, warm = 0, None, None
        while not hvd.allreduce(torch.tensor([float(os.path.exists("stop"))]), op=hvd.Max, name="stop")[0]:
            if own is None and os.path.exists("own"):
                own = torch.profiler.profile()
                own.start()
            if warm is None and os.path.exists("warm"):
                own.stop()
                assert len(own.events()) > 10
                warm = torch.profiler.profile(schedule=torch.profiler.schedule(wait=0, warmup=10**6, active=1))
                warm.start()
                print("warming up", flush=True)
            optimizer.zero_grad()
            model(torch.ones(8, 50)).sum().backward()
            optimizer.step()
            steps += 1
            if steps == 3:
                print("rolling", flush=True)
            time.sleep(0.02)
        if warm is not None:
            warm.stop()
        print("done", hvd.rank(), hvd.metrics()["steps"] == steps, flush=True)
        hvd.shutdown()
        print("threads", [each.name for each in threading.enumerate() if "horovodlike-" in each.name], flush=True)
"""


def test_a_job_of_pytorch(job: Callable[..., Launch], client: Callable[..., Launch], tmp_path: Path) -> None:
    running = job(TORCH)
    running.expect(b"rolling", 2)
    ended = client(running, "profile", "--steps", "5", "--output", "profile").finish(5 * LIMIT_S)
    assert ended.code == 0, ended.err
    for rank, trace in enumerate(check_times(tmp_path / "profile", 5)):
        names = [event["name"] for event in trace["traceEvents"]]
        assert names.count("aten::linear") == 5
        assert any("Backward" in name for name in names)  # of autograd's thread
        assert read(tmp_path / "profile", rank)[0]["framework"] == "torch"
    for output in ("second", "third", "fourth"):
        if output == "fourth":  # the script's own profiler waits for its first step
            (tmp_path / "warm").touch()
            running.expect(b"warming up", 2)
        other = client(running, "profile", "--steps", "5", "--output", output)
        if output == "second":
            other.expect_error("(will record)")  # the profiler is warm, and starts three seconds later
            (tmp_path / "own").touch()
        ended = other.finish(5 * LIMIT_S)
        assert ended.code == 1
        assert re.search(r"rank \d: RuntimeError: another profiler is running in this process", ended.err), ended.err
    stop(running, tmp_path)


@pytest.mark.slow
def test_a_time_of_a_job_of_pytorch(job: Callable[..., Launch], client: Callable[..., Launch], tmp_path: Path) -> None:
    """It needs no marks: the reporter's thread records all threads."""
    running = job(TORCH)
    running.expect(b"rolling", 2)
    ended = client(running, "profile", "--seconds", "5", "--output", "profile").finish(5 * LIMIT_S)
    assert ended.code == 0, ended.err
    for rank in (0, 1):
        about, trace, _ = read(tmp_path / "profile", rank)
        assert about["framework"] == "torch" and about["steps"] > 1
        assert sum(event["name"] == "aten::linear" for event in trace["traceEvents"]) > 1
    stop(running, tmp_path)
