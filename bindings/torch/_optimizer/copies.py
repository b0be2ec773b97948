"""The options of a `DistributedOptimizer`, and those that a copy or a pickle keeps until it reduces gradients."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any

import torch

from horovodlike.process_set import global_process_set, registered_of
from horovodlike.torch._ops.compressors import NoneCompressor
from horovodlike.torch._optimizer.gradient_reducer import GradientReducer
from horovodlike.torch._optimizer.submission import ReductionOptions


@dataclass(frozen=True)
class Options:
    """The arguments of `DistributedOptimizer`, checked."""

    names: dict[torch.nn.Parameter, str]
    reduction: ReductionOptions
    passes: int
    reducer: GradientReducer | None
    groups: int | list[list[torch.nn.Parameter]] | None


@dataclass(frozen=True)
class CopiedOptions:
    """The options of a copy, without a reducer, and with the ranks of the process set in place of the set itself."""

    options: Options
    ranks: list[int] | None  # None: all ranks
    reason: str | None  # why the copy can never reduce, in any job; None if it can

    @classmethod
    def of(cls, options: Options, pickled: bool) -> CopiedOptions:
        """Return the options for a copy of an optimizer with these options."""
        compression, process_set = options.reduction.compression, options.reduction.process_set
        weight, reason = options.reduction.weight, None
        if options.reducer is not None:
            reason = f"compression={type(options.reducer).__name__} has a state of its own for the parameters"
        elif pickled and not _can_be_imported(compression):
            reason = f"compression={compression.__name__} cannot be imported, so that the pickle has none"
            compression = NoneCompressor
        elif pickled and callable(weight) and not _can_be_imported(weight):
            reason, weight = f"weight={weight!r} cannot be imported, so that the pickle has none", None
        reduction = replace(options.reduction, process_set=global_process_set, compression=compression, weight=weight)
        ranks = None if process_set is global_process_set else process_set.ranks
        return cls(replace(options, reducer=None, reduction=reduction), ranks, reason)

    def obstacle(self) -> str | None:
        """Return why the copy cannot reduce in the current job; None if it can."""
        try:
            self.restored()
        except ValueError as error:
            return self.reason or str(error)
        return self.reason

    def restored(self) -> Options:
        """Return the options, with the process set that is registered in this job.

        Raises:
            ValueError: No process set of these ranks is registered.
        """
        process_set = global_process_set if self.ranks is None else registered_of(self.ranks)
        return replace(self.options, reduction=replace(self.options.reduction, process_set=process_set))


def _can_be_imported(cls: Any) -> bool:
    found: Any = sys.modules.get(getattr(cls, "__module__", ""))
    for part in getattr(cls, "__qualname__", "").split("."):
        found = getattr(found, part, None)
    return found is cls
