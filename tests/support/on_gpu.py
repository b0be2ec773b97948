"""Checks on ranks with a GPU: their inputs, and the results that torch computes on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

import horovodlike.torch as hvd

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
DTYPES = (*FLOATS, *INTEGERS, torch.bool)
OPS = (hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product)
SHAPES = ((0,), (1,), (), (17,), (3, 5, 2), (1_000_003,))


def choose_gpu(shared: bool) -> torch.device:
    """The GPU of this rank: the first one if all share it, else its own."""
    device = torch.device("cuda", 0 if shared else hvd.local_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def inputs(dtype: torch.dtype, shape: tuple[int, ...]) -> list[torch.Tensor]:
    """Return each rank's input, on the CPU: small integers, so that sums and products are exact in every dtype."""
    low = 0 if dtype in (torch.uint8, torch.bool) else -2
    generators = (torch.Generator().manual_seed(1000 * rank + len(shape)) for rank in range(hvd.size()))
    return [torch.randint(low, 3, shape, generator=generator).to(dtype) for generator in generators]


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
    assert actual.is_cuda, what
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), what
    tolerance = 4 * torch.finfo(actual.dtype).eps if actual.is_floating_point() else 0
    assert torch.allclose(actual.cpu(), expected, rtol=tolerance, atol=0), (what, actual, expected)


def run_all(checks: Mapping[str, Callable[[bool], None]]) -> None:
    """Run checks by name in a program, whose ranks share a GPU if there are more of them than GPUs."""
    hvd.init()
    for name, run in checks.items():
        run(hvd.local_size() > torch.cuda.device_count())
        print(f"{name}: right", flush=True)
    hvd.shutdown()
