"""Linear layers that are split by their output features, or by their input features."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from horovodlike.process_set import ProcessSet, global_process_set
from horovodlike.splits import even_share
from horovodlike.torch.nn._module import COLUMNS, ROWS, ParallelModule


class _ParallelLinear(ParallelModule):
    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None

    def _describe(self, in_features: int, out_features: int, bias: bool) -> None:
        self.in_features, self.out_features, self.has_bias = in_features, out_features, bias

    def unsplit(self, device: Any = None, dtype: torch.dtype | None = None) -> torch.nn.Linear:
        """Return a new `torch.nn.Linear` of the same options."""
        return torch.nn.Linear(self.in_features, self.out_features, self.has_bias, device, dtype)

    def extra_repr(self) -> str:
        """Return the options for `repr`."""
        split = f"rank {self._region.place} of {self._region.num_ranks}"
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.has_bias}, {split}"


class ColumnParallelLinear(_ParallelLinear):
    """A `torch.nn.Linear` whose output features are split among the ranks of a process set.

    Forward, the input is used as it is, and nothing is sent unless `gather_output` is set. Backward, the ranks'
    gradients of the input are summed. Parameters: `weight` of shape (out_features / ranks, in_features), and `bias` of
    shape (out_features / ranks).

    All ranks of the set must give the same input, and run the same layers forward and backward in the same order. Only
    one thread of a process at a time may run a layer. A tensor that requires a gradient on one rank must require one on
    all.

    Args:
        in_features: The size of the last dimension of the input.
        out_features: The output features of all ranks together; a multiple of the number of ranks.
        bias: True if the layer adds a bias.
        gather_output: True: every rank returns all output features. False: its own part, as `RowParallelLinear` with
            `input_is_parallel=True` takes it.
        process_set: The ranks.
        device: As for `torch.nn.Linear`.
        dtype: As for `torch.nn.Linear`.

    Raises:
        NotInitializedError: `init()` has not been called.
        ValueError: `out_features` cannot be split evenly, or this rank is not in the process set. In forward: the last
            dimension of the input is not `in_features`.
        HorovodInternalError: In forward and backward: the ranks disagree, or the job is broken or shut down.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        gather_output: bool = True,
        process_set: ProcessSet = global_process_set,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__({"weight": ROWS, "bias": ROWS}, process_set)
        even_share(out_features, f"{type(self).__name__}: out_features", self._region.num_ranks)
        self._describe(in_features, out_features, bias)
        self.gather_output = gather_output
        self.take_parts(self.unsplit(device, dtype))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return a tensor (..., out_features) for one of (..., in_features); this rank's part if not gathered."""
        self._check_width(input, self.in_features)
        output = functional.linear(self._region.copy(input), self.weight, self.bias)
        return self._region.gather(output) if self.gather_output else output


class RowParallelLinear(_ParallelLinear):
    """A `torch.nn.Linear` whose input features are split among the ranks of a process set.

    Forward, the ranks' products are summed, in place, and then the bias is added once. Backward, nothing is sent unless
    the input is whole. Parameters: `weight` of shape (out_features, in_features / ranks), and `bias` of shape
    (out_features), which all ranks have; its gradient is the same on all.

    The requirements on the ranks are the same as for `ColumnParallelLinear`.

    Args:
        in_features: The input features of all ranks together; a multiple of the number of ranks.
        out_features: The size of the last dimension of the output.
        bias: True if the layer adds a bias.
        input_is_parallel: True: the input is this rank's part of the features, as `ColumnParallelLinear` with
            `gather_output=False` returns it. False: all ranks give the same whole input.
        process_set: The ranks.
        device: As for `torch.nn.Linear`.
        dtype: As for `torch.nn.Linear`.

    Raises:
        NotInitializedError: `init()` has not been called.
        ValueError: `in_features` cannot be split evenly, or this rank is not in the process set. In forward: the last
            dimension of the input has another size.
        HorovodInternalError: In forward and backward: the ranks disagree, or the job is broken or shut down.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        input_is_parallel: bool = False,
        process_set: ProcessSet = global_process_set,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__({"weight": COLUMNS, "bias": None}, process_set)
        self._share = even_share(in_features, f"{type(self).__name__}: in_features", self._region.num_ranks)
        self._describe(in_features, out_features, bias)
        self.input_is_parallel = input_is_parallel
        self.take_parts(self.unsplit(device, dtype))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return a tensor (..., out_features) for one of (..., in_features), or for this rank's part of it."""
        if self.input_is_parallel:
            remedy = f"; for an input of all {self.in_features} features, make the layer with input_is_parallel=False"
            self._check_width(input, self._share, remedy)
        else:
            remedy = f"; for an input of this rank's {self._share} features, make it with input_is_parallel=True"
            self._check_width(input, self.in_features, remedy)
            input = self._region.split(input)
        product = self._region.sum(functional.linear(input, self.weight))
        return product if self.bias is None else product.add_(self.bias)
