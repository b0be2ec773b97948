"""`DistributedGradientTape`: a `tf.GradientTape` whose gradients are reduced over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovodlike.basics import Average
from horovodlike.process_set import ProcessSet, global_process_set
from horovodlike.tensorflow._gradient_reduction import GradientReduction
from horovodlike.tensorflow.compression import Compression, Compressor
from horovodlike.weighting import Weight

__all__ = ["DistributedGradientTape", "PartialDistributedGradientTape"]


class _Distributed(tf.GradientTape):  # type: ignore[misc]  # has no annotations
    """A tape that passes all calls on to another tape, and reduces the gradients that `gradient` returns."""

    def __init__(self, tape: tf.GradientTape, reduction: GradientReduction) -> None:
        tf.GradientTape.__init__(self)  # makes state that is not used: all methods below use `_inner`
        self._inner = tape
        self._reduction = reduction

    def __enter__(self) -> _Distributed:
        self._inner.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._inner.__exit__(*error)

    def register_local_source(self, source: Any) -> None:
        """Exclude the gradient of a variable from the reduction, from now on."""
        self._reduction.register_local(source)

    def _register_local_layers(self, layers: Sequence[Any]) -> None:
        self._reduction.register_local_layers(layers)

    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
        **more: Any,
    ) -> Any:
        """Return the gradients of the target, reduced over the ranks, in the structure of the sources.

        Args:
            target: As for `tf.GradientTape.gradient`.
            sources: As for `tf.GradientTape.gradient`; the same number on all ranks.
            output_gradients: As for `tf.GradientTape.gradient`.
            use_generic_names: Name the operations after the positions of the gradients instead of the variables.
            more: Further arguments of `tf.GradientTape.gradient`.

        Raises:
            tf.errors.OpError: The ranks disagree about a gradient, or the job is broken.
        """
        gradients = self._inner.gradient(target, sources, output_gradients, **more)
        reduced = self._reduction(tf.nest.flatten(gradients), tf.nest.flatten(sources), use_generic_names)
        return tf.nest.pack_sequence_as(sources, reduced)

    def watch(self, tensor: Any) -> None:
        """Call `watch` of the wrapped tape."""
        self._inner.watch(tensor)

    def watched_variables(self) -> Any:
        """Call `watched_variables` of the wrapped tape."""
        return self._inner.watched_variables()

    def stop_recording(self) -> Any:
        """Call `stop_recording` of the wrapped tape."""
        return self._inner.stop_recording()

    def reset(self) -> None:
        """Call `reset` of the wrapped tape."""
        self._inner.reset()

    def jacobian(self, *arguments: Any, **more: Any) -> Any:
        """Call `jacobian` of the wrapped tape, without a reduction over the ranks."""
        return self._inner.jacobian(*arguments, **more)

    def batch_jacobian(self, *arguments: Any, **more: Any) -> Any:
        """Call `batch_jacobian` of the wrapped tape, without a reduction over the ranks."""
        return self._inner.batch_jacobian(*arguments, **more)


def _distributed(tape: tf.GradientTape, reduction: GradientReduction) -> Any:
    if not isinstance(tape, tf.GradientTape):
        raise TypeError(f"expected a tf.GradientTape, got {type(tape).__name__}")
    kind = type(tape)
    return type(kind.__name__, (_Distributed, kind), {})(tape, reduction)


def DistributedGradientTape(  # noqa: N802 - Horovod's name
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    weight: Weight = None,
) -> Any:
    """Return a tape that works like the given one, but whose `gradient` returns gradients reduced over the ranks.

    Args:
        gradtape: The tape, before, while or after it records.
        device_dense: Not needed.
        device_sparse: Not needed.
        compression: How gradients are compressed before they are sent, such as `Compression.fp16`.
        sparse_as_dense: Make a `tf.IndexedSlices` dense and reduce it, instead of gathering it.
        op: The reduction: Average, Sum, Min, Max, Product or Adasum.
        gradient_predivide_factor: With Average: gradients are divided by this factor before they are summed, and the
            sum by the number of ranks divided by this factor.
        num_groups: The number of operations that reduce the gradients; 0: one for each gradient, or in eager mode one
            for all.
        groups: A number, as `num_groups`; or lists of variables, the gradients of each list being one operation.
        process_set: The ranks that take part; on other ranks, gradients do not change.
        scale_local_gradients: Divide local gradients (of `register_local_source`) by the number of ranks.
        weight: The number of samples behind this rank's gradients; a tensor, such as `tf.shape(batch)[0]`; or a
            function without arguments that returns the number: gradients are then reduced to the mean over the samples
            of all ranks. `hvd.batch_weight`: the weight that `set_batch_weight` has set. None: the same, or the average
            over ranks if none is set. Needs Average.

    Raises:
        ValueError: An argument cannot be used, or arguments contradict each other.
        TypeError: `gradtape` is not a tape, or another argument is of the wrong type.
    """
    del device_dense, device_sparse
    reduction = GradientReduction(
        *(compression, op, gradient_predivide_factor, sparse_as_dense, num_groups, groups, process_set),
        *(scale_local_gradients, weight),
    )
    return _distributed(gradtape, reduction)


def PartialDistributedGradientTape(  # noqa: N802 - Horovod's name
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
    weight: Weight = None,
) -> Any:
    """Wrap a tape like `DistributedGradientTape`, but do not reduce the gradients of some layers.

    `local_layers` is a layer of Keras 3 or tf_keras (Keras 2), or a list of layers. All other arguments are as for
    `DistributedGradientTape`; with `scale_local_gradients` the gradients of these layers are divided by the number of
    ranks.

    Raises:
        ValueError: An item of `local_layers` is not a layer, or the arguments contradict each other.
    """
    tape = DistributedGradientTape(
        *(gradtape, device_dense, device_sparse, compression, sparse_as_dense, op, gradient_predivide_factor),
        *(num_groups, groups, process_set, scale_local_gradients, weight),
    )
    layers = [] if local_layers is None else local_layers
    layers = layers if isinstance(layers, (list, tuple)) else [layers]
    # Layers of Keras 3 or tf_keras: only `trainable_variables` is read, and only when gradients are reduced.
    if not all(hasattr(type(layer), "trainable_variables") for layer in layers):
        raise ValueError("All local layers must be of tf.keras.layers.Layer type.")
    tape._register_local_layers(layers)
    return tape
