"""Adaptive summation of the changes that each rank's own step makes to the parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from horovodlike import basics
from horovodlike.torch._optimizer.submission import ReductionOptions
from horovodlike.torch.mpi_ops import grouped_allreduce_

T = TypeVar("T")


class AdasumDeltaReduction:
    """Combines the parameter changes that the ranks' own optimizer steps make, by Adasum."""

    def __init__(self, optimizer: torch.optim.Optimizer, name: str, options: ReductionOptions) -> None:
        """Reduce, in each step, the changes of the optimizer's parameters that then require a gradient.

        Raises:
            ValueError: An option has no meaning with Adasum.
        """
        if options.sparse_as_dense:
            raise ValueError("op=Adasum adds up changes of parameters, which are dense: leave sparse_as_dense out")
        self._optimizer = optimizer
        self._name = name
        self._options = options

    def step(self, own_step: Callable[[], T]) -> T:
        """Do the rank's own step, and replace its changes by their Adasum over the ranks. All ranks have to call this.

        Raises:
            HorovodInternalError: The reduction failed. Then the parameters are as before the step.
        """
        groups = self._optimizer.param_groups
        params = [param for group in groups for param in group["params"] if param.requires_grad]
        if not params:
            return own_step()
        before = [param.detach().clone() for param in params]
        returned = own_step()
        with torch.no_grad():
            deltas = [param - start for param, start in zip(params, before, strict=True)]
            for param, start in zip(params, before, strict=True):
                param.copy_(start)
            for param, delta in zip(params, self._added_up(deltas), strict=True):
                param.add_(delta)
        return returned

    def _added_up(self, deltas: list[torch.Tensor]) -> list[torch.Tensor]:
        compression, process_set = self._options.compression, self._options.process_set
        pairs = [compression.compress(delta) for delta in deltas]
        reduced = grouped_allreduce_(
            [compressed for compressed, _ in pairs], name=self._name, op=basics.Adasum, process_set=process_set
        )
        return [compression.decompress(delta, ctx) for delta, (_, ctx) in zip(reduced, pairs, strict=True)]
