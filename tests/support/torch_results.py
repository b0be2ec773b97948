"""Inputs of collectives on tensors, and the results that torch computes of them on one rank."""

from __future__ import annotations

import torch

import horovodlike.torch as hvd

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
DTYPES = (*FLOATS, *INTEGERS, torch.bool)
OPS = (hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product)


def input_of(rank: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return small integers, so that sums and products are exact in every dtype; different on each rank."""
    generator = torch.Generator().manual_seed(1000 * rank + len(shape))
    low = 0 if dtype in (torch.uint8, torch.bool) else -2
    return torch.randint(low, 3, shape, generator=generator).to(dtype)


def inputs_of_all(dtype: torch.dtype, shape: tuple[int, ...]) -> list[torch.Tensor]:
    return [input_of(rank, dtype, shape) for rank in range(hvd.size())]


def reduced(tensors: list[torch.Tensor], op: int) -> torch.Tensor:
    dtype = tensors[0].dtype
    if dtype is torch.bool:
        stacked = torch.stack(tensors)
        return stacked.any(0) if op in (hvd.Sum, hvd.Max) else stacked.all(0)
    wide = torch.stack([tensor.to(torch.float64) for tensor in tensors])
    result = {
        hvd.Average: lambda: wide.sum(0) / len(tensors),
        hvd.Sum: lambda: wide.sum(0),
        hvd.Min: lambda: wide.amin(0),
        hvd.Max: lambda: wide.amax(0),
        hvd.Product: lambda: wide.prod(0),
    }[op]()
    return result.to(dtype) if dtype.is_floating_point else result.trunc().to(dtype)


def check(actual: torch.Tensor, expected: torch.Tensor, what: object) -> None:
    assert actual.dtype == expected.dtype, what
    assert actual.shape == expected.shape, what
    # Everything here but an average is exact. (torch.testing takes seconds to import.)
    tolerance = 4 * torch.finfo(actual.dtype).eps if actual.is_floating_point() else 0
    assert torch.allclose(actual, expected, rtol=tolerance, atol=0), (what, actual, expected)
