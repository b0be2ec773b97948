"""The module `horovodlike.keras.functions.objects` for Keras 3: functions on variables, models and optimizers.

Loss scaling: all ranks take a step or all skip it. `keras.optimizers.LossScaleOptimizer` passes gradients to its inner
optimizer only if they are finite. If the inner optimizer reduced them, a rank with an infinity would skip the reduction
and the other ranks would wait for it. So gradients are reduced before this check, and an infinity on one rank becomes
one on all ranks. Under the policy "mixed_float16", `compile()` by default wraps any optimizer in a LossScaleOptimizer
of its own. Therefore this module patches that class.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import keras
import numpy as np
from keras import ops
from keras.optimizers import LossScaleOptimizer

from horovodlike.keras._gradients import Gradients
from horovodlike.keras._wrapping import Local, Options, Wrapped, subclassed

# The optimizers that do not treat each element of a variable alone, as far as this Keras has them.
_OF_WHOLES = tuple(getattr(keras.optimizers, name, ()) for name in ("Adafactor", "Lamb", "Muon"))


def is_tensor(value: Any) -> bool:
    """Return whether a value is a tensor or a variable."""
    return keras.ops.is_tensor(value) or isinstance(value, keras.Variable)


def to_tensor(value: Any) -> Any:
    """Return an array as a tensor of the backend."""
    return ops.convert_to_tensor(value)


def to_numpy(value: Any) -> np.ndarray[Any, Any]:
    """Return a tensor, a variable or a number as an array."""
    return np.asarray(ops.convert_to_numpy(value) if hasattr(value, "dtype") else value)


def read(variables: Sequence[Any]) -> list[np.ndarray[Any, Any]]:
    """Return the values of variables."""
    return [to_numpy(variable) for variable in variables]


def write(variables: Sequence[Any], values: Sequence[np.ndarray[Any, Any]]) -> None:
    """Set variables to these values."""
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def is_built(optimizer: keras.Optimizer) -> bool:
    """Return whether an optimizer has made its own variables, such as momenta, for the model's variables."""
    return bool(optimizer.built)


def build(optimizer: keras.Optimizer, variables: Sequence[Any]) -> None:
    """Have an optimizer make its variables for the model's `variables`, if it has not done so."""
    if not optimizer.built:
        optimizer.build(variables)


def variables_of(optimizer: keras.Optimizer) -> list[Any]:
    """Return the variables of an optimizer."""
    return list(optimizer.variables)


def owner(optimizer: keras.Optimizer, slot: Any, variables: Sequence[Any]) -> Any:
    """Return the trained variable that a slot of an optimizer belongs to; None if there is none."""
    # The name of a slot begins with the path of its variable. One path may be a prefix of another.
    paths = {f"{variable.path.replace('/', '_')}_": variable for variable in variables}
    owners = [path for path in paths if slot.name.startswith(path)]
    return paths[max(owners, key=len)] if owners else None


def innermost(optimizer: keras.Optimizer) -> keras.Optimizer:
    """Return the optimizer that a `LossScaleOptimizer` wraps; return any other optimizer itself."""
    return optimizer.inner_optimizer if isinstance(optimizer, LossScaleOptimizer) else optimizer


def schedule_of(optimizer: keras.Optimizer) -> Any:
    """Return the schedule that sets the learning rate; None if the rate is a number that can be set."""
    rate = getattr(innermost(optimizer), "_learning_rate", "nothing")
    return None if isinstance(rate, keras.Variable) else rate


def momenta(optimizer: keras.Optimizer, variables: Sequence[Any]) -> list[Any] | None:
    """Return the variables of a built optimizer that hold momenta; None if they cannot be found."""
    found = getattr(optimizer, "momentums", None) or getattr(optimizer, "_momentums", None)
    return None if found is None else [momentum for momentum in found if momentum is not None]


def gradients_of(optimizer: Any) -> Gradients | None:
    """Return the `Gradients` of a distributed optimizer or of one in a LossScaleOptimizer; None for others."""
    return getattr(innermost(optimizer), "_distributed_gradients", None)


def forget_fit(model: keras.Model) -> None:
    """Drop the iterator over the previous job's validation data, which Keras keeps when `fit()` is interrupted."""
    model._eval_epoch_iterator = None


class _Wrapped(Wrapped):
    def _gradients(self) -> Gradients | None:
        return gradients_of(self)

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        """Make an optimizer from a configuration that `get_config` returned, and wrap it in the same way.

        Raises:
            ValueError: The configuration is one of Keras 2, or has a key that Keras does not know.
        """
        if "lr" in config:
            raise ValueError(f"{cls.__name__} of Keras 3 takes no lr={config['lr']!r}: use learning_rate")
        return super().from_config(config, custom_objects)

    @property
    def lr(self) -> NoReturn:
        """Raise an error: Keras 3 has no `lr`, and a script of Keras 2 would set an attribute without effect.

        Raises:
            AttributeError: Always.
        """
        raise AttributeError(f"{type(self).__name__} of Keras 3 has no attribute 'lr': use learning_rate")

    @lr.setter
    def lr(self, value: Any) -> None:
        raise AttributeError(
            f"{type(self).__name__} of Keras 3 has no attribute 'lr' to set to {value!r}: use learning_rate"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _reduced(self)


class _Distributed(_Wrapped):
    """The methods with which `DistributedOptimizer` overrides methods of the optimizer that it wraps."""

    _distributed_gradients: Gradients

    def build(self, variables: Sequence[Any]) -> None:
        """Make the optimizer's variables.

        Raises:
            ValueError: The optimizer looks at whole variables, and this rank has only its part of one.
        """
        parts = [variable.path for variable in variables if getattr(variable, "is_part", False)]
        clips = [name for name in ("clipnorm", "global_clipnorm") if getattr(self, name, None) is not None]
        if parts and (clips or isinstance(self, _OF_WHOLES)):
            raise ValueError(
                f"{type(self).__name__}{f' with {clips[0]}' if clips else ''} looks at whole variables, and each rank "
                f"has only its part of {parts[0]}: use another optimizer, such as Adam, without a limit of norms"
            )
        super().build(variables)  # type: ignore[misc]  # the optimizer's class comes next

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Reduce the gradients over the ranks, and apply them as the wrapped optimizer does.

        Raises:
            HorovodInternalError: A reduction failed, on the torch backend.
            tf.errors.OpError: A reduction failed, or the step is being compiled with XLA, on the TensorFlow backend.
        """
        gradients = self._distributed_gradients
        grads = list(grads)
        if gradients.is_done or not grads:
            self._apply_reduced(grads, trainable_variables)
            return
        variables = _built_variables(self, trainable_variables)
        gradients.apply(grads, variables, lambda reduced: self._apply_reduced(reduced, variables))

    def _apply_reduced(self, grads: list[Any], variables: Sequence[Any] | None) -> None:
        passes = self._distributed_gradients.options.backward_passes_per_step
        if passes > 1:
            self._iterations.assign_add(passes - 1)  # type: ignore[attr-defined]  # the optimizer's class comes next
        super().apply(grads, variables)  # type: ignore[misc]  # the optimizer's class comes next

    @property
    def iterations(self) -> Any:
        """The number of steps. Learning rate schedules see the number of passes, of which a step has one or several."""
        passes = self._distributed_gradients.options.backward_passes_per_step
        iterations = super().iterations  # type: ignore[misc]  # the optimizer's class comes next
        return iterations if passes == 1 else ops.floor_divide(iterations, passes)


class _DistributedLossScale(_Wrapped):
    """The first base class of a LossScaleOptimizer with a distributed optimizer inside."""


def wrapped(optimizer: keras.Optimizer, options: Options, local: Local) -> keras.Optimizer:
    """Return an optimizer that works like the given one, with gradients reduced over the ranks."""
    _teach_loss_scaling()
    wrap = functools.partial(wrapped, options=options, local=local)
    if isinstance(optimizer, LossScaleOptimizer):
        added = {"inner_optimizer": wrap(optimizer.inner_optimizer)}
        return subclassed(optimizer, _DistributedLossScale, added, wrap)
    gradients = Gradients(options, optimizer._var_key, local)
    return subclassed(optimizer, _Distributed, {"_distributed_gradients": gradients}, wrap)


def _wrapped_copy(make: Callable[..., Any], arguments: Any, options: Options, local: Local) -> Any:
    """Return a distributed optimizer, for ``copy`` and ``pickle``: make the plain one, and wrap it."""
    return wrapped(make(*arguments), options, local)


def _reduced(optimizer: Any) -> tuple[Any, ...]:
    """Return the result of `__reduce__`, for `pickle` and `copy`: how to make the plain optimizer and wrap it."""
    gradients = gradients_of(optimizer)
    assert gradients is not None
    return _wrapped_copy, (*_unwrapped(optimizer).__reduce__(), gradients.options, gradients.local)


def _unwrapped(optimizer: keras.Optimizer) -> keras.Optimizer:
    """Return the plain optimizer: of the class that was wrapped, with the same variables."""
    plain_class = optimizer.__class__
    plain = plain_class.__new__(plain_class)
    vars(plain).update(vars(optimizer))
    if isinstance(plain, LossScaleOptimizer):
        vars(plain)["inner_optimizer"] = _unwrapped(plain.inner_optimizer)
    else:
        del vars(plain)["_distributed_gradients"]
    return plain


@functools.lru_cache(maxsize=1)
def _teach_loss_scaling() -> None:
    """Patch LossScaleOptimizer: if its inner optimizer is distributed, it and its copies reduce gradients first."""
    apply, reduce = LossScaleOptimizer.apply, LossScaleOptimizer.__reduce__

    @functools.wraps(apply)
    def reducing_apply(self: Any, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        gradients = gradients_of(self)
        if gradients is None or gradients.is_done:
            apply(self, grads, trainable_variables)
            return
        variables = _built_variables(self, trainable_variables)

        def apply_reduced(reduced: list[Any]) -> None:
            with gradients.done():
                apply(self, reduced, variables)

        gradients.apply(list(grads), variables, apply_reduced)

    @functools.wraps(reduce)
    def reduce_either(self: Any) -> Any:
        return reduce(self) if gradients_of(self) is None else _reduced(self)

    LossScaleOptimizer.apply, LossScaleOptimizer.__reduce__ = reducing_apply, reduce_either


def _built_variables(optimizer: Any, variables: Sequence[Any] | None) -> list[Any]:
    """Build an optimizer if necessary, and return its trained variables.

    Raises:
        ValueError: `variables` is None, and the optimizer is not built.
    """
    if variables is None:
        if not optimizer.built:
            raise ValueError(
                f"{optimizer.name} got gradients without variables, and is not built: pass the variables, or call "
                "optimizer.build(trainable_variables) before"
            )
        return list(optimizer._trainable_variables)
    build(optimizer, variables := list(variables))
    return variables
