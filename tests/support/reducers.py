"""Reducers of gradients, and parameters whose gradients a test chooses."""

from __future__ import annotations

import hashlib

import torch

import horovodlike.torch as hvd

# Every reducer of the package, with options under which it compresses the gradients of the 2-D parameters below.
METHODS = {
    "powersgd": lambda **options: hvd.PowerSGD(rank=2, min_compression=1.0, **options),
    "topk": lambda **options: hvd.TopK(ratio=0.05, **options),
}
ROWS, COLUMNS = 24, 16


def make_parameters(dtype: torch.dtype = torch.float32) -> dict[str, torch.nn.Parameter]:
    shapes = {"matrix": (ROWS, COLUMNS), "kernel": (8, 6, 3, 3), "bias": (ROWS,), "scalar": ()}
    return {name: torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for name, shape in shapes.items()}


def make_optimizer(
    parameters: dict[str, torch.nn.Parameter], reducer: object, **options: object
) -> torch.optim.Optimizer:
    sgd = torch.optim.SGD(parameters.values(), lr=1.0)
    return hvd.DistributedOptimizer(sgd, parameters.items(), compression=reducer, **options)


def gradients_of(step: int, rank: int, parameters: dict[str, torch.nn.Parameter]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {name: torch.randn(p.shape, generator=generator).to(p.dtype) for name, p in parameters.items()}


def mean_of_gradients(step: int, parameters: dict[str, torch.nn.Parameter]) -> dict[str, torch.Tensor]:
    each = [gradients_of(step, rank, parameters) for rank in range(hvd.size())]
    return {name: sum(gradients[name].double() for gradients in each) / hvd.size() for name in parameters}


def backward_with(parameters: dict[str, torch.nn.Parameter], gradients: dict[str, torch.Tensor]) -> None:
    sum((parameters[name] * gradient).sum().float() for name, gradient in gradients.items()).backward()


def same_everywhere(tensors: list[torch.Tensor]) -> bool:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return len(set(hvd.allgather_object(digest.hexdigest()))) == 1
