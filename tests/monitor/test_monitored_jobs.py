"""Real jobs with a monitor."""

from __future__ import annotations

import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from monitors import fetch, state_of, wait_for
from prometheus_client.parser import text_string_to_metric_families as parse_text
from support.hvdrun_process import LIMIT_S, SLACK_S, Launch

TRAIN = """
        import os, sys, time
        import numpy as np
        import horovodlike as hvd

        hvd.init()
        print("begun", hvd.rank(), flush=True)
        step = 0
        while not os.path.exists("stop"):
            if hvd.rank() == 1:
                time.sleep(0.3)  # far longer than a crowded machine delays the others
            hvd.allreduce(np.ones(1000, np.float32), name=f"layer{step % 2}")
            stops = hvd.allreduce(np.array([os.path.exists("stop")], np.float32), op=hvd.Max, name="stop")
            step += 1
            if stops[0]:
                break
        print("done", hvd.rank(), flush=True)
"""

ELASTIC = """
        import os, signal, time
        import numpy as np
        import horovodlike as hvd
        from horovodlike import elastic

        hvd.init()

        @elastic.run
        def train(state):
            while not os.path.exists("stop"):
                hvd.allreduce(np.ones(4, np.float32), name="x")
                if os.path.exists("kill") and os.environ["HOROVODLIKE_WORKER"] == "1":
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(0.01)
                state.commit()
                if hvd.allreduce(np.array([os.path.exists("stop")], np.float32), op=hvd.Max, name="end")[0]:
                    break

        train(elastic.ObjectState(batch=0))
"""


def has_straggler(state: dict[str, Any], rank: int = 1) -> bool:
    return state["straggler"] is not None and state["straggler"]["rank"] == rank


def test_a_job_of_two_ranks(watched: Callable[..., Any], program: Callable[[str], Path], tmp_path: Path) -> None:
    script = program(TRAIN)
    job, url = watched("--metrics-file", "job.prom", "--output-filename", "logs", "-np", 2, sys.executable, script)
    state = wait_for(url, lambda found: has_straggler(found) and found["ranks"][0]["counters"]["requests"] > 10)
    assert state["straggler"]["seconds_each"] > 0.1
    assert state["output_directory"] == "logs"
    assert [each["rank"] for each in state["ranks"]] == [0, 1]
    assert state["ranks"][0]["counters"]["requests"] > 10
    assert state["ranks"][0]["process"]["resident_bytes"] > 1_000_000
    assert state["ranks"][0]["parts"]["waiting"] > state["ranks"][1]["parts"]["waiting"]
    assert state["ranks"][1]["seconds_waited_for"] > 0.1
    assert state["tensors"][0]["last_rank"] == 1
    families = {family.name: family for family in parse_text(fetch(url, "/metrics")[2].decode())}
    assert len(families["horovodlike_batches"].samples) == 2
    (tmp_path / "stop").touch()
    ended = job.finish()
    assert ended.code == 0
    assert sorted(re.findall(rb"done \d", ended.out)) == [b"done 0", b"done 1"]
    text = (tmp_path / "job.prom").read_text()
    values = {
        (sample.name, *(value for label, value in sample.labels.items() if label != "job_id")): sample.value
        for family in parse_text(text)
        for sample in family.samples
    }
    assert values["horovodlike_ranks_in_state", "ended"] == 2
    assert values["horovodlike_events_total", "end"] == 1
    assert sorted(path.name for path in tmp_path.iterdir() if "prom" in path.name) == ["job.prom"]


def test_a_straggler_among_thousands_of_collectives(
    watched: Callable[..., Any], program: Callable[[str], Path], tmp_path: Path
) -> None:
    """The flight recorder forgets most of them before the other rank reports."""
    script = program("""
        import os, time
        import numpy as np
        import horovodlike as hvd

        hvd.init()
        while not hvd.allreduce(np.array([os.path.exists("stop")], np.float32), op=hvd.Max, name="stop")[0]:
            if hvd.rank() == 1:
                time.sleep(0.3)
            for _ in range(1000):
                hvd.allreduce(np.ones(4, np.float32), name="x")
    """)
    job, url = watched("-np", 2, sys.executable, script)
    state = wait_for(url, has_straggler)
    assert state["straggler"]["seconds_each"] > 0.05
    assert state["ranks"][0]["counters"]["batches"] > 1000
    (tmp_path / "stop").touch()
    assert job.finish().code == 0


def test_a_stall_with_its_stacks(watched: Callable[..., Any], program: Callable[[str], Path], tmp_path: Path) -> None:
    script = program("""
        import os, time
        import numpy as np
        import horovodlike as hvd

        def load_data(until):
            while not os.path.exists(until):
                time.sleep(0.05)

        hvd.init()
        load_data("start")
        hvd.allreduce(np.ones(4, np.float32), name="first")
        if hvd.rank() == 1:
            load_data("stop")
        hvd.allreduce(np.ones(4, np.float32), name="second")
    """)
    environ = {"HOROVODLIKE_STALL_CHECK_TIME_SECONDS": "1"}
    job, url = watched("-np", 2, sys.executable, script, env=environ)
    state = wait_for(url, lambda found: len(found["ranks"]) == 2 and all(each["stack"] for each in found["ranks"]))
    assert [each["state"] for each in state["ranks"]] == ["starting"] * 2  # each loads data, and none waits
    assert (state["stall"], state["event_counts"]["stall"]) == (None, 0)
    (tmp_path / "start").touch()
    state = wait_for(url, lambda found: found["stall"] and found["event_counts"]["stall"])
    stacks = {tuple(group["ranks"]): group["stack"] for group in state["stall"]["stacks"]}
    assert "in load_data" in stacks[1,]
    assert "allreduce" in stacks[0,]
    event = next(each for each in state["events"] if each["kind"] == "stall")
    assert "second'" in event["text"]
    assert "monitor" not in event["text"]
    (tmp_path / "stop").touch()
    assert job.finish().code == 0


def test_ranks_go_on_without_their_launcher_answering(
    watched: Callable[..., Any], program: Callable[[str], Path], tmp_path: Path
) -> None:
    """The monitor's thread is in hvdrun: if that is stopped, ranks must neither wait nor fail, nor in shutdown()."""
    script = program("""
        import os, time
        import numpy as np
        import horovodlike as hvd

        hvd.init()
        steps = 0
        while not hvd.allreduce(np.array([steps > 20], np.float32), op=hvd.Max, name="end")[0]:
            hvd.allreduce(np.ones(4, np.float32), name="x")
            steps += os.path.exists("stopped")
            time.sleep(0.01)
        rank = hvd.rank()
        begin = time.monotonic()
        hvd.shutdown()
        with open("ended", "a") as file:
            file.write(f"{rank} {steps} {time.monotonic() - begin}\\n")
    """)
    job, url = watched("-np", 2, sys.executable, script)
    wait_for(url, lambda found: len(found["ranks"]) == 2)
    job.signal(signal.SIGSTOP)
    (tmp_path / "stopped").touch()
    ended, deadline = tmp_path / "ended", time.monotonic() + LIMIT_S
    while not ended.exists() or ended.read_text().count("\n") < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    job.signal(signal.SIGCONT)
    assert job.finish().code == 0
    found = sorted(tuple(map(float, line.split())) for line in ended.read_text().splitlines())
    assert [rank for rank, _, _ in found] == [0, 1]
    assert all(seconds < SLACK_S for _, _, seconds in found)


def test_a_rank_that_cannot_report_goes_on(program: Callable[[str], Path], tmp_path: Path) -> None:
    script = program("""
        import os
        import horovodlike as hvd
        from horovodlike._engine import reporter

        def start(thread):
            raise RuntimeError("can't start new thread")

        for port in ("x", "1"):
            os.environ["HOROVODLIKE_MONITOR_PORT"] = port
            hvd.init()
            hvd.shutdown()
            reporter._Reporter.start = start
        print("done")
    """)
    launch = Launch(["-np", "1", sys.executable, str(script)], cwd=tmp_path)
    ended = launch.finish()
    launch.close()
    assert (ended.code, ended.lines_of(0)) == (0, [b"done"])
    warnings = [line for line in ended.err.splitlines() if "horovodlike warning" in line]
    assert len(warnings) == 2
    assert "rank 0 does not report to the monitor: ValueError(" in warnings[0]
    assert "rank 0 does not report to the monitor: RuntimeError(" in warnings[1]


def test_an_elastic_job_shows_its_generations(
    watched: Callable[..., Any], program: Callable[[str], Path], tmp_path: Path
) -> None:
    script = program(ELASTIC)
    job, url = watched("-np", 2, "--min-np", 1, "--max-np", 2, sys.executable, script)
    wait_for(url, lambda found: len(found["ranks"]) == 2 and found["generation"] == 1)
    (tmp_path / "kill").touch()
    state = wait_for(url, lambda found: found["generation"] >= 2 and found["ranks"])
    assert "worker 1" in " ".join(each["text"] for each in state["events"])
    (tmp_path / "stop").touch()
    assert job.finish().code == 0


def test_nothing_of_it_is_imported_without_being_asked_for(program: Callable[[str], Path], tmp_path: Path) -> None:
    script = program("""
        import horovodlike as hvd
        hvd.init()
    """)
    environ = {"PYTHONPROFILEIMPORTTIME": "1"}  # hvdrun and the rank say what they import
    launch = Launch(["-np", "1", sys.executable, str(script)], cwd=tmp_path, env=environ)
    ended = launch.finish()
    launch.close()
    assert ended.code == 0
    lines = ended.err.splitlines()
    of_rank = {line.rpartition("|")[2].strip() for line in lines if "import time:" in line and line.startswith("[0]")}
    of_hvdrun = {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}
    assert "horovodlike._bootstrap.bootstrap" in of_rank and "horovodlike.launcher.cli" in of_hvdrun
    unwanted = re.compile(
        r"horovodlike\.(monitor|launcher\.supervisor\.monitoring|_engine\.(reporter|profile|profilers))\b|asyncio$|psutil$"
    )
    assert [name for name in sorted(of_rank | of_hvdrun) if unwanted.match(name)] == []


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--monitor=x", "-np", "1", "true"], "--monitor x cannot be used: it must be an integer >= 0"),
        (["--monitor=65536", "-np", "1", "true"], "--monitor 65536 cannot be used"),
        (["--monitor", "9400", "-np", "1", "true"], "write --monitor=9400"),
        (["--metrics-file", "nowhere/x.prom", "-np", "1", "true"], "--metrics-file nowhere/x.prom cannot be written"),
    ],
)
def test_what_cannot_be_used(tmp_path: Path, words: list[str], text: str) -> None:
    launch = Launch(words, cwd=tmp_path)
    ended = launch.finish()
    launch.close()
    assert ended.code == 2
    assert text in ended.err


def test_a_port_in_use(watched: Callable[..., Any], tmp_path: Path) -> None:
    job, url = watched("-np", 1, "sleep", 100)
    port = re.search(r":(\d+)/", url)
    assert port is not None
    second = Launch([f"--monitor={port[1]}", "-np", "1", "true"], cwd=tmp_path)
    ended = second.finish()
    second.close()
    assert ended.code == 1
    assert f"the monitor cannot listen on 127.0.0.1 port {port[1]}" in ended.err
    assert state_of(url)["ranks"] == []
    job.signal(signal.SIGTERM)
    job.finish()


def test_the_token_can_be_chosen(watched: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("ab" * 32)
    path.chmod(0o600)
    command = "-np", 1, "sh", "-c", "echo ready >&2; exec sleep 100"
    job, url = watched(*command, env={"HOROVODLIKE_MONITOR_TOKEN_FILE": str(path)})
    assert url.endswith("token=" + "ab" * 32)
    job.expect_error(
        r"\[0\]<stderr>: (ready)"
    )  # a signal before that ends hvdrun at once, and the agent a moment later
    job.signal(signal.SIGTERM)
    job.finish()


def test_a_monitor_on_rank_0(tmp_path: Path, program: Callable[[str], Path]) -> None:
    script = program("""
        import json, os, sys, threading, time, urllib.request
        import numpy as np
        import horovodlike as hvd
        from horovodlike import monitor

        hvd.init()
        seen = []
        hvd.on_metrics(seen.append, seconds=0.2)
        for again in range(2):
            url = monitor.start()
            assert (url is None) == (hvd.rank() != 0), url
            done = False
            while not done:
                time.sleep(0.02 * hvd.rank())
                hvd.allreduce(np.ones(1000, np.float32), name="x")
                if url:
                    state = json.load(urllib.request.urlopen(url.replace("/?", "/api/state?")))
                    done = len(state["ranks"]) == 2 and any(each["late"] for each in state["ranks"]) and len(seen) > 2
                done = bool(hvd.allreduce(np.array([done], np.float32), op=hvd.Max, name="done")[0])
        if url:
            assert state["straggler"] is None or state["straggler"]["rank"] == 1
            assert seen[-1]["straggler_rank"] == 1 and seen[-1]["batches_per_second"] > 1
        hvd.shutdown()
        left = [each.name for each in threading.enumerate() if "horovodlike" in each.name]
        assert not left, left
        if url:
            try:
                urllib.request.urlopen(url, timeout=5)
            except OSError:
                print("closed")
    """)
    launch = Launch(["-np", "2", sys.executable, str(script)], cwd=tmp_path)
    ended = launch.finish()
    launch.close()
    assert ended.code == 0, ended.err
    assert ended.lines_of(0) == [b"closed"]


def test_what_monitor_start_cannot_use(tmp_path: Path, program: Callable[[str], Path]) -> None:
    """All ranks raise, and can go on; none waits for another one."""
    script = program("""
        import numpy as np
        import horovodlike as hvd
        from horovodlike import monitor
        from horovodlike.errors import RendezvousError

        hvd.init()
        for port, host in ((70000, "::1"), (-1, "::1"), ("x", "::1"), (0, ""), (0, "a" * 70 + ".b"), (0, "nonsense.")):
            try:
                monitor.start(port, host)
            except (ValueError, RendezvousError) as error:
                print(type(error).__name__, error, flush=True)
            assert hvd.allreduce(np.ones(1), op=hvd.Sum, name="on")[0] == 2
    """)
    launch = Launch(["--no-fold", "-np", "2", sys.executable, str(script)], cwd=tmp_path)
    ended = launch.finish()
    launch.close()
    assert ended.code == 0, ended.err
    assert ended.lines_of(0) == ended.lines_of(1)
    found = [line.decode() for line in ended.lines_of(0)]
    assert [line.split()[0] for line in found] == ["ValueError"] * 4 + ["RendezvousError"] * 2
    assert "port must be from 0 to 65535, got 70000" in found[0]
    assert "Unknown error" not in found[5]
