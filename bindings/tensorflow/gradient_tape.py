"""`DistributedGradientTape`: a `tf.GradientTape` whose gradients are reduced over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovodlike.basics import Average
from horovodlike.process_set import ProcessSet, global_process_set
from horovodlike.tensorflow._gradient_reduction import GradientReduction
from horovodlike.tensorflow.compression import Compression, Compressor

__all__ = ["DistributedGradientTape", "PartialDistributedGradientTape"]


class _Distributed(tf.GradientTape):  # type: ignore[misc]  # has no annotations
    """Does everything with the tape that it was made of, and reduces what `gradient` returns."""

    def __init__(self, tape: tf.GradientTape, reduction: GradientReduction) -> None:
        tf.GradientTape.__init__(self)  # which the methods below leave unused
        self._inner = tape
        self._reduction = reduction

    def __enter__(self) -> _Distributed:
        self._inner.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._inner.__exit__(*error)

    def register_local_source(self, source: Any) -> None:
        """Have the gradient of this variable stay on its rank, from now on."""
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
            sources: As for `tf.GradientTape.gradient`; as many on all ranks.
            output_gradients: As for `tf.GradientTape.gradient`.
            use_generic_names: Name the operations after the places of the gradients instead of after the variables.
            more: Further arguments of `tf.GradientTape.gradient`.

        Raises:
            tf.errors.OpError: The ranks disagree about a gradient, or the job is broken.
        """
        gradients = self._inner.gradient(target, sources, output_gradients, **more)
        reduced = self._reduction(tf.nest.flatten(gradients), tf.nest.flatten(sources), use_generic_names)
        return tf.nest.pack_sequence_as(sources, reduced)

    def watch(self, tensor: Any) -> None:
        """Do what `tf.GradientTape.watch` does."""
        self._inner.watch(tensor)

    def watched_variables(self) -> Any:
        """Do what `tf.GradientTape.watched_variables` does."""
        return self._inner.watched_variables()

    def stop_recording(self) -> Any:
        """Do what `tf.GradientTape.stop_recording` does."""
        return self._inner.stop_recording()

    def reset(self) -> None:
        """Do what `tf.GradientTape.reset` does."""
        self._inner.reset()

    def jacobian(self, *arguments: Any, **more: Any) -> Any:
        """Do what `tf.GradientTape.jacobian` does, for this rank."""
        return self._inner.jacobian(*arguments, **more)

    def batch_jacobian(self, *arguments: Any, **more: Any) -> Any:
        """Do what `tf.GradientTape.batch_jacobian` does, for this rank."""
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
) -> Any:
    """Return a tape that does what the given one does, and whose `gradient` reduces over the ranks.

    Args:
        gradtape: The tape, before, while or after it records.
        device_dense: Not needed.
        device_sparse: Not needed.
        compression: What to send instead of the gradients.
        sparse_as_dense: Make a `tf.IndexedSlices` dense and reduce it, instead of gathering it.
        op: How to reduce: Average, Sum, Min, Max, Product or Adasum.
        gradient_predivide_factor: With Average: what gradients are divided by before they are summed up; the result
            is divided by the rest of the number of ranks.
        num_groups: Reduce the gradients as so many operations; 0: one for each, or eagerly one for all.
        groups: The same number; or lists of variables, whose gradients are reduced as one operation each.
        process_set: The ranks that take part; the gradients of the others stay what they are.
        scale_local_gradients: Divide gradients that stay on their rank (`register_local_source`) by the number of
            ranks.

    Raises:
        ValueError: The arguments contradict each other.
        TypeError: It is no tape.
    """
    del device_dense, device_sparse
    reduction = GradientReduction(
        *(compression, op, gradient_predivide_factor, sparse_as_dense, num_groups, groups, process_set),
        scale_local_gradients,
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
) -> Any:
    """Do what `DistributedGradientTape` does, for all but the gradients of some layers, which stay on their rank.

    `local_layers` is a Keras layer, also one of tf_keras (Keras 2), or a list of them. All other arguments are those of
    `DistributedGradientTape`; with `scale_local_gradients` the gradients of these layers are divided by the number of
    ranks.

    Raises:
        ValueError: Something in `local_layers` is no layer, or the arguments contradict each other.
    """
    tape = DistributedGradientTape(
        *(gradtape, device_dense, device_sparse, compression, sparse_as_dense, op, gradient_predivide_factor),
        *(num_groups, groups, process_set, scale_local_gradients),
    )
    layers = [] if local_layers is None else local_layers
    layers = layers if isinstance(layers, (list, tuple)) else [layers]
    # Of Keras 3 or of tf_keras: only their variables are asked for, when they are built.
    if not all(hasattr(type(layer), "trainable_variables") for layer in layers):
        raise ValueError("All local layers must be of tf.keras.layers.Layer type.")
    tape._register_local_layers(layers)
    return tape
