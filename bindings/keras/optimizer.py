"""`DistributedOptimizer`: any Keras optimizer, with gradients reduced over the ranks before it applies them."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import ops

from horovodlike import basics
from horovodlike._arguments import check_compression, check_name, passes_per_step, predivide_factor, reduce_op
from horovodlike.keras._gradients import Gradients, Groups, Local, Options
from horovodlike.keras._legacy import check_keras_3
from horovodlike.keras._loss_scaling import build, gradients_of, teach
from horovodlike.process_set import ProcessSet, check_registered, global_process_set

__all__ = ["DistributedOptimizer", "PartialDistributedOptimizer"]


class _Registering:
    """What wrapped optimizers have besides the methods of the optimizer."""

    _wrap: Callable[[keras.Optimizer], keras.Optimizer]

    def register_local_var(self, var: Any) -> None:
        """Leave the gradient of a variable with its rank: it is not reduced.

        Args:
            var: A variable that the optimizer trains, before the first step.
        """
        gradients = gradients_of(self)
        assert gradients is not None
        gradients.register_local(var)

    # Keras writes the class of an optimizer into a saved model, and asks for it by this name. It gets that of the
    # optimizer that was wrapped, so the model can be loaded where there is no horovodlike.
    @property  # type: ignore[misc]  # it is not to be written to
    def __class__(self) -> Any:
        return type(self).__bases__[1]

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        """Make an optimizer from what `get_config` returned, and wrap it in the same way."""
        wrapped: Any = cls.__bases__[1]
        return cls._wrap(wrapped.from_config(config, custom_objects=custom_objects))

    def __reduce__(self) -> tuple[Any, ...]:
        return _reduced(self)


class _Distributed(_Registering):
    """What `DistributedOptimizer` puts in front of the class of the optimizer that it wraps."""

    _distributed_gradients: Gradients

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Reduce the gradients over the ranks, and do what the wrapped optimizer does with them.

        Raises:
            HorovodInternalError: A reduction failed, on the torch backend.
            tf.errors.OpError: A reduction failed, or the step is being compiled with XLA, on the TensorFlow backend.
        """
        gradients = self._distributed_gradients
        grads = list(grads)
        if gradients.is_done or not grads:
            self._apply_reduced(grads, trainable_variables)
            return
        variables = build(self, trainable_variables)
        gradients.apply(grads, variables, lambda reduced: self._apply_reduced(reduced, variables))

    def _apply_reduced(self, grads: list[Any], variables: Sequence[Any] | None) -> None:
        passes = self._distributed_gradients.options.backward_passes_per_step
        if passes > 1:
            self._iterations.assign_add(passes - 1)  # type: ignore[attr-defined]
        super().apply(grads, variables)  # type: ignore[misc]

    @property
    def iterations(self) -> Any:
        """How many steps have been made. Learning rate schedules are given how many passes."""
        passes = self._distributed_gradients.options.backward_passes_per_step
        iterations = super().iterations  # type: ignore[misc]
        return iterations if passes == 1 else ops.floor_divide(iterations, passes)


class _DistributedLossScale(_Registering):
    """What stands in front of the class of a LossScaleOptimizer, whose inner optimizer is a distributed one."""


def DistributedOptimizer(
    optimizer: keras.Optimizer | str,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = None,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = basics.Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> keras.Optimizer:
    """Wrap an optimizer so that it steps with gradients reduced over all ranks.

    The result is of a subclass of the optimizer's class, shares its variables, and replaces it: in `compile()`, or
    where `apply` or `apply_gradients` is called. To Keras it is an optimizer of the wrapped class, so a model that is
    saved with it can be loaded without horovodlike. With one rank nothing is sent.

    A `keras.optimizers.LossScaleOptimizer` may be wrapped, or put around the result, as `compile()` does by itself
    under the policy "mixed_float16". Gradients are reduced before anybody looks whether they are finite: all ranks
    take a step or all skip it.

    The step cannot be compiled with XLA: on the TensorFlow backend pass `jit_compile=False` to `compile()` where there
    is a GPU. Without one that is what Keras does.

    Args:
        optimizer: Any Keras optimizer, over the same variables on all ranks; or its name, such as "adam".
        name: How the names of the reductions begin; what the ranks match them by. Without one, the names and the number
            of the variables tell optimizers apart. Those of models that are alike, but for shapes, need names if
            several threads use them.
        device_dense: Not needed; accepted for scripts that pass it.
        device_sparse: As `device_dense`.
        compression: What to send instead of a gradient: `Compression.none` (the default), `.fp16` or a class of your
            own, for tensors of the backend.
        sparse_as_dense: Reduce gradients that have rows only for some positions (of embeddings, on the TensorFlow
            backend) as plain tensors. Otherwise their rows are gathered.
        gradient_predivide_factor: The average is made of gradients divided by this; and multiplied afterwards.
        op: Average or Sum.
        backward_passes_per_step: So many calls of `apply` make one step. The gradients of a rank are added up, and
            reduced and applied in the last of them; what is not needed yet does not change the variables.
        average_aggregated_gradients: Average the gradients over these passes, instead of summing them.
        num_groups: Deprecated; use `groups`.
        groups: Into how many groups to divide the variables, or lists of variables. A group is reduced as one. 0 or
            None: the backend decides.
        process_set: The ranks that reduce gradients together. On others this is a plain optimizer.
        scale_local_gradients: Divide gradients that are not reduced by the number of ranks, as if the other ranks
            had none.

    Returns:
        The wrapped optimizer. It has a method `register_local_var(var)` for a variable whose gradient is not reduced.

    Raises:
        NotImplementedError: Keras uses a backend other than "tensorflow" and "torch".
        ValueError: An argument cannot be used.
        TypeError: The optimizer is of tf_keras.
    """
    del device_dense, device_sparse
    options = Options(
        name=name,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=reduce_op(op, "DistributedOptimizer"),
        backward_passes_per_step=passes_per_step(backward_passes_per_step, "DistributedOptimizer"),
        average_aggregated_gradients=average_aggregated_gradients,
        groups=_one_of(num_groups, groups),
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    return _wrapped(optimizer, options, Local())


def PartialDistributedOptimizer(
    optimizer: keras.Optimizer | str,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = None,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: int = basics.Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    local_layers: keras.layers.Layer | Sequence[keras.layers.Layer] | None = None,
    scale_local_gradients: bool = True,
) -> keras.Optimizer:
    """Do what `DistributedOptimizer` does, but leave the gradients of some layers with their rank.

    `local_layers` is a layer or several, whose variables may then have different values on each rank. They need not be
    built yet. All other arguments are those of `DistributedOptimizer`.

    Raises:
        NotImplementedError: Keras uses a backend other than "tensorflow" and "torch".
        ValueError: An argument cannot be used, or one of `local_layers` is no layer.
        TypeError: The optimizer or a layer is of tf_keras.
    """
    del device_dense, device_sparse
    if local_layers is None:
        local_layers = []
    check_keras_3(local_layers, "PartialDistributedOptimizer")
    layers = [local_layers] if isinstance(local_layers, keras.layers.Layer) else list(local_layers)
    for layer in layers:
        check_keras_3(layer, "PartialDistributedOptimizer")
    if not all(isinstance(layer, keras.layers.Layer) for layer in layers):
        raise ValueError(f"All local layers must be of keras.layers.Layer type, got {layers!r}")
    options = Options(
        name=name,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=reduce_op(op, "DistributedOptimizer"),
        backward_passes_per_step=passes_per_step(backward_passes_per_step, "DistributedOptimizer"),
        average_aggregated_gradients=average_aggregated_gradients,
        groups=_one_of(num_groups, groups),
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    return _wrapped(optimizer, options, Local(layers))


def _wrapped(optimizer: keras.Optimizer | str, options: Options, local: Local) -> keras.Optimizer:
    check_keras_3(optimizer, "DistributedOptimizer")
    optimizer = keras.optimizers.get(optimizer)
    _check(optimizer, options)
    teach()
    _teach_to_copy()
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        wrapper: type = _DistributedLossScale
        added = {"inner_optimizer": _wrapped(optimizer.inner_optimizer, options, local)}
    else:
        wrapper = _Distributed
        added = {"_distributed_gradients": Gradients(options, optimizer._var_key, local)}
    base = type(optimizer)

    def wrap(other: keras.Optimizer) -> keras.Optimizer:
        return _wrapped(other, options, local)

    namespace = {"__module__": base.__module__, "__doc__": base.__doc__, "_wrap": staticmethod(wrap)}
    cls: Any = type(base.__name__, (wrapper, base), namespace)
    result = cls.__new__(cls)
    # The same variables and lists of them, so that nothing of its state is lost.
    vars(result).update(vars(optimizer))
    vars(result).update(added)
    return result


def _reduced(optimizer: keras.Optimizer) -> tuple[Any, ...]:
    """Return how to make a copy, for `pickle` and `copy`: what Keras makes of the wrapped optimizer, wrapped again."""
    gradients = gradients_of(optimizer)
    assert gradients is not None
    return _wrapped_copy, (*_unwrapped(optimizer).__reduce__(), gradients.options, gradients.local)


def _wrapped_copy(make: Callable[..., Any], arguments: Any, options: Options, local: Local) -> keras.Optimizer:
    return _wrapped(make(*arguments), options, local)


def _unwrapped(optimizer: keras.Optimizer) -> keras.Optimizer:
    """Return an optimizer of the class that was wrapped, with the same variables."""
    plain_class = optimizer.__class__
    plain = plain_class.__new__(plain_class)
    vars(plain).update(vars(optimizer))
    if isinstance(plain, keras.optimizers.LossScaleOptimizer):
        vars(plain)["inner_optimizer"] = _unwrapped(plain.inner_optimizer)
    else:
        del vars(plain)["_distributed_gradients"]
    return plain


@functools.lru_cache(maxsize=1)
def _teach_to_copy() -> None:
    """Have LossScaleOptimizer know of copies, if the optimizer inside is distributed."""
    reduce = keras.optimizers.LossScaleOptimizer.__reduce__

    @functools.wraps(reduce)
    def reduce_either(self: Any) -> Any:
        return reduce(self) if gradients_of(self) is None else _reduced(self)

    keras.optimizers.LossScaleOptimizer.__reduce__ = reduce_either


def _one_of(num_groups: int, groups: Groups) -> Groups:
    if num_groups:
        warnings.warn("num_groups is deprecated: use groups", DeprecationWarning, stacklevel=3)
    return num_groups if groups is None and num_groups else groups


def _check(optimizer: keras.Optimizer, options: Options) -> None:
    if gradients_of(optimizer) is not None:
        raise ValueError(f"{optimizer.name} is distributed already: wrap an optimizer once")
    if options.op not in (basics.Average, basics.Sum):
        raise ValueError(f"op currently only supports Average and Sum, got {options.op!r}")
    predivide_factor(options.gradient_predivide_factor, options.op, "DistributedOptimizer")
    check_name(options.name, "DistributedOptimizer")
    if options.compression is not None:
        check_compression(options.compression, "DistributedOptimizer")
    inner_steps = getattr(optimizer, "gradient_accumulation_steps", None)
    if options.backward_passes_per_step > 1 and inner_steps:
        raise ValueError(
            f"{optimizer.name} has gradient_accumulation_steps={inner_steps}, which cannot be combined with "
            f"backward_passes_per_step={options.backward_passes_per_step}: leave one of them out"
        )
    check_registered(options.process_set)
    _check_groups(options.groups, optimizer)


def _check_groups(groups: Groups, optimizer: keras.Optimizer) -> None:
    if groups is None:
        return
    if isinstance(groups, int):
        if groups < 0 or isinstance(groups, bool):
            raise ValueError(f"groups must be a non-negative integer or a list of lists of variables, got {groups}")
        return
    if not isinstance(groups, list) or not all(isinstance(group, list) for group in groups):
        raise ValueError(f"groups must be a non-negative integer or a list of lists of variables, got {groups!r}")
    members = [member for group in groups for member in group]
    if not all(hasattr(member, "assign") for member in members):
        raise ValueError("groups must be made of variables")
    if len({optimizer._var_key(member) for member in members}) < len(members):
        raise ValueError("a variable can be in one group only")
