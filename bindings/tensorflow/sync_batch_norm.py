"""`SyncBatchNormalization`: batch normalization over the batches of all ranks."""

from __future__ import annotations

import re
from typing import Any

import keras
import tensorflow as tf

from horovodlike.basics import Sum
from horovodlike.keras._legacy import check_keras_3_is_used
from horovodlike.process_set import ProcessSet, global_process_set, registered_of
from horovodlike.tensorflow._calls import outermost
from horovodlike.tensorflow.mpi_ops import allreduce, grouped_allreduce

__all__ = ["SyncBatchNormalization"]

_NUMBER = re.compile(r"_\d+$")


@keras.saving.register_keras_serializable("horovodlike")
class SyncBatchNormalization(keras.layers.BatchNormalization):  # type: ignore[misc]
    """Normalizes by mean and variance of the batches of all ranks together, whatever the size of each.

    Args:
        fused: Only False; the kernels that compute all at once see one rank's batch.
        process_set: The ranks that take part. A saved or cloned layer has the ranks; the set has to be registered
            where the layer is made again.
        kwargs: As for `keras.layers.BatchNormalization`.

    Raises:
        ValueError: `fused` is True or None, or Keras does not run on TensorFlow.
        TypeError: `tf.keras` is tf_keras (Keras 2), whose models cannot have this layer.
    """

    def __init__(self, fused: bool = False, process_set: ProcessSet = global_process_set, **kwargs: Any) -> None:
        if fused in (True, None):
            raise ValueError("SyncBatchNormalization does not support fused=True.")
        check_keras_3_is_used("SyncBatchNormalization")
        if keras.backend.backend() != "tensorflow":
            raise ValueError(f"SyncBatchNormalization is for Keras on TensorFlow, not on {keras.backend.backend()}")
        super().__init__(**kwargs)
        self.process_set = process_set

    def get_config(self) -> dict[str, Any]:
        """As that of the layer of Keras, with the ranks of the process set; None: all."""
        ranks = None if self.process_set is global_process_set else self.process_set.ranks
        return {**super().get_config(), "process_set": ranks}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> SyncBatchNormalization:
        """Make a layer from what `get_config` returned.

        Raises:
            ValueError: No process set of these ranks is registered.
        """
        ranks = config.get("process_set")
        process_set = global_process_set if ranks is None else registered_of(ranks)
        layer: SyncBatchNormalization = super().from_config({**config, "process_set": process_set})
        return layer

    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        # A name scope instead of those that Keras has around this, which TensorFlow would put into the names of the
        # gradients: see _name_now.
        with tf.name_scope("SyncBatchNormalization/"):
            return self._moments_of_all(inputs, mask)

    def _moments_of_all(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        axes = self._reduction_axes
        weights = tf.ones_like(inputs[..., :1] if self.axis in (-1, inputs.shape.rank - 1) else inputs)
        if mask is not None:
            weights *= tf.cast(mask, inputs.dtype)[..., tf.newaxis]
        total, count = grouped_allreduce(
            [tf.reduce_sum(inputs * weights, axes), tf.reduce_sum(weights, axes)],
            op=Sum,
            name=self._name_now("sum"),
            process_set=self.process_set,
        )
        count = tf.maximum(count, 1.0)  # no rank may have a sample
        mean = total / count
        shape = [1] * inputs.shape.rank
        shape[self.axis] = -1
        # Around the mean of all, because the difference of two large numbers would lose digits.
        squares = tf.reduce_sum(weights * tf.square(inputs - tf.reshape(mean, shape)), axes)
        squares = allreduce(squares, op=Sum, name=self._name_now("squares"), process_set=self.process_set)
        return mean, squares / count

    def _name_now(self, part: str) -> str | None:
        if tf.executing_eagerly():
            return None  # it is counted
        # Without the numbers that Keras counts up with each layer that a process has made, in names and name scopes:
        # rank 0 may have made another model. Layers of one name, and calls of a layer, are told apart by the order in
        # which they are traced.
        graph = outermost(tf.compat.v1.get_default_graph())
        with graph.name_scope(None):
            return str(graph.unique_name(f"{_NUMBER.sub('', self.name)}.{part}"))
