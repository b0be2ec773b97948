"""How variables, models and optimizers are dealt with, which differs between Keras 3 and tf_keras."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, Protocol

import numpy as np

from horovodlike.keras._backends.module import is_tf_keras
from horovodlike.keras._options import Local, Options


class Gradients(Protocol):
    """The gradients of a distributed optimizer, on their way to the optimizer that it wraps."""

    options: Options
    local: Local

    def register_local(self, variable: Any) -> None:
        """Leave the gradient of a variable with its rank."""

    def forget(self) -> None:
        """Begin a step anew: drop what has been accumulated."""


class Objects(Protocol):
    """One of the two modules. An optimizer is any that `compile()` takes, loss scaling included."""

    @staticmethod
    def is_tensor(value: Any) -> bool:
        """Return whether a value is a tensor or a variable."""

    @staticmethod
    def to_tensor(value: Any) -> Any:
        """Return an array as a tensor."""

    @staticmethod
    def to_numpy(value: Any) -> np.ndarray[Any, Any]:
        """Return a tensor, a variable or a number as an array."""

    @staticmethod
    def read(variables: Sequence[Any]) -> list[np.ndarray[Any, Any]]:
        """Return the values of variables."""

    @staticmethod
    def write(variables: Sequence[Any], values: Sequence[np.ndarray[Any, Any]]) -> None:
        """Set variables to these values."""

    @staticmethod
    def is_built(optimizer: Any) -> bool:
        """Return whether an optimizer has the variables that it keeps for each of the model's."""

    @staticmethod
    def build(optimizer: Any, variables: Sequence[Any]) -> None:
        """Have an optimizer make these variables, if it has not."""

    @staticmethod
    def variables_of(optimizer: Any) -> list[Any]:
        """Return the variables of an optimizer."""

    @staticmethod
    def owner(optimizer: Any, slot: Any, variables: Sequence[Any]) -> Any:
        """Return the variable for which an optimizer keeps one of its own; None: there is none."""

    @staticmethod
    def innermost(optimizer: Any) -> Any:
        """Return the optimizer that trains, which loss scaling has inside."""

    @staticmethod
    def schedule_of(optimizer: Any) -> Any:
        """Return what sets the learning rate; None if it is a number that can be set."""

    @staticmethod
    def momenta(optimizer: Any, variables: Sequence[Any]) -> list[Any] | None:
        """Return the variables of a built optimizer that hold momenta of these; None if they cannot be found."""

    @staticmethod
    def forget_fit(model: Any) -> None:
        """Drop what Keras has kept of a `fit()` that was left."""

    @staticmethod
    def gradients_of(optimizer: Any) -> Gradients | None:
        """Return what reduces the gradients of an optimizer, or of the one inside it; None if nothing does."""

    @staticmethod
    def wrapped(optimizer: Any, options: Options, local: Local) -> Any:
        """Return an optimizer that does the same, with reduced gradients."""


objects: Objects = import_module(  # type: ignore[assignment]  # a module with these functions
    "horovodlike.keras._backends.tf_keras" if is_tf_keras else "horovodlike.keras._backends.keras_3"
)
