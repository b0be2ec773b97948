"""Optimizers that take the place of another one: objects of a subclass of its class, which share its attributes."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from horovodlike._engine.arguments import check_name


def checked_names(
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None, params: Sequence[torch.nn.Parameter]
) -> dict[torch.nn.Parameter, str]:
    """Return the names of parameters from `model.named_parameters()`; an empty dictionary for None.

    Raises:
        ValueError: The names cannot be used, are not unique, or do not name each of `params`.
    """
    if named_parameters is None:
        return {}
    named = list(named_parameters)
    if not all(isinstance(entry, tuple) and len(entry) == 2 for entry in named):
        raise ValueError(
            "named_parameters must be a sequence of tuples (name, parameter), as model.named_parameters() returns"
        )
    names = [name for name, _ in named]
    for name in names:
        check_name(name, "named_parameters")
    duplicates = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if duplicates:
        raise ValueError(f"the names in named_parameters must be unique, found duplicates: {', '.join(duplicates)}")
    by_parameter = {param: name for name, param in named}
    unnamed = [id(param) for param in params if param not in by_parameter]
    if named and unnamed:
        raise ValueError(
            f"named_parameters does not name {len(unnamed)} of the optimizer's parameters; their Python object ids "
            f"are {', '.join(map(str, unnamed))}"
        )
    return by_parameter


def share_what_is_loaded(inner: torch.optim.Optimizer, wrapper: torch.optim.Optimizer) -> None:
    """Have the wrapper share the groups and state that are loaded into the wrapped optimizer later."""
    found = weakref.ref(wrapper)

    def share(loaded: torch.optim.Optimizer) -> None:
        wrapper = found()
        if loaded is inner and wrapper is not None:
            wrapper.state, wrapper.param_groups = inner.state, inner.param_groups

    if hasattr(inner, "_optimizer_load_state_dict_post_hooks"):  # not before torch 2.2
        inner.register_load_state_dict_post_hook(share)


class Wrapper(torch.optim.Optimizer):
    """The methods that all wrappers share."""

    _inner: torch.optim.Optimizer

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do the wrapped optimizer's `load_state_dict`. Operations in flight are not changed."""
        super().load_state_dict(state_dict)
        # Schedulers made before the wrapping refer to the wrapped optimizer, and change its groups.
        self._inner.state, self._inner.param_groups = self.state, self.param_groups

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be copied or pickled: each parameter has one exchange with the other ranks.

        Raises:
            TypeError: Always.
        """
        raise TypeError(
            f"this {type(self).__name__} is a wrapped optimizer, which cannot be copied or pickled: copy the model and "
            "the optimizer before the optimizer is wrapped, or keep optimizer.state_dict()"
        )


def subclass_instance(methods: type[Wrapper], optimizer: torch.optim.Optimizer) -> Any:
    """Return an object that shares all the optimizer's attributes.

    Its class has the name of the optimizer's class, and `methods` override that class's methods.
    """
    base = type(optimizer)
    wrapper: Any = object.__new__(type(base.__name__, (methods, base), {"__module__": base.__module__}))
    wrapper.__dict__.update(optimizer.__dict__)
    # Remove the attribute `step` that a learning rate scheduler sets: made before the wrapping, it calls the `step` of
    # the optimizer's own class.
    wrapper.__dict__.pop("step", None)
    return wrapper
