"""Reduction of gradients for Keras's torch backend."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras
import torch

from horovodlike.basics import Max
from horovodlike.keras._backend import Reduction, with_those_alone
from horovodlike.process_set import ProcessSet
from horovodlike.torch._ops import disable_compile, gpu
from horovodlike.torch.compression import Compression
from horovodlike.torch.mpi_ops import allreduce_async_, grouped_allreduce_async_, join, synchronize

__all__ = ["Compression", "densify", "divided_by_size", "is_sparse", "is_tracing", "join", "reduce", "translated"]


@torch.no_grad()
def reduce(
    reduction: Reduction,
    groups: Sequence[Sequence[int]],
    names: Sequence[str],
    gradients: Sequence[Any],
    like: Sequence[keras.Variable],
) -> list[Any]:
    """Reduce gradients in groups; without groups, reduce all of them in one grouped operation.

    The set of gradients that exist may differ between ranks and steps. So a missing gradient is reduced as zeros, and
    each group has one more tensor, which marks the gradients that exist: a gradient that no rank has stays None. For
    gradients on a GPU one such tensor, on the CPU, serves all groups, so that the host does not wait for the GPU.

    The memory of a gradient is overwritten if it is the `.grad` of its variable, as in Keras's train step.
    """
    chosen = with_those_alone(groups, len(names)) if groups else [list(range(len(names)))]
    is_real = [gradient is not None for gradient in gradients]
    apart = torch.tensor(is_real, dtype=torch.uint8) if gpu.is_on_gpu(like[0].value) else None
    started = []
    for group in chosen:
        tensors, contexts = [], []
        for position in group:
            tensor, context = reduction.compression.compress(_own(gradients[position], like[position].value))
            tensors.append(tensor)
            contexts.append(context)
        if apart is None:
            present = torch.tensor([is_real[position] for position in group], dtype=torch.float32)
            tensors.append(present.to(tensors[0].device))
        handle = grouped_allreduce_async_(
            tensors,
            name=names[group[0]],
            op=reduction.op,
            prescale_factor=reduction.prescale,
            postscale_factor=reduction.postscale,
            process_set=reduction.process_set,
        )
        started.append((handle, contexts))
    if apart is not None:
        name = f"{names[0]}.presence"
        handle_of_apart = allreduce_async_(apart, name=name, op=Max, process_set=reduction.process_set)
    reduced: list[Any] = [None] * len(names)
    for group, (handle, contexts) in zip(chosen, started, strict=True):
        outcome: Any = synchronize(handle)
        results = list(outcome)
        if apart is None:
            for position, count in zip(group, results.pop().tolist(), strict=True):
                is_real[position] = count > 0
        for position, result, context in zip(group, results, contexts, strict=True):
            reduced[position] = reduction.compression.decompress(result, context)
    if apart is not None:
        # Waited for last: a rank with its gradients on the CPU lacks this operation; the groups report that mismatch.
        synchronize(handle_of_apart)
        is_real = apart.tolist()
    return [gradient if real else None for gradient, real in zip(reduced, is_real, strict=True)]


disable_compile(reduce)


def _own(gradient: torch.Tensor | None, parameter: torch.Tensor) -> torch.Tensor:
    """Return a gradient, or zeros for a missing one, in memory that may be overwritten."""
    if gradient is None:
        return torch.zeros_like(parameter)
    return gradient if gradient is parameter.grad else gradient.detach().clone()


def is_sparse(gradient: torch.Tensor) -> bool:
    """Return whether a gradient is a sparse tensor. Keras's own layers make no such gradients."""
    return gradient.layout is not torch.strided


def densify(gradient: torch.Tensor) -> torch.Tensor:
    """Return a sparse gradient as a plain tensor."""
    return gradient.to_dense()


def divided_by_size(gradient: torch.Tensor, process_set: ProcessSet) -> torch.Tensor:
    """Return a gradient divided by the number of ranks."""
    return gradient / (process_set.size() or 1)


def is_tracing() -> bool:
    """Return False: torch recompiles a function that depends on the number of ranks when this number changes."""
    return False


def translated() -> AbstractContextManager[None]:
    """Return a context that does nothing: torch passes the engine's errors on unchanged."""
    return nullcontext()
