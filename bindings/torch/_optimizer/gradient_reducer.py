"""The interface of methods that reduce gradients by other means than one allreduce.

A `Compressor` of `horovodlike.torch.compression` turns one tensor into one tensor that is summed over the ranks.
A method that needs several rounds of communication, or gathers instead of summing, or keeps a state between steps, is a
`GradientReducer`: an object that receives all gradients of a step together.
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
            name: The name of the operation in errors; unique among the operations of one step.

        Raises:
            HorovodInternalError: The ranks disagree, or the job is broken or shut down.
        """

    def gather(self, tensors: Sequence[torch.Tensor], name: str) -> Sequence[torch.Tensor]:
        """Return, for each tensor, the tensors of all ranks, stacked by rank along a new first dimension.

        This is one operation. Arguments and errors are as for `average`; integer tensors are allowed as well.
        """


class GradientReducer(ABC):
    """A method that reduces all gradients of a step together; `compression=` takes an instance.

    An instance belongs to one optimizer, since it may keep a state for each parameter. It is used by the thread
    that calls `step()` or `synchronize()` of that optimizer, and by no other at the same time.

    Attributes:
        bytes_sent: The bytes that this rank has contributed to averages and gathers since the start. An average of n
            bytes costs each rank about 2n(size-1)/size bytes of traffic, a gather of n bytes from each rank n(size-1).
        bytes_uncompressed: The value that `bytes_sent` would have if all gradients had been averaged as they were.
    """

    bytes_sent: int = 0
    bytes_uncompressed: int = 0

    @abstractmethod
    def reduce(self, gradients: NamedGradients, ranks: Collectives) -> None:
        """Replace each gradient, in place, by an approximation of its average over the ranks.

        Called without gradient recording. The result must have the same bits on every rank. If this raises, the step is
        abandoned.

        Args:
            gradients: Names of parameters and their gradients: dense, floating point, of any shape, stride and device.
                The same names in the same order on all ranks. Parameters without a gradient on any rank are left out; a
                gradient that only some ranks have is zero on the others.
            ranks: The collectives with which to communicate.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the reducer keeps between steps, to be saved with a checkpoint of this rank."""
        return {}

    def shared_state_dict(self) -> dict[str, Any]:
        """Return the entries of `state_dict` that are equal on all ranks, for ranks that are new in an elastic job.

        By default all entries.
        """
        return self.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a state that `state_dict` returned.

        Raises:
            ValueError: It is the state of another kind of object.
        """
        if state_dict:
            raise ValueError(f"{type(self).__name__} has no state, got {', '.join(map(str, state_dict))}")
