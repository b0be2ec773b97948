"""Checks on ranks with a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

import horovodlike.torch as hvd
from support import torch_results

SHAPES = ((0,), (1,), (), (17,), (3, 5, 2), (1_000_003,))


def choose_gpu(shared: bool) -> torch.device:
    """The GPU of this rank: the first one if all share it, else its own."""
    device = torch.device("cuda", 0 if shared else hvd.local_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def check(actual: torch.Tensor, expected: torch.Tensor, what: object) -> None:
    assert actual.is_cuda, what
    torch_results.check(actual.cpu(), expected, what)


def run_all(checks: Mapping[str, Callable[[bool], None]]) -> None:
    """Run checks by name in a program, whose ranks share a GPU if there are more of them than GPUs."""
    hvd.init()
    for name, run in checks.items():
        run(hvd.local_size() > torch.cuda.device_count())
        print(f"{name}: right", flush=True)
    hvd.shutdown()
