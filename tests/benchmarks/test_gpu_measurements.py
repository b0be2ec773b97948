"""Evaluation of measurements on GPUs: counting shares, merging ranks, and the content of the tables."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2]))

from benchmarks import gpu, tables, targets

Interval = tuple[float, float]


@pytest.mark.parametrize(
    ("inner", "outer", "share"),
    [
        ([(0, 10)], [(0, 10)], 1.0),
        ([(0, 10)], [(10, 20)], 0.0),
        ([(0, 10)], [], 0.0),
        ([(0, 10)], [(2, 4), (8, 20)], 0.4),
        ([(0, 4), (6, 10)], [(3, 7)], 0.25),
        ([(0, 10), (5, 15)], [(0, 5), (3, 8), (14, 99)], 0.6),  # what overlaps counts once
        ([(20, 30), (0, 10)], [(25, 30), (0, 5)], 0.5),
    ],
)
def test_share_covered(inner: list[Interval], outer: list[Interval], share: float) -> None:
    assert gpu.share_covered(inner, outer) == pytest.approx(share)


def test_what_a_trace_says() -> None:
    from benchmarks.gpu_rank import split_trace

    events = [
        {"cat": "kernel", "name": "ncclDevKernel_AllReduce_Sum_f32_RING_LL", "ts": 10, "dur": 5},
        {"cat": "kernel", "name": "sgemm", "ts": 12.5, "dur": 10},
        {"cat": "gpu_memcpy", "name": "Memcpy DtoH (Device -> Pinned)", "ts": 1, "dur": 2},
        {"cat": "gpu_memcpy", "name": "Memcpy DtoD (Device -> Device)", "ts": 4, "dur": 2},
        {"cat": "cpu_op", "name": "nccl:all_reduce", "ts": 0, "dur": 9},
        {"ph": "M", "name": "process_name"},
    ]
    assert split_trace({"traceEvents": events}) == ([(10, 15), (1, 3)], [(12.5, 22.5)])


def test_the_slowest_rank_counts() -> None:
    def report(seconds: list[float], share: float) -> dict[str, Any]:
        return {"part": [{"case": {"peer": "a", "nbytes": 4}, "seconds": seconds, "share": share}]}

    [row] = gpu._slowest([report([1.0, 5.0, 3.0], 0.5), report([2.0, 1.0, 1.0], 0.25)], "part")
    assert row == {"peer": "a", "nbytes": 4, "seconds": 3.0, "share": 0.25}


def results(ours: float, host: float) -> dict[str, Any]:
    peers = {"plain": (1.0, 0.5), "horovodlike": (ours, host), "ddp": (1.1, 0.8)}
    training = [
        {"np": 1, "model": model, "peer": peer, "seconds": seconds, "host_seconds": host_seconds}
        for model in gpu.MODELS
        for peer, (seconds, host_seconds) in peers.items()
    ]
    allreduce = [
        {"np": 1, "through": "nccl", "nbytes": 4, "count": 1, "peer": peer, "seconds": seconds, "host_seconds": 1e-5}
        for peer, seconds in (("horovodlike", 3e-5), ("nccl", 2e-5))
    ]
    overlap = [{"np": 2, "model": "resnet50", "through": "staging", "share": 0.75, "communicating": 0.01}]
    return {
        "device": {"name": "H"},
        "allreduce": allreduce,
        "training": training,
        "overlap": overlap,
    }


@pytest.mark.parametrize(("ours", "host", "passed"), [(1.015, 0.7, [True, True]), (1.03, 0.9, [False, False])])
def test_targets(ours: float, host: float, passed: list[bool]) -> None:
    verdicts = [each for each in targets.check({"gpu": results(ours, host)}) if each.what.startswith("GPU")]
    assert [each.passed for each in verdicts] == 2 * passed
    assert [each.passed for each in targets.check({}) if each.what.startswith("GPU")] == [None] * 4


def test_tables() -> None:
    page = "\n".join(tables._gpu(results(1.015, 0.7)))
    assert (
        "| 4 B  | 30 us       | 20 us                   | 10 us           | 10 us                     | +10 us " in page
    )
    assert "| ResNet-50, 224x224     | 1 s              | 1.01 s      | 1.1 s | 1.015   | 1.100         |" in page
    assert "| ResNet-50, 224x224 | 2     | the host (staging) | 10 ms         | 75.0%" in page


@pytest.mark.timeout(600)
@pytest.mark.thorough
def test_the_program_runs_without_a_gpu() -> None:
    found = gpu.measure(sizes=(4, 4096), models=("tiny",), rounds=1, quick=True, device="cpu")
    assert [(row["np"], row["peer"]) for row in found["allreduce"][:2]] == [(1, "horovodlike"), (1, "gloo")]
    assert {(row["np"], row["nbytes"], row["count"]) for row in found["allreduce"]} == {
        (ranks, *case) for ranks in (1, 2) for case in ((4, 1), (4096, 1), (1024, 400))
    }
    assert [row["peer"] for row in found["training"]] == ["plain", "horovodlike", "ddp"]
    assert all(row["seconds"] > 0 for row in (*found["allreduce"], *found["training"]))
    assert found["overlap"] == []  # there is no device that communicates
