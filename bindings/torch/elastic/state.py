"""`TorchState`: the state that elastic training with PyTorch saves, restores and sends to new ranks.

A `StateHandler` defines how values of a type are saved, restored and brought to the same value on all ranks.
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

    Add your own subclasses to the registry with `set_handler_registry`. Not thread-safe.

    Args:
        value: The value to save. The constructor does not save it yet.

    Attributes:
        value: The value that is saved; `set_value` replaces it.
        saved: The copy that `save` has made. It must be picklable, because `State.persist` writes it to disk.
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
        """Give the value the state that it has on rank `root_rank`. All ranks call this. The saved copy stays as it is.

        Raises:
            HorovodInternalError: The job is broken, or the ranks' values do not match, for example in shape.
        """

    def tensors(self) -> Iterable[torch.Tensor]:
        """Return the tensors that collectives may have written; before a save the host waits for all of them."""
        return ()

    def set_value(self, value: Any) -> None:
        """Replace the value, and save the new one."""
        self.value = value
        self.save()

    def reset(self) -> None:  # noqa: B027 - most have nothing to do
        """Adapt the value to the job's new ranks, after the job has restarted. No collective."""


def _snapshot(value: Any, before: Any = None) -> Any:
    """Return a deep copy; its tensors reuse the memory of those in `before`, an earlier copy, where possible."""
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


def _form_of(buffer: torch.Tensor | None) -> tuple[torch.Size, torch.dtype, str] | None:
    return None if buffer is None else (buffer.shape, buffer.dtype, buffer.device.type)


class ModelStateHandler(StateHandler):
    """Saves the parameters and buffers of a module, also buffers that its `state_dict` leaves out.

    They are restored and synchronized in place, so optimizers and compiled functions can keep references to them. The
    results of the submodules' `get_extra_state` are saved as well.
    """

    value: torch.nn.Module

    def _tensors(self) -> dict[str, torch.Tensor]:
        tensors = dict([*self.value.named_parameters(), *self.value.named_buffers()])
        lazy = [name for name, tensor in tensors.items() if is_lazy(tensor)]
        if lazy:
            raise ValueError(f"{lazy[0]} of the model has no shape yet: run the model once before it becomes a state")
        return tensors

    def _buffers(self) -> dict[str, torch.Tensor | None]:
        """Return the buffers by name; some are None until the first forward pass."""
        unset = {
            f"{path}.{name}".removeprefix("."): None
            for path, module in self.value.named_modules()
            for name, buffer in module._buffers.items()
            if buffer is None
        }
        return {**unset, **dict(self.value.named_buffers())}

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
        names = [name for name, _ in self.value.named_parameters()]
        state = {"tensors": self._buffers() | self._tensors(), "parameters": names, "extra": self._extra_state()}
        self.saved = _snapshot(state, self.saved)

    @torch.no_grad()
    def restore(self) -> None:
        """Copy the tensors back.

        Raises:
            ValueError: The module has other parameters than those that were saved, or cannot have the saved buffers.
        """
        parameters, saved = dict(self.value.named_parameters()), self.saved["tensors"]
        before = self.saved.get("parameters", [name for name in parameters if name in saved])
        changed = [
            name
            for name in dict.fromkeys([*parameters, *before])
            if name not in parameters or name not in before or parameters[name].shape != saved[name].shape
        ]
        if changed:
            raise ValueError(
                f"the model has other parameters than when it was saved: {', '.join(changed)}; when a model has "
                "been changed, assign it to the state again"
            )
        self._reform_buffers({name: _form_of(saved[name]) for name in saved if name not in parameters})
        for name, tensor in self._tensors().items():
            tensor.copy_(saved[name])
        self._set_extra_state(_snapshot(self.saved["extra"]))

    def sync(self, root_rank: int) -> None:
        """Broadcast the tensors in place, and the extra state as an object."""
        forms = {name: _form_of(buffer) for name, buffer in self._buffers().items()}
        self._reform_buffers(broadcast_object(forms, root_rank, "elastic.buffers"))
        broadcast_parameters(self._tensors(), root_rank)
        if self._with_extra_state():
            self._set_extra_state(broadcast_object(self._extra_state(), root_rank, "elastic.extra_state"))

    def _reform_buffers(self, forms: dict[str, Any]) -> None:
        """Give the buffers these names, shapes and dtypes: in training some are made, others grow."""
        here = self._buffers()
        for name in sorted(here.keys() | forms.keys()):
            buffer, form = here.get(name), forms.get(name)
            if buffer is not None and form is not None:
                if form[:2] != (buffer.shape, buffer.dtype):
                    buffer.data = buffer.new_empty(form[0], dtype=form[1])
            elif buffer is not form:  # one of them is None
                path, _, leaf = name.rpartition(".")
                module = self.value.get_submodule(path)
                made = form and torch.empty(form[0], dtype=form[1], device=form[2])
                if name not in forms:
                    delattr(module, leaf)
                elif name in here:
                    setattr(module, leaf, made)
                else:
                    module.register_buffer(leaf, made)


class OptimizerStateHandler(StateHandler):
    """Saves the state of an optimizer: the state of each parameter, and all options of its parameter groups.

    The state of a `DistributedOptimizer`'s `GradientReducer` is saved as well; a new rank receives the part of it that
    is equal on all ranks.
    """

    value: torch.optim.Optimizer

    def tensors(self) -> Iterable[torch.Tensor]:
        """Return the parameters: waiting for their GPUs' streams completes the optimizer's state there as well."""
        return itertools.chain.from_iterable(group["params"] for group in self.value.param_groups)

    def save(self) -> None:
        """Copy the state."""
        reducer = reducer_of(self.value)
        state = {"optimizer": self.value.state_dict(), "reducer": None if reducer is None else reducer.state_dict()}
        self.saved = _snapshot(state, self.saved)

    def restore(self) -> None:
        """Load the saved state, and drop the gradients of an unfinished step."""
        state = _snapshot(self.saved)
        load_exactly(self.value, state["optimizer"])
        reducer = reducer_of(self.value)
        if reducer is not None:
            reducer.load_state_dict(state["reducer"])
        self.value.zero_grad(set_to_none=True)

    def sync(self, root_rank: int) -> None:
        """Load the root's state, which may have more or fewer entries than the state of this rank."""
        broadcast_optimizer_state(self.value, root_rank)
        reducer = reducer_of(self.value)
        if reducer is not None:
            shared = broadcast_object(reducer.shared_state_dict(), root_rank, "elastic.reducer")
            reducer.load_state_dict({**reducer.state_dict(), **shared})

    def reset(self) -> None:
        """Drop the gradients: backward passes are counted from 0 again."""
        self.value.zero_grad(set_to_none=True)


@runtime_checkable
class Stateful(Protocol):
    """An object that returns and loads its state: a learning rate scheduler, gradient scaler or `DynamicPartition`."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Load a state."""


class StateDictHandler(StateHandler):
    """Saves any object with `state_dict` and `load_state_dict`, which receives a copy of the saved state."""

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
    """Saves an `ElasticSampler`, and divides its remaining indices again when the job restarts."""

    value: ElasticSampler

    def reset(self) -> None:
        """Divide the remaining indices among the job's new ranks."""
        self.value.reset()


Registry = Sequence[tuple[type, Callable[[Any], StateHandler]]]

_registry: Registry = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
    (Stateful, StateDictHandler),
]


def get_handler_registry() -> Registry:
    """Return pairs of a type and a factory of a `StateHandler` for its values. The first pair that matches is used."""
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
    if isinstance(value, type):  # a class has the methods of `Stateful`, but no state
        return None
    for kind, make in _registry:
        if isinstance(value, kind):
            return make(value)
    return None


class TorchState(ObjectState):
    """The state of a training run with PyTorch: all values that change during the run.

    Values of types in the handler registry are saved by their handlers, and stay the same objects: modules, optimizers,
    `ElasticSampler`, and anything with `state_dict` and `load_state_dict`, such as learning rate schedulers, gradient
    scalers and `horovodlike.data.DynamicPartition`. Other values are saved as deep copies. All values are attributes of
    the state. A value with a handler is saved as soon as it is assigned.

    `restore` brings back exactly the values that were saved last. Gradients are not saved: they are dropped when the
    state is restored and when the job restarts, because backward passes are then counted from 0 again.

    `sync` takes all values from the rank with the most commits, and saves them. The optimizer state of that rank
    replaces this rank's, even if only one of them has the entries that the optimizer creates in its first step.

    Args:
        model: A model with the same parameters and buffers on all ranks.
        optimizer: An optimizer, wrapped in a `DistributedOptimizer` or not.
        **kwargs: More values; each name becomes an attribute.

    Raises:
        ValueError: A module is lazy and has not seen its input yet; a list or dictionary holds values that need
            handlers; or a name is already an attribute of this class.
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
        """Set an attribute, and save the value if it has a handler."""
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
        """Keep a copy of all values in memory.

        Raises:
            HorovodInternalError: The job has ended, so tensors on a GPU may lack results; the previous copies are kept.
        """
        if gpu.finish(tensor for handler in self._handlers.values() for tensor in handler.tensors()):
            check_results()
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        """Go back to the values that were saved last."""
        super().restore()
        for handler in self._handlers.values():
            handler.restore()

    def sync(self) -> None:
        """Take all values from the rank with the most commits, and save them. Collective.

        Raises:
            HorovodInternalError: The job is broken, or the ranks' models have different parameters.
        """
        root = self._elect_root()
        for name in sorted(self._handlers):
            self._handlers[name].sync(root)
        super().sync()

    def reset(self) -> None:
        """Adapt to the job's new ranks: drop gradients, and divide the samplers' remaining indices again."""
        super().reset()
        for handler in self._handlers.values():
            handler.reset()

    def _saved_to_bytes(self) -> bytes:
        """Return a pickle of all values that were saved last.

        Raises:
            NotImplementedError: A handler's `save` does not keep its copy in `saved`.
        """
        for name, handler in self._handlers.items():
            if handler.saved is None:
                raise NotImplementedError(
                    f"{name} cannot be persisted: {type(handler).__name__}.save() has to keep its copy in `saved`"
                )
        saved = {name: handler.saved for name, handler in self._handlers.items()}
        return dumps((super()._saved_to_bytes(), saved))

    def _saved_from_bytes(self, saved: bytes) -> None:
        """Read a pickle that `_saved_to_bytes` made.

        Raises:
            ValueError: It is the pickle of a state whose values with handlers have other names.
        """
        objects, of_handlers = pickle.loads(saved)
        if of_handlers.keys() != self._handlers.keys():
            raise ValueError(
                f"a state with {sorted(of_handlers)} was persisted, and this one has {sorted(self._handlers)}: "
                "resume with the script that wrote it, or remove the file to begin anew"
            )
        super()._saved_from_bytes(objects)
        for name, handler in self._handlers.items():
            handler.saved = of_handlers[name]


def _check_has_no_handled_part(name: str, value: Any) -> None:
    """Refuse containers of values with handlers: a deep copy would separate modules, say, from their optimizer."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple, set)) else ()
    for part in parts:
        if handler_of(part) is not None:
            raise ValueError(
                f"{name} holds a {type(part).__name__}, and a {type(value).__name__} is saved as a copy of its own: "
                "give each of them to TorchState by a name of its own"
            )
