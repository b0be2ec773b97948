"""Reducescatter: a reduction of which each rank keeps its share of the rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from horovodlike._engine.ops import Kind
from horovodlike.basics import Average
from horovodlike.process_set import ProcessSet, global_process_set
from horovodlike.torch._ops.autograd import run
from horovodlike.torch._ops.calls import compressed, group, reduction_call
from horovodlike.torch._ops.handles import start_reducescatter
from horovodlike.torch.compression import Compression, Compressor


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduce a tensor over all ranks and return this rank's rows of the result.

    Dimension 0 is divided among the ranks in their order. If it is no multiple of their number, the first ranks get a
    row more; if it is less than their number, the last ranks get an empty tensor.

    Differentiable for Average and Sum: the gradient is the allgather of the gradients, times the factors and, for Sum,
    times the number of ranks.

    Args:
        tensor: Of at least one dimension, and of the same shape and dtype on all ranks.
        name: What the ranks match the operation by; counted if None.
        compression: What to send instead of the tensor.
        op: Average, Sum, Min, Max or Product. Average truncates integers; bool knows no Average.
        process_set: The ranks that take part.
        prescale_factor: Multiplies the tensor before the reduction.
        postscale_factor: Multiplies the result.

    Raises:
        HorovodInternalError: The ranks disagree, or the job is broken or shut down.
        UnsupportedReductionError: `op` is Adasum.
        ValueError: An argument cannot be used, or the name is in flight already.
    """
    call = reduction_call(Kind.REDUCESCATTER, "reducescatter", name, op, prescale_factor, postscale_factor, process_set)
    [(sent, ctx)] = compressed(compression, [tensor], call.name)
    return compression.decompress(run(call, [sent])[0], ctx)


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start what `reducescatter` does and return a handle for `poll` and `synchronize`. Not differentiable."""
    call = reduction_call(Kind.REDUCESCATTER, "reducescatter", name, op, prescale_factor, postscale_factor, process_set)
    return start_reducescatter(call, [tensor], single=True)


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Do what `reducescatter` does for a list of tensors, of any dtypes, as one operation; return a list."""
    call = reduction_call(
        Kind.REDUCESCATTER, "grouped_reducescatter", name, op, prescale_factor, postscale_factor, process_set
    )
    pairs = compressed(compression, group(tensors, call.name), call.name)
    reduced = run(call, [sent for sent, _ in pairs])
    return [compression.decompress(tensor, ctx) for tensor, (_, ctx) in zip(reduced, pairs, strict=True)]


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start what `grouped_reducescatter` does and return a handle, whose result is a tuple."""
    call = reduction_call(
        Kind.REDUCESCATTER, "grouped_reducescatter", name, op, prescale_factor, postscale_factor, process_set
    )
    return start_reducescatter(call, group(tensors, call.name), single=False)
