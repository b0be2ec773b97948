"""SyncBatchNorm over sizes, shares, shapes, dtypes and options: what torch's BatchNorm gives for the joined batch."""

from __future__ import annotations

import pytest
import torch
from support.batch_norms import (
    CHANNELS,
    assert_alike,
    assert_close,
    make_pair,
    share_of,
    step_both,
)

import horovodlike.torch as hvd

SIZES = (1, 2, 3, 4)
SHAPES = ((), (7,), (3, 2), (2, 3, 2))  # after the batch and the channels
OPTIONS = (
    {},
    {"affine": False},
    {"track_running_stats": False},
    {"momentum": None},
    {"momentum": 0.7, "eps": 0.3},
    {"affine": False, "track_running_stats": False},
)
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}


def _shares_of(size: int) -> list[list[int]]:
    """Equal shares, different ones, an empty one on each rank in turn, and everything on one rank."""
    with_an_empty_one = [[0 if rank == empty else 3 for rank in range(size)] for empty in range(size) if size > 1]
    return [[4] * size, [2 + rank for rank in range(size)], *with_an_empty_one, [0] * (size - 1) + [5]]


def _grid() -> None:
    torch.manual_seed(0)  # the same whole batch on all ranks
    for trailing in SHAPES:
        for options in OPTIONS:
            layer, plain = make_pair(trailing, options)
            for counts in _shares_of(hvd.size()):
                whole = torch.randn(sum(counts), CHANNELS, *trailing, dtype=torch.float64) * 3 + 1
                step_both(layer, plain, whole, counts, 1e-12)
                assert_alike(layer, plain)


def _dtypes() -> None:
    torch.manual_seed(1)
    counts = [3 + rank for rank in range(hvd.size())]
    for dtype, tolerance in TOLERANCES.items():
        for parameters in {dtype, torch.float32 if dtype is not torch.float64 else dtype}:
            layer, plain = make_pair((4, 4), {})
            layer = layer.to(parameters)
            plain.load_state_dict(layer.state_dict())
            whole = torch.randn(sum(counts), CHANNELS, 4, 4).to(dtype)
            step_both(layer, plain, whole, counts, tolerance)
            assert layer.weight.grad.dtype == parameters and layer.running_var.dtype == parameters
            assert_close(layer.running_mean, plain.running_mean, tolerance)
            assert_close(layer.running_var, plain.running_var, tolerance)


def _memory_formats() -> None:
    torch.manual_seed(2)
    counts = [2 + rank for rank in range(hvd.size())]
    for trailing, memory_format in (((4, 3), torch.channels_last), ((2, 3, 2), torch.channels_last_3d)):
        layer, plain = make_pair(trailing, {})
        whole = torch.randn(sum(counts), CHANNELS, *trailing, dtype=torch.float64).to(memory_format=memory_format)
        assert step_both(layer, plain, whole, counts, 1e-12).is_contiguous(memory_format=memory_format)
        assert_alike(layer, plain)
    layer, plain = make_pair((6,), {})
    step_both(layer, plain, torch.randn(CHANNELS, sum(counts), 6, dtype=torch.float64).transpose(0, 1), counts, 1e-12)
    mine = share_of(torch.randn(sum(counts), CHANNELS, 6, dtype=torch.float64), counts).requires_grad_()
    layer(mine).sum().backward()  # whose gradient is one number, expanded
    assert_close(mine.grad, torch.zeros_like(mine), 1e-12)


def _a_mean_that_is_large() -> None:
    """Sums of squares would have lost the variance here: its share of them is below float32's resolution."""
    torch.manual_seed(3)
    counts = [64] * hvd.size()
    layer, plain = make_pair((8,), {})
    layer = layer.float()
    plain.load_state_dict(layer.state_dict())
    whole = torch.randn(sum(counts), CHANNELS, 8) + 4096.0
    expected = plain(whole.double())
    assert_close(layer(share_of(whole, counts)), share_of(expected, counts), 5e-3)
    assert_close(layer.running_var, plain.running_var, 1e-3)


def _evaluation() -> None:
    torch.manual_seed(4)
    for options in OPTIONS:
        layer, plain = make_pair((3,), options)
        counts = [4] * hvd.size()
        step_both(layer, plain, torch.randn(4 * hvd.size(), CHANNELS, 3, dtype=torch.float64), counts, 1e-12)
        layer.eval()
        plain.eval()
        mine = torch.randn(4, CHANNELS, 3, dtype=torch.float64, requires_grad=True)
        if hvd.rank() == 0:  # would wait for the others if it sent anything
            assert_close(layer(mine), plain(mine), 1e-12)
            layer(mine).square().sum().backward()
    hvd.barrier()


def _nobody_has_anything() -> None:
    layer, plain = make_pair((3,), {})
    mine = torch.empty(0, CHANNELS, 3, dtype=torch.float64, requires_grad=True)
    assert layer(mine).shape == plain(mine).shape
    layer(mine).sum().backward()
    assert mine.grad.shape == mine.shape
    assert layer.running_var.tolist() == [1.0] * CHANNELS and layer.num_batches_tracked.item() == 2


CASES = (_grid, _dtypes, _memory_formats, _a_mean_that_is_large, _evaluation, _nobody_has_anything)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.strip("_"))
def test_as_the_plain_layer_on_the_joined_batch(ranks, case, size):
    ranks(size).run(case)


def _bad_inputs() -> None:
    layer = hvd.SyncBatchNorm(CHANNELS)
    for training in (True, False):
        with pytest.raises(ValueError, match=r"at least 2D input \(got 1D input\)"):
            layer.train(training)(torch.randn(CHANNELS))
    layer.train()
    with pytest.raises(ValueError, match=r"5 channels, got size \[2, 4\]"):
        layer(torch.randn(2, 4))
    # One value on all ranks together: an error on all of them, and the layer still works.
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        layer(torch.randn(1 if hvd.rank() == 1 else 0, CHANNELS))
    assert layer.num_batches_tracked.item() == 0
    with pytest.raises(hvd.HorovodInternalError, match="sync_batch_norm"):
        layer(torch.randn(3, CHANNELS, dtype=torch.float64 if hvd.rank() == 0 else torch.float32))
    assert layer(torch.randn(1, CHANNELS)).shape == (1, CHANNELS)
    x = torch.randn(2, CHANNELS, requires_grad=True)
    (gradient,) = torch.autograd.grad(layer(x).exp().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_bad_inputs(ranks):
    ranks(2).run(_bad_inputs)
