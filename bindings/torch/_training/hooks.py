"""The hooks of a training loop, the state that they see, and the checks of the loop's arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from horovodlike._engine.arguments import integer

__all__ = ["HOOKS", "Hook", "LoopState", "checked_function", "checked_functions", "checked_hooks", "count"]

HOOKS = (
    *("start", "start_epoch", "sample", "forward", "loss", "backward", "before_update", "after_update"),
    *("end_epoch", "end"),
)
"""The points at which an `Engine` calls hooks, in their order."""


@dataclass
class LoopState:
    """The state of a training loop, as hooks see it.

    Attributes:
        model: The model.
        optimizer: The `DistributedOptimizer`.
        epoch: The number of the epoch, from 0.
        batch: The number of batches of this epoch that are done.
        step: The number of steps that are done in all epochs.
        sample: Inputs and targets of the current batch, on the device.
        output: The output of the model.
        loss: The loss of this rank's batch.
        metrics: The loss and the metrics of the last complete epoch, averaged over the samples of all ranks.
        stop: Set it to True to take no more batches. Training ends with the epoch, on all ranks: another rank ends it
            with its own last batch. If the ranks must stop after the same step, set it on all of them.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    epoch: int = 0
    batch: int = 0
    step: int = 0
    sample: tuple[Any, Any] = (None, None)
    output: Any = None
    loss: Any = None
    metrics: dict[str, float] = field(default_factory=dict)
    stop: bool = False


Hook = Callable[[LoopState], object]


def count(argument: str, value: Any) -> int:
    """Return a number that counts something.

    Raises:
        TypeError: The value is no integer.
        ValueError: The value is negative.
    """
    number = integer(value, argument, "Engine")
    if number < 0:
        raise ValueError(f"Engine: {argument} must be 0 or more, got {number}")
    return number


def checked_function(argument: str, value: Any) -> Callable[..., Any]:
    """Return a function.

    Raises:
        TypeError: The value cannot be called.
    """
    if not callable(value):
        raise TypeError(f"Engine: {argument} must be a function, got {value!r}")
    function: Callable[..., Any] = value
    return function


def checked_hooks(hooks: Mapping[str, Hook | Sequence[Hook]]) -> dict[str, list[Hook]]:
    """Return lists of hooks by point.

    Raises:
        TypeError: A hook is no function.
        ValueError: There is no such point.
    """
    for point in hooks:
        if point not in HOOKS:
            raise ValueError(f"Engine: there is no point {point!r} for hooks; there are {', '.join(HOOKS)}")
    lists = {point: given if isinstance(given, (list, tuple)) else [given] for point, given in hooks.items()}
    return {point: [checked_function(f"hooks[{point!r}]", hook) for hook in given] for point, given in lists.items()}


def checked_functions(loss: Any, metrics: Mapping[str, Any]) -> dict[str, Callable[[Any, Any], Any]]:
    """Return the loss and the metrics by name, the loss first.

    Raises:
        TypeError: One of them is no function.
        ValueError: A metric has the name of the loss.
    """
    if "loss" in metrics:
        raise ValueError("Engine: a metric cannot be called 'loss': the loss is always reported by that name")
    named = {"loss": loss, **metrics}
    return {name: checked_function(name, each) for name, each in named.items()}
