"""The choice between Keras 3 and tf_keras, and the interface by which gradients are reduced on each Keras backend.

This process uses Keras 3, or tf_keras (Keras 2) if TF_USE_LEGACY_KERAS is set. The code for each backend of Keras is in
the binding of its framework, and the code for tf_keras in the TensorFlow binding. It is imported only when needed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any, Protocol

from horovodlike.process_set import ProcessSet
from horovodlike.weighting import Weight

# TensorFlow accepts these values as true. On another backend the variable is ignored: tf_keras has only TensorFlow.
is_tf_keras = os.environ.get("TF_USE_LEGACY_KERAS") in ("1", "true", "True") and os.environ.get(
    "KERAS_BACKEND", "tensorflow"
) in ("", "tensorflow")


def _imported(package: str) -> Any:
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        if error.name != "tf_keras":
            raise
        raise ImportError(
            "TF_USE_LEGACY_KERAS is set, and tf_keras (Keras 2) is not installed: pip install --no-deps tf_keras, of "
            "TensorFlow's version, or unset TF_USE_LEGACY_KERAS to use Keras 3"
        ) from error


keras = _imported("tf_keras" if is_tf_keras else "keras")

_OTHER = {
    False: ("tf_keras", "tf_keras (Keras 2)", "Keras 3", "set TF_USE_LEGACY_KERAS=1 in the environment of all ranks"),
    True: ("keras", "Keras 3", "tf_keras (Keras 2)", "unset TF_USE_LEGACY_KERAS, or make it with tf_keras"),
}


def check(given: Any, what: str) -> None:
    """Check that neither the class of an object nor a base class of it comes from the other Keras.

    Args:
        given: The object.
        what: The function or class that takes the object, for the message.

    Raises:
        TypeError: A class comes from the Keras that this process does not use.
    """
    package, other, this, remedy = _OTHER[is_tf_keras]
    if any(cls.__module__.partition(".")[0] == package for cls in type(given).__mro__):
        raise TypeError(f"{what} is for {this} here, and this {type(given).__name__} is of {other}: {remedy}")


class OfSameKeras:
    """The first base class of a callback, before Keras's own: it checks that the model is of the same Keras."""

    def set_model(self, model: Any) -> None:
        """Set the model that is trained.

        Raises:
            TypeError: The model is of the Keras that this process does not use.
        """
        check(model, f"horovodlike.keras's {type(self).__name__}")
        super().set_model(model)  # type: ignore[misc]  # Keras's class comes next


MODULES = {"tensorflow": "horovodlike.tensorflow._keras_backend", "torch": "horovodlike.torch._keras_backend"}
"""The supported backends of Keras, and for each the module that implements `Backend`."""


@dataclass(frozen=True)
class Reduction:
    """The options of a reduction of gradients, the same on all ranks.

    Attributes:
        op: Average or Sum.
        prescale: Multiplies each rank's gradients.
        postscale: Multiplies the results.
        compression: A compression class of the backend, such as `horovodlike.keras.Compression.none`.
        process_set: The ranks that take part.
        weight: The weight of this rank's gradients in this step; None: they are not weighted.
    """

    op: int
    prescale: float
    postscale: float
    compression: Any
    process_set: ProcessSet
    weight: Any = None


class RegionOperations(Protocol):
    """The collectives of a split layer, as `horovodlike.torch.nn._region` describes them, on tensors of the backend."""

    name: str
    place: int
    num_ranks: int
    process_set: ProcessSet

    def copy(self, whole: Any) -> Any:
        """Return a tensor, and sum its gradient over the ranks."""

    def sum(self, summand: Any) -> Any:
        """Return the sum of the ranks' tensors, which may be in the same memory."""

    def gather(self, part: Any) -> Any:
        """Return the ranks' tensors joined along the last dimension."""

    def split(self, whole: Any) -> Any:
        """Return this rank's part of the last dimension."""


class Backend(Protocol):
    """The interface of each module in `MODULES`.

    A gradient is a tensor of the backend, or, with TensorFlow, `tf.IndexedSlices`. For `reduce` it may also be None:
    this rank has no gradient.
    """

    Compression: Any

    @staticmethod
    def set_batch_weight(weight: Any) -> None:
        """Set the weight of this rank's gradients in the next step: see `horovodlike.weighting.set_batch_weight`."""

    @staticmethod
    def weight_of_step(weight: Weight, op: int, operation: str, alone: bool) -> Any:
        """Return this rank's weight in this step, for `Reduction`; None if gradients are not weighted.

        Args:
            weight: The argument of the optimizer.
            op: The reduction of the gradients.
            operation: The wrapper, for messages.
            alone: No other rank takes part, so that the weight must not be 0.

        Raises:
            ValueError: A weight cannot be used.
        """

    @staticmethod
    def reduce(
        reduction: Reduction,
        groups: Sequence[Sequence[int]],
        names: Sequence[str],
        gradients: Sequence[Any],
        like: Sequence[Any],
    ) -> list[Any]:
        """Return the reduced gradients.

        Args:
            reduction: The options.
            groups: Positions of gradients to reduce together, each in one group at most. If empty, the backend decides.
            names: The name of each gradient, equal on all ranks.
            gradients: A gradient for each name.
            like: The variables that the gradients belong to.

        Raises:
            Exception: A reduction failed or cannot be compiled. The type depends on the binding of the framework.
        """

    @staticmethod
    def is_sparse(gradient: Any) -> bool:
        """Return whether a gradient is sparse: has values for some of the rows only."""

    @staticmethod
    def densify(gradient: Any) -> Any:
        """Return a sparse gradient as a dense tensor."""

    @staticmethod
    def divided_by_size(gradient: Any, process_set: ProcessSet) -> Any:
        """Return a gradient, which may be sparse, divided by the number of ranks at the time when the step runs."""

    @staticmethod
    def is_tracing() -> bool:
        """Return whether a graph is being traced. It may run again after the ranks of the job have changed."""

    @staticmethod
    def translated() -> AbstractContextManager[None]:
        """Return a context that turns the backend's error for a broken job into a `HorovodInternalError`."""

    @staticmethod
    def region(layer: str, process_set: ProcessSet) -> RegionOperations:
        """Return the region of a new layer, whose class has the name `layer`."""

    @staticmethod
    def join() -> int:
        """Declare that this rank has no more data; return the rank that joined last."""


@lru_cache(maxsize=1)
def current() -> Backend:
    """Return the implementation of `Backend` for the backend that Keras uses.

    Raises:
        NotImplementedError: Keras uses a backend that is not in `MODULES`.
    """
    name = keras.backend.backend()
    if name not in MODULES:
        raise NotImplementedError(
            f"horovodlike.keras reduces gradients on the Keras backends {' and '.join(map(repr, MODULES))}, and Keras "
            f"uses {name!r}: set the environment variable KERAS_BACKEND to one of them"
        )
    return import_module(MODULES[name])  # type: ignore[return-value]  # a module with these functions


def with_those_alone(groups: Sequence[Sequence[int]], count: int) -> list[Sequence[int]]:
    """Return the groups that are not empty, and a group of one for each of `count` positions that is in no group."""
    grouped = {position for group in groups for position in group}
    return [*filter(None, groups), *([position] for position in range(count) if position not in grouped)]
