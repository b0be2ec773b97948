"""The reduction of a step's gradients, which the tape and the optimizer have in common."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from horovodlike import basics
from horovodlike._engine import steps
from horovodlike._engine.arguments import check_compression, predivide_factor, reduce_op
from horovodlike.arrays.consistency import compare, is_second_step, of_variables
from horovodlike.basics import Average
from horovodlike.process_set import ProcessSet, check_registered, global_process_set
from horovodlike.tensorflow import _weights
from horovodlike.tensorflow._ops.calls import outermost
from horovodlike.tensorflow._ops.native import ops
from horovodlike.tensorflow.compression import Compression, Compressor
from horovodlike.tensorflow.mpi_ops import grouped_allreduce, reduce_dense, size_op
from horovodlike.weighting import Weight

Gradient = Any  # a tensor, a tf.IndexedSlices, or None
Variable = Any  # tf.Variable or a Keras variable


@dataclass
class GradientReduction:
    """Reduces the gradients of variables over the ranks.

    Without groups, in eager mode all gradients are reduced as one operation, because they are available together. In a
    graph each gradient is reduced by an operation of its own, which begins as soon as the gradient is computed.

    Attributes:
        compression: How gradients are compressed before they are sent.
        op: The reduction, such as Average.
        predivide_factor: With Average: gradients are divided by this factor before they are summed, and the sum by the
            number of ranks divided by this factor.
        sparse_as_dense: Make a `tf.IndexedSlices` dense and reduce it, instead of gathering it.
        num_groups: The number of groups, each reduced as one operation; 0: not used.
        groups: Lists of variables, the gradients of each list being reduced as one operation; or the number of groups.
        process_set: The ranks that take part. On other ranks, gradients do not change.
        scale_local: Divide local gradients by the number of ranks, as if the gradients of the other ranks were 0.
        weight: The number of samples behind this rank's gradients, a function that returns it, or a tensor.

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: An argument cannot be used, or arguments contradict each other.
    """

    compression: type[Compressor] = Compression.none
    op: int = Average
    predivide_factor: float = 1.0
    sparse_as_dense: bool = False
    num_groups: int = 0
    groups: int | Sequence[Sequence[Variable]] | None = None
    process_set: ProcessSet = global_process_set
    scale_local: bool = True
    weight: Weight = None
    _local: list[Variable] = field(default_factory=list, init=False, repr=False)
    _local_layers: list[Any] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        what = "distributed gradients"
        check_registered(self.process_set)
        check_compression(self.compression, what)
        self.op = reduce_op(self.op, what)
        self.predivide_factor = predivide_factor(self.predivide_factor, self.op, what)
        _weights.check_argument(self.weight, self.op, what)
        if isinstance(self.groups, int) and not isinstance(self.groups, bool):
            self.num_groups, self.groups = self.groups, None
        if self.num_groups < 0:
            raise ValueError(
                f"groups must be a list of lists of variables or a non-negative integer, got {self.num_groups}"
            )

    def register_local(self, variable: Variable) -> None:
        """Exclude the gradient of a variable from the reduction: make it local."""
        if not any(variable is one for one in self._local):
            self._local.append(variable)

    def register_local_layers(self, layers: Sequence[Any]) -> None:
        """Exclude the gradients of all variables of these layers from the reduction: make them local.

        The layers may be unbuilt: their variables are looked up in each call.
        """
        self._local_layers.extend(layers)

    def __call__(
        self, gradients: Sequence[Gradient], variables: Sequence[Variable], use_generic_names: bool = False
    ) -> list[Gradient]:
        """Return the reduced gradients; None stays None. All ranks must have gradients of the same variables.

        Marks a step if some are reduced; in a graph, if it uses the first of them.

        Raises:
            ValueError: Not initialised, or the process set is not registered.
        """
        basics.size()  # raises before init()
        check_registered(self.process_set)
        weight = _weights.of_step(self.weight, self.op, "distributed gradients")
        results = list(gradients)
        if not self.process_set.included():
            return results
        of_layers = [one for layer in self._local_layers for one in layer.trainable_variables]
        local = {id(one) for one in (*self._local, *of_layers)}  # by id, looked up in each call: copies have other ids
        reduced = []
        for i, (gradient, variable) in enumerate(zip(results, variables, strict=True)):
            if gradient is None:
                continue
            if id(variable) in local:
                results[i] = self._scaled(gradient)
                continue
            if self.sparse_as_dense and isinstance(gradient, tf.IndexedSlices):
                results[i] = tf.convert_to_tensor(gradient)
            reduced.append(i)
        shared = compared([variables[i] for i in reduced], [results[i] for i in reduced], self.process_set)
        for i, gradient in zip(reduced, shared, strict=True):
            results[i] = gradient
        groups = self._grouped(reduced, variables)
        if weight is not None and groups:
            name = self._name(groups[0], variables, use_generic_names)
            factor = self._factor(weight, [results[i] for i in groups[0]], name)
            for i, gradient in zip(reduced, _weights.scaled([results[i] for i in reduced], factor), strict=True):
                results[i] = gradient
        for group in groups:
            of_group = self._reduce([results[i] for i in group], self._name(group, variables, use_generic_names))
            for i, gradient in zip(group, of_group, strict=True):
                results[i] = gradient
        if reduced and tf.executing_eagerly():
            steps.mark()
        elif reduced:  # this code runs only once
            results[reduced[0]] = _with_mark(results[reduced[0]])
        return results

    def _factor(self, weight: Any, first: list[Gradient], name: str | None) -> Any:
        """Exchange the weights as the operation that reduces the first group in a step without weights."""
        dense = [gradient for gradient in first if not isinstance(gradient, tf.IndexedSlices)]
        if not dense:
            name = None if name is None else f"{name}.slices"
            return _weights.factor(weight, "grouped_allgather", name, self.process_set)
        operation = "allreduce" if len(dense) == 1 else "grouped_allreduce"
        return _weights.factor(weight, operation, name, self.process_set)

    def _grouped(self, reduced: list[int], variables: Sequence[Variable]) -> list[list[int]]:
        """Return the groups: positions of gradients that are reduced together."""
        if self.num_groups > 0:
            count = min(self.num_groups, len(reduced))
            bounds = [len(reduced) * part // count for part in range(count + 1)] if count else [0]
            return [reduced[begin:end] for begin, end in zip(bounds, bounds[1:], strict=False)]
        if self.groups is not None:
            assert not isinstance(self.groups, int)
            group_of = {id(variable): number for number, group in enumerate(self.groups) for variable in group}
            together: dict[object, list[int]] = {}
            for i in reduced:
                together.setdefault(group_of.get(id(variables[i]), ("alone", i)), []).append(i)
            return list(together.values())
        if tf.executing_eagerly():
            return [reduced] if reduced else []
        return [[i] for i in reduced]

    def _name(self, group: list[int], variables: Sequence[Variable], use_generic_names: bool) -> str | None:
        position = group[0]
        name = f"grad_{position}"
        if tf.executing_eagerly():
            return name if use_generic_names else None
        if not use_generic_names:
            # Positions instead of paths: a path contains numbers by which Keras counts the layers made in a process,
            # and rank 0 may have made another model before. So do the names of weights that the user has not named.
            of_variable = str(getattr(variables[position], "name", "")).removesuffix(":0").rpartition("/")[2]
            of_variable = re.sub(r"^variable_\d+$", "variable", of_variable)
            name = f"grad.{position}.{of_variable}"
        # Several tapes in a function may have the same names.
        return str(outermost(tf.compat.v1.get_default_graph()).unique_name(name))

    def _reduce(self, gradients: list[Gradient], name: str | None) -> list[Gradient]:
        factors = (1 / self.predivide_factor, self.predivide_factor)
        dense = [gradient for gradient in gradients if not isinstance(gradient, tf.IndexedSlices)]
        sparse = [gradient for gradient in gradients if isinstance(gradient, tf.IndexedSlices)]
        reduced = reduce_dense(dense, self.compression, self.op, factors, name, self.process_set)
        gathered = grouped_allreduce(sparse, op=self.op, name=name, process_set=self.process_set)
        parts = {False: iter(reduced), True: iter(gathered)}
        return [next(parts[isinstance(gradient, tf.IndexedSlices)]) for gradient in gradients]

    def _scaled(self, gradient: Gradient) -> Gradient:
        if not self.scale_local:
            return gradient
        values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
        set_id = self.process_set.process_set_id or 0
        values = values / tf.cast(size_op(set_id), values.dtype)
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        return values


def _with_mark(gradient: Gradient) -> Gradient:
    """Return a gradient that marks a step whenever a graph computes it."""
    if isinstance(gradient, tf.IndexedSlices):
        values = ops.horovodlike_mark_step(tensor=gradient.values)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return ops.horovodlike_mark_step(tensor=gradient)


def compared(
    variables: Sequence[Variable], gradients: Sequence[Gradient], process_set: ProcessSet, name: str = ""
) -> list[Gradient]:
    """Return gradients that wait, in the second step, until the ranks have compared the variables that they belong to.

    The first variable keeps the count of steps, each of which may have another tape. Sparse gradients are left out, as
    the order of their rows changes bits.
    """
    pairs = zip(variables, gradients, strict=True)
    shared = [one for one, each in pairs if hasattr(one, "assign") and not isinstance(each, tf.IndexedSlices)]
    with tf.init_scope():
        if not shared or process_set.size() == 1 or not tf.executing_eagerly():  # the last: a graph of TensorFlow 1
            return list(gradients)
    leaf = str(getattr(shared[0], "name", "")).removesuffix(":0").rpartition("/")[2]
    name = f"{name}.{len(shared)}.{re.sub('_[0-9]+$', '', leaf)}{[*shared[0].shape]}"

    def count() -> Any:
        if is_second_step(shared[0]):
            compare(partial(of_variables, shared), process_set, name)()
        return np.int64(0)

    if tf.executing_eagerly():
        count()
        return list(gradients)
    with tf.device("CPU:0"):
        counted = tf.numpy_function(count, [], tf.int64)
    with tf.control_dependencies([counted]):
        return [tf.identity(each) if isinstance(each, tf.Tensor) else each for each in gradients]
