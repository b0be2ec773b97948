"""`TorchState`: what elastic training saves, restores and sends to new ranks, for PyTorch."""

from __future__ import annotations

import pickle
from typing import Any

import torch

from horovodlike._net.pickling import dumps
from horovodlike.elastic import ObjectState
from horovodlike.elastic._state import check_results
from horovodlike.torch._ops import gpu
from horovodlike.torch.elastic._handlers import (
    ModelStateHandler,
    OptimizerStateHandler,
    SamplerStateHandler,
    StateDictHandler,
    StateHandler,
    get_handler_registry,
    handler_of,
    set_handler_registry,
)

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
