"""How values of each type are saved, restored and brought to the same value on all ranks."""

from __future__ import annotations

import copy
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch.nn.parameter import is_lazy

from horovodlike.torch.elastic.sampler import ElasticSampler
from horovodlike.torch.functions import (
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
    load_exactly,
)
from horovodlike.torch.optimizer import reducer_of


class StateHandler(ABC):
    """Saves one value of a `TorchState`.

    Classes of one's own go into the registry (`set_handler_registry`). One thread at a time.

    Args:
        value: What to save. Nothing is saved yet.

    Attributes:
        value: The same, or what `set_value` was given since.
        saved: What `save` has kept, which can be pickled: it is part of what `State.persist` writes.
    """

    saved: Any = None

    def __init__(self, value: Any) -> None:
        self.value = value

    @abstractmethod
    def save(self) -> None:
        """Keep a copy of the value's state in memory. No collective."""

    @abstractmethod
    def restore(self) -> None:
        """Give the value the state that was saved last. No collective."""

    @abstractmethod
    def sync(self, root_rank: int) -> None:
        """Give the value the state that it has on one rank. All ranks call it; what was saved stays as it is.

        Raises:
            HorovodInternalError: The job is broken, or the values of the ranks do not fit together.
        """

    def tensors(self) -> Iterable[torch.Tensor]:
        """Return the tensors that collectives may have made; before they are saved, all are waited for."""
        return ()

    def set_value(self, value: Any) -> None:
        """Take another value, and save it."""
        self.value = value
        self.save()

    def reset(self) -> None:  # noqa: B027 - most have nothing to do
        """Adapt the value to a job of other ranks, which has just begun. No collective."""


def _snapshot(value: Any, before: Any = None) -> Any:
    """Return a deep copy, of which tensors are in the memory of an earlier one where they fit."""
    if isinstance(value, torch.Tensor):
        return _copy_of(value, before)
    if type(value) is dict:
        earlier = before if type(before) is dict else {}
        return {key: _snapshot(entry, earlier.get(key)) for key, entry in value.items()}
    if type(value) in (list, tuple):
        fits = type(before) is type(value) and len(before) == len(value)
        return type(value)(map(_snapshot, value, before if fits else [None] * len(value)))
    return copy.deepcopy(value)


def _copy_of(tensor: torch.Tensor, before: Any) -> torch.Tensor:
    fits = isinstance(before, torch.Tensor) and (
        (before.shape, before.dtype, before.device, before.layout)
        == (tensor.shape, tensor.dtype, tensor.device, torch.strided)
    )
    return before.copy_(tensor.detach()) if fits else tensor.detach().clone()


class ModelStateHandler(StateHandler):
    """Saves the parameters and buffers of a module, also buffers that its `state_dict` leaves out.

    They are restored and synchronized in place: optimizers and compiled functions that hold them still do. What
    submodules return from `get_extra_state` is saved as well.
    """

    value: torch.nn.Module

    def _tensors(self) -> dict[str, torch.Tensor]:
        tensors = dict([*self.value.named_parameters(), *self.value.named_buffers()])
        lazy = [name for name, tensor in tensors.items() if is_lazy(tensor)]
        if lazy:
            raise ValueError(f"{lazy[0]} of the model has no shape yet: run the model once before it becomes a state")
        return tensors

    def tensors(self) -> Iterable[torch.Tensor]:
        """Return parameters and buffers."""
        return self._tensors().values()

    def _with_extra_state(self) -> dict[str, torch.nn.Module]:
        plain = torch.nn.Module.get_extra_state
        return {name: module for name, module in self.value.named_modules() if type(module).get_extra_state != plain}

    def _extra_state(self) -> dict[str, Any]:
        return {name: module.get_extra_state() for name, module in self._with_extra_state().items()}

    def _set_extra_state(self, states: dict[str, Any]) -> None:
        for name, module in self._with_extra_state().items():
            module.set_extra_state(states[name])

    def save(self) -> None:
        """Copy all tensors.

        Raises:
            ValueError: The module is lazy and has not seen its input yet.
        """
        self.saved = _snapshot({"tensors": self._tensors(), "extra": self._extra_state()}, self.saved)

    @torch.no_grad()
    def restore(self) -> None:
        """Copy the tensors back.

        Raises:
            ValueError: The module has other tensors than those that were saved.
        """
        tensors, saved = self._tensors(), self.saved["tensors"]
        if tensors.keys() != saved.keys():
            raise ValueError(
                "the model has other parameters and buffers than when it was saved: "
                f"{', '.join(sorted(tensors.keys() ^ saved.keys()))}; when a model has been changed, assign it to the "
                "state again"
            )
        for name, tensor in tensors.items():
            if tensor.shape == saved[name].shape:
                tensor.copy_(saved[name])
            else:
                tensor.data = saved[name].clone()  # a buffer that grows, say
        self._set_extra_state(_snapshot(self.saved["extra"]))

    def sync(self, root_rank: int) -> None:
        """Broadcast the tensors in place, and the rest as objects."""
        self._resize_buffers(root_rank)
        broadcast_parameters(self._tensors(), root_rank)
        if self._with_extra_state():
            self._set_extra_state(broadcast_object(self._extra_state(), root_rank, "elastic.extra_state"))

    def _resize_buffers(self, root_rank: int) -> None:
        """Give buffers the shapes that they have on the root: one may have grown in training."""
        buffers = dict(self.value.named_buffers())
        shapes = broadcast_object({name: buffer.shape for name, buffer in buffers.items()}, root_rank, "elastic.shapes")
        for name, buffer in buffers.items():
            if shapes.get(name, buffer.shape) != buffer.shape:
                buffer.data = buffer.new_empty(shapes[name])


class OptimizerStateHandler(StateHandler):
    """Saves the state of an optimizer: what it holds for each parameter, and all options of its groups.

    What the `GradientReducer` of a `DistributedOptimizer` remembers is saved as well; a new rank takes over the part
    that is the same on all ranks.
    """

    value: torch.optim.Optimizer

    def tensors(self) -> Iterable[torch.Tensor]:
        """Return the parameters, after which whatever the optimizer makes of their gradients is there, too."""
        return itertools.chain.from_iterable(group["params"] for group in self.value.param_groups)

    def save(self) -> None:
        """Copy the state."""
        reducer = reducer_of(self.value)
        state = {"optimizer": self.value.state_dict(), "reducer": None if reducer is None else reducer.state_dict()}
        self.saved = _snapshot(state, self.saved)

    def restore(self) -> None:
        """Load the state. Gradients are dropped: those of an unfinished step count no more."""
        state = _snapshot(self.saved)
        load_exactly(self.value, state["optimizer"])
        reducer = reducer_of(self.value)
        if reducer is not None:
            reducer.load_state_dict(state["reducer"])
        self.value.zero_grad(set_to_none=True)

    def sync(self, root_rank: int) -> None:
        """Load the root's state, of which there may be more or less than here."""
        broadcast_optimizer_state(self.value, root_rank)
        reducer = reducer_of(self.value)
        if reducer is not None:
            shared = broadcast_object(reducer.shared_state_dict(), root_rank, "elastic.reducer")
            reducer.load_state_dict({**reducer.state_dict(), **shared})

    def reset(self) -> None:
        """Drop the gradients: backward passes are counted anew."""
        self.value.zero_grad(set_to_none=True)


@runtime_checkable
class Stateful(Protocol):
    """An object with its state as a dictionary: a learning rate scheduler, a gradient scaler, a partition of data."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Take over a state."""


class StateDictHandler(StateHandler):
    """Saves anything that has `state_dict` and `load_state_dict`, which is given a copy of its own."""

    value: Stateful

    def save(self) -> None:
        """Copy the state."""
        self.saved = _snapshot(self.value.state_dict(), self.saved)

    def restore(self) -> None:
        """Load the state."""
        self.value.load_state_dict(_snapshot(self.saved))

    def sync(self, root_rank: int) -> None:
        """Load the root's state, on the root as well."""
        self.value.load_state_dict(broadcast_object(_snapshot(self.value.state_dict()), root_rank, "elastic.state"))


class SamplerStateHandler(StateDictHandler):
    """Saves an `ElasticSampler`, which divides its rest among the ranks of each job."""

    value: ElasticSampler

    def reset(self) -> None:
        """Divide the rest anew."""
        self.value.reset()


Registry = Sequence[tuple[type, Callable[[Any], StateHandler]]]

_registry: Registry = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
    (Stateful, StateDictHandler),
]


def get_handler_registry() -> Registry:
    """Return pairs of a type and what makes a `StateHandler` of a value of that type. The first that fits counts."""
    return list(_registry)


def set_handler_registry(registry: Registry) -> None:
    """Replace the registry, for values that become part of a state from now on.

    Raises:
        TypeError: An entry is no pair of a type and a callable.
    """
    global _registry
    entries = list(registry)
    for entry in entries:
        if not (isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], type) and callable(entry[1])):
            raise TypeError(f"a handler registry is made of pairs of a type and a StateHandler class, got {entry!r}")
    _registry = entries


def handler_of(value: Any) -> StateHandler | None:
    """Return the handler of a value, with nothing saved yet; None if the value is saved as an object."""
    if isinstance(value, type):  # it has its methods, but no state
        return None
    for kind, make in _registry:
        if isinstance(value, kind):
            return make(value)
    return None
