"""Verdicts on real jobs with a rank that is made slow, and on jobs without one.

Each rank has a processor of its own, so that the ranks alone do not disturb each other: the cases need two processors
on which nothing else runs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from monitors import state_of, wait_for

pytestmark = pytest.mark.thorough

PROCESSORS = sorted(os.sched_getaffinity(0))
WATCHED_S = 30.0
TRAIN = """
        import contextlib, os, random, sys, time
        with contextlib.suppress(OSError):  # as if nothing else ran here
            with open("/proc/self/autogroup", "w") as file:
                file.write("-20")
        import torch
        import horovodlike.torch as hvd

        hvd.init()
        kind, slow, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
        processors = sorted(os.sched_getaffinity(0))
        processor = processors[hvd.rank() % len(processors)]
        os.sched_setaffinity(0, {processor})
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        chance = random.Random(seed * 100 + hvd.rank())
        is_slow = hvd.rank() == slow
        burner = None
        if is_slow and kind in ("neighbour", "priority"):
            rank, burner = os.getpid(), os.fork()
            if burner == 0:
                while os.getppid() == rank and not os.path.exists("stop"):
                    sum(range(100000))
                os._exit(0)
            if kind == "priority":
                os.nice(1 + seed % 4)
        width = 256 if kind == "input" else 512
        model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(4)))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        print("begun", flush=True)
        while True:
            reads = 0.004 * chance.random() + (0.01 + 0.005 * (seed % 4) if is_slow and kind == "input" else 0.0)
            time.sleep(reads)
            batch = torch.randn(32 + chance.randrange(3), width)
            optimizer.zero_grad()
            for _ in range(2):
                loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            stops = torch.tensor([os.path.exists("stop")], dtype=torch.int32)
            if hvd.allreduce(stops, op=hvd.Max, name="stop").item():
                break
        if burner:
            os.waitpid(burner, 0)
"""


@pytest.fixture
def job(
    watched: Callable[..., Any], program: Callable[[str], Path], tmp_path: Path
) -> Callable[[str, int, int], tuple[Any, str]]:
    def start(kind: str, slow: int, seed: int) -> tuple[Any, str]:
        size = 2 if kind != "input" else 2 + seed % 3
        if len(PROCESSORS) < 2:
            pytest.skip("two ranks need two processors")
        return watched("-np", size, sys.executable, program(TRAIN), kind, slow, seed)

    return start


def verdicts(state: dict[str, Any]) -> list[str]:
    return [each["text"] for each in state["events"] if each["kind"] == "slow"]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("kind", "expected"), [("neighbour", "compute"), ("priority", "compute"), ("input", "input")])
def test_a_slow_rank_and_its_reason(
    job: Callable[..., Any], tmp_path: Path, kind: str, expected: str, seed: int
) -> None:
    slow = seed % 2
    running, url = job(kind, slow, seed)
    state = wait_for(url, lambda found: found["slow"], 60.0)
    assert [(each["ranks"], each["kind"]) for each in state["slow"]] == [([slow], expected)], state["slow"]
    assert [f"rank {slow} is " in text for text in verdicts(state)] == [True]
    assert (
        0 <= state["slow"][0]["since_step"] <= state["ranks"][0]["counters"]["steps"]
        and state["ranks"][0]["counters"]["steps"] > 10
    )
    running.expect_error(rf"(hvdrun: rank {slow} is \d+ % slower in {expected} since step )")
    (tmp_path / "stop").touch()
    assert running.finish().code == 0


@pytest.mark.parametrize("seed", range(10))
def test_no_rank_is_blamed_in_a_job_without_a_slow_one(job: Callable[..., Any], tmp_path: Path, seed: int) -> None:
    running, url = job("none" if seed % 2 else "input", -1, seed)
    begun = wait_for(url, lambda found: found["ranks"] and found["ranks"][0]["counters"].get("steps", 0) > 10)["time"]
    wait_for(url, lambda found: found["time"] > begun + WATCHED_S, 2 * WATCHED_S)
    assert verdicts(state_of(url)) == []
    (tmp_path / "stop").touch()
    assert running.finish().code == 0
