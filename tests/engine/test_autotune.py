"""Autotuning of a job: what it tries, what it says, and that results stay as they are."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import pytest
from support.ranks import RankPool

MIB = 1 << 20
AUTOTUNE = {
    "HOROVOD_AUTOTUNE": "1",
    "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "1",
    "HOROVODLIKE_AUTOTUNE_STEPS_PER_SAMPLE": "2",
}
ENOUGH_STEPS = 400  # for any search with these samples


def _train(steps: int) -> int:
    """Each step reduces 4 MiB in 4 tensors. Returns how many batches that were."""
    import numpy as np
    from support.collectives import enqueue

    import horovodlike
    from horovodlike import basics
    from horovodlike._engine import ops

    before = horovodlike.metrics()["batches"]
    rank, size = basics.rank(), basics.size()
    gradients = [np.empty(MIB // 4, np.float32) for _ in range(4)]
    for step in range(steps):
        for number, gradient in enumerate(gradients):
            gradient.fill(rank + number + step)
        handles = [enqueue(ops.Kind.ALLREDUCE, str(n), [gradient]) for n, gradient in enumerate(gradients)]
        for handle in handles:
            ops.wait(handle)
        for number, gradient in enumerate(gradients):
            assert (gradient == sum(range(size)) + size * (number + step)).all()
    return horovodlike.metrics()["batches"] - before


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _lines(pool: RankPool, rank: int) -> list[str]:
    return [line for line in pool.output(rank).splitlines() if "autotuning" in line]


def _chosen(row: dict[str, str]) -> str:
    threshold, cycle_time = row["tensor_fusion_threshold"], float(row["cycle_time_ms"])
    return f"HOROVODLIKE_FUSION_THRESHOLD={threshold} HOROVODLIKE_CYCLE_TIME={cycle_time:g}"


@pytest.mark.slow
@pytest.mark.parametrize("overlap", ["always", "never"])
def test_a_job_is_tuned_and_says_what_it_chose(
    fresh_ranks: Callable[..., RankPool], tmp_path: Path, overlap: str
) -> None:
    path = tmp_path / "tuned.csv"
    pool = fresh_ranks(2, {**AUTOTUNE, "HOROVOD_AUTOTUNE_LOG": str(path), "HOROVODLIKE_OVERLAP": overlap})
    pool.run(_train, ENOUGH_STEPS)
    rows = _rows(path)
    *samples, last = rows
    assert [row["sample"] for row in samples] == [str(number) for number in range(1, len(samples) + 1)]
    assert all(float(row["score"]) > 0 for row in rows)
    start = {"cycle_time_ms": "0", "tensor_fusion_threshold": str(128 * MIB)}
    assert samples[0]["reason"] == "warm-up"
    assert start.items() <= samples[0].items()
    assert samples[1]["reason"] == "the best so far"
    assert start.items() <= samples[1].items()
    # A quarter of the largest batch; ranks that overlap may begin before all of a step is there.
    assert int(samples[2]["tensor_fusion_threshold"]) in ([MIB] if overlap == "never" else [MIB // 2, MIB])
    assert (len({row["cycle_time_ms"] for row in samples}) > 1) is (overlap == "always")
    assert last["reason"] == "chosen"
    for rank, number in ((0, 1), (1, 0)):
        lines = _lines(pool, rank)
        assert len(lines) == number
        assert all(_chosen(last) in line for line in lines)
    pool.run(_train, 3)  # goes on with what was chosen
    assert _rows(path) == rows


def test_a_smaller_limit_is_what_the_coordinator_goes_by(fresh_ranks: Callable[..., RankPool], tmp_path: Path) -> None:
    settings = {**AUTOTUNE, "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "0", "HOROVODLIKE_OVERLAP": "never"}
    path = tmp_path / "tuned.csv"
    pool = fresh_ranks(2, {**settings, "HOROVOD_AUTOTUNE_LOG": str(path)})
    pool.run(_train, 3)
    assert _rows(path) == []
    pool.run(_train, 1)  # the first sample ends when its tensors come back
    assert [row["reason"] for row in _rows(path)] == ["the best so far"]
    for batches in pool.run(_train, 3):
        assert batches >= 3 * 3  # at most 1 MiB each, but for what was decided before


def test_what_is_set_is_not_tuned(fresh_ranks: Callable[..., RankPool], tmp_path: Path) -> None:
    path = tmp_path / "tuned.csv"
    settings = {**AUTOTUNE, "HOROVOD_FUSION_THRESHOLD": str(2 * MIB), "HOROVODLIKE_OVERLAP": "always"}
    pool = fresh_ranks(2, {**settings, "HOROVOD_AUTOTUNE_LOG": str(path)})
    pool.run(_train, ENOUGH_STEPS)
    rows = _rows(path)
    assert {row["tensor_fusion_threshold"] for row in rows} == {str(2 * MIB)}
    assert {"0", "0.25"} <= {row["cycle_time_ms"] for row in rows}
    assert rows[-1]["reason"] == "chosen"


@pytest.mark.parametrize(
    ("size", "settings", "reason"),
    [
        (1, {}, "a job of one rank has no batches"),
        (
            2,
            {"HOROVOD_FUSION_THRESHOLD": "1048576", "HOROVODLIKE_OVERLAP": "never"},
            "HOROVODLIKE_FUSION_THRESHOLD is set, and HOROVODLIKE_CYCLE_TIME matters only to ranks that overlap",
        ),
        (
            2,
            {"HOROVOD_FUSION_THRESHOLD": "0", "HOROVOD_CYCLE_TIME": "0", "HOROVODLIKE_OVERLAP": "always"},
            "HOROVODLIKE_FUSION_THRESHOLD is set, and HOROVODLIKE_CYCLE_TIME is, too",
        ),
    ],
)
def test_it_says_so_where_there_is_nothing_to_tune(
    fresh_ranks: Callable[..., RankPool], size: int, settings: dict[str, str], reason: str
) -> None:
    pool = fresh_ranks(size, {**AUTOTUNE, **settings})
    pool.run(_train, 1)
    (line,) = _lines(pool, 0)
    assert line.startswith(f"horovodlike warning: autotuning has nothing to do: {reason}")


def test_a_log_that_cannot_be_written_is_no_reason_not_to_tune(
    fresh_ranks: Callable[..., RankPool], tmp_path: Path
) -> None:
    path = tmp_path / "missing" / "tuned.csv"
    pool = fresh_ranks(2, {**AUTOTUNE, "HOROVOD_AUTOTUNE_LOG": str(path)})
    pool.run(_train, ENOUGH_STEPS)
    lines = _lines(pool, 0)
    assert f"HOROVODLIKE_AUTOTUNE_LOG='{path}': No such file or directory" in lines[0]
    assert len(lines) == 2
    assert "HOROVODLIKE_FUSION_THRESHOLD=" in lines[1]


def _train_and_start_again(steps: int) -> None:
    from horovodlike import basics

    _train(steps)
    basics.shutdown()
    basics.init()


@pytest.mark.parametrize(("steps", "remedy"), [(1, "there were too few of them"), (5, "Let the job run longer")])
def test_a_job_that_ends_before_it_is_tuned_says_so_and_begins_anew(
    fresh_ranks: Callable[..., RankPool], tmp_path: Path, steps: int, remedy: str
) -> None:
    path = tmp_path / "tuned.csv"
    pool = fresh_ranks(2, {**AUTOTUNE, "HOROVOD_AUTOTUNE_LOG": str(path)})
    pool.run(_train_and_start_again, steps)
    (line,) = _lines(pool, 0)
    assert "autotuning was not done" in line
    assert remedy in line
    assert _lines(pool, 1) == []
    assert _rows(path) == []
    pool.run(_train, 8)
    assert [row["reason"] for row in _rows(path)] == ["warm-up", "the best so far"]
