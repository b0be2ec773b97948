"""Collectives on values, and broadcasts of variables."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from horovodlike import basics
from horovodlike._engine.arguments import check_compression
from horovodlike.arrays import functions as arrays
from horovodlike.keras import _backend
from horovodlike.keras._backend import check, is_tf_keras
from horovodlike.process_set import ProcessSet, forget_numbers, global_process_set

# Functions on variables, models and optimizers. Keras 3 and tf_keras need different code, in two modules with the same
# functions. These accept any optimizer that `compile()` accepts, also a LossScaleOptimizer.
if TYPE_CHECKING or not is_tf_keras:
    from horovodlike.keras import _keras_3

    objects = _keras_3
else:
    objects = import_module("horovodlike.tensorflow._tf_keras")

__all__ = [
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "join",
    "reducescatter",
    "set_batch_weight",
]


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: Any = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduce a value over all ranks. Not differentiable, and not for use in a compiled function.

    Args:
        value: A number, a NumPy array, a tensor of the backend or a variable, of the same dtype and shape on all ranks.
        name: The name by which the ranks match the operation; None: a number that counts such calls.
        average: Deprecated; use `op`.
        prescale_factor: Multiplies the value before the reduction.
        postscale_factor: Multiplies the result.
        op: Average (the default), Sum, Min, Max, Product or Adasum. Average truncates integers, as in Horovod.
        compression: How the value is compressed before it is sent: `Compression.none` or `.fp16`.
        process_set: The ranks that take part.

    Returns:
        A tensor of the backend if `value` is such a tensor or a variable, else a NumPy array or scalar.

    Raises:
        HorovodInternalError: The ranks disagree, or the job is broken or shut down.
        ValueError: An argument cannot be used, or the name is in flight already.
    """
    if average is not None and op is not None:
        raise ValueError("pass op or average, not both: average is deprecated")
    if op is None:
        op = basics.Sum if average is False else basics.Average
    if compression is not None:
        check_compression(compression, "allreduce")
        tensor, context = compression.compress(objects.to_tensor(objects.to_numpy(value)))
        reduced = arrays.allreduce(objects.to_numpy(tensor), name, op, prescale_factor, postscale_factor, process_set)
        restored = compression.decompress(objects.to_tensor(reduced), context)
        return restored if objects.is_tensor(value) else objects.to_numpy(restored)[()]
    array = objects.to_numpy(value)
    return _like(value, arrays.allreduce(array, name, op, prescale_factor, postscale_factor, process_set))


def allgather(value: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Return the values of all ranks concatenated along dimension 0, the only one in which their shapes may differ.

    Arguments, result and errors are as for `allreduce`; the value has at least one dimension.
    """
    return _like(value, arrays.allgather(objects.to_numpy(value), name, process_set))


def broadcast(value: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Return one rank's value on all ranks. Its dtype and shape must be the same on all ranks.

    Other arguments, result and errors are as for `allreduce`.
    """
    return _like(value, arrays.broadcast(objects.to_numpy(value), root_rank, name, process_set))


def reducescatter(
    value: Any, name: str | None = None, op: int = basics.Average, process_set: ProcessSet = global_process_set
) -> Any:
    """Reduce a value over all ranks and return this rank's share of the rows.

    If the rows cannot be divided evenly, the first ranks receive one row more. Other arguments, result and errors are
    as for `allreduce`; the value has at least one dimension.
    """
    return _like(value, arrays.reducescatter(objects.to_numpy(value), name, op, process_set))


def broadcast_global_variables(root_rank: int, model: Any | None = None) -> None:
    """Broadcast the weights of one rank's model, and the state of its optimizer if the optimizer is built.

    The states of random number generators are not broadcast, so dropout differs between the ranks, as their data does.

    Args:
        root_rank: The rank whose values are taken.
        model: A built model, the same on all ranks. It is required, because Keras has no list of all variables.

    Raises:
        ValueError: There is no model, or it is not built.
        TypeError: The model is of tf_keras, and this process uses Keras 3; or the other way round.
        HorovodInternalError: The models differ in shape, or the job is broken or shut down.
    """
    if model is None:
        raise ValueError(
            "Keras keeps no list of global variables: call broadcast_global_variables(root_rank, model), or give "
            "hvd.callbacks.BroadcastGlobalVariablesCallback(root_rank) to fit()"
        )
    check(model, "broadcast_global_variables")
    if not model.built:
        raise ValueError(f"{model.name} has no variables yet: build it, or call it once, on all ranks")
    broadcast_variables(variables_of(model), root_rank)


def broadcast_variables(variables: Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set) -> None:
    """Set the variables of all ranks to the values of one rank's, in one operation."""
    variables = list(variables)
    values = objects.read(variables)
    results = arrays.grouped_broadcast(values, root_rank, "variables", process_set) if values else ()
    changed = [i for i, result in enumerate(results) if not np.array_equal(values[i], result)]
    objects.write([variables[i] for i in changed], [results[i] for i in changed])


def variables_of(model: Any, local: Iterable[Any] = ()) -> list[Any]:
    """Return the weights of a model and the variables of its optimizer.

    Args:
        model: A built model.
        local: Variables to leave out, together with the variables that the optimizer has for them.
    """
    left_out = {id(variable) for variable in local}
    weights = [weight for weight in model.weights if id(weight) not in left_out]
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None or not objects.is_built(optimizer):
        return weights
    slots = objects.variables_of(optimizer)
    if left_out:
        trained = model.trainable_variables
        slots = [slot for slot in slots if id(objects.owner(optimizer, slot, trained)) not in left_out]
    return [*weights, *slots]


def join() -> int:
    """Declare that this rank has no more data, and return when all ranks have joined.

    Until then the other ranks continue without it. `horovodlike.keras.callbacks.JoinCallback` calls this in `fit()`.

    Returns:
        The rank that joined last, the same on all ranks.

    Raises:
        HorovodInternalError: The job is broken or shut down.
    """
    last = _backend.current().join()
    forget_numbers(0)  # the ranks have made different numbers of unnamed calls
    return last


def set_batch_weight(weight: Any) -> None:
    """Set the number of samples behind the gradients that this rank computes next, for the average over samples.

    Call this before each step, in a `train_step` of your own or in a callback: the step then reduces gradients to the
    mean over the samples of all ranks, each rank's gradients being means over its own samples. All ranks must set a
    weight before a step, or none. The step uses the weight up when it begins to reduce gradients. Weights that are set
    before that, as for the passes of one step, add up.

    Args:
        weight: The number of samples, or another number >= 0 that is proportional to it; within a step that is traced,
            also a scalar tensor. 0: this rank has no samples, and its gradients do not count, even if they are NaN.
            None, outside of traced steps: drop the weight.

    Raises:
        ValueError: `weight` is no number, negative or not finite.
        tf.errors.InvalidArgumentError: The same, in a traced step of TensorFlow.
    """
    _backend.current().set_batch_weight(weight)


def _like(value: Any, result: np.ndarray[Any, Any]) -> Any:
    return objects.to_tensor(result) if objects.is_tensor(value) else result[()]
