"""The gradients of the collectives, which TensorFlow finds by the names of the ops.

By convention a loss is averaged over the ranks: the gradient of a value that all ranks receive is averaged over them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from horovodlike.basics import Average, Sum
from horovodlike.tensorflow._ops.calls import Description, anchored, call, outermost, run
from horovodlike.tensorflow._ops.native import ops

Gradients = list[Any]  # a tensor, or None


def _backward(op: Any, part: str = "grad") -> Description:
    """Return the description of an operation in the backward pass, named after the one in the forward pass."""
    forward = Description.of(op)
    name = f"{forward.name}.{part}"
    if not tf.executing_eagerly():  # there may be several gradients of one operation
        name = outermost(tf.compat.v1.get_default_graph()).unique_name(name)
    return Description(name, forward.numbered, forward.process_set)


def _of_floats(compute: Callable[[Any, list[tf.Tensor], list[tf.Tensor]], Sequence[Any]]) -> Callable[..., Gradients]:
    """Return a gradient function: `compute(op, gradients, inputs)` of floating-point tensors, and None for others."""

    def gradient(op: Any, *gradients: Any) -> Gradients:
        passed_on = [one is not None and one.dtype.is_floating for one in gradients]
        given = [tf.convert_to_tensor(one) for one, passed in zip(gradients, passed_on, strict=True) if passed]
        inputs = [one for one, passed in zip(op.inputs, passed_on, strict=True) if passed]
        results = iter(compute(op, given, inputs) if given else ())
        return [next(results) if passed else None for passed in passed_on]

    return gradient


def _average(op: Any, gradients: list[tf.Tensor]) -> list[tf.Tensor]:
    return run("allreduce", gradients, _backward(op)._replace(op=Average).encode())


def _check_differentiable(forward: Description, what: str) -> None:
    if forward.op not in (Average, Sum):
        raise NotImplementedError(
            f"{forward.name}: {what} has a gradient for op=Average and op=Sum only; use tf.stop_gradient on its input"
        )


@_of_floats
def _of_allreduce(op: Any, gradients: list[tf.Tensor], _: list[tf.Tensor]) -> Sequence[Any]:
    forward = Description.of(op)
    _check_differentiable(forward, "an allreduce")
    backward = forward._replace(name=_backward(op).name)
    return run("allreduce", gradients, backward.encode())


@_of_floats
def _of_allgather(op: Any, gradients: list[tf.Tensor], inputs: list[tf.Tensor]) -> Sequence[Any]:
    rows = [tf.shape(one)[0] for one in inputs]
    with tf.device("CPU:0"):  # a few integers, which TensorFlow keeps on the host
        rank = ops.horovodlike_rank()
        mine = tf.stack([rank, *rows])[tf.newaxis]
        (of_each,) = run("allgather", [mine], _backward(op, "grad.rows").encode())
        before = tf.boolean_mask(of_each, of_each[:, 0] < rank)  # of lower ranks that take part
        starts = tf.unstack(tf.reduce_sum(before[:, 1:], axis=0), num=len(rows))
    averaged = _average(op, gradients)
    return [gradient[start : start + count] for gradient, start, count in zip(averaged, starts, rows, strict=True)]


@_of_floats
def _of_broadcast(op: Any, gradients: list[tf.Tensor], _: list[tf.Tensor]) -> Sequence[Any]:
    is_root = tf.equal(ops.horovodlike_rank(), Description.of(op).root_rank)
    return [tf.where(is_root, gradient, tf.zeros_like(gradient)) for gradient in _average(op, gradients)]


@_of_floats
def _of_reducescatter(op: Any, gradients: list[tf.Tensor], inputs: list[tf.Tensor]) -> Sequence[Any]:
    forward = Description.of(op)
    _check_differentiable(forward, "a reducescatter")
    gathered = run("allgather", gradients, _backward(op).encode())
    results = []
    for gradient, one in zip(gathered, inputs, strict=True):
        factor = tf.cast(forward.prescale * forward.postscale, gradient.dtype)
        if forward.op == Sum:
            factor *= tf.cast(ops.horovodlike_size(process_set=forward.process_set), gradient.dtype)
        results.append(tf.ensure_shape(gradient * factor, one.shape))
    return results


def _of_alltoall(op: Any, gradient: Any, _: Any) -> Gradients:
    if gradient is None or not gradient.dtype.is_floating:
        return [None, None]
    (given,) = anchored([tf.convert_to_tensor(gradient)])
    returned, _ = call("alltoall", _backward(op).encode(), given, op.outputs[1])
    # The gradient of rows that were not sent to any rank is 0.
    missing = tf.shape(op.inputs[0])[0] - tf.shape(returned)[0]
    padding = tf.concat([[[0, missing]], tf.zeros([tf.rank(returned) - 1, 2], tf.int32)], axis=0)
    return [tf.ensure_shape(tf.pad(returned, padding), op.inputs[0].shape), None]


def _of_anchored(_: Any, *gradients: Any) -> Gradients:
    return [*gradients, None]


_GRADIENTS = {
    "HorovodlikeAnchored": _of_anchored,
    "HorovodlikeMarkStep": lambda op, gradient: gradient,
    "HorovodlikeAllreduce": _of_allreduce,
    "HorovodlikeAllgather": _of_allgather,
    "HorovodlikeBroadcast": _of_broadcast,
    "HorovodlikeReducescatter": _of_reducescatter,
    "HorovodlikeAlltoall": _of_alltoall,
}
for _op_type, _gradient in _GRADIENTS.items():
    tf.RegisterGradient(_op_type)(_gradient)
