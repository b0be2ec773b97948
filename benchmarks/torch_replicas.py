"""The way of torch.nn.DataParallel, which needs GPUs, on the CPU: a peer of `hvd.DataParallel`.

torch's own `replicate`, which makes new modules for each replica, with a broadcast for the CPU in place of the one for
GPUs; new threads; and the sum of the gradients of all replicas, as torch's documentation and source describe.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.parallel import replicate

DEVICES = 2

Forward = Callable[[torch.Tensor], torch.Tensor]


class Broadcast(torch.autograd.Function):
    """Give replica 0 the tensors, and each other replica a copy, made as one tensor; add the replicas' gradients."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.width = len(tensors)
        copies = [_copies(tensors) for _ in range(count - 1)]
        return tuple(tensor.detach() for each in (tensors, *copies) for tensor in each)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        replicas = [list(grads[at : at + ctx.width]) for at in range(0, len(grads), ctx.width)]
        total = replicas[0]
        for other in replicas[1:]:
            total = torch._foreach_add(total, other)
        return None, *total


def _copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    pieces = flat.split([tensor.numel() for tensor in tensors])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)]


def broadcast(tensors: Sequence[torch.Tensor], devices: Sequence[int], detach: bool = False) -> list[Any]:
    """Replace the function of this kind in `torch.nn.parallel.replicate`, which is for GPUs, on the CPU."""
    if not tensors:
        return []
    if detach:
        return [list(tensors), *([tensor.clone() for tensor in tensors] for _ in devices[1:])]
    values = Broadcast.apply(len(devices), *tensors)
    return [list(values[at : at + len(tensors)]) for at in range(0, len(values), len(tensors))]


def replicas_of(module: nn.Module) -> list[nn.Module]:
    """Return the replicas that torch.nn.DataParallel makes of a module in each forward pass."""
    with mock.patch.dict(replicate.__globals__, {"_broadcast_coalesced_reshape": broadcast}):
        return replicate(module, range(DEVICES))


def torchs_way(module: nn.Module) -> Forward:
    """Return the forward pass of torch.nn.DataParallel, for the CPU."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        parts = x.chunk(DEVICES)
        replicas = replicas_of(module)
        outputs = list(parts)

        def work(number: int) -> None:
            outputs[number] = replicas[number](parts[number])

        threads = [threading.Thread(target=work, args=(number,)) for number in range(DEVICES)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return torch.cat(outputs)

    return forward
