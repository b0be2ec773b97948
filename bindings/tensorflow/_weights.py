"""The weights of gradients by samples, in eager mode and in graphs: see `horovodlike.weighting`.

A weight is a number in eager mode and a scalar of float64 in a graph, where it is read when the step runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from horovodlike import basics, weighting
from horovodlike.process_set import ProcessSet, members
from horovodlike.tensorflow._ops.calls import describe, outermost, run, set_id_of
from horovodlike.weighting import Weight

__all__ = ["set_batch_weight"]


def set_batch_weight(weight: Any) -> None:
    """Set the number of samples behind the gradients that this rank computes next, for the average over samples.

    As `horovodlike.weighting.set_batch_weight`, which see. In a `tf.function` or a graph the weight may be a tensor,
    and is set each time that the graph runs.

    Raises:
        ValueError: `weight` is no number, negative or not finite.
        tf.errors.InvalidArgumentError: The same, in a graph.
    """
    if tf.executing_eagerly():
        weighting.set_batch_weight(_read(weight))
        return
    outermost(tf.compat.v1.get_default_graph())._horovodlike_weighted = True
    tf.numpy_function(weighting.set_batch_weight, [tf.cast(weight, tf.float64)], [])


def check_argument(weight: Weight, op: int, operation: str) -> None:
    """Check the argument `weight` of a wrapper, as `weighting.check_argument` does; a tensor of a graph is accepted."""
    if _is_symbolic(weight):
        weighting.check_op(op, operation)
    else:
        weighting.check_argument(_read(weight), op, operation)


def of_step(weight: Weight, op: int, operation: str, alone: bool = False) -> Any:
    """Return this rank's weight in the step; None if gradients are not weighted.

    Args:
        weight: The argument of the wrapper.
        op: The reduction of the gradients.
        operation: The wrapper, for messages.
        alone: No other rank takes part, and nothing is sent: the weight must not be 0.

    Raises:
        ValueError: A weight cannot be used.
        RuntimeError: `weight` is `batch_weight`, and no weight has been set.
        tf.errors.OpError: The same, in a graph, when it runs.
    """
    if tf.executing_eagerly():
        own = weighting.of_step(_read(weight), op, operation)
        if alone and own is not None:
            weighting.factor(own, own, 1)
        return own
    if weight is None:
        graph = outermost(tf.compat.v1.get_default_graph())
        if not weighting.is_set() and not getattr(graph, "_horovodlike_weighted", False):
            return None
        weight = weighting.batch_weight
    weighting.check_op(op, operation)
    in_graph = _in_graph(weight, operation)
    if alone:
        _assert_average(in_graph)
    return in_graph


def _is_symbolic(value: Any) -> bool:
    return tf.is_tensor(value) and not isinstance(value, tf.Variable) and not hasattr(value, "numpy")


def _read(weight: Any) -> Any:
    """Return the value of an eager tensor or a variable; return anything else itself."""
    return weight.numpy() if tf.is_tensor(weight) and hasattr(weight, "numpy") else weight


def _in_graph(weight: Weight, operation: str) -> tf.Tensor:
    if callable(weight) and not tf.is_tensor(weight):
        ask: Callable[[], Any] = weight

        def checked() -> Any:
            return np.float64(weighting.checked(_read(ask()), operation))

        value = tf.numpy_function(checked, [], tf.float64)
        value.set_shape(())
        return value
    if not tf.is_tensor(weight):
        return tf.constant(weighting.checked(weight, operation), tf.float64)
    value = tf.reshape(tf.cast(weight, tf.float64), ())
    # A bad weight is an error on all ranks: it makes the sum of the weights a NaN.
    is_good = tf.logical_and(value >= 0, tf.math.is_finite(value))
    return tf.where(is_good, value, tf.constant(float("nan"), tf.float64))


def factor(weight: Any, operation: str, name: str | None, process_set: ProcessSet) -> Any:
    """Exchange the weights of the ranks, and return the factor for this rank's gradients.

    Args:
        weight: From `of_step`.
        operation: The first operation that reduces gradients in a step without weights, and its name: on ranks that
            disagree about weights this is also a gradient's name, and so an error instead of a wait.
        name: This name.
        process_set: The ranks that take part.

    Raises:
        ValueError: The sum of all weights is 0 or not finite, in eager mode.
        tf.errors.OpError: The same, in a graph, when it runs; or only some ranks weight the gradients of this step.
    """
    with tf.device("CPU:0"):
        own = tf.convert_to_tensor(weight, tf.float64)
        pair = tf.stack([own, tf.ones((), tf.float64)])
        description = describe(operation, name, [pair], False, process_set)
        if tf.executing_eagerly():
            try:
                [sums] = run("allreduce", [pair], description)
            except tf.errors.FailedPreconditionError as error:
                message = f"{error.message} {weighting.DISAGREE}"
                raise tf.errors.FailedPreconditionError(error.node_def, error.op, message) from error
            total, present = sums.numpy().tolist()
            return weighting.factor(weight, total, weighting.divisor(present, len(members(set_id_of(process_set)))))
        [sums] = run("allreduce", [pair], description)
        total, present = sums[0], sums[1]
        if basics.average_counts_joined():
            present = tf.constant(len(members(set_id_of(process_set))), tf.float64)
        with tf.control_dependencies([_assert_average(total)]):
            return own * present / total


def _assert_average(total: tf.Tensor) -> Any:
    is_good = tf.logical_and(total > 0, tf.math.is_finite(total))
    return tf.debugging.Assert(is_good, [weighting.NO_AVERAGE, total])


def scaled(gradients: Sequence[Any], factor: Any) -> list[Any]:
    """Return gradients times a factor: tensors, `tf.IndexedSlices` or None. A factor of 0 makes zeros of NaN, too."""
    if isinstance(factor, float) and factor == 1.0:
        return list(gradients)
    return [None if gradient is None else _scaled(gradient, factor) for gradient in gradients]


def _scaled(gradient: Any, factor: Any) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(_scaled(gradient.values, factor), gradient.indices, gradient.dense_shape)
    gradient = tf.convert_to_tensor(gradient)
    wide = tf.float32 if gradient.dtype.size < 4 else gradient.dtype  # half precision would round the factor
    factor = tf.cast(tf.convert_to_tensor(factor, tf.float64), wide)
    return tf.cast(tf.math.multiply_no_nan(tf.cast(gradient, wide), factor), gradient.dtype)
