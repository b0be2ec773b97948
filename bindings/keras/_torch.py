"""Gradients of Keras's torch backend."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras
import torch

from horovodlike.keras._backend import Reduction, with_those_alone
from horovodlike.process_set import ProcessSet
from horovodlike.torch import Compression, join
from horovodlike.torch._compile import leave_alone
from horovodlike.torch.mpi_ops import grouped_allreduce_async_, synchronize

__all__ = ["Compression", "densify", "divided_by_size", "is_sparse", "is_tracing", "join", "reduce", "translated"]


@torch.no_grad()
def reduce(
    reduction: Reduction,
    groups: Sequence[Sequence[int]],
    names: Sequence[str],
    gradients: Sequence[Any],
    like: Sequence[keras.Variable],
) -> list[Any]:
    """Reduce in groups; without any asked for, all in one, which costs one call of the engine.

    Which gradients there are may differ between ranks and steps. So all take part, zeros where there is none, and with
    each group goes a tensor that says which are real: what no rank has stays None.

    The memory of a gradient is overwritten if it is the `.grad` of its variable, as that of the train step is.
    """
    chosen = with_those_alone(groups, len(names)) if groups else [list(range(len(names)))]
    started = []
    for group in chosen:
        tensors, contexts = [], []
        for position in group:
            tensor, context = reduction.compression.compress(_own(gradients[position], like[position].value))
            tensors.append(tensor)
            contexts.append(context)
        present = torch.tensor([gradients[position] is not None for position in group], dtype=torch.float32)
        handle = grouped_allreduce_async_(
            [*tensors, present.to(tensors[0].device)],
            name=names[group[0]],
            op=reduction.op,
            prescale_factor=reduction.prescale,
            postscale_factor=reduction.postscale,
            process_set=reduction.process_set,
        )
        started.append((handle, contexts))
    reduced: list[Any] = [None] * len(names)
    for group, (handle, contexts) in zip(chosen, started, strict=True):
        outcome = synchronize(handle)
        assert isinstance(outcome, tuple)
        *results, there = outcome
        assert isinstance(there, torch.Tensor)
        for position, result, context, count in zip(group, results, contexts, there.tolist(), strict=True):
            if count > 0:
                reduced[position] = reduction.compression.decompress(result, context)
    return reduced


leave_alone(reduce)


def _own(gradient: torch.Tensor | None, parameter: torch.Tensor) -> torch.Tensor:
    """Return a tensor that may be overwritten."""
    if gradient is None:
        return torch.zeros_like(parameter)
    return gradient if gradient is parameter.grad else gradient.detach().clone()


def is_sparse(gradient: torch.Tensor) -> bool:
    """Whether a gradient has rows only for some positions. Layers of Keras make none of those."""
    return gradient.layout is not torch.strided


def densify(gradient: torch.Tensor) -> torch.Tensor:
    """Return a sparse gradient as a plain tensor."""
    return gradient.to_dense()


def divided_by_size(gradient: torch.Tensor, process_set: ProcessSet) -> torch.Tensor:
    """Return a gradient divided by the number of ranks."""
    return gradient / (process_set.size() or 1)


def is_tracing() -> bool:
    """No: torch compiles again what depends on the number of ranks when that has changed."""
    return False


def translated() -> AbstractContextManager[None]:
    """Return a context that does nothing: the engine's errors come through as they are."""
    return nullcontext()
