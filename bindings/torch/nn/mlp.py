"""Two linear layers with an activation between them, split by the hidden features."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from horovodlike.process_set import ProcessSet, global_process_set
from horovodlike.torch.nn.linear import ColumnParallelLinear, RowParallelLinear


class ParallelMLP(torch.nn.Module):
    """Two linear layers and an activation, whose hidden features are split among the ranks of a process set.

    A forward pass costs one allreduce, and so does a backward pass. From the same seed the layer has the weights of
    `Linear(in_features, hidden_features)` and `Linear(hidden_features, out_features)`, made one after the other.

    Args:
        in_features: The size of the last dimension of the input.
        hidden_features: The features between the layers; a multiple of the number of ranks.
        out_features: The size of the last dimension of the output. None: `in_features`.
        activation: A function or module that treats each element alone, as `relu` and `gelu` do: a rank has only its
            part of the hidden features.
        bias: True if both layers add a bias.
        process_set: The ranks.
        device: As for `torch.nn.Linear`.
        dtype: As for `torch.nn.Linear`.

    Raises:
        NotInitializedError: `init()` has not been called.
        ValueError: `hidden_features` cannot be split evenly, or this rank is not in the process set. In forward: the
            last dimension of the input is not `in_features`.
        HorovodInternalError: In forward and backward: the ranks disagree, or the job is broken or shut down.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        activation: Callable[[torch.Tensor], torch.Tensor] = functional.gelu,
        bias: bool = True,
        process_set: ProcessSet = global_process_set,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        out_features = in_features if out_features is None else out_features
        self.activation = activation
        self.up = ColumnParallelLinear(in_features, hidden_features, bias, False, process_set, device, dtype)
        self.down = RowParallelLinear(hidden_features, out_features, bias, True, process_set, device, dtype)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return a tensor (..., out_features) for one of (..., in_features), the same on all ranks."""
        output: torch.Tensor = self.down(self.activation(self.up(input)))
        return output
