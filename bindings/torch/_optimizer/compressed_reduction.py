"""Reduction of one optimizer's gradients by a `GradientReducer`: all together, at the end of the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from horovodlike import basics
from horovodlike._engine.ops import GpuStream
from horovodlike.process_set import ProcessSet
from horovodlike.torch._optimizer.gradient_reducer import GradientReducer
from horovodlike.torch._optimizer.gradient_state import GradientState
from horovodlike.torch._optimizer.reduction import Reduction
from horovodlike.torch._optimizer.submission import CURRENT, ReductionOptions
from horovodlike.torch.mpi_ops import grouped_allgather, grouped_allreduce_


class CompressedReduction(Reduction):
    """The gradients of one optimizer, all of which are given to a reducer at the end of the step."""

    reducer: GradientReducer

    def __init__(self, options: ReductionOptions, passes: int, reducer: GradientReducer) -> None:
        """Start without parameters.

        Raises:
            ValueError: The options ask for something other than a plain average or sum.
        """
        if options.op not in (basics.Average, basics.Sum):
            raise ValueError(f"compression={type(reducer).__name__} works with op=Average and op=Sum only")
        if options.prescale != 1.0:
            raise ValueError(f"compression={type(reducer).__name__} knows no gradient_predivide_factor")
        super().__init__(options, passes)
        self._submission.plain = False
        self.reducer = reducer

    def _without_parameters(self) -> Reduction:
        return CompressedReduction(self.options, self.passes, self.reducer)

    def hand_over(self, but_small: bool = False) -> None:
        """Count the backward passes only: `finish` hands the gradients over."""
        self.count()

    def _submit(
        self, states: list[GradientState], streams: Mapping[GradientState, GpuStream] = CURRENT, waits: bool = False
    ) -> None:
        self._scale(states, streams)
        for state in states:
            grad = state.gradient()
            if grad is None:
                continue
            state.dense = state.dense_form_of(grad, self.options.sparse_as_dense)
            state.grad = grad
            self._submission.borrowed.append(grad)
        self._announce_if_complete()

    def _wait(self) -> None:
        # By now all ranks have gradients for the same parameters: a gradient that a rank lacked is zeros.
        states = sorted((state for state in self.states if state.grad is not None), key=lambda state: state.index)
        gradients = [(each.name.removeprefix("allreduce."), each.dense) for each in states if each.dense is not None]
        if not gradients:
            return
        ranks = _CountedCollectives(f"{gradients[0][0]}..{gradients[-1][0]}", self.options.process_set)
        with torch.no_grad():
            self.reducer.reduce(gradients, ranks)
            for state, (_, dense) in zip(states, gradients, strict=True):
                if self.options.op == basics.Sum:
                    dense.mul_(ranks.size)
                state.param.grad = dense.to_sparse() if state.sparse else state.grad
        self.reducer.bytes_sent += ranks.bytes_sent
        self.reducer.bytes_uncompressed += _bytes_in([dense for _, dense in gradients])


class _CountedCollectives:
    """The collectives of one step, with a count of the bytes that this rank sends."""

    def __init__(self, name: str, process_set: ProcessSet) -> None:
        """Start counting at 0. `name` is the prefix of all operation names, which no other optimizer uses."""
        size = process_set.size()
        assert size is not None
        self.size = size
        self.bytes_sent = 0
        self._name = name
        self._process_set = process_set

    def average(self, tensors: Sequence[torch.Tensor], name: str) -> None:
        if tensors:
            self.bytes_sent += _bytes_in(tensors)
            grouped_allreduce_(tensors, name=f"{self._name}.{name}", op=basics.Average, process_set=self._process_set)

    def gather(self, tensors: Sequence[torch.Tensor], name: str) -> Sequence[torch.Tensor]:
        if not tensors:
            return []
        self.bytes_sent += _bytes_in(tensors)
        rows = [tensor.unsqueeze(0) for tensor in tensors]
        return grouped_allgather(rows, name=f"{self._name}.{name}", process_set=self._process_set)


def _bytes_in(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
