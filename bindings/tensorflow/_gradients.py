"""The gradients of the collectives, which TensorFlow finds by the names of the ops.

They follow the convention that a loss is averaged over the ranks: what all ranks read is averaged on its way back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from horovodlike.basics import Average, Sum
from horovodlike.tensorflow._calls import bits, not_folded, reduce
from horovodlike.tensorflow._native import ops

_ONE = bits(1.0)
Gradients = list[Any]  # a tensor, or None


def _identity(op: Any, part: str = "grad") -> dict[str, Any]:
    """Return the attributes of an operation in the backward pass, named after the one in the forward pass."""
    name = f"{op.get_attr('tensor_name').decode()}.{part}"
    if not tf.executing_eagerly():
        name = tf.compat.v1.get_default_graph().unique_name(name)  # there may be several gradients of one operation
    return {
        "tensor_name": name,
        "numbered": op.get_attr("numbered"),
        "process_set": op.get_attr("process_set"),
    }


def _of_floats(compute: Callable[[Any, list[tf.Tensor], list[tf.Tensor]], Sequence[Any]]) -> Callable[..., Gradients]:
    """Have `compute(op, gradients, inputs)` see only what is of floating point; other tensors have no gradient."""

    def gradient(op: Any, *gradients: Any) -> Gradients:
        passed_on = [one is not None and one.dtype.is_floating for one in gradients]
        given = [tf.convert_to_tensor(one) for one, passed in zip(gradients, passed_on, strict=True) if passed]
        inputs = [one for one, passed in zip(op.inputs, passed_on, strict=True) if passed]
        results = iter(compute(op, given, inputs) if given else ())
        return [next(results) if passed else None for passed in passed_on]

    return gradient


def _average(op: Any, gradients: list[tf.Tensor]) -> list[tf.Tensor]:
    attributes = {**_identity(op), "reduce_op": Average, "prescale_bits": _ONE, "postscale_bits": _ONE}
    return reduce("allreduce", gradients, attributes)


def _check_differentiable(op: Any, what: str) -> None:
    if op.get_attr("reduce_op") not in (Average, Sum):
        name = op.get_attr("tensor_name").decode()
        raise NotImplementedError(
            f"{name}: {what} has a gradient for op=Average and op=Sum only; use tf.stop_gradient on its input"
        )


@tf.RegisterGradient("HorovodlikeAllreduce")
@_of_floats
def _of_allreduce(op: Any, gradients: list[tf.Tensor], _: list[tf.Tensor]) -> Sequence[Any]:
    _check_differentiable(op, "an allreduce")
    same = {name: op.get_attr(name) for name in ("reduce_op", "prescale_bits", "postscale_bits")}
    return reduce("allreduce", gradients, {**_identity(op), **same})


@tf.RegisterGradient("HorovodlikeAllgather")
@_of_floats
def _of_allgather(op: Any, gradients: list[tf.Tensor], inputs: list[tf.Tensor]) -> Sequence[Any]:
    rank = ops.horovodlike_rank()
    rows = [tf.shape(one)[0] for one in inputs]
    mine = tf.stack([rank, *rows])[tf.newaxis]
    (of_each,) = reduce("allgather", [mine], _identity(op, "grad.rows"))
    before = tf.boolean_mask(of_each, of_each[:, 0] < rank)  # of those that take part
    starts = tf.unstack(tf.reduce_sum(before[:, 1:], axis=0), num=len(rows))
    averaged = _average(op, gradients)
    return [gradient[start : start + count] for gradient, start, count in zip(averaged, starts, rows, strict=True)]


@tf.RegisterGradient("HorovodlikeBroadcast")
@_of_floats
def _of_broadcast(op: Any, gradients: list[tf.Tensor], _: list[tf.Tensor]) -> Sequence[Any]:
    is_root = tf.equal(ops.horovodlike_rank(), op.get_attr("root_rank"))
    return [tf.where(is_root, gradient, tf.zeros_like(gradient)) for gradient in _average(op, gradients)]


@tf.RegisterGradient("HorovodlikeReducescatter")
@_of_floats
def _of_reducescatter(op: Any, gradients: list[tf.Tensor], inputs: list[tf.Tensor]) -> Sequence[Any]:
    _check_differentiable(op, "a reducescatter")
    gathered = reduce("allgather", gradients, _identity(op))
    factor = _factor(op, "prescale_bits") * _factor(op, "postscale_bits")
    results = []
    for gradient, one in zip(gathered, inputs, strict=True):
        scale = tf.cast(factor, gradient.dtype)
        if op.get_attr("reduce_op") == Sum:
            scale *= tf.cast(ops.horovodlike_size(process_set=op.get_attr("process_set")), gradient.dtype)
        results.append(tf.ensure_shape(gradient * scale, one.shape))
    return results


def _factor(op: Any, name: str) -> float:
    import struct

    return float(struct.unpack("d", struct.pack("q", op.get_attr(name)))[0])


@tf.RegisterGradient("HorovodlikeAlltoall")
def _of_alltoall(op: Any, gradient: Any, _: Any) -> Gradients:
    if gradient is None or not gradient.dtype.is_floating:
        return [None, None]
    (given,) = not_folded([tf.convert_to_tensor(gradient)])
    returned, _ = ops.horovodlike_alltoall(tensor=given, splits=op.outputs[1], **_identity(op))
    # Rows that were sent to nobody have no influence.
    missing = tf.shape(op.inputs[0])[0] - tf.shape(returned)[0]
    padding = tf.concat([[[0, missing]], tf.zeros([tf.rank(returned) - 1, 2], tf.int32)], axis=0)
    return [tf.ensure_shape(tf.pad(returned, padding), op.inputs[0].shape), None]
