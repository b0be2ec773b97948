"""The module `keras.functions.objects` for tf_keras (Keras 2): functions on variables, models and optimizers.

There are three kinds of optimizers. Optimizers of `tf_keras.optimizers` ("new") and of `tf_keras.optimizers.legacy`
("legacy") have a method that aggregates the gradients of replicas. It is overridden and reduces gradients over the
ranks. A LossScaleOptimizer calls this method of its inner optimizer before it checks whether gradients are finite.
Optimizers of `tf.compat.v1.train` are wrapped as they are without Keras. Keras accepts them only in a graph of
TensorFlow 1, and wraps them in a TFOptimizer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras

from horovodlike.keras._wrapping import Local, Options, Wrapped, subclassed
from horovodlike.tensorflow._gradient_reduction import GradientReduction
from horovodlike.tensorflow._ops.calls import outermost
from horovodlike.tensorflow.compression import Compression
from horovodlike.tensorflow.gradient_aggregation import LocalGradientAggregationHelper
from horovodlike.tensorflow.optimizer import DistributedOptimizer as DistributedOptimizerOfTensorFlow1

_backend = tf_keras.backend
_Pairs = list[tuple[Any, Any]]  # pairs of a gradient and its variable


def is_tensor(value: Any) -> bool:
    """Return whether a value is a tensor or a variable."""
    return tf.is_tensor(value) or isinstance(value, tf.Variable)


def to_tensor(value: Any) -> tf.Tensor:
    """Return an array as a tensor."""
    return tf.convert_to_tensor(value)


def to_numpy(value: Any) -> np.ndarray[Any, Any]:
    """Return a tensor, a variable or a number as an array, also in a graph of TensorFlow 1."""
    return np.asarray(_backend.get_value(value) if is_tensor(value) else value)


def read(variables: Sequence[Any]) -> list[np.ndarray[Any, Any]]:
    """Return the values of variables."""
    return [np.asarray(value) for value in _backend.batch_get_value(list(variables))]


def write(variables: Sequence[Any], values: Sequence[np.ndarray[Any, Any]]) -> None:
    """Set variables to these values."""
    _backend.batch_set_value(list(zip(variables, values, strict=True)))


def _is_legacy(optimizer: Any) -> bool:
    return isinstance(optimizer, tf_keras.optimizers.legacy.Optimizer)


def _of_tensorflow_1(optimizer: Any) -> Any:
    """Return the optimizer of `tf.compat.v1.train` that `optimizer` is or wraps; None if there is none."""
    inside = getattr(optimizer, "optimizer", optimizer)
    return inside if isinstance(inside, tf.compat.v1.train.Optimizer) else None


def is_built(optimizer: Any) -> bool:
    """Return whether an optimizer has made its own variables, such as momenta, for the model's variables."""
    optimizer = innermost(optimizer)
    if _is_legacy(optimizer):
        return bool(optimizer._hypers_created)
    return _of_tensorflow_1(optimizer) is not None or bool(getattr(optimizer, "_built", False))


def build(optimizer: Any, variables: Sequence[Any]) -> None:
    """Have an optimizer make its variables for the model's `variables`, if it has not done so."""
    optimizer, variables = innermost(optimizer), list(variables)
    with tf.init_scope():
        if _is_legacy(optimizer):
            optimizer._create_all_weights(variables)
        elif (of_tensorflow := _of_tensorflow_1(optimizer)) is not None:
            of_tensorflow._create_slots(variables)
        else:
            optimizer.build(variables)


def variables_of(optimizer: Any) -> list[Any]:
    """Return the variables of an optimizer."""
    optimizer = innermost(optimizer)
    if (of_tensorflow := _of_tensorflow_1(optimizer)) is not None:
        own = of_tensorflow.variables()
        return own if of_tensorflow is optimizer else [optimizer.iterations, *own]
    return list(optimizer.variables())  # in "new" optimizers this is a list that can be called


def owner(optimizer: Any, slot: Any, variables: Sequence[Any]) -> Any:
    """Return the trained variable that a slot of an optimizer belongs to; None if there is none."""
    optimizer = innermost(optimizer)
    of_tensorflow = _of_tensorflow_1(optimizer)
    if _is_legacy(optimizer) or of_tensorflow is not None:
        keeper = of_tensorflow or optimizer
        found = [v for v in variables for name in keeper.get_slot_names() if _slot(keeper, v, name) is slot]
        return found[0] if found else None
    # The name of a slot of a "new" optimizer ends with its variable's name. One name may be a suffix of another.
    name = slot.name.partition(":")[0]
    owners = [variable for variable in variables if name.endswith(f"/{variable._shared_name}")]
    return max(owners, key=lambda variable: len(variable._shared_name)) if owners else None


def _slot(optimizer: Any, variable: Any, name: str) -> Any:
    """Return the slot of this name that an optimizer keeps for a variable; None if there is none."""
    try:
        return optimizer.get_slot(variable, name)
    except KeyError:
        return None


def innermost(optimizer: Any) -> Any:
    """Return the optimizer that a `LossScaleOptimizer` wraps; return any other optimizer itself."""
    is_scaled = isinstance(optimizer, tf_keras.mixed_precision.LossScaleOptimizer)
    return optimizer.inner_optimizer if is_scaled else optimizer


def schedule_of(optimizer: Any) -> Any:
    """Return the schedule, or optimizer of TensorFlow 1, that sets the learning rate; None if the rate can be set."""
    optimizer = innermost(optimizer)
    if (of_tensorflow := _of_tensorflow_1(optimizer)) is not None:
        return of_tensorflow
    rate = optimizer._hyper.get("learning_rate") if _is_legacy(optimizer) else optimizer._learning_rate
    return None if isinstance(rate, (int, float, tf.Variable)) or tf.is_tensor(rate) else rate


def momenta(optimizer: Any, variables: Sequence[Any]) -> list[Any] | None:
    """Return the variables of a built optimizer that hold momenta; None if they cannot be found."""
    if _is_legacy(optimizer):
        names = optimizer.get_slot_names()
        if names and "momentum" not in names:
            return None
        slots = (_slot(optimizer, variable, "momentum") for variable in variables)
        return [slot for slot in slots if slot is not None]
    found = getattr(optimizer, "momentums", None) or getattr(optimizer, "_momentums", None)
    return None if found is None else list(found)


def forget_fit(model: Any) -> None:
    """Drop the iterator over the previous job's validation data, which Keras keeps when `fit()` is interrupted."""
    model._eval_data_handler = None


class Gradients:
    """Accumulates gradients over the passes of a step and reduces them over the ranks."""

    def __init__(self, options: Options, local: Local) -> None:
        self.options = options
        self.local = local
        self.reduction = GradientReduction(
            compression=options.compression or Compression.none,
            op=options.op,
            predivide_factor=options.gradient_predivide_factor,
            sparse_as_dense=options.sparse_as_dense,
            groups=options.groups,
            process_set=options.process_set,
            scale_local=options.scale_local_gradients,
            weight=options.weight,
        )
        self.reduction.register_local_layers(local.layers)
        for variable in local.variables:
            self.reduction.register_local(variable)
        self._aggregation = LocalGradientAggregationHelper(
            options.backward_passes_per_step,
            self._reduce,
            options.sparse_as_dense,
            options.average_aggregated_gradients,
        )
        self._variables: list[Any] = []  # with several passes, the variables that have had gradients

    def register_local(self, variable: Any) -> None:
        """Do not reduce the gradient of a variable."""
        self.local = replace(self.local, variables=[*self.local.variables, variable])
        self.reduction.register_local(variable)

    def forget(self) -> None:
        """Restart the step: drop the accumulated gradients."""
        self._aggregation.forget()

    def aggregate(self, pairs: Sequence[tuple[Any, Any]]) -> _Pairs:
        """Return the gradients to be applied: reduced, or zeros before the last pass of a step.

        All ranks need gradients of the same variables.
        """
        pairs = list(pairs)
        if not pairs:
            return pairs
        if self.options.backward_passes_per_step == 1:
            gradients, variables = zip(*pairs, strict=True)
            return list(zip(self._reduce(gradients, variables), variables, strict=True))
        # Keras leaves out variables without a gradient, but the sums are identified by position.
        own = {id(variable): gradient for gradient, variable in pairs}
        known = {id(variable) for variable in self._variables}
        self._variables.extend(variable for _, variable in pairs if id(variable) not in known)
        reduced = self._aggregation.compute_gradients([own.get(id(v)) for v in self._variables], self._variables)
        # Zeros replace gradients before the last pass: an infinity would change the loss scale on this rank alone.
        is_last = self._aggregation.is_last
        masked = [g if g is None else tf.math.multiply_no_nan(g, tf.cast(is_last, g.dtype)) for g in reduced]
        return list(zip(masked, self._variables, strict=True))

    def apply(self, optimizer: Any, pairs: _Pairs, apply: Callable[[_Pairs], Any]) -> Any:
        """Apply the gradients that `aggregate` returned, if this is the last pass of a step."""
        if self.options.backward_passes_per_step == 1 or not pairs:
            return apply(pairs)
        build(optimizer, [variable for _, variable in pairs])  # here, as a branch of tf.cond cannot make variables
        return self._aggregation.apply_gradients(lambda: apply(pairs), optimizer)

    def _reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        if tf.executing_eagerly():
            return self.reduction(gradients, variables)
        graph = outermost(tf.compat.v1.get_default_graph())
        with graph.name_scope(f"{self.options.name or 'DistributedOptimizer'}/"):
            return self.reduction(gradients, variables)


class _Wrapped(Wrapped):
    _distributed_gradients: Gradients

    def _gradients(self) -> Gradients | None:
        return gradients_of(self)

    def __reduce__(self) -> tuple[Any, ...]:
        gradients = gradients_of(self)
        assert gradients is not None
        arguments = (self.get_config(),)  # type: ignore[attr-defined]  # the optimizer's class comes next
        return _wrapped_copy, (self.__class__.from_config, arguments, gradients.options, gradients.local)

    # This overrides the `__deepcopy__` of legacy optimizers: its copies would be of the wrapped class.
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        make, arguments = self.__reduce__()
        return make(*copy.deepcopy(arguments, memo))


class _New(_Wrapped):
    """The first base class of a distributed optimizer; the second is a class of `tf_keras.optimizers`."""

    def aggregate_gradients(self, grads_and_vars: Sequence[tuple[Any, Any]]) -> _Pairs:
        """Reduce the gradients over the ranks."""
        return self._distributed_gradients.aggregate(grads_and_vars)

    def apply_gradients(
        self,
        grads_and_vars: Sequence[tuple[Any, Any]],
        name: str | None = None,
        skip_gradients_aggregation: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Reduce the gradients, if that has not been done, and apply them with the wrapped optimizer."""
        pairs = list(grads_and_vars)
        if not skip_gradients_aggregation and kwargs.get("experimental_aggregate_gradients", True):
            pairs = self.aggregate_gradients(pairs)
        apply: Any = super().apply_gradients  # type: ignore[misc]  # the optimizer's class comes next
        return self._distributed_gradients.apply(
            self, pairs, lambda pairs: apply(pairs, name=name, skip_gradients_aggregation=True)
        )


class _Legacy(_Wrapped):
    """The first base class of a distributed optimizer; the second is a class of `tf_keras.optimizers.legacy`."""

    def _aggregate_gradients(self, grads_and_vars: Sequence[tuple[Any, Any]]) -> _Pairs:
        return self._distributed_gradients.aggregate(grads_and_vars)

    def apply_gradients(
        self,
        grads_and_vars: Sequence[tuple[Any, Any]],
        name: str | None = None,
        experimental_aggregate_gradients: bool = True,
    ) -> Any:
        """Reduce the gradients, if that has not been done, and apply them with the wrapped optimizer."""
        apply: Any = super().apply_gradients  # type: ignore[misc]  # the optimizer's class comes next
        pairs = [pair for pair in grads_and_vars if pair[0] is not None]
        if not pairs:
            return apply(grads_and_vars, name)  # raises the error about missing gradients
        if experimental_aggregate_gradients:
            pairs = self._transform_unaggregated_gradients(pairs)  # type: ignore[attr-defined]  # the optimizer's
            pairs = self._aggregate_gradients(pairs)
        return self._distributed_gradients.apply(self, pairs, lambda pairs: apply(pairs, name, False))


class _LossScale(_Wrapped):
    """The first base class of a LossScaleOptimizer with a distributed optimizer inside."""


def gradients_of(optimizer: Any) -> Gradients | None:
    """Return the `Gradients` of a distributed optimizer or of one in a LossScaleOptimizer; None for others."""
    found: Gradients | None = getattr(innermost(optimizer), "_distributed_gradients", None)
    return found


def wrapped(optimizer: Any, options: Options, local: Local) -> Any:
    """Return an optimizer that works like the given one, with gradients reduced over the ranks."""
    inner, wrap = innermost(optimizer), partial(wrapped, options=options, local=local)
    if inner is not optimizer:
        scaled = wrap(inner)
        return subclassed(optimizer, _LossScale, {"_optimizer": scaled, "_trackable": scaled}, wrap)
    if (of_tensorflow := _of_tensorflow_1(optimizer)) is not None:
        return _wrapped_of_tensorflow_1(of_tensorflow, options, local)
    added = {"_distributed_gradients": Gradients(options, local)}
    return subclassed(optimizer, _Legacy if _is_legacy(optimizer) else _New, added, wrap)


def _wrapped_copy(make: Callable[..., Any], arguments: Any, options: Options, local: Local) -> Any:
    """Restore a distributed optimizer from a copy or a pickle: make the plain one, and wrap it."""
    return wrapped(make(*arguments), options, local)


def _wrapped_of_tensorflow_1(optimizer: Any, options: Options, local: Local) -> Any:
    arguments = {**vars(options), "compression": options.compression or Compression.none}  # named as the options
    result = DistributedOptimizerOfTensorFlow1(optimizer, **arguments)
    for variable in [*local.variables, *(one for layer in local.layers for one in layer.trainable_variables)]:
        result.register_local_var(variable)
    return result
