"""Batch normalization over all ranks, compared with torch's layer on the batches of all ranks joined."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import horovodlike.torch as hvd

CHANNELS = 5
PLAIN = {0: torch.nn.BatchNorm1d, 1: torch.nn.BatchNorm1d, 2: torch.nn.BatchNorm2d, 3: torch.nn.BatchNorm3d}


def share_of(whole: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    return whole.split(list(counts))[hvd.rank()].detach().clone()


def assert_close(actual: torch.Tensor | None, expected: torch.Tensor | None, tolerance: float = 1e-12) -> None:
    if actual is None or expected is None:
        assert actual is expected
        return
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance)


def assert_alike(layer: torch.nn.Module, plain: torch.nn.Module, tolerance: float = 1e-12) -> None:
    """Check that the layers have the same state, and that gradients over all ranks equal the joined batch's."""
    assert layer.state_dict().keys() == plain.state_dict().keys()
    for name, value in plain.state_dict().items():
        assert_close(layer.state_dict()[name], value, tolerance)
    assert_same_gradients(layer, plain, tolerance)


def assert_same_gradients(layer: torch.nn.Module, plain: torch.nn.Module, tolerance: float) -> None:
    for (_, mine), (_, joined) in zip(layer.named_parameters(), plain.named_parameters(), strict=True):
        assert_close(hvd.allreduce(mine.grad, op=hvd.Sum), joined.grad, tolerance)


def make_pair(trailing: tuple[int, ...], options: dict[str, object]) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Return the distributed layer and torch's layer, with the same parameters."""
    layer, plain = hvd.SyncBatchNorm(CHANNELS, **options).double(), PLAIN[len(trailing)](CHANNELS, **options).double()
    for parameter in plain.parameters():
        torch.nn.init.uniform_(parameter, -2.0, 2.0)
    layer.load_state_dict(plain.state_dict())
    return layer, plain


def step_both(
    layer: torch.nn.Module, plain: torch.nn.Module, whole: torch.Tensor, counts: Sequence[int], tolerance: float
) -> torch.Tensor:
    """Run forward and backward passes through both, and compare them; return the distributed layer's output."""
    mine, joined = share_of(whole, counts).requires_grad_(), whole.clone().double().requires_grad_()
    layer.zero_grad()
    plain.zero_grad()
    actual, expected = layer(mine), plain(joined)
    direction = torch.randn_like(expected)
    assert actual.dtype == mine.dtype
    assert_close(actual, share_of(expected, counts), tolerance)
    (actual.double() * share_of(direction, counts)).sum().backward()
    (expected * direction).sum().backward()
    assert mine.grad.dtype == mine.dtype
    assert_close(mine.grad, share_of(joined.grad, counts), tolerance)
    return actual
