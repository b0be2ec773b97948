"""Tensors of 8-bit floats, held against float32 and the conversions of PyTorch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from support.ranks import RankPool

import horovodlike.torch as hvd

DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
OPS = (hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product)
SHAPES = ((0,), (), (17,), (3, 5, 2), (100_003,))
FACTORS = ((1.0, 1.0), (0.3, 1.0), (1.0, -7.0))


# All that PyTorch computes with these types is a conversion, so everything here is compared as float32.


def _every_number(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(256, dtype=torch.uint8).view(dtype)


def _inputs(dtype: torch.dtype, shape: tuple[int, ...]) -> list[torch.Tensor]:
    """Any numbers of the type, NaN as well, in another order on each rank; a third of them are near 1."""
    inputs = []
    for rank in range(hvd.size()):
        generator = torch.Generator().manual_seed(1000 * rank + len(shape))
        numbers = _every_number(dtype)[torch.randint(0, 256, shape, generator=generator)].float()
        near = torch.randn(shape, generator=generator)
        inputs.append(torch.where(torch.rand(shape, generator=generator) < 0.3, near, numbers).to(dtype))
    return inputs


def _reduced(tensors: Sequence[torch.Tensor], op: int, prescale: float = 1.0, postscale: float = 1.0) -> torch.Tensor:
    combine = {hvd.Min: torch.minimum, hvd.Max: torch.maximum, hvd.Product: torch.mul}.get(op, torch.add)
    result, *others = (tensor.float() * prescale for tensor in tensors)
    for other in others:
        result = combine(result, other)
    if op == hvd.Average:
        result = result / len(tensors)
    return (result * postscale).to(tensors[0].dtype)


def _check(actual: torch.Tensor, expected: torch.Tensor, what: object) -> None:
    assert actual.dtype is expected.dtype, what
    assert actual.shape == expected.shape, what
    assert torch.allclose(actual.float(), expected.float(), rtol=0, atol=0, equal_nan=True), (what, actual, expected)


def _conversions() -> None:
    factors = torch.randn(1500, generator=torch.Generator().manual_seed(5)).exp2() ** 4
    for dtype in DTYPES:
        every = _every_number(dtype)
        _check(hvd.allreduce(every, op=hvd.Sum), every, dtype)
        for factor in factors.tolist():
            scaled = hvd.allreduce(every, op=hvd.Sum, prescale_factor=factor)
            _check(scaled, (every.float() * factor).to(dtype), (dtype, factor))


def test_rounding_and_overflow_are_those_of_pytorch(ranks: Callable[[int], RankPool]) -> None:
    ranks(1).run(_conversions)


def _reductions() -> None:
    for dtype, op, shape in itertools.product(DTYPES, OPS, SHAPES):
        inputs = _inputs(dtype, shape)
        mine = inputs[hvd.rank()]
        for prescale, postscale in FACTORS:
            expected = _reduced(inputs, op, prescale, postscale)
            factors = {"prescale_factor": prescale, "postscale_factor": postscale}
            what = (dtype, op, shape, prescale, postscale)
            _check(hvd.allreduce(mine, op=op, **factors), expected, what)
            if shape:
                part = hvd.reducescatter(mine, op=op, **factors)
                _check(part, expected.tensor_split(hvd.size())[hvd.rank()], (what, "scattered"))
        for _ in range(2):  # the second time as a known request
            target = mine.clone()
            assert hvd.allreduce_(target, op=op, name=f"{dtype}.{op}.{shape}") is target
            _check(target, _reduced(inputs, op), (dtype, op, shape, "in place"))
        single, eight = hvd.grouped_allreduce([mine.float(), mine], op=op)
        assert single.dtype is torch.float32
        _check(eight, _reduced(inputs, op), (dtype, op, shape, "grouped"))


def _adasum() -> None:
    for dtype in DTYPES:
        mine = torch.randn(1009, generator=torch.Generator().manual_seed(hvd.rank())).to(dtype)
        expected = hvd.allreduce(mine.float(), op=hvd.Adasum).to(dtype)
        _check(hvd.allreduce(mine, op=hvd.Adasum), expected, (dtype, "Adasum"))


def _movements() -> None:
    size, rank = hvd.size(), hvd.rank()
    for dtype in DTYPES:
        for shape in ((17,), (3, 5, 2), (100_003,)):
            inputs = _inputs(dtype, shape)
            for root in range(size):
                _check(hvd.broadcast(inputs[rank], root), inputs[root], (dtype, shape, root))
            wide = torch.cat([tensor.float()[: r + 1] for r, tensor in enumerate(inputs)])
            _check(hvd.allgather(inputs[rank][: rank + 1]), wide.to(dtype), (dtype, shape, "gathered"))
            received = hvd.alltoall(inputs[rank][:size])
            rows = torch.stack([tensor.float()[rank] for tensor in inputs])
            _check(received, rows.to(dtype), (dtype, shape, "exchanged"))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_collectives(ranks: Callable[[int], RankPool], size: int) -> None:
    for work in (_reductions, _adasum, _movements):
        ranks(size).run(work)
