"""GPUs: `python -m benchmarks gpu`, which needs PyTorch built for CUDA and a GPU. Runs in the driver.

- One rank on a GPU, through NCCL. The peers are in the same process and take turns: allreduces of torch.distributed
  with its NCCL backend, which at one rank cost no more than the call, so the difference is the engine's overhead; and
  training steps without communication and with DistributedDataParallel.
- Two ranks on the first GPU, through staging, against Gloo, which copies to the host as well.
- As many ranks as there are GPUs, through NCCL, if there are several.
- The share of communication that overlaps computation, from PyTorch's profiler: over all GPUs, or of two ranks on one,
  where the copies count. One rank alone has nothing to send.

Times are of a loop between two synchronizations of the device. The host's time is until a call returns, on a device
that is idle when it begins: a training loop cannot use this time for anything else.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import driver

RANK_SCRIPT = Path(__file__).with_name("gpu_rank.py")
KIB, MIB = 1 << 10, 1 << 20
SIZES = (4, 64 * KIB, MIB, 16 * MIB, 64 * MIB, 256 * MIB)
MODELS = ("resnet50", "gpt87m")

Row = dict[str, Any]


def missing() -> str:
    """Why nothing can be measured here, or the empty string."""
    question = "import torch; print(torch.version.cuda, torch.cuda.device_count())"
    done = subprocess.run([sys.executable, "-c", question], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return f"PyTorch cannot be used: {done.stderr.strip().splitlines()[-1]}"
    cuda, gpus = done.stdout.split()
    if cuda == "None":
        return "PyTorch is not built for CUDA"
    return "PyTorch finds no GPU" if gpus == "0" else ""


def measure(*, sizes: Sequence[int], models: Sequence[str], rounds: int, quick: bool, device: str = "cuda") -> Row:
    """Return the results of all jobs.

    Args:
        sizes: of the allreduces, in bytes.
        models: that are trained.
        rounds: turns of each peer.
        quick: few iterations and small batches; the figures mean little.
        device: "cpu" tries the program where there is no GPU.
    """
    results: Row = {"allreduce": [], "training": [], "overlap": []}

    common = {"sizes": sizes, "models": models, "rounds": rounds, "quick": quick, "device": device}

    def job(ranks: int, *parts: str, shared: bool = False) -> int:
        options = {"parts": parts, "shared": shared, **common}
        reports = driver.reports(RANK_SCRIPT, ranks, *(f"{name}={_text(value)}" for name, value in options.items()))
        results["device"] = reports[0]["device"]
        for name in parts:
            results[name] += [{"np": ranks, **row} for row in _slowest(reports, name)]
        return int(reports[0]["gpus"])

    gpus = job(1, "allreduce", "training")
    job(2, "allreduce", "overlap", shared=True)
    if gpus > 1:
        job(gpus, "allreduce", "overlap")
    return results


def _text(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _slowest(reports: Sequence[Row], name: str) -> Iterator[Row]:
    """One row for each case: the median over the rounds of the slowest rank's times, and other numbers' least."""
    by_case: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for report in reports:
        for row in report[name]:
            by_case[tuple(sorted(row["case"].items()))].append(row)
    for rows in by_case.values():
        merged = dict(rows[0]["case"])
        for key in rows[0].keys() - {"case"}:
            values = [row[key] for row in rows]
            merged[key] = (
                statistics.median(map(max, zip(*values, strict=True))) if isinstance(values[0], list) else min(values)
            )
        yield merged


def share_covered(inner: Sequence[tuple[float, float]], outer: Sequence[tuple[float, float]]) -> float:
    """Return the part of some intervals that lies within others; both may overlap among themselves.

    Args:
        inner: (begin, end) of the intervals to be covered; together longer than 0.
        outer: (begin, end) of the intervals that cover.
    """
    covering = _union(outer)
    total = covered = 0.0
    first = 0
    for begin, end in _union(inner):
        total += end - begin
        while first < len(covering) and covering[first][1] <= begin:
            first += 1
        for left, right in covering[first:]:
            if left >= end:
                break
            covered += min(end, right) - max(begin, left)
    return covered / total


def _union(intervals: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged
