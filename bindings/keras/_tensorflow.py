"""Gradients of Keras's TensorFlow backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from horovodlike.keras._backend import Reduction, with_those_alone
from horovodlike.tensorflow import Compression, allreduce, grouped_allreduce, join

__all__ = ["Compression", "densify", "is_sparse", "join", "reduce", "scale"]


def reduce(
    reduction: Reduction,
    groups: Sequence[Sequence[int]],
    names: Sequence[str],
    gradients: Sequence[Any],
    like: Sequence[keras.Variable],
) -> list[Any]:
    """Reduce in groups; without any asked for, each on its own in a graph, while TensorFlow computes the next.

    Eagerly each call waits for its result, so all are one group then. Which gradients there are is decided when the
    step is traced, the same way on all ranks. Rows of `IndexedSlices` are gathered, and are not divided before.
    """
    del like
    if not groups and tf.executing_eagerly():
        groups = [range(len(names))]
    reduced: list[Any] = [None] * len(names)
    dense = [i for i, gradient in enumerate(gradients) if gradient is not None and not is_sparse(gradient)]
    common: dict[str, Any] = {
        "op": reduction.op,
        "compression": reduction.compression,
        "process_set": reduction.process_set,
    }
    factors: dict[str, Any] = {"prescale_factor": reduction.prescale, "postscale_factor": reduction.postscale}
    for group in with_those_alone([[i for i in group if i in dense] for group in groups], len(names)):
        first = group[0]
        if len(group) > 1:
            results = grouped_allreduce([gradients[i] for i in group], name=names[first], **common, **factors)
            for i, result in zip(group, results, strict=True):
                reduced[i] = result
        elif first in dense:
            reduced[first] = allreduce(gradients[first], name=names[first], **common, **factors)
        elif gradients[first] is not None:
            reduced[first] = allreduce(gradients[first], name=names[first], **common)
    return reduced


def is_sparse(gradient: Any) -> bool:
    """Whether a gradient has rows only for some positions, as that of an embedding."""
    return isinstance(gradient, tf.IndexedSlices)


def densify(gradient: tf.IndexedSlices) -> tf.Tensor:
    """Return a sparse gradient as a plain tensor."""
    return tf.convert_to_tensor(gradient)


def scale(gradient: Any, factor: float) -> Any:
    """Return a gradient times a factor."""
    if is_sparse(gradient):
        return tf.IndexedSlices(gradient.values * factor, gradient.indices, gradient.dense_shape)
    return gradient * factor
