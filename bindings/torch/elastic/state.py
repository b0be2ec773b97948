"""`TorchState`: what elastic training saves, restores and sends to new ranks, for PyTorch.

A `StateHandler` says how values of a type are saved, restored and brought to the same value on all ranks.
"""

from __future__ import annotations

import copy
import itertools
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch.nn.parameter import is_lazy

from horovodlike._net.object_seal import dumps
from horovodlike.elastic import ObjectState
from horovodlike.elastic._state import check_results
from horovodlike.torch._ops import gpu
from horovodlike.torch.elastic.sampler import ElasticSampler
from horovodlike.torch.functions import (
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
    load_exactly,
)
from horovodlike.torch.optimizer import reducer_of

__all__ = [
    "ModelStateHandler",
    "OptimizerStateHandler",
    "SamplerStateHandler",
    "StateDictHandler",
    "StateHandler",
    "TorchState",
    "get_handler_registry",
    "set_handler_registry",
]


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


class TorchState(ObjectState):
    """The state of a training with PyTorch: everything that changes during it.

    Values of types that the handler registry knows are saved by their handlers: modules, optimizers, `ElasticSampler`,
    and anything with `state_dict` and `load_state_dict`, such as learning rate schedulers, gradient scalers and
    `horovodlike.data.DynamicPartition`. They stay the same objects. Others are saved as deep copies. All are
    attributes of the state. A value with a handler is saved at once when it is assigned.

    `restore` brings back every bit of what was saved last. Gradients are not part of it: they are dropped when the
    state is restored and when the job begins anew, because backward passes are counted anew then.

    `sync` takes everything from the rank that has committed most, and saves it. An optimizer may hold more there than
    here, or less: what is made in the first step comes along, and so does the lack of it.

    Args:
        model: Of the same parameters and buffers on all ranks.
        optimizer: Wrapped in a `DistributedOptimizer` or not.
        **kwargs: More values, by the names of the attributes.

    Raises:
        ValueError: A module is lazy and has not seen its input yet; a list or dictionary holds values that need
            handlers; or a name is one of the state's own.
    """

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        given = {"model": model, "optimizer": optimizer, **kwargs}
        for name, value in given.items():
            _check_has_no_handled_part(name, value)
        self._handlers: dict[str, StateHandler] = {}
        super().__init__(**dict.fromkeys(given))
        for name, value in given.items():
            setattr(self, name, value)
        ObjectState.save(self)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute, and save it if it has a handler."""
        object.__setattr__(self, name, value)
        kept = self.__dict__.get("_handlers", {}).get(name)
        if kept is not None and isinstance(value, type(kept.value)):
            kept.set_value(value)
        elif kept is not None or name in self.__dict__.get("_names", ()):
            self._find_handler(name, value)

    def _find_handler(self, name: str, value: Any) -> None:
        had_one = self._handlers.pop(name, None) is not None
        handler = handler_of(value)
        if handler is not None:
            handler.save()
            self._handlers[name] = handler
        if had_one != (handler is not None):
            others = tuple(each for each in self._names if each != name)
            self._names = others if handler is not None else (*others, name)
            ObjectState.save(self)

    def save(self) -> None:
        """Keep a copy of everything in memory.

        Raises:
            HorovodInternalError: The job has ended, and what is on a GPU may not be worth saving; what was saved before
                is kept.
        """
        if gpu.finish(tensor for handler in self._handlers.values() for tensor in handler.tensors()):
            check_results()
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        """Go back to what was saved last."""
        super().restore()
        for handler in self._handlers.values():
            handler.restore()

    def sync(self) -> None:
        """Take everything from the rank that has committed most, and save it. Collective.

        Raises:
            HorovodInternalError: The job is broken, or the ranks have models that do not fit together.
        """
        root = self.elect_root()
        for name in sorted(self._handlers):
            self._handlers[name].sync(root)
        super().sync()

    def reset(self) -> None:
        """Adapt to other ranks: drop gradients, and divide what samplers have left."""
        super().reset()
        for handler in self._handlers.values():
            handler.reset()

    def saved_to_bytes(self) -> bytes:
        """Return a pickle of everything as it was saved.

        Raises:
            NotImplementedError: A handler does not say what it has saved.
        """
        for name, handler in self._handlers.items():
            if handler.saved is None:
                raise NotImplementedError(
                    f"{name} cannot be persisted: {type(handler).__name__}.save() has to keep its copy in `saved`"
                )
        saved = {name: handler.saved for name, handler in self._handlers.items()}
        return dumps((super().saved_to_bytes(), saved))

    def saved_from_bytes(self, saved: bytes) -> None:
        """Read the pickle.

        Raises:
            ValueError: It is that of a state with other values.
        """
        objects, of_handlers = pickle.loads(saved)
        if of_handlers.keys() != self._handlers.keys():
            raise ValueError(
                f"a state with {sorted(of_handlers)} was persisted, and this one has {sorted(self._handlers)}: "
                "resume with the script that wrote it, or remove the file to begin anew"
            )
        super().saved_from_bytes(objects)
        for name, handler in self._handlers.items():
            handler.saved = of_handlers[name]


def _check_has_no_handled_part(name: str, value: Any) -> None:
    """Refuse what a deep copy would tear away from the rest: a list of modules, say, from their optimizer."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple, set)) else ()
    for part in parts:
        if handler_of(part) is not None:
            raise ValueError(
                f"{name} holds a {type(part).__name__}, and a {type(value).__name__} is saved as a copy of its own: "
                "give each of them to TorchState by a name of its own"
            )
