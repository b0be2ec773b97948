"""`ParallelModule`: the base class of layers whose weights are split among the ranks of a process set."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from horovodlike.process_set import ProcessSet
from horovodlike.splits import Split
from horovodlike.torch.nn._region import Region

ROWS, COLUMNS = Split(0), Split(1)  # of a matrix that torch stores as (out_features, in_features)

_layers: weakref.WeakSet[ParallelModule] = weakref.WeakSet()
# The optimizers that do not treat each element of a parameter alone, as far as this torch has them.
_OF_WHOLES = tuple(getattr(torch.optim, name, ()) for name in ("Adafactor", "LBFGS", "Muon"))


class ParallelModule(torch.nn.Module):
    """A layer of which each rank of a process set has a part.

    Its parameters have the names of the *unsplit* layer's, which is a layer of torch, and are parts of its values.

    Args:
        splits: For each parameter its split; None if every rank has the whole.
        process_set: The ranks.

    Attributes:
        process_set: The ranks among which the layer is split.
        splits: As given.

    Raises:
        NotInitializedError: `init()` has not been called.
        TypeError: `process_set` is no process set.
        ValueError: The set is not registered, or this rank is no member.
    """

    def __init__(self, splits: Mapping[str, Split | None], process_set: ProcessSet) -> None:
        super().__init__()
        self.splits = dict(splits)
        self._region = Region.of(type(self).__name__, process_set)
        _layers.add(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # torch has no annotations here
        _layers.add(self)  # this is a copy or an unpickled layer

    @property
    def process_set(self) -> ProcessSet:
        return self._region.process_set

    def unsplit(self, device: Any = None, dtype: torch.dtype | None = None) -> torch.nn.Module:
        """Return a new unsplit layer of the same options, with parameters that torch draws."""
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Draw new parameters of an unsplit layer, of which each rank keeps its part.

        All ranks of the set need torch's generator in the same state before, and have it in the same state afterwards.
        """
        parameter = next(self.parameters())
        self.take_parts(self.unsplit(parameter.device, parameter.dtype))

    @torch.no_grad()
    def take_parts(self, unsplit: torch.nn.Module) -> None:
        """Set the parameters to this rank's parts of an unsplit layer's; register them if they have no memory yet."""
        for name in self.splits:
            whole = getattr(unsplit, name)
            part = None if whole is None else self.part(name, whole)
            known = self._parameters.get(name)
            if part is None or known is None or known.is_meta:
                self.register_parameter(name, None if part is None else torch.nn.Parameter(part))
            else:
                known.copy_(part)

    def part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the unsplit layer's parameter of this name, as a new tensor."""
        split, region = self.splits[name], self._region
        return whole.clone() if split is None else split.part(whole, region.place, region.num_ranks, torch.cat)

    def _check_width(self, input: torch.Tensor, width: int, remedy: str = "") -> None:
        if input.dim() == 0 or input.shape[-1] != width:
            raise ValueError(
                f"{type(self).__name__}: expected an input whose last dimension is {width}, got the shape "
                f"{tuple(input.shape)}{remedy}"
            )


def _refuse_parts(optimizer: torch.optim.Optimizer, *_: object) -> None:
    if isinstance(optimizer, _OF_WHOLES):
        layers = [layer for layer in _layers if layer._region.num_ranks > 1]
        split = [(layer, name) for layer in layers for name, how in layer.splits.items() if how]
        owners = {id(layer._parameters.get(name)): f"{name} of a {type(layer).__name__}" for layer, name in split}
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            if id(parameter) in owners:
                raise ValueError(
                    f"{type(optimizer).__name__} looks at whole parameters, and each rank has only its part of the "
                    f"{owners[id(parameter)]}: give it to another optimizer, such as AdamW or SGD"
                )


register_optimizer_step_pre_hook(_refuse_parts)
