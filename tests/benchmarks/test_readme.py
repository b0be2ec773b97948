"""The rows of README.md that measurements write."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))

from benchmarks import readme

MEASURED = {
    4: {"horovodlike": 3.72e-6, "gloo": 197e-6, "openmpi": 0.623e-6},
    64 << 10: {"horovodlike": 5.78e-6, "gloo": 1.83e-3, "openmpi": 11.2e-6},
    64 << 20: {"horovodlike": 4.36e-3, "gloo": 39.7e-3, "openmpi": 24.3e-3},
}
STEPS = {"alone": 30.3e-3, "horovodlike": 36.6e-3, "gloo": 69e-3, "python": 31.1e-3}
RESULTS: dict[str, Any] = {
    "meta": {"cores": 2, "cpu": "AMD EPYC"},
    "allreduce": [
        {
            "np": np,
            "dtype": dtype,
            "nbytes": nbytes,
            "peer": peer,
            "seconds": seconds * slower,
            "algbw": nbytes / seconds,
        }
        for np, dtype, slower in ((2, "float32", 1), (2, "bfloat16", 2), (4, "float32", 8))
        for nbytes, peers in MEASURED.items()
        for peer, seconds in {"memcpy": 1.0, **peers}.items()
    ],
    "training": [{"model": "resnet18", "np": 2, "peer": peer, "seconds": seconds} for peer, seconds in STEPS.items()],
}


def test_four_rows_of_two_ranks_and_float32() -> None:
    lines = readme.rows(RESULTS).splitlines()
    assert [line for line in lines if line.startswith("| ")][1:] == [
        "| in-place allreduce of 4 B | 3.72 µs | 197 µs | 0.623 µs |",
        "| in-place allreduce of 64 KiB | 5.78 µs | 1.83 ms | 11.2 µs |",
        "| in-place allreduce of 64 MiB | 15.4 GB/s | 1.7 GB/s | 2.8 GB/s |",
        "| training step of ResNet-18 | 36.6 ms | 69 ms, with DDP | |",
    ]
    assert any(line.startswith("Without communication that step takes 30.3 ms.") for line in lines)


def test_the_rows_replace_the_old_ones_between_the_marks() -> None:
    page = readme.PAGE.read_text()
    written = readme.insert(page, readme.rows(RESULTS))
    assert written.count("| training step of ResNet-18 |") == 1
    outside = [page.partition(readme.BEGIN)[0], page.partition(readme.END)[2]]
    assert [written.partition(readme.BEGIN)[0], written.partition(readme.END)[2]] == outside
