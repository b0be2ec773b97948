"""From arguments that have been checked to ops of TensorFlow: what all collectives have in common."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import tensorflow as tf
from horovodlike import ops as engine_ops
from horovodlike.basics import Adasum, Average, Max, Min, Product, Sum
from horovodlike.process_set import ProcessSet, global_process_set, registered_id
from horovodlike.tensorflow._native import ops
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

DTYPES = (
    *(tf.uint8, tf.int8, tf.uint16, tf.int16, tf.int32, tf.int64),
    *(tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.bool),
)

_PREFIX = "tensorflow."  # keeps the names apart from those of another framework in the same process


@lru_cache
def bits(factor: float) -> int:
    """Return a factor as the integer of the same 64 bits, which is how the ops take it."""
    (as_integer,) = struct.unpack("q", struct.pack("d", factor))
    return int(as_integer)


def set_id_of(process_set: ProcessSet) -> int:
    """Return the id of a process set of which this rank is a member.

    Raises:
        ValueError: It is not registered, or this rank is no member.
        TypeError: It is no process set.
    """
    return 0 if process_set is global_process_set else registered_id(process_set)


def reduction(op: int | None, average: bool | None, *, adasum: bool) -> int:
    """Return how to reduce, from Horovod's two ways to say so.

    Raises:
        ValueError: Both are given, or `op` is none of the known ones.
    """
    if average is not None:
        return handle_average_backwards_compatibility(op, average)
    if op is None:
        return Average
    if op not in (Average, Sum, Min, Max, Product) and not (adasum and op == Adasum):
        also = ", Product and Adasum" if adasum else " and Product"
        raise ValueError(f"op must be one of hvd.Average, Sum, Min, Max{also}, got {op!r}")
    return op


def handle_average_backwards_compatibility(op: int | None, average: bool | None) -> int:
    """Return the operation that a script asks for by `op`, or in the old way by `average`.

    Raises:
        ValueError: Both are given.
    """
    import warnings

    if average is None:
        return Average if op is None else op
    if op is not None:
        raise ValueError("op supersedes average: give only one of them")
    warnings.warn("average is deprecated: use op=Average or op=Sum", DeprecationWarning, stacklevel=4)
    return Average if average else Sum


def as_tensor(value: Any, operation: str) -> tf.Tensor:
    """Return a value as a tensor that the engine can take.

    Raises:
        ValueError: Its dtype is not supported; the message names it.
    """
    tensor = value if isinstance(value, tf.Tensor) else tf.convert_to_tensor(value)
    if tensor.dtype not in DTYPES:
        supported = ", ".join(dtype.name for dtype in DTYPES)
        raise ValueError(
            f"{operation}: tensors of dtype {tensor.dtype.name} are not supported; supported are {supported}"
        )
    return tensor


def identity(operation: str, name: str | None, tensors: Sequence[tf.Tensor], ignore_name_scope: bool) -> dict[str, Any]:
    """Return the attributes by which the ranks match an operation.

    In a graph an unnamed operation is named after its tensor, and so has the same name on all ranks that trace the same
    function. Eagerly it has a number when it runs.
    """
    if tf.executing_eagerly():
        engine_ops.hand_over()  # what bindings of other frameworks hold back: this thread is going to wait
        if name is None:
            return {"tensor_name": f"{_PREFIX}{operation}.noname", "numbered": True}
        return {"tensor_name": f"{_PREFIX}{operation}.{name}", "numbered": False}
    graph = tf.compat.v1.get_default_graph()
    if GraphOrParentsInXlaContext(graph):
        raise tf.errors.InvalidArgumentError(
            None,
            None,
            f"{operation}: collectives cannot be compiled by XLA; set jit_compile=False for the tf.function or in "
            "model.compile() of Keras",
        )
    if name is None:
        outermost = graph
        while getattr(outermost, "outer_graph", None) is not None and outermost.outer_graph.building_function:
            outermost = outermost.outer_graph
        of_what = tensors[0].op.name if tensors else "noname"
        name = outermost.unique_name(of_what.rpartition("/")[2] if ignore_name_scope else of_what)
    return {"tensor_name": f"{_PREFIX}{operation}.{name}", "numbered": False}


def not_folded(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Return the tensors such that TensorFlow does not compute what is made of them beforehand if they are constant.

    The result of a collective is not a constant, however constant its input is on this rank.
    """
    if tf.executing_eagerly():
        return list(tensors)
    return [tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=tensor.shape) for tensor in tensors]


def reduce(kind: str, tensors: Sequence[tf.Tensor], attributes: dict[str, Any]) -> list[tf.Tensor]:
    """Add the op of this kind, which takes a list of tensors and returns one."""
    return list(_OPS[kind](tensors=not_folded(tensors), **attributes))


_OPS = {
    "allreduce": ops.horovodlike_allreduce,
    "reducescatter": ops.horovodlike_reducescatter,
    "allgather": ops.horovodlike_allgather,
    "broadcast": ops.horovodlike_broadcast,
}
