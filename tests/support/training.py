"""A small model, its data, and its training by all ranks or by one rank alone."""

from __future__ import annotations

import torch

import horovodlike.torch as hvd

STEPS = 20
BATCH = 24  # each rank's part can be halved


def make_model(dtype: torch.dtype = torch.float64) -> torch.nn.Sequential:
    torch.manual_seed(7)
    layers = torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3)
    return torch.nn.Sequential(*layers).to(dtype)


def make_batches(steps: int = STEPS, dtype: torch.dtype = torch.float64) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(11)
    random = [torch.randn(steps, BATCH, width, generator=generator, dtype=torch.float64) for width in (6, 3)]
    return list(zip(random[0].to(dtype), random[1].to(dtype), strict=True))


def my_part(whole: torch.Tensor) -> torch.Tensor:
    return whole.chunk(hvd.size())[hvd.rank()]


def loss_of(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(x), y)


def flat_parameters(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def make_sgd(model: torch.nn.Module, **options: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, **options)


def train_model(wrap: dict[str, object] | None, passes: int = 1, make: object = make_sgd) -> torch.Tensor:
    """Train on this rank's part of each batch with a wrapped optimizer; with `wrap=None` on whole batches, alone."""
    model = make_model()
    optimizer = make(model)
    if wrap is not None:
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), **wrap)
    for x, y in make_batches():
        optimizer.zero_grad()
        part = (x, y) if wrap is None else (my_part(x), my_part(y))
        for px, py in zip(part[0].chunk(passes), part[1].chunk(passes), strict=True):
            (loss_of(model, px, py) / passes).backward()
        optimizer.step()
    return flat_parameters(model)


def relative_difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual - expected).norm() / expected.norm()).item()
