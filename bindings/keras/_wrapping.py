"""How an optimizer becomes a distributed one: an object of a subclass of its class, with its variables.

Here are also the arguments of a distributed optimizer, and how copies and pickles of it keep them.
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
    """The arguments of `DistributedOptimizer`, checked. The same on all ranks.

    A copy is the object itself, so that its groups are still those of the variables that are trained. A pickle has the
    ranks of the process set, which has to be registered where it is read.
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
    """The layers and variables whose gradients stay with their rank.

    A copy has the same layers and variables, and their copies where those have been made before in the same go. In a
    pickle layers are those that the pickle holds.
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
    """The methods that wrapped optimizers have in addition to those of the optimizer."""

    _wrap: Callable[[Any], Any]

    def _gradients(self) -> Any:
        """Return what reduces the gradients, here or in the optimizer inside."""
        raise NotImplementedError

    def register_local_var(self, var: Any) -> None:
        """Do not reduce the gradient of a variable over the ranks.

        Args:
            var: A variable that the optimizer trains, before the first step.
        """
        self._gradients().register_local(var)

    # Keras writes `optimizer.__class__` into a saved model. This property returns the class of the wrapped optimizer,
    # so that the model can be loaded where horovodlike is not installed.
    @property  # type: ignore[misc]  # it must not be written to
    def __class__(self) -> Any:
        return type(self).__bases__[1]

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        """Make an optimizer from what `get_config` returned, and wrap it in the same way."""
        wrapped: Any = cls.__bases__[1]
        return cls._wrap(wrapped.from_config(config, custom_objects=custom_objects))


def subclassed(optimizer: Any, wrapper: type, added: Mapping[str, Any], wrap: Callable[[Any], Any]) -> Any:
    """Return an optimizer of the same name and state, with methods of `wrapper` in front and these attributes.

    `wrap` does with another optimizer what is done with this one.
    """
    base = type(optimizer)
    namespace = {"__module__": base.__module__, "__doc__": base.__doc__, "_wrap": staticmethod(wrap)}
    cls: Any = type(base.__name__, (wrapper, base), namespace)
    result = cls.__new__(cls)
    # The result has the same variables and lists of them, so that no state is lost.
    vars(result).update(vars(optimizer))
    vars(result).update(added)
    return result
