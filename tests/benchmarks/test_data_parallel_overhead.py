"""Replicas for a step of `DataParallel` cost at most half of what those of torch.nn.DataParallel cost."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import horovodlike.torch as hvd

sys.path.append(str(Path(__file__).parents[2]))

from benchmarks.torch_replicas import DEVICES, replicas_of, torchs_way


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [
        layer for _ in range(40) for layer in (torch.nn.Linear(16, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU())
    ]
    return torch.nn.Sequential(*layers)


def seconds_of(function: Callable[[], object]) -> float:
    start = time.thread_time()  # of this thread alone, so that other programs do not count
    function()
    return time.thread_time() - start


@pytest.mark.parametrize("devices", [["cpu"] * DEVICES, [f"cpu:{i}" for i in range(DEVICES)]], ids=str)
def test_replicas_cost_at_most_half_of_torchs(devices: list[str]) -> None:
    model = make_model()
    parallel = hvd.DataParallel(model, devices)
    ours, torchs = [], []
    for _ in range(20):
        with torch.no_grad():
            for parameter in model.parameters():  # as an optimizer does
                parameter.mul_(0.999)
        ours.append(seconds_of(lambda: parallel.replicate(model, parallel.device_ids)))
        torchs.append(seconds_of(lambda: replicas_of(model)))
    assert min(ours) * 2 <= min(torchs)


def test_the_peer_does_the_same() -> None:
    x = torch.randn(6, 16)
    results = []
    for way in (torchs_way, lambda module: hvd.DataParallel(module, ["cpu"] * DEVICES)):
        model = make_model()
        way(model)(x).square().sum().backward()
        results.append([*(parameter.grad for parameter in model.parameters()), *model.buffers()])
    torch.testing.assert_close(*results)
