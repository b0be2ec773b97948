"""Reduction of gradients for Keras's torch backend."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import keras
import torch

from horovodlike import weighting
from horovodlike.arrays.consistency import compare, is_second_step, of_variables
from horovodlike.basics import Max, Sum
from horovodlike.errors import MismatchError
from horovodlike.keras._backend import Reduction, with_those_alone
from horovodlike.process_set import ProcessSet, members, registered_id
from horovodlike.torch._ops import disable_compile, gpu
from horovodlike.torch.compression import Compression
from horovodlike.torch.mpi_ops import allreduce_async_, grouped_allreduce_async_, join, synchronize
from horovodlike.torch.nn._region import Region
from horovodlike.weighting import Weight, set_batch_weight

__all__ = [
    "Compression",
    "densify",
    "divided_by_size",
    "is_sparse",
    "is_tracing",
    "join",
    "reduce",
    "region",
    "set_batch_weight",
    "translated",
    "weight_of_step",
]

region = Region.of


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
    if is_second_step(like[0]):
        compare(partial(of_variables, like), reduction.process_set, names[0])()
    chosen = with_those_alone(groups, len(names)) if groups else [list(range(len(names)))]
    if reduction.weight is not None:
        factor = _exchanged(reduction, names[chosen[0][0]])
        gradients = [_scaled(gradient, each, factor) for gradient, each in zip(gradients, like, strict=True)]
        names = [f"{name}.weighted" for name in names]
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


def weight_of_step(weight: Weight, op: int, operation: str, alone: bool) -> float | None:
    """Return this rank's weight in this step; None if gradients are not weighted: see `Backend`."""
    own = weighting.of_step(weight, op, operation)
    if alone and own is not None:
        weighting.factor(own, own, 1)
    return own


def _exchanged(reduction: Reduction, name: str) -> float:
    """Exchange the ranks' weights, and return the factor for this rank's gradients.

    The exchange has the name under which a step without weights reduces its first gradients: ranks that disagree about
    weights get an error.
    """
    sums = torch.tensor([reduction.weight, 1.0], dtype=torch.float64, device="cpu")
    process_set = reduction.process_set
    handle = grouped_allreduce_async_([sums], name=name, op=Sum, process_set=process_set)
    try:
        synchronize(handle)
    except MismatchError as error:
        raise MismatchError(f"{error} {weighting.DISAGREE}") from error
    total, present = sums.tolist()
    num_ranks = len(members(registered_id(process_set)))
    return weighting.factor(reduction.weight, total, weighting.divisor(present, num_ranks))


def _scaled(gradient: torch.Tensor | None, variable: keras.Variable, factor: float) -> torch.Tensor | None:
    """Return a gradient times a factor; None, as on a rank without it, if the factor is 0."""
    if gradient is None or factor == 0:
        return None
    if factor == 1:
        return gradient
    return gradient.mul_(factor) if gradient is variable.value.grad else gradient * factor


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
