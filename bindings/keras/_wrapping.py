"""How an optimizer becomes a distributed one: an object of a subclass of its class, with its variables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from horovodlike.keras import _objects
from horovodlike.keras._options import Local, Options


class Wrapped:
    """The methods that wrapped optimizers have in addition to those of the optimizer."""

    _wrap: Callable[[Any], Any]

    def register_local_var(self, var: Any) -> None:
        """Leave the gradient of a variable with its rank: it is not reduced.

        Args:
            var: A variable that the optimizer trains, before the first step.
        """
        gradients = _objects.objects.gradients_of(self)
        assert gradients is not None
        gradients.register_local(var)

    # Keras writes the class of an optimizer into a saved model, and asks for it by this name. It gets that of the
    # optimizer that was wrapped, so the model can be loaded where there is no horovodlike.
    @property  # type: ignore[misc]  # it must not be written to
    def __class__(self) -> Any:
        return type(self).__bases__[1]

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        """Make an optimizer from what `get_config` returned, and wrap it in the same way."""
        wrapped: Any = cls.__bases__[1]
        return cls._wrap(wrapped.from_config(config, custom_objects=custom_objects))


def subclassed(optimizer: Any, wrapper: type, added: Mapping[str, Any], options: Options, local: Local) -> Any:
    """Return an optimizer of the same name and state, with methods of `wrapper` in front and these attributes."""
    base = type(optimizer)

    def wrap(other: Any) -> Any:
        return _objects.objects.wrapped(other, options, local)

    namespace = {"__module__": base.__module__, "__doc__": base.__doc__, "_wrap": staticmethod(wrap)}
    cls: Any = type(base.__name__, (wrapper, base), namespace)
    result = cls.__new__(cls)
    # The same variables and lists of them, so that nothing of its state is lost.
    vars(result).update(vars(optimizer))
    vars(result).update(added)
    return result


def wrapped_copy(make: Callable[..., Any], arguments: Any, options: Options, local: Local) -> Any:
    """Return the distributed optimizer that a copy or a pickle of one becomes."""
    return _objects.objects.wrapped(make(*arguments), options, local)
