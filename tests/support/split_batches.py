"""References for `DataParallel`: a module applied to the parts of a batch in turn, and to the batch as a whole."""

from __future__ import annotations

import torch
from torch.func import functional_call

# Replicas that share the parameters' memory, that have copies, and both.
DEVICES = (["cpu", "cpu"], ["cpu"] * 3, ["cpu:0", "cpu:1"], ["cpu:0", "cpu:1", "cpu:0", "cpu:2", "cpu:2"])


def make_mlp(dtype: torch.dtype = torch.float64) -> torch.nn.Sequential:
    torch.manual_seed(3)
    layers = torch.nn.Linear(5, 9), torch.nn.Tanh(), torch.nn.Linear(9, 9), torch.nn.Tanh(), torch.nn.Linear(9, 2)
    return torch.nn.Sequential(*layers).to(dtype)


def by_parts(module: torch.nn.Module, x: torch.Tensor, count: int) -> torch.Tensor:
    """Apply the module to the first part, and to each other part with buffers that are then dropped."""
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    outputs = []
    for number, part in enumerate(x.chunk(count)):
        others = {name: buffer.clone() for name, buffer in buffers.items()}
        outputs.append(functional_call(module, others, (part,)) if number else module(part))
    return torch.cat(outputs)


def assert_same(actual: torch.nn.Module, expected: torch.nn.Module, tolerance: float = 1e-6) -> None:
    """Compare all parameters and buffers by name."""
    values = expected.state_dict()
    assert list(actual.state_dict()) == list(values)
    for name, value in actual.state_dict().items():
        torch.testing.assert_close(value, values[name], rtol=tolerance, atol=tolerance, msg=name)


def gradients(module: torch.nn.Module) -> list[torch.Tensor | None]:
    return [None if parameter.grad is None else parameter.grad.clone() for parameter in module.parameters()]
