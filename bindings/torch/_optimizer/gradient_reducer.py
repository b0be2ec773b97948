"""Reducing gradients by other means than one allreduce: the interface of methods that need more than that.

A `Compressor` of `horovodlike.torch.compression` turns one tensor into one tensor that is summed over the ranks.
Methods that need several rounds of communication, or gather instead of sum, or remember something from step to step,
are a `GradientReducer`: an object that is handed all gradients of a step together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

NamedGradients = Sequence[tuple[str, torch.Tensor]]


class Collectives(Protocol):
    """The collectives that a reducer can use. All ranks must call the same ones, in the same order."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def average(self, tensors: Sequence[torch.Tensor], name: str) -> None:
        """Replace the tensors by their averages over the ranks, in place, as one operation.

        Args:
            tensors: Floating-point tensors on one device, with the same shapes and dtypes on all ranks; there may be
                none.
            name: What the operation is called in errors; unique among those of one step.

        Raises:
            HorovodInternalError: The ranks disagree, or the job is broken or shut down.
        """

    def gather(self, tensors: Sequence[torch.Tensor], name: str) -> Sequence[torch.Tensor]:
        """Return, for each tensor, those of all ranks: with a first dimension more, by rank. As one operation.

        Args and errors: as those of `average`; tensors may be of integers.
        """


class GradientReducer(ABC):
    """A method that reduces all gradients of a step together; `compression=` takes an instance.

    An instance belongs to one optimizer, since it may remember something of each parameter. It is used by the thread
    that calls `step()` or `synchronize()` of that optimizer, and by no other at the same time.

    Attributes:
        bytes_sent: What this rank has contributed to averages and gathers since the start. An average of n bytes costs
            each rank about 2n(size-1)/size bytes of traffic, a gather to which each contributes n bytes n(size-1).
        bytes_uncompressed: What it would have contributed if all gradients had been averaged as they were.
    """

    bytes_sent: int = 0
    bytes_uncompressed: int = 0

    @abstractmethod
    def reduce(self, gradients: NamedGradients, ranks: Collectives) -> None:
        """Replace each gradient, in place, by what stands for its average over the ranks.

        Called without gradient recording. Every rank has to end with the same bits. If it raises, the step is lost.

        Args:
            gradients: Names of parameters and their gradients: dense, floating point, of any shape, stride and device.
                The same names in the same order on all ranks. Parameters without a gradient on any rank are left out;
                one that only some ranks have is zero on the others.
            ranks: How to communicate.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return what is remembered from step to step, to be saved with a checkpoint of this rank."""
        return {}

    def shared_state_dict(self) -> dict[str, Any]:
        """Return the entries of `state_dict` that are the same on all ranks: what a rank that is new takes over.

        Elastic training asks for them. All, unless a subclass says otherwise.
        """
        return self.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned.

        Raises:
            ValueError: It is the state of something else.
        """
        if state_dict:
            raise ValueError(f"{type(self).__name__} has no state, got {', '.join(map(str, state_dict))}")
