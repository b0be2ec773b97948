"""The common part of all operations of a process group."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from datetime import timedelta
from typing import Any

import torch

from horovodlike._engine.ops import Kind
from horovodlike.torch.distributed._team import Team
from horovodlike.torch.distributed._tensors import seconds_of
from horovodlike.torch.distributed._work import HvdWork, Operation

Tensors = Sequence[torch.Tensor]


class Operations:
    """The ranks of a group, and the conversion of operations in flight to the works that calls return.

    Args:
        team: The ranks.
    """

    def __init__(self, team: Team) -> None:
        """Begin without operations."""
        self._team = team
        self._coalesced: list[Operation] | None = None

    def start(
        self,
        kind: Kind,
        signature: Hashable,
        inputs: Tensors,
        outputs: Tensors,
        results: Tensors,
        opts: Any,
        timeout: timedelta | None = None,
        **how: Any,
    ) -> HvdWork:
        """Give an operation to the engine, and return its work.

        `opts` are the caller's options; `timeout` holds if they have none. For the other arguments see `Team.start`.
        """
        seconds = seconds_of(getattr(opts, "timeout", timeout))
        return self.work_of(self._team.start(kind, signature, inputs, outputs, results, timeout=seconds, **how), opts)

    def note(self, operation: Operation) -> None:
        """Keep an operation for `_end_coalescing`, if `_start_coalescing` has been called."""
        if self._coalesced is not None:
            self._coalesced.append(operation)

    def work_of(self, operation: Operation, opts: Any) -> HvdWork:
        """Return the work of an operation; first wait for it if the options ask for a synchronous call."""
        self.note(operation)
        if self._coalesced is None and not getattr(opts, "asyncOp", True):
            operation.wait()
            return HvdWork((), operation.outputs)
        return HvdWork((operation,), operation.outputs)

    def root_of(self, place: int, what: str) -> int:
        """Return the rank in the job of a root, given its place in the group."""
        if not 0 <= place < self._team.size:
            raise ValueError(f"{what}: the group has ranks 0 to {self._team.size - 1}, but no root {place}")
        return self._team.ranks[place]


def place_of_root(opts: Any) -> int:
    """Return the root's place in the group, given the options or the place itself."""
    return opts if isinstance(opts, int) else getattr(opts, "rootRank", 0)


def copy_all(sources: Tensors, targets: Tensors) -> None:
    """Copy each result to its tensor, unless it is that tensor itself."""
    for source, target in zip(sources, targets, strict=True):
        if source is not target:
            with torch.no_grad():
                target.copy_(source)
