"""`DistributedOptimizer`: any Keras optimizer, with gradients reduced over the ranks before it applies them."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

from horovodlike import basics
from horovodlike._engine.arguments import check_compression, check_name, passes_per_step, predivide_factor, reduce_op
from horovodlike.keras._backend import check, keras
from horovodlike.keras._wrapping import Groups, Local, Options
from horovodlike.keras.functions import objects
from horovodlike.process_set import ProcessSet, check_registered, global_process_set
from horovodlike.weighting import Weight, check_argument

__all__ = ["DistributedOptimizer", "PartialDistributedOptimizer"]


def DistributedOptimizer(
    optimizer: Any,
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
    weight: Weight = None,
) -> Any:
    """Wrap an optimizer so that it steps with gradients reduced over all ranks.

    The result is of a subclass of the optimizer's class, shares its variables, and replaces it: in `compile()`, or
    where `apply` or `apply_gradients` is called. To Keras it is an optimizer of the wrapped class, so a model that is
    saved with it can be loaded without horovodlike. With one rank nothing is sent.

    A `keras.optimizers.LossScaleOptimizer` may be wrapped, or put around the result, as `compile()` does by itself
    under the policy "mixed_float16". Gradients are reduced before they are checked for being finite: all ranks take a
    step or all skip it.

    The step cannot be compiled with XLA: on the TensorFlow backend pass `jit_compile=False` to `compile()` where there
    is a GPU. Without a GPU, Keras does not use XLA.

    Args:
        optimizer: Any Keras optimizer, over the same variables on all ranks; or its name, such as "adam".
        name: A prefix of the names by which the ranks match the reductions. Without it, optimizers are distinguished by
            the names and the number of their variables. If these are equal for two models, and several threads train
            them, their optimizers need names.
        device_dense: Not needed; accepted for scripts that pass it.
        device_sparse: As `device_dense`.
        compression: How gradients are compressed before they are sent: `Compression.none` (the default), `.fp16` or a
            class of your own, for tensors of the backend.
        sparse_as_dense: Reduce sparse gradients (of embeddings, on the TensorFlow backend) as dense tensors.
            Otherwise their rows are gathered.
        gradient_predivide_factor: Divides gradients before they are averaged, and multiplies the averages.
        op: Average or Sum.
        backward_passes_per_step: The number of calls of `apply` that make one step. A rank adds up its gradients; the
            last call reduces and applies the sums, and the earlier ones do not change the variables.
        average_aggregated_gradients: Average the gradients over these calls, instead of summing them.
        num_groups: Deprecated; use `groups`.
        groups: The number of groups to divide the variables into, or lists of variables. The gradients of a group are
            reduced as one operation. 0 or None: the backend decides.
        process_set: The ranks that reduce gradients together. On other ranks the result is a plain optimizer.
        scale_local_gradients: Divide local gradients, which are not reduced, by the number of ranks, as if the
            gradients of the other ranks were 0.
        weight: The number of samples behind this rank's gradients in each step, or a function without arguments that
            returns it and is called when a step reduces gradients, also where the step is traced: gradients are then
            reduced to the mean over the samples of all ranks. With several passes it is the number of samples of all of
            them. `hvd.batch_weight`: the weight that `set_batch_weight` has set. None: the same, or the average over
            ranks if none is set (a traced step: when it is traced). Needs Average. Local gradients are not weighted.

    Returns:
        The wrapped optimizer. It has a method `register_local_var(var)` for a variable whose gradient is not reduced.

    Raises:
        NotImplementedError: Keras uses a backend other than "tensorflow" and "torch".
        ValueError: An argument cannot be used.
        TypeError: The optimizer is of tf_keras, and this process uses Keras 3; or the other way round.
    """
    del device_dense, device_sparse
    options = Options(
        *(name, compression, sparse_as_dense, gradient_predivide_factor, op, backward_passes_per_step),
        *(average_aggregated_gradients, _one_of(num_groups, groups), process_set, scale_local_gradients, weight),
    )
    return _wrapped(optimizer, options, Local(), "DistributedOptimizer")


def PartialDistributedOptimizer(
    optimizer: Any,
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
    local_layers: Any = None,
    scale_local_gradients: bool = True,
    weight: Weight = None,
) -> Any:
    """Wrap an optimizer like `DistributedOptimizer`, but do not reduce the gradients of some layers.

    `local_layers` is one layer or several. Their variables may then have different values on each rank. The layers do
    not need to be built yet. All other arguments are as for `DistributedOptimizer`.

    Raises:
        NotImplementedError: Keras uses a backend other than "tensorflow" and "torch".
        ValueError: An argument cannot be used, or one of `local_layers` is no layer.
        TypeError: The optimizer or a layer is of tf_keras, and this process uses Keras 3; or the other way round.
    """
    del device_dense, device_sparse
    if local_layers is None:
        local_layers = []
    check(local_layers, "PartialDistributedOptimizer")
    layers = [local_layers] if isinstance(local_layers, keras.layers.Layer) else list(local_layers)
    for layer in layers:
        check(layer, "PartialDistributedOptimizer")
    if not all(isinstance(layer, keras.layers.Layer) for layer in layers):
        raise ValueError(f"All local layers must be of keras.layers.Layer type, got {layers!r}")
    options = Options(
        *(name, compression, sparse_as_dense, gradient_predivide_factor, op, backward_passes_per_step),
        *(average_aggregated_gradients, _one_of(num_groups, groups), process_set, scale_local_gradients, weight),
    )
    return _wrapped(optimizer, options, Local(layers), "PartialDistributedOptimizer")


def _wrapped(optimizer: Any, options: Options, local: Local, caller: str) -> Any:
    passes = passes_per_step(options.backward_passes_per_step, caller)
    options = replace(options, op=reduce_op(options.op, caller), backward_passes_per_step=passes)
    check(optimizer, caller)
    optimizer = keras.optimizers.get(optimizer)
    _check(optimizer, options, caller)
    return objects.wrapped(optimizer, options, local)


def _one_of(num_groups: int, groups: Groups) -> Groups:
    if num_groups:
        warnings.warn("num_groups is deprecated: use groups", DeprecationWarning, stacklevel=3)
    return num_groups if groups is None and num_groups else groups


def _check(optimizer: Any, options: Options, caller: str) -> None:
    if objects.gradients_of(optimizer) is not None:
        raise ValueError(f"{type(optimizer).__name__} is distributed already: wrap an optimizer once")
    if options.op not in (basics.Average, basics.Sum):
        raise ValueError(f"op currently only supports Average and Sum, got {options.op!r}")
    predivide_factor(options.gradient_predivide_factor, options.op, caller)
    check_argument(options.weight, options.op, caller)
    check_name(options.name, caller)
    if options.compression is not None:
        check_compression(options.compression, caller)
    inner_steps = getattr(optimizer, "gradient_accumulation_steps", None)
    if options.backward_passes_per_step > 1 and inner_steps:
        raise ValueError(
            f"{type(optimizer).__name__} has gradient_accumulation_steps={inner_steps}, which cannot be combined with "
            f"backward_passes_per_step={options.backward_passes_per_step}: leave one of them out"
        )
    check_registered(options.process_set)
    _check_groups(options.groups)


def _check_groups(groups: Groups) -> None:
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
    if len({id(member) for member in members}) < len(members):
        raise ValueError("a variable can be in one group only")
