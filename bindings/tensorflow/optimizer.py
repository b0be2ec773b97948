"""`DistributedOptimizer`: an optimizer whose gradients are reduced over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovodlike._engine.arguments import passes_per_step, reduce_op
from horovodlike.basics import Adasum, Average
from horovodlike.process_set import ProcessSet, global_process_set
from horovodlike.tensorflow._gradient_reduction import GradientReduction
from horovodlike.tensorflow.compression import Compression, Compressor
from horovodlike.tensorflow.gradient_aggregation import LocalGradientAggregationHelper
from horovodlike.weighting import Weight

__all__ = ["DistributedOptimizer"]

_Legacy: Any = tf.compat.v1.train.Optimizer


class _DistributedOptimizer(_Legacy):  # type: ignore[misc]  # has no annotations
    """An optimizer of TensorFlow 1 that wraps another one and reduces its gradients over the ranks."""

    def __init__(
        self, optimizer: Any, name: str, use_locking: bool, reduction: GradientReduction, passes: int, average: bool
    ) -> None:
        super().__init__(use_locking, name)
        self._optimizer = optimizer
        self._reduction = reduction
        self._aggregation = LocalGradientAggregationHelper(passes, reduction, reduction.sparse_as_dense, average)

    def register_local_var(self, var: Any) -> None:
        """Exclude the gradient of a variable from the reduction, from now on."""
        self._reduction.register_local(var)

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Call the wrapped optimizer's method, and reduce the gradients over the ranks."""
        gradients, variables = zip(*self._optimizer.compute_gradients(*args, **kwargs), strict=True)
        return list(zip(self._aggregation.compute_gradients(gradients, variables), variables, strict=True))

    def apply_gradients(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped optimizer's method, but only in the last of the passes that make a step."""
        return self._aggregation.apply_gradients(
            lambda: self._optimizer.apply_gradients(*args, **kwargs), self, *args, **kwargs
        )

    def _create_slots(self, var_list: Sequence[Any]) -> None:
        self._optimizer._create_slots(var_list)

    def get_slot(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped optimizer's method."""
        return self._optimizer.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped optimizer's method."""
        return self._optimizer.get_slot_names(*args, **kwargs)

    def variables(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped optimizer's method."""
        return self._optimizer.variables(*args, **kwargs)


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    weight: Weight = None,
) -> Any:
    """Return an optimizer that works like the given one, with gradients reduced over the ranks.

    Args:
        optimizer: A Keras optimizer, or one of `tf.compat.v1.train`.
        name: For TensorFlow 1: the name of the result. For Keras: see `horovodlike.keras.DistributedOptimizer`.
        use_locking: As for `tf.compat.v1.train.Optimizer`; not used for Keras.
        device_dense: Not needed.
        device_sparse: Not needed.
        compression: How gradients are compressed before they are sent, such as `Compression.fp16`.
        sparse_as_dense: Make a `tf.IndexedSlices` dense and reduce it, instead of gathering it.
        backward_passes_per_step: The number of passes whose gradients are summed before they are reduced and applied.
        op: The reduction, such as Average.
        gradient_predivide_factor: With Average: gradients are divided by this factor before they are summed over the
            ranks, and the sum by the number of ranks divided by this factor.
        average_aggregated_gradients: Divide the sum over the passes by the number of passes.
        num_groups: The number of operations that reduce the gradients; 0: one for each gradient, or in eager mode one
            for all.
        groups: A number, as `num_groups`; or lists of variables, the gradients of each list being one operation.
        process_set: The ranks that take part; on other ranks, gradients do not change.
        scale_local_gradients: Divide local gradients (of `register_local_var`) by the number of ranks.
        weight: As for `horovodlike.keras.DistributedOptimizer`.

    Raises:
        ValueError: An argument cannot be used, or arguments contradict each other.
    """
    op = reduce_op(op, "DistributedOptimizer")
    if op == Adasum and average_aggregated_gradients:
        raise ValueError("Adasum does not support average_aggregated_gradients == True")
    if not isinstance(optimizer, _Legacy):
        return _of_keras(
            optimizer,
            name=name,
            compression=compression,
            sparse_as_dense=sparse_as_dense,
            backward_passes_per_step=backward_passes_per_step,
            op=op,
            gradient_predivide_factor=gradient_predivide_factor,
            average_aggregated_gradients=average_aggregated_gradients,
            num_groups=num_groups,
            groups=groups,
            process_set=process_set,
            scale_local_gradients=scale_local_gradients,
            weight=weight,
        )
    if isinstance(optimizer, _DistributedOptimizer):
        raise ValueError(f"{optimizer.get_name()} is distributed already: wrap an optimizer once")
    backward_passes_per_step = passes_per_step(backward_passes_per_step, "DistributedOptimizer")
    if tf.executing_eagerly() and backward_passes_per_step > 1:
        raise ValueError(
            "backward_passes_per_step > 1 is not supported eagerly with an optimizer of TensorFlow 1; use one of Keras"
        )
    reduction = GradientReduction(
        *(compression, op, gradient_predivide_factor, sparse_as_dense, num_groups, groups, process_set),
        *(scale_local_gradients, weight),
    )
    name = name or f"Distributed{type(optimizer).__name__}"
    return _DistributedOptimizer(
        optimizer, name, use_locking, reduction, backward_passes_per_step, average_aggregated_gradients
    )


def _of_keras(optimizer: Any, **options: Any) -> Any:
    from horovodlike.keras import DistributedOptimizer as KerasDistributedOptimizer

    return KerasDistributedOptimizer(optimizer, **options)
