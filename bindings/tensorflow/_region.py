"""The collectives of split layers of Keras on TensorFlow: see `horovodlike.torch.nn._region`, which describes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from horovodlike.basics import Sum
from horovodlike.splits import RegionBase
from horovodlike.tensorflow._ops.calls import unique_in_graph
from horovodlike.tensorflow.mpi_ops import allgather, allreduce


class TensorFlowRegion(RegionBase):
    """The collectives of a layer, eagerly and in graphs. With one rank they do nothing."""

    def copy(self, whole: tf.Tensor) -> tf.Tensor:
        """Return a tensor, and sum its gradient over the ranks."""
        return self._with_gradient(tf.identity, self.sum, whole)

    def sum(self, summand: tf.Tensor) -> tf.Tensor:
        """Return the sum of the ranks' tensors."""
        return self._with_gradient(self._summed, self.copy, summand)

    def gather(self, part: tf.Tensor) -> tf.Tensor:
        """Return the ranks' tensors joined along the last dimension."""
        return self._with_gradient(self._gathered, self.split, part)

    def split(self, whole: tf.Tensor) -> tf.Tensor:
        """Return this rank's part of the last dimension."""
        return self._with_gradient(lambda x: tf.split(x, self.num_ranks, axis=-1)[self.place], self.gather, whole)

    def _with_gradient(
        self, forward: Callable[[tf.Tensor], tf.Tensor], backward: Callable[[tf.Tensor], tf.Tensor], tensor: tf.Tensor
    ) -> tf.Tensor:
        tensor = tf.convert_to_tensor(tensor)
        return tensor if self.num_ranks == 1 else tf.custom_gradient(lambda x: (forward(x), backward))(tensor)

    def _name(self, operation: str) -> str:
        name = f"{self.name}.{operation}"
        return name if tf.executing_eagerly() else unique_in_graph(name)

    def _summed(self, summand: tf.Tensor) -> tf.Tensor:
        return allreduce(summand, op=Sum, name=self._name("sum"), process_set=self.process_set)

    def _gathered(self, part: tf.Tensor) -> Any:
        parts = allgather(part[tf.newaxis], name=self._name("gather"), process_set=self.process_set)
        return tf.concat(tf.unstack(parts, num=self.num_ranks), axis=-1)
