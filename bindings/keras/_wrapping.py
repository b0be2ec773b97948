"""Construction of a distributed optimizer: an object of a subclass of the optimizer's class, with the same variables.

The arguments of a distributed optimizer are here as well, with the rules by which copies and pickles keep them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from horovodlike import basics
from horovodlike.process_set import ProcessSet, global_process_set, registered_of

Groups = int | Sequence[Sequence[Any]] | None


@dataclass(frozen=True)
class Options:
    """The checked arguments of `DistributedOptimizer`, the same on all ranks.

    A deep copy is the object itself, so that `groups` still holds the variables that are trained. A pickle contains the
    ranks of the process set; a set of these ranks must be registered where the pickle is read.
    """

    name: str | None = None
    compression: Any = None
    sparse_as_dense: bool = False
    gradient_predivide_factor: float = 1.0
    op: int = basics.Average
    backward_passes_per_step: int = 1
    average_aggregated_gradients: bool = False
    groups: Groups = None
    process_set: ProcessSet = global_process_set
    scale_local_gradients: bool = True
    weight: Any = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Options:
        return self

    def __getstate__(self) -> dict[str, Any]:
        if self.groups and not isinstance(self.groups, int):
            _refuse_to_pickle("groups of variables")
        ranks = None if self.process_set is global_process_set else self.process_set.ranks
        return {**vars(self), "process_set": ranks}

    def __setstate__(self, state: dict[str, Any]) -> None:
        ranks = state["process_set"]
        vars(self).update({**state, "process_set": global_process_set if ranks is None else registered_of(ranks)})


@dataclass(frozen=True)
class Local:
    """The layers and variables whose gradients are not reduced.

    A deep copy has the same layers and variables, and also their copies that the same `deepcopy()` call has made
    before. A pickle contains the layers; pickling fails if there are variables.
    """

    layers: Sequence[Any] = ()
    variables: Sequence[Any] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Local:
        def and_copies(those: Sequence[Any]) -> list[Any]:
            return [*those, *(memo[id(one)] for one in those if id(one) in memo)]

        return Local(and_copies(self.layers), and_copies(self.variables))

    def __getstate__(self) -> dict[str, Any]:
        if self.variables:
            _refuse_to_pickle("variables that were registered as local")
        return vars(self)


def _refuse_to_pickle(what: str) -> NoReturn:
    raise TypeError(
        f"an optimizer with {what} cannot be pickled: what is read would have other variables than the model; make the "
        "optimizer where it is used"
    )


class Wrapped:
    """The methods that a distributed optimizer adds to the methods of the optimizer that it wraps."""

    _wrap: Callable[[Any], Any]

    def _gradients(self) -> Any:
        """Return the `Gradients` of this optimizer, or of the one inside a LossScaleOptimizer."""
        raise NotImplementedError

    def register_local_var(self, var: Any) -> None:
        """Exclude the gradient of a variable from the reduction over the ranks. Call this before the first step.

        Args:
            var: A variable that the optimizer trains.
        """
        self._gradients().register_local(var)

    # Keras writes `optimizer.__class__` into a saved model. This property returns the class of the wrapped optimizer,
    # so that the model can be loaded where horovodlike is not installed.
    @property  # type: ignore[misc]  # it must not be written to
    def __class__(self) -> Any:
        return type(self).__bases__[1]

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        """Make an optimizer from a configuration that `get_config` returned, and wrap it in the same way."""
        wrapped: Any = cls.__bases__[1]
        return cls._wrap(wrapped.from_config(config, custom_objects=custom_objects))


def subclassed(optimizer: Any, wrapper: type, added: Mapping[str, Any], wrap: Callable[[Any], Any]) -> Any:
    """Return an optimizer with the same state, of a class derived from `wrapper` and the optimizer's own class.

    The class keeps its name. `added` are attributes of the result; `wrap` wraps another optimizer in the same way.
    """
    base = type(optimizer)
    namespace = {"__module__": base.__module__, "__doc__": base.__doc__, "_wrap": staticmethod(wrap)}
    cls: Any = type(base.__name__, (wrapper, base), namespace)
    result = cls.__new__(cls)
    # The result shares the variables, and the lists of variables, so that no state is lost.
    vars(result).update(vars(optimizer))
    vars(result).update(added)
    return result
