"""The reduction of gradients on Keras's TensorFlow backend: see `Backend`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovodlike.basics import Max
from horovodlike.keras._backend import Reduction, with_those_alone
from horovodlike.process_set import ProcessSet
from horovodlike.tensorflow import _weights
from horovodlike.tensorflow._gradient_reduction import compared
from horovodlike.tensorflow._ops.calls import translated, unique_in_graph
from horovodlike.tensorflow._region import TensorFlowRegion
from horovodlike.tensorflow._weights import of_step as weight_of_step
from horovodlike.tensorflow._weights import set_batch_weight
from horovodlike.tensorflow.compression import Compression
from horovodlike.tensorflow.mpi_ops import allreduce, grouped_allreduce, join, size_op

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

region = TensorFlowRegion.of


def reduce(
    reduction: Reduction,
    groups: Sequence[Sequence[int]],
    names: Sequence[str],
    gradients: Sequence[Any],
    like: Sequence[Any],
) -> list[Any]:
    """Reduce in groups. In a graph without groups, each gradient is reduced alone while TensorFlow computes the next.

    In eager mode each call waits for its result, so without groups all dense gradients are one group. Some of them may
    be missing, on some ranks or in some steps. In a graph the gradients that exist are known when the step is traced,
    and must be the same on all ranks. The rows of `IndexedSlices` are gathered without the factors, on all ranks.
    """
    gradients = compared(like, gradients, reduction.process_set, names[0])
    if tf.executing_eagerly():
        groups = groups or [range(len(names))]
    else:
        names = [unique_in_graph(name) for name in names]
    if reduction.weight is not None:
        names, gradients = _weighted(reduction, groups, names, gradients)
    if tf.executing_eagerly():
        return _reduce_eagerly(reduction, groups, names, gradients, like)
    reduced: list[Any] = [None] * len(names)
    dense = {i for i, gradient in enumerate(gradients) if gradient is not None and not is_sparse(gradient)}
    options = _options(reduction)
    for group in with_those_alone([[i for i in group if i in dense] for group in groups], len(names)):
        first = group[0]
        if len(group) > 1:
            results = grouped_allreduce([gradients[i] for i in group], name=names[first], **options)
            for i, result in zip(group, results, strict=True):
                reduced[i] = result
        elif first in dense:
            reduced[first] = allreduce(gradients[first], name=names[first], **options)
        elif gradients[first] is not None:
            reduced[first] = _reduce_sparse(reduction, names[first], gradients[first])
    return reduced


def _weighted(
    reduction: Reduction, groups: Sequence[Sequence[int]], names: Sequence[str], gradients: Sequence[Any]
) -> tuple[list[str], list[Any]]:
    """Exchange the ranks' weights; return other names for the gradients, and the gradients times this rank's factor.

    The exchange has the name under which a step without weights reduces its first gradients.
    """
    sparse = {i for i, gradient in enumerate(gradients) if gradient is not None and is_sparse(gradient)}
    missing = set() if tf.executing_eagerly() else {i for i, gradient in enumerate(gradients) if gradient is None}
    ordered = with_those_alone([[i for i in group if i not in sparse | missing] for group in groups], len(names))
    first = next((group[0] for group in ordered if group[0] not in missing), 0)
    name = f"{names[first]}.slices" if first in sparse else names[first]
    factor = _weights.factor(reduction.weight, "grouped_allreduce", name, reduction.process_set)
    scaled = _weights.scaled(gradients, factor)
    if isinstance(factor, float) and factor == 0:  # as on a rank without these gradients
        scaled = [gradient if i in sparse else None for i, gradient in enumerate(scaled)]
    return [f"{each}.weighted" for each in names], scaled


def _reduce_eagerly(
    reduction: Reduction,
    groups: Sequence[Sequence[int]],
    names: Sequence[str],
    gradients: Sequence[Any],
    like: Sequence[Any],
) -> list[Any]:
    """Reduce in groups, with zeros for missing gradients; a gradient that no rank has stays None.

    Each group has an additional tensor, which marks the gradients that exist on a rank. For gradients on a GPU there is
    one such tensor for all groups, on the CPU, so that the host does not wait for the GPU.
    """
    is_real = [gradient is not None for gradient in gradients]
    first_variable = like[0] if isinstance(like[0], tf.Variable) else like[0].value
    apart = "GPU" in first_variable.device
    reduced: list[Any] = [None] * len(names)
    sparse = {i for i, gradient in enumerate(gradients) if gradient is not None and is_sparse(gradient)}
    for group in with_those_alone([[i for i in group if i not in sparse] for group in groups], len(names)):
        first = group[0]
        if first in sparse:
            reduced[first] = _reduce_sparse(reduction, names[first], gradients[first])
            continue
        own = [tf.zeros(like[i].shape, like[i].dtype) if gradients[i] is None else gradients[i] for i in group]
        compressed = [reduction.compression.compress(tensor) for tensor in own]
        tensors = [tensor for tensor, _ in compressed]
        if not apart:
            tensors.append(tf.constant([float(is_real[i]) for i in group]))  # added here, so not compressed
        options = {**_options(reduction), "compression": Compression.none}
        results = grouped_allreduce(tensors, name=names[first], **options)
        if not apart:
            for i, count in zip(group, results.pop().numpy(), strict=True):
                is_real[i] = count > 0
        for i, result, (_, context) in zip(group, results, compressed, strict=True):
            reduced[i] = reduction.compression.decompress(result, context)
    if apart:
        with tf.device("CPU:0"):
            there = tf.constant([int(real) for real in is_real], tf.uint8)
            there = allreduce(there, name=f"{names[0]}.presence", op=Max, process_set=reduction.process_set)
        is_real = there.numpy().tolist()
    return [gradient if real else None for gradient, real in zip(reduced, is_real, strict=True)]


def _reduce_sparse(reduction: Reduction, name: str, gradient: tf.IndexedSlices) -> tf.IndexedSlices:
    options = {**_options(reduction), "prescale_factor": 1.0, "postscale_factor": 1.0}
    return allreduce(gradient, name=name, **options)


def _options(reduction: Reduction) -> dict[str, Any]:
    return {
        "op": reduction.op,
        "compression": reduction.compression,
        "process_set": reduction.process_set,
        "prescale_factor": reduction.prescale,
        "postscale_factor": reduction.postscale,
    }


def is_sparse(gradient: Any) -> bool:
    """Return whether a gradient is sparse: has values for some of the rows only, as an embedding's gradient."""
    return isinstance(gradient, tf.IndexedSlices)


def densify(gradient: tf.IndexedSlices) -> tf.Tensor:
    """Return a sparse gradient as a dense tensor."""
    return tf.convert_to_tensor(gradient)


def divided_by_size(gradient: Any, process_set: ProcessSet) -> Any:
    """Return a gradient divided by the number of ranks; a graph reads that number when it runs."""
    values = gradient.values if is_sparse(gradient) else gradient
    values = values / tf.cast(size_op(process_set.process_set_id or 0), values.dtype)
    return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape) if is_sparse(gradient) else values


def is_tracing() -> bool:
    """Return whether a graph is being built."""
    return not tf.executing_eagerly()
