"""The collectives of split layers, each with a backward pass that gives the gradients of the unsplit layer.

All ranks of the process set compute the same loss, so a gradient is neither summed over copies of the loss nor
averaged. Between a tensor that all ranks have (*whole*) and one of which each rank has its part, there are four ways:

| | forward | backward |
|---|---|---|
| `copy`: each rank uses a whole tensor for its own part | nothing | sum of the ranks' gradients |
| `sum`: the ranks' results are summands of a whole tensor | sum | nothing |
| `gather`: the ranks' results are parts of a whole tensor | allgather | this rank's part of the gradient |
| `split`: each rank uses its part of a whole tensor | this rank's part | allgather |

`copy` and `sum` are each other's transposes, and so are `gather` and `split`: the backward pass of one is the other,
which makes gradients of gradients right too. Tensors on the device "meta" are not sent: they have a shape only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.function import FunctionCtx

from horovodlike.basics import Sum
from horovodlike.process_set import registered_id
from horovodlike.splits import RegionBase
from horovodlike.torch._ops.custom_ops import IS_AVAILABLE
from horovodlike.torch.mpi_ops import allgather, allreduce, allreduce_


class Region(RegionBase):
    """The collectives of a layer. With one rank they do nothing."""

    def copy(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the tensor. The backward pass sums its gradient, in place: only one new tensor may depend on it."""
        return whole if self.num_ranks == 1 else _apply(_Copy, whole, self)

    def sum(self, summand: torch.Tensor) -> torch.Tensor:
        """Overwrite a new tensor with the sum of the ranks' tensors, and return it."""
        return summand if self.num_ranks == 1 else _apply(_Sum, summand, self)

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Return the ranks' tensors joined along the last dimension."""
        return part if self.num_ranks == 1 else _apply(_Gather, part, self)

    def split(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the last dimension, whose size the number of ranks divides."""
        return whole if self.num_ranks == 1 else _apply(_Split, whole, self)


def _apply(function: Any, tensor: torch.Tensor, region: Region) -> torch.Tensor:
    result: torch.Tensor = function.apply(tensor, region)
    return result


class _Context(FunctionCtx):
    region: Region


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, whole: torch.Tensor, region: Region) -> torch.Tensor:
        ctx.region = region
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: _Context, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _apply(_Sum, gradient, ctx.region), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, summand: torch.Tensor, region: Region) -> torch.Tensor:
        ctx.region = region
        name = f"{region.name}.sum"
        if summand.is_meta:
            return summand.clone()
        if torch.compiler.is_compiling():  # the compiler decides which operations work in place
            return allreduce(summand, name=name, op=Sum, process_set=region.process_set)
        ctx.mark_dirty(summand)
        return allreduce_(summand, name=name, op=Sum, process_set=region.process_set)

    @staticmethod
    def backward(ctx: _Context, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _apply(_Copy, gradient, ctx.region), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, part: torch.Tensor, region: Region) -> torch.Tensor:
        ctx.region = region
        return _gathered(part.unsqueeze(0), region).movedim(0, -2).flatten(-2)

    @staticmethod
    def backward(ctx: _Context, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _apply(_Split, gradient, ctx.region), None


def _gathered(row: torch.Tensor, region: Region) -> torch.Tensor:
    name = f"{region.name}.gather"
    if row.is_meta:
        return row.expand(region.num_ranks, *row.shape[1:])
    if not (IS_AVAILABLE and torch.compiler.is_compiling()):
        return allgather(row, name=name, process_set=region.process_set)
    # The same with a number of rows that the compiler knows: it cannot trace an autograd function with others.
    options = "allgather", name, None, Sum, -1, 1.0, 1.0, registered_id(region.process_set)
    rows: list[torch.Tensor] = torch.ops.horovodlike.allgather([row], [region.num_ranks], *options)
    return rows[0]


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, whole: torch.Tensor, region: Region) -> torch.Tensor:
        ctx.region = region
        return whole.chunk(region.num_ranks, dim=-1)[region.place].clone()

    @staticmethod
    def backward(ctx: _Context, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _apply(_Gather, gradient, ctx.region), None


@contextmanager
def own_random_stream(region: Region, device: torch.device) -> Iterator[None]:
    """Have torch's generator of a device give this rank numbers of its own, others on each call.

    One number is drawn from torch's generator of the CPU. With the rank's place it is the seed within the context;
    after the context, the generators continue from there. So they have the same state on all ranks of the set
    afterwards, if they had before, and a recomputation that restores their state draws the same numbers.
    """
    seed = int(torch.randint(2**48, (), device="cpu")) * region.num_ranks + region.place
    if device.type == "cpu":
        with torch.random.fork_rng(devices=()):
            torch.default_generator.manual_seed(seed)
            yield
    else:
        with torch.random.fork_rng(devices=(device,), device_type=device.type):
            torch.get_device_module(device).manual_seed(seed)
            yield
