"""Reducescatter, whose result is this rank's share of the rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovodlike._engine.arguments import called
from horovodlike.basics import Average
from horovodlike.process_set import ProcessSet, global_process_set
from horovodlike.tensorflow._ops.calls import as_tensor, as_tensors, factors_of, reduce, reduction
from horovodlike.tensorflow.compression import Compression, Compressor

__all__ = ["grouped_reducescatter", "reducescatter"]

Tensor = Any  # a tf.Tensor, or what can be made one


def reducescatter(
    tensor: Tensor,
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> tf.Tensor:
    """Reduce a tensor over all ranks and return this rank's share of the rows of the result.

    The gradient, for Average and Sum, is made of the gradients of all shares.

    Args:
        tensor: Of the same shape and dtype on all ranks, and at least one dimension. If the rows cannot be divided
            evenly the first ranks have one more; with fewer rows than ranks the last ones have none.
        device_dense: Not needed.
        compression: What to send instead of the tensor.
        op: Average, Sum, Min, Max or Product.
        name: What the ranks match the operation by.
        process_set: The ranks that take part.
        ignore_name_scope: As for `allreduce`.
        prescale_factor: Multiplies the tensor before the reduction.
        postscale_factor: Multiplies the result.

    Raises:
        ValueError: An argument cannot be used.
        tf.errors.OpError: As described for the module.
    """
    del device_dense
    op = reduction(op, None, called("reducescatter", name), adasum=False)
    factors = factors_of(prescale_factor, postscale_factor, called("reducescatter", name))
    tensors = [as_tensor(tensor, "reducescatter")]
    return reduce(
        *("reducescatter", "reducescatter", tensors, compression, op, factors, name, process_set, ignore_name_scope)
    )[0]


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
) -> list[tf.Tensor]:
    """Do what `reducescatter` does for a list of tensors, of any dtypes, as one operation; return a list."""
    del device_dense
    op = reduction(op, None, called("grouped_reducescatter", name), adasum=False)
    factors = factors_of(prescale_factor, postscale_factor, called("grouped_reducescatter", name))
    group = as_tensors(tensors, "grouped_reducescatter")
    if not group:
        return []
    return reduce(
        *("reducescatter", "grouped_reducescatter", group, compression, op, factors, name, process_set),
        ignore_name_scope,
    )
