"""One rank of the memory measurement: `memory_rank.py FOLDER NBYTES`, started by hvdrun.

Looks at the process from outside the engine, through /proc: before init, after init and after an allreduce of NBYTES.
The tensor is there and touched from the start, so it is in none of the differences. Writes FOLDER/<rank>.json.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import psutil
import torch

import horovodlike.torch as hvd
from horovodlike._engine import ops


def private_bytes() -> int:
    """Return the memory that only this process has."""
    gc.collect()
    return int(psutil.Process().memory_full_info().uss)


def shared_bytes() -> int:
    """Return this process's resident memory that is shared memory: not of files, not its own."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssShmem:"):
            return int(line.split()[1]) * 1024
    return 0


def main() -> None:
    """Measures and writes."""
    folder, nbytes = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    tensor = torch.ones(nbytes // 4)
    tensor.add_(0)
    private_before, shared_before = private_bytes(), shared_bytes()
    hvd.init()
    private_init = private_bytes()
    for _ in range(3):
        hvd.allreduce_(tensor, name="memory", op=hvd.Average)
    result = {
        "rank": hvd.rank(),
        "nbytes": nbytes,
        "private_after_init": private_init - private_before,
        "private_after_allreduce": private_bytes() - private_before,
        # Every rank of the host maps the whole segment.
        "shared_per_rank": (shared_bytes() - shared_before) / hvd.local_size(),
        "counted_shared_per_rank": ops.counters()["segment_bytes"],
    }
    # No rank ends before all have measured.
    hvd.barrier()
    (folder / f"{hvd.rank()}.json").write_text(json.dumps(result))
    hvd.shutdown()


if __name__ == "__main__":
    main()
