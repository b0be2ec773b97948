"""The collectives on TensorFlow tensors.

They work eagerly, in `tf.function`, and in graphs of TensorFlow 1. Common to all of them:

* Ranks match operations by name. In a graph an unnamed operation is named after its tensor. In eager mode it gets a
  number, so every rank has to call unnamed operations in the same order.
* Tensors may be of any dtype of docs/users/arrays.md and of any size, 0 elements included.
* They run on the CPU or on an NVIDIA GPU: TensorFlow and `tf.device` decide, as for any op. Results are on the same
  device, but eager ones of int32 may be on the host. On a GPU they return when all work has been enqueued. All ranks
  must use the same kind of device.
* If the ranks disagree about an operation it raises `tf.errors.FailedPreconditionError` on all of them, and the job
  continues. A call that is wrong on this rank alone raises `tf.errors.InvalidArgumentError`, or `ValueError` if the
  error is found before the op is made. If the job is broken or shut down, they raise `tf.errors.UnknownError`.
* In a graph operations run in any order that their tensors allow, and the order may differ between the ranks.
* All but `barrier`, `broadcast_` and `join` are differentiable. By convention the loss is averaged over the ranks.
* Every operation takes a process set. Ranks that are not in the set do not need to call the operation.
* Any thread may call them, as long as all ranks use the same names.
* `device_dense` and `device_sparse` are accepted for scripts that pass them.
* XLA cannot compile them: with `jit_compile=True` they raise `tf.errors.InvalidArgumentError` when they are traced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from horovodlike import basics
from horovodlike._engine.arguments import called, integer, split_counts
from horovodlike.basics import *  # scripts take them from this module as well
from horovodlike.basics import Adasum, Average, Sum, average_counts_joined
from horovodlike.process_set import ProcessSet, add_process_set, forget_numbers, global_process_set, remove_process_set
from horovodlike.tensorflow._ops import gradients  # noqa: F401  # registers them
from horovodlike.tensorflow._ops.calls import (
    anchored,
    as_tensor,
    as_tensors,
    call,
    describe,
    factors_of,
    handle_average_backwards_compatibility,
    ranks_of,
    reduce,
    reduction,
    run,
    set_id_of,
)
from horovodlike.tensorflow._ops.native import (
    local_rank_op,
    local_size_op,
    process_set_included_op,
    rank_op,
    size_op,
)
from horovodlike.tensorflow.compression import Compression, Compressor
from horovodlike.timeline import start_timeline, stop_timeline

__all__ = [
    "ProcessSet",
    "add_process_set",
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "check_num_rank_power_of_2",
    "global_process_set",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_broadcast",
    "grouped_reducescatter",
    "handle_average_backwards_compatibility",
    "join",
    "local_rank_op",
    "local_size_op",
    "process_set_included_op",
    "rank_op",
    "reducescatter",
    "remove_process_set",
    "size_op",
    "start_timeline",
    "stop_timeline",
]
__all__ += basics.__all__

Tensor = Any  # a tf.Tensor, or a value that can be converted to one
TensorOrSlices = Any  # a Tensor as above, or tf.IndexedSlices


def allreduce(
    tensor: TensorOrSlices,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> TensorOrSlices:
    """Reduce a tensor over all ranks and return the result.

    The gradient, for Average and Sum, is the allreduce of the gradient with the same op and factors.

    Args:
        tensor: A tensor of the same shape and dtype on all ranks. Or a `tf.IndexedSlices`: its rows are gathered
            instead, ranks may have different numbers of rows, and the result may have several rows of one index.
        average: Deprecated; use `op`.
        device_dense: Not needed.
        device_sparse: Not needed.
        compression: How the tensor is compressed before it is sent, such as `Compression.fp16`.
        op: Average (the default), Sum, Min, Max, Product or Adasum; for `tf.IndexedSlices` Average or Sum only.
            Average truncates integers, and is not defined for bool.
        prescale_factor: Multiplies the tensor before the reduction.
        postscale_factor: Multiplies the result.
        name: The name by which the ranks match the operation.
        process_set: The ranks that take part.
        ignore_name_scope: Leave the name scope out of the name of an unnamed operation, so that it matches
            operations of graphs with other name scopes.

    Raises:
        ValueError: An argument cannot be used.
        NotImplementedError: `op` or a factor is not supported for a `tf.IndexedSlices`.
        tf.errors.OpError: As described for the module.
    """
    del device_dense, device_sparse
    op = reduction(op, average, called("allreduce", name))
    factors = factors_of(prescale_factor, postscale_factor, called("allreduce", name))
    if isinstance(tensor, tf.IndexedSlices):
        return _gathered_slices([tensor], op, factors, name, process_set, ignore_name_scope)[0]
    tensors = [as_tensor(tensor, "allreduce")]
    return reduce("allreduce", "allreduce", tensors, compression, op, factors, name, process_set, ignore_name_scope)[0]


def grouped_allreduce(
    tensors: Sequence[TensorOrSlices],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[TensorOrSlices]:
    """Do what `allreduce` does for a list of tensors, of any dtypes, as one operation; return a list.

    The `tf.IndexedSlices` in the list are gathered as another operation. An empty list is returned as it is.
    """
    del device_dense, device_sparse
    op = reduction(op, average, called("grouped_allreduce", name))
    factors = factors_of(prescale_factor, postscale_factor, called("grouped_allreduce", name))
    results: list[TensorOrSlices] = list(tensors)
    _check_group(results, op, factors)
    sparse = [i for i, tensor in enumerate(results) if isinstance(tensor, tf.IndexedSlices)]
    dense = [i for i in range(len(results)) if i not in set(sparse)]
    if dense:
        group = as_tensors([results[i] for i in dense], "grouped_allreduce")
        reduced = reduce(
            *("allreduce", "grouped_allreduce", group, compression, op, factors, name, process_set, ignore_name_scope)
        )
        for i, tensor in zip(dense, reduced, strict=True):
            results[i] = tensor
    if sparse:
        slices = [results[i] for i in sparse]
        gathered = _gathered_slices(slices, op, factors, name, process_set, ignore_name_scope)
        for i, tensor in zip(sparse, gathered, strict=True):
            results[i] = tensor
    return results


def reduce_dense(
    tensors: Sequence[tf.Tensor],
    compression: type[Compressor],
    op: int,
    factors: tuple[float, float],
    name: str | None,
    process_set: ProcessSet,
) -> list[tf.Tensor]:
    """Reduce a list of dense tensors as one operation, as `allreduce` and, for several, `grouped_allreduce` do.

    Args:
        tensors: The tensors.
        compression: How the tensors are compressed before they are sent.
        op: The reduction, such as Average.
        factors: They multiply the tensors before and after the reduction.
        name: The name by which the ranks match the operation.
        process_set: The ranks that take part.
    """
    operation = "allreduce" if len(tensors) == 1 else "grouped_allreduce"
    group = as_tensors(tensors, operation)
    return reduce("allreduce", operation, group, compression, op, factors, name, process_set, False) if group else []


def _check_slices(op: int, factors: tuple[float, float]) -> None:
    """Check that this reduction, with these factors, is supported for `tf.IndexedSlices`.

    Raises:
        NotImplementedError: The combination is not supported.
    """
    if op == Adasum:
        raise NotImplementedError("Adasum is not for tf.IndexedSlices: make them dense, with sparse_as_dense=True")
    if op not in (Average, Sum):
        raise NotImplementedError("Only Sum and Average ops are supported with tf.IndexedSlices")
    if factors != (1.0, 1.0):
        raise NotImplementedError("prescale_factor and postscale_factor are not supported with tf.IndexedSlices")


def _check_group(tensors: Sequence[TensorOrSlices], op: int, factors: tuple[float, float]) -> None:
    """Check the `tf.IndexedSlices` of a group before any tensor is sent, so that the group is refused as a whole."""
    slices = [tensor for tensor in tensors if isinstance(tensor, tf.IndexedSlices)]
    if slices:
        _check_slices(op, factors)
        as_tensors([part for one in slices for part in (one.values, one.indices)], "grouped_allreduce")


def _gathered_slices(
    slices: Sequence[tf.IndexedSlices],
    op: int,
    factors: tuple[float, float],
    name: str | None,
    process_set: ProcessSet,
    ignore_name_scope: bool,
) -> list[tf.IndexedSlices]:
    _check_slices(op, factors)
    parts = [part for one in slices for part in (one.values, one.indices)]
    counts_present = op == Average and not average_counts_joined()
    if counts_present:
        parts.append(tf.ones([1], tf.uint8))  # one row of each rank that has not joined
    gathered = grouped_allgather(parts, None if name is None else f"{name}.slices", ignore_name_scope, process_set)
    divisor = tf.size(gathered.pop()) if counts_present else size_op(set_id_of(process_set))
    results = []
    for one, values, indices in zip(slices, gathered[::2], gathered[1::2], strict=True):
        if op == Average:
            values = values / tf.cast(divisor, values.dtype)
        results.append(tf.IndexedSlices(values, indices, dense_shape=one.dense_shape))
    return results


def allgather(
    tensor: Tensor,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Return the tensors of all ranks concatenated along dimension 0, in the order of the ranks.

    The gradient of a rank's tensor is its rows of the result's gradient, averaged over the ranks.

    Args:
        tensor: A tensor of at least one dimension. Only dimension 0 may differ between ranks; it may be 0.
        name: The name by which the ranks match the operation.
        ignore_name_scope: As for `allreduce`.
        process_set: The ranks that take part.

    Raises:
        ValueError: An argument cannot be used.
        tf.errors.OpError: As described for the module.
    """
    return _allgather("allgather", [as_tensor(tensor, "allgather")], name, ignore_name_scope, process_set)[0]


def grouped_allgather(
    tensors: Sequence[Tensor],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """Do what `allgather` does for a list of tensors, of any dtypes, as one operation; return a list."""
    group = as_tensors(tensors, "grouped_allgather")
    return _allgather("grouped_allgather", group, name, ignore_name_scope, process_set) if group else []


def _allgather(
    operation: str, tensors: Sequence[tf.Tensor], name: str | None, ignore_name_scope: bool, process_set: ProcessSet
) -> list[tf.Tensor]:
    return run("allgather", tensors, describe(operation, name, tensors, ignore_name_scope, process_set))


def broadcast(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Return the root's tensor.

    The gradient of the root's tensor is the result's gradient, averaged over the ranks; on other ranks it is zero.

    Args:
        tensor: A tensor of the same shape and dtype on all ranks.
        root_rank: The rank whose tensor is sent, by its number in the job.
        name: The name by which the ranks match the operation.
        ignore_name_scope: As for `allreduce`.
        process_set: The ranks that take part.

    Raises:
        ValueError: An argument cannot be used.
        tf.errors.OpError: As described for the module.
    """
    return _broadcast("broadcast", [as_tensor(tensor, "broadcast")], root_rank, name, ignore_name_scope, process_set)[0]


def grouped_broadcast(
    tensors: Sequence[Tensor],
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """Do what `broadcast` does for a list of tensors, of any dtypes, as one operation; return a list."""
    group = as_tensors(tensors, "grouped_broadcast")
    return _broadcast("grouped_broadcast", group, root_rank, name, ignore_name_scope, process_set) if group else []


def _broadcast(
    operation: str,
    tensors: Sequence[tf.Tensor],
    root_rank: int,
    name: str | None,
    ignore_name_scope: bool,
    process_set: ProcessSet,
) -> list[tf.Tensor]:
    ranks = ranks_of(process_set)
    root_rank = integer(root_rank, "root_rank", called(operation, name))
    if root_rank not in ranks:
        raise ValueError(f"{operation}: the root rank {root_rank} is not one of the ranks {ranks}")
    description = describe(operation, name, tensors, ignore_name_scope, process_set, root_rank=root_rank)
    return run("broadcast", tensors, description)


def broadcast_(
    variables: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Set variables to the root's values, in one operation, and return them.

    Args:
        variables: `tf.Variable` or Keras variables, of the same shapes and dtypes on all ranks.
        root_rank: The rank whose values are sent, by its number in the job.
        name: The name by which the ranks match the operation.
        process_set: The ranks that take part.

    Returns:
        The variables; in a graph of TensorFlow 1 the results of `assign`, to be evaluated.

    Raises:
        ValueError: An argument cannot be used.
        tf.errors.OpError: As described for the module.
    """
    variables = list(variables)
    if not variables:
        return []
    results = _broadcast("broadcast_", as_tensors(variables, "broadcast_"), root_rank, name, False, process_set)
    assigned = [variable.assign(value) for variable, value in zip(variables, results, strict=True)]
    return variables if tf.compat.v1.executing_eagerly_outside_functions() else assigned


def alltoall(
    tensor: Tensor,
    splits: Tensor | None = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send rows of the tensor to each rank, and return the rows received, in the order of the ranks.

    The gradient of each row is sent back to the rank that the row came from.

    Args:
        tensor: A tensor of at least one dimension.
        splits: The number of rows to send to each rank, in the order of the ranks: integers. Rows beyond their sum are
            not sent. None: the same number for each rank.
        name: The name by which the ranks match the operation.
        ignore_name_scope: As for `allreduce`.
        process_set: The ranks that take part.

    Returns:
        The rows received; with `splits`, also how many came from each rank (int32).

    Raises:
        ValueError: An argument cannot be used.
        tf.errors.OpError: As described for the module.
    """
    tensor = as_tensor(tensor, "alltoall")
    label = called("alltoall", name)
    if splits is None:
        given = tf.zeros([0], tf.int32)
    elif hasattr(splits, "dtype") or np.ndim(splits) > 1:  # the op reports errors in these
        given = tf.convert_to_tensor(splits)
    else:
        given = tf.constant(split_counts(splits, None, label), tf.int64)
    if given.dtype not in (tf.int32, tf.int64):
        raise ValueError(f"{label}: splits must be int32 or int64, not {given.dtype.name}")
    if splits is not None and given.shape == (0,):
        raise ValueError(f"{label}: splits are empty; there is one for each rank")
    description = describe("alltoall", name, [tensor], ignore_name_scope, process_set)
    (tensor,) = anchored([tensor])
    result, received_splits = call("alltoall", description, tensor, given)
    return result if splits is None else (result, received_splits)


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

    The gradient, for Average and Sum, is gathered from the gradients of all ranks' shares, times the factors and, for
    Sum, times the number of ranks. For either this is size() times the derivative of the sum of all ranks' losses, as
    in Horovod.

    Args:
        tensor: A tensor of at least one dimension, of the same shape and dtype on all ranks. If the rows cannot be
            divided evenly the first ranks get one more; with fewer rows than ranks the last ranks get none.
        device_dense: Not needed.
        compression: How the tensor is compressed before it is sent, such as `Compression.fp16`.
        op: Average, Sum, Min, Max or Product.
        name: The name by which the ranks match the operation.
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
    options = compression, op, factors, name, process_set, ignore_name_scope
    return reduce("reducescatter", "reducescatter", tensors, *options)[0]


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
    options = compression, op, factors, name, process_set, ignore_name_scope
    return reduce("reducescatter", "grouped_reducescatter", group, *options) if group else []


def barrier(process_set: ProcessSet = global_process_set, name: str | None = None) -> Any:
    """Wait until all ranks of the process set have called this; in a graph of TensorFlow 1, return an op that waits."""
    operation = call("barrier", describe("barrier", name or "all", [], False, process_set))
    return None if tf.compat.v1.executing_eagerly_outside_functions() else operation


def check_num_rank_power_of_2(num_rank: int) -> bool:
    """Return whether a number of ranks is a power of 2. Provided for scripts: horovodlike does not depend on it."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def join(process_set: ProcessSet = global_process_set) -> Any:
    """Declare that this rank has no more data, and return when all ranks of the process set have joined.

    Until then the other ranks continue without it: a rank that has joined contributes nothing to their collectives.

    Args:
        process_set: The ranks that join.

    Returns:
        The rank that joined last, the same on all ranks: an integer, or in a graph a tensor.

    Raises:
        tf.errors.UnknownError: The job is broken or shut down.
        tf.errors.InvalidArgumentError: Another thread of this rank is joining already.
    """
    last = call("join", describe("join", "all", [], False, process_set))
    forget_numbers(set_id_of(process_set))
    return int(last) if tf.executing_eagerly() else last
