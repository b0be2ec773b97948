"""`LocalGradientAggregationHelper`: sums the gradients of several backward passes before they are reduced."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from horovodlike._engine.arguments import passes_per_step
from horovodlike.process_set import ProcessSet, global_process_set

__all__ = ["LocalGradientAggregationHelper"]


class LocalGradientAggregationHelper:
    """Sums gradients, and has the sums reduced and applied in the last pass of a step. Works eagerly and in graphs.

    If a variable that had a gradient before has none in a pass, its sum does not change. If it has none in a whole
    step, its reduced gradient is 0.

    Args:
        backward_passes_per_step: The number of passes that make a step.
        allreduce_func: `allreduce_func(gradients, variables)` returns the reduced gradients.
        sparse_as_dense: Make a `tf.IndexedSlices` dense. If a step has several passes, none is allowed without this.
        average_aggregated_gradients: Divide the sum by the number of passes.
        rank: Not needed.
        optimizer_type: Not needed.
        process_set: Not needed; `allreduce_func` knows it.
        scale_local_gradients: Not needed; likewise.
    """

    def __init__(
        self,
        backward_passes_per_step: int,
        allreduce_func: Callable[[Sequence[Any], Sequence[Any]], list[Any]],
        sparse_as_dense: bool = False,
        average_aggregated_gradients: bool = False,
        rank: int = -1,
        optimizer_type: str = "",
        process_set: ProcessSet = global_process_set,
        scale_local_gradients: bool = True,
    ) -> None:
        del rank, optimizer_type, process_set, scale_local_gradients
        self.backward_passes_per_step = passes_per_step(backward_passes_per_step, "distributed gradients")
        self._reduce = allreduce_func
        self._sparse_as_dense = sparse_as_dense
        self._average = average_aggregated_gradients
        self._counter: Any = None
        self.is_last: Any = None  # a tensor of the last compute_gradients(): is this a step's last pass?
        self._sums: dict[int, Any] = {}  # by position; of the gradients that have occurred so far

    def compute_gradients(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Add gradients to the sums; return the reduced sums in the last pass of a step, else the given gradients.

        Args:
            grads: The gradients, some of which may be None: the same ones on all ranks, but not in all calls. In a
                graph, a gradient that is None in the first call must be None in all calls.
            variables: The variables of the gradients, the same in each call.

        Raises:
            ValueError: With several passes per step: there is a `tf.IndexedSlices` and `sparse_as_dense` is False; or,
                in a graph, there is a gradient that was None in the first call.
        """
        grads = [self._dense(gradient) for gradient in grads]
        if self.backward_passes_per_step == 1:
            return self._reduce(grads, variables)
        present = [i for i, gradient in enumerate(grads) if gradient is not None]
        self._make_variables({i: grads[i] for i in present})
        added = [self._sums[i].assign_add(grads[i]) for i in present]
        summed = sorted(self._sums)
        with tf.control_dependencies([*added, self._counter.assign_add(1)]):
            self.is_last = tf.equal(self._counter.read_value(), self.backward_passes_per_step)

            def reduced() -> list[Any]:
                factor = 1.0 / self.backward_passes_per_step if self._average else 1.0
                totals = [self._sums[i] for i in summed]
                sums = [total.read_value() * tf.cast(factor, total.dtype) for total in totals]
                results = [tf.convert_to_tensor(one) for one in self._reduce(sums, [variables[i] for i in summed])]
                # The sums are reset here and not when the gradients are applied, which loss scaling may skip.
                with tf.control_dependencies([*sums, *results]), tf.control_dependencies(self._zero()):
                    return [tf.identity(result) for result in results]

            def own() -> list[Any]:
                return [tf.zeros_like(self._sums[i]) if grads[i] is None else tf.identity(grads[i]) for i in summed]

            passed_on = tf.cond(self.is_last, reduced, own)
        results: list[Any] = [None] * len(grads)
        for i, gradient in zip(summed, passed_on, strict=True):
            results[i] = gradient
        return results

    def _zero(self) -> list[Any]:
        sums = [total.assign(tf.zeros_like(total)) for total in self._sums.values()]
        return [] if self._counter is None else [self._counter.assign(0), *sums]

    def forget(self) -> None:
        """Restart the step: drop the sums."""
        self._zero()

    def apply_gradients(self, apply_grads_closure: Callable[[], Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the closure in the last pass of a step; in other passes only increment the optimizer's iterations.

        To be called after `compute_gradients`.
        """
        del args
        if self.backward_passes_per_step == 1:
            return apply_grads_closure()
        assert self.is_last is not None, "compute_gradients() comes first"

        def step() -> Any:
            operation = apply_grads_closure()
            with tf.control_dependencies([] if tf.executing_eagerly() or operation is None else [operation]):
                return tf.group()

        def wait() -> Any:
            global_step = kwargs.get("global_step", getattr(optimizer, "iterations", None))
            return tf.group() if global_step is None else tf.group(global_step.assign_add(1))

        return tf.cond(self.is_last, step, wait)

    def _dense(self, gradient: Any) -> Any:
        if not isinstance(gradient, tf.IndexedSlices):
            return gradient
        if self._sparse_as_dense:
            return tf.convert_to_tensor(gradient)
        if self.backward_passes_per_step > 1:
            raise ValueError(
                "IndexedSlices are not supported when `backward_passes_per_step` > 1 and `sparse_as_dense` is False."
            )
        return gradient

    def _make_variables(self, grads: Mapping[int, Any]) -> None:
        shapes = {i: (gradient.shape, gradient.dtype) for i, gradient in grads.items() if i not in self._sums}
        if shapes and self._counter is not None and not tf.executing_eagerly():
            # TensorFlow cannot make variables after the first trace, and the traced graph would not reduce the sums.
            raise ValueError(
                f"gradients number {list(shapes)} were None in the first pass: in a tf.function or a graph give zeros "
                "instead of None for those that come in a later pass"
            )
        with tf.init_scope():
            if self._counter is None:
                self._counter = tf.Variable(0, trainable=False, name="horovodlike_passes", dtype=tf.int32)
            for i, shape in shapes.items():
                self._sums[i] = tf.Variable(tf.zeros(*shape), trainable=False, name="horovodlike_sum")
