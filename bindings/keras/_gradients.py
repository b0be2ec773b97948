"""Accumulation and reduction of gradients in a distributed optimizer of Keras 3."""

from __future__ import annotations

import itertools
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import keras
from keras import ops

from horovodlike import basics
from horovodlike.keras import _backend
from horovodlike.keras._wrapping import Local, Options
from horovodlike.process_set import check_registered, global_process_set

Apply = Callable[[list[Any]], None]


class Gradients:
    """Accumulates gradients over the passes of a step and reduces them over the ranks.

    The accumulators are not variables of the optimizer, so a saved model has the same variables as without horovodlike.

    Args:
        options: The options of the reduction.
        key: Returns the key by which the optimizer identifies a variable.
        local: The layers and variables whose gradients are not reduced.
    """

    def __init__(self, options: Options, key: Callable[[Any], Any], local: Local) -> None:
        self.options = options
        self.local = local
        self.is_done = False  # True: the gradients passed to the optimizer have been reduced
        self._backend = _backend.current()
        self._key = key
        self._accumulators: dict[Any, keras.Variable] = {}
        self._accumulated: set[Any] = set()  # the keys of variables that have had a gradient since the last step
        self._passes: keras.Variable | None = None

    @property
    def communicates(self) -> bool:
        """True if this rank reduces gradients together with other ranks."""
        process_set = self.options.process_set
        if process_set is global_process_set:
            # A function that is compiled in a job of one rank must communicate as well if ranks may be added later.
            return basics.size() > 1 or (self._backend.is_tracing() and basics.is_elastic())
        check_registered(process_set)
        return bool(process_set.included()) and (process_set.size() or 1) > 1

    def register_local(self, variable: Any) -> None:
        """Do not reduce the gradient of a variable."""
        self.local = replace(self.local, variables=[*self.local.variables, variable])

    @contextmanager
    def done(self) -> Iterator[None]:
        """Return a context in which the optimizer receives gradients that have been reduced already."""
        self.is_done = True
        try:
            yield
        finally:
            self.is_done = False

    def apply(self, gradients: Sequence[Any], variables: Sequence[Any], apply: Apply) -> None:
        """Reduce gradients and have them applied; with several passes per step, do so in the last one only.

        Args:
            gradients: Tensors of the backend; None for a variable that has no gradient.
            variables: The variables that these gradients belong to, in the same order on all ranks.
            apply: Called with the reduced gradients, in the order of `variables`.
        """
        gradients = [self._dense_if_asked(gradient) for gradient in gradients]
        if self.options.backward_passes_per_step == 1:
            apply(self.reduce(gradients, variables))
        else:
            self._accumulate(gradients, variables)
            assert self._passes is not None
            is_last = ops.equal(self._passes.value, self.options.backward_passes_per_step)
            ops.cond(is_last, lambda: self._apply_accumulated(variables, apply), lambda: None)

    def _dense_if_asked(self, gradient: Any) -> Any:
        if gradient is None or not self._backend.is_sparse(gradient):
            return gradient
        if self.options.sparse_as_dense:
            return self._backend.densify(gradient)
        if self.options.backward_passes_per_step > 1:
            raise ValueError(
                "IndexedSlices are not supported when `backward_passes_per_step` > 1 and `sparse_as_dense` is False: "
                "pass sparse_as_dense=True to DistributedOptimizer"
            )
        return gradient

    def _accumulate(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        if self._passes is None:
            self._passes = keras.Variable(0, dtype="int", trainable=False, name="passes")
        for gradient, variable in zip(gradients, variables, strict=True):
            key = self._key(variable)
            if key not in self._accumulators:
                self._accumulators[key] = keras.Variable(
                    shape=variable.shape,
                    dtype=variable.dtype,
                    initializer="zeros",
                    trainable=False,
                    name="accumulated_gradient",
                )
            if gradient is not None:
                self._accumulators[key].assign_add(gradient)
                self._accumulated.add(key)
        self._passes.assign_add(1)

    def _apply_accumulated(self, variables: Sequence[Any], apply: Apply) -> None:
        keys = [self._key(variable) for variable in variables]
        gradients = [self._accumulators[key].value if key in self._accumulated else None for key in keys]
        if self.options.average_aggregated_gradients:
            factor = 1.0 / self.options.backward_passes_per_step
            gradients = [None if gradient is None else gradient * factor for gradient in gradients]
        apply(self.reduce(gradients, variables))
        self.forget()

    def forget(self) -> None:
        """Restart the step: drop the accumulated gradients."""
        # Zeros are assigned, because the product of an infinity and 0 is NaN.
        for accumulator in self._accumulators.values():
            accumulator.assign(ops.zeros(accumulator.shape, accumulator.dtype))
        self._accumulated.clear()
        if self._passes is not None:
            self._passes.assign(0)

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the gradients to be applied: reduced, or scaled if they are local."""
        options, communicates = self.options, self.communicates
        alone = not communicates and bool(options.process_set.included())
        weight = self._backend.weight_of_step(options.weight, options.op, "DistributedOptimizer", alone)
        if not communicates:
            return list(gradients)
        of_layers = [variable for layer in self.local.layers for variable in layer.trainable_variables]
        local = {self._key(variable) for variable in (*of_layers, *self.local.variables)}
        result, positions = list(gradients), []
        for position, variable in enumerate(variables):
            if self._key(variable) not in local:
                positions.append(position)
            elif self.options.scale_local_gradients and gradients[position] is not None:
                result[position] = self._backend.divided_by_size(gradients[position], self.options.process_set)
        shared = [variables[position] for position in positions]
        if shared:
            prefix = self.options.name or f"DistributedOptimizer_{_digest(shared)}"
            reduced = self._backend.reduce(
                self._reduction(weight),
                self._groups(shared),
                # Names contain positions instead of the variables' paths. A path contains numbers by which Keras counts
                # the layers made in a process. They differ between ranks if rank 0 has made another model before.
                [f"{prefix}.{position}.{_name(variables[position])}" for position in positions],
                [gradients[position] for position in positions],
                shared,
            )
            for position, gradient in zip(positions, reduced, strict=True):
                result[position] = gradient
        return result

    def _reduction(self, weight: Any) -> _backend.Reduction:
        factor = self.options.gradient_predivide_factor
        compression = self.options.compression or self._backend.Compression.none
        return _backend.Reduction(self.options.op, 1.0 / factor, factor, compression, self.options.process_set, weight)

    def _groups(self, variables: Sequence[Any]) -> list[list[int]]:
        groups = self.options.groups
        if not groups:
            return []
        if isinstance(groups, int):
            count = min(groups, len(variables))
            bounds = [len(variables) * index // count for index in range(count + 1)]
            return [list(range(begin, end)) for begin, end in itertools.pairwise(bounds)]
        positions = {self._key(variable): position for position, variable in enumerate(variables)}
        keys = [[self._key(variable) for variable in group] for group in groups]
        return [[positions[key] for key in group if key in positions] for group in keys]


def _digest(variables: Sequence[Any]) -> str:
    """Return a checksum of the variables' names, which distinguishes optimizers and is the same on all ranks.

    A counter of optimizers would be lower on a rank that is new in an elastic job. Shapes are left out, because ranks
    with different shapes receive an error that says so only if they use the same names.
    """
    described = "\n".join(map(_name, variables))
    return f"{zlib.crc32(described.encode()):08x}"


def _name(variable: Any) -> str:
    """Return the name of a variable, without the number that Keras appends to the names of unnamed ones."""
    return re.sub(r"^variable_\d+$", "variable", str(variable.name))
