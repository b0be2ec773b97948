"""`SyncBatchNormalization`: batch normalization over the batches of all ranks."""

from __future__ import annotations

import re
from typing import Any

import tensorflow as tf

from horovodlike.basics import Sum
from horovodlike.keras._backend import is_tf_keras, keras
from horovodlike.process_set import ProcessSet, global_process_set, registered_of
from horovodlike.tensorflow._ops.calls import outermost
from horovodlike.tensorflow.mpi_ops import allreduce, grouped_allreduce

__all__ = ["SyncBatchNormalization"]

_NUMBER = re.compile(r"_\d+$")


@keras.saving.register_keras_serializable("horovodlike")
class SyncBatchNormalization(keras.layers.BatchNormalization):  # type: ignore[misc]  # has no annotations
    """Normalizes by mean and variance of the batches of all ranks together, also of different sizes.

    Args:
        fused: Must be False: a fused kernel computes the mean and variance of one rank's batch only.
        process_set: The ranks that take part. The configuration of a saved or cloned layer has these ranks; a set of
            them must be registered where the layer is made again.
        kwargs: As for `keras.layers.BatchNormalization`.

    Raises:
        ValueError: `fused` is True or None, or Keras does not run on TensorFlow.
    """

    def __init__(self, fused: bool = False, process_set: ProcessSet = global_process_set, **kwargs: Any) -> None:
        if fused in (True, None):
            raise ValueError("SyncBatchNormalization does not support fused=True.")
        if keras.backend.backend() != "tensorflow":
            raise ValueError(f"SyncBatchNormalization is for Keras on TensorFlow, not on {keras.backend.backend()}")
        if is_tf_keras:
            kwargs["fused"] = False
        super().__init__(**kwargs)
        self.process_set = process_set

    def get_config(self) -> dict[str, Any]:
        """Return the configuration of Keras's layer and the ranks of the process set; None stands for all ranks."""
        ranks = None if self.process_set is global_process_set else self.process_set.ranks
        return {**super().get_config(), "process_set": ranks}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> SyncBatchNormalization:
        """Make a layer from a configuration that `get_config` returned.

        Raises:
            ValueError: No process set of these ranks is registered.
        """
        ranks = config.get("process_set")
        process_set = global_process_set if ranks is None else registered_of(ranks)
        layer: SyncBatchNormalization = super().from_config({**config, "process_set": process_set})
        return layer

    # tf_keras also passes the axes and keep_dims, and its `self.axis` is a list.
    def _moments(self, inputs: Any, *args: Any, keep_dims: bool = False, mask: Any = None) -> tuple[Any, Any]:
        if not is_tf_keras:
            (mask,) = args
        own = [self.axis] if isinstance(self.axis, int) else self.axis
        rank = inputs.shape.rank
        axes = [axis for axis in range(rank) if axis not in {one % rank for one in own}]
        # This replaces the name scopes of Keras. TensorFlow would put these into the names of the gradients, and they
        # may differ between ranks: see _name_now.
        with tf.name_scope("SyncBatchNormalization/"):
            mean, variance = self._moments_of_all(inputs, axes, mask)
        return (mean, variance) if keep_dims else (tf.squeeze(mean, axes), tf.squeeze(variance, axes))

    def _moments_of_all(self, inputs: Any, axes: list[int], mask: Any) -> tuple[Any, Any]:
        """Return mean and variance over `axes`, each of which has extent 1 in the results."""
        weights = tf.ones_like(inputs[..., :1] if inputs.shape.rank - 1 not in axes else inputs)
        if mask is not None:
            weights *= tf.cast(mask, inputs.dtype)[..., tf.newaxis]
        total, count = grouped_allreduce(
            [tf.reduce_sum(inputs * weights, axes, True), tf.reduce_sum(weights, axes, True)],
            op=Sum,
            name=self._name_now("sum"),
            process_set=self.process_set,
        )
        count = tf.maximum(count, 1.0)  # the count is 0 if no rank has any sample
        mean = total / count
        # The mean is subtracted before squaring: a difference of two large sums would lose digits.
        squares = tf.reduce_sum(weights * tf.square(inputs - mean), axes, True)
        squares = allreduce(squares, op=Sum, name=self._name_now("squares"), process_set=self.process_set)
        return mean, squares / count

    def _name_now(self, part: str) -> str | None:
        if tf.executing_eagerly():
            return None  # an unnamed operation receives a number
        # Names and name scopes of Keras contain numbers by which it counts the layers made in a process. They are left
        # out, because rank 0 may have made another model before. Layers of one name, and several calls of a layer, are
        # distinguished by the order in which they are traced.
        graph = outermost(tf.compat.v1.get_default_graph())
        with graph.name_scope(None):
            return str(graph.unique_name(f"{_NUMBER.sub('', self.name)}.{part}"))
