"""Process groups of torch.distributed in ranks of a test."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

import horovodlike.torch as hvd


@contextlib.contextmanager
def process_group(store: Path, **options: Any) -> Iterator[None]:
    """The default group of all ranks, which have called `hvd.init()` and meet by a file that does not exist yet."""
    dist.init_process_group("hvd", init_method=f"file://{store}", rank=hvd.rank(), world_size=hvd.size(), **options)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def own_engine(store: Path, **options: Any) -> Iterator[None]:
    """As `process_group`, with an engine that the group starts and ends; then the ranks call `hvd.init()` again."""
    rank, size = hvd.rank(), hvd.size()
    hvd.shutdown()
    try:
        dist.init_process_group("hvd", init_method=f"file://{store}", rank=rank, world_size=size, **options)
        try:
            yield
        finally:
            dist.destroy_process_group()
    finally:
        hvd.init()
