"""The interface of Keras's backends: how gradients of the backend's own type are reduced."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from horovodlike.keras._backends.module import keras
from horovodlike.process_set import ProcessSet

MODULES = {"tensorflow": "horovodlike.keras._backends.tensorflow", "torch": "horovodlike.keras._backends.torch"}
"""The backends whose gradients can be reduced, and where they are."""


@dataclass(frozen=True)
class Reduction:
    """How gradients are reduced. The same on all ranks.

    Attributes:
        op: Average or Sum.
        prescale: Multiplies each rank's gradients.
        postscale: Multiplies the results.
        compression: A class of the backend's, as `horovodlike.keras.Compression.none`.
        process_set: The ranks that take part.
    """

    op: int
    prescale: float
    postscale: float
    compression: Any
    process_set: ProcessSet


class Backend(Protocol):
    """One of `MODULES`. A gradient is a tensor of the backend's, or None."""

    Compression: Any

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
            reduction: What to do.
            groups: Positions that belong together, each in one group at most. Without any the backend decides.
            names: The name of each gradient, equal on all ranks.
            gradients: One for each name.
            like: The variables whose gradients they are.

        Raises:
            Exception: A reduction failed, or cannot be compiled; as collectives of the backend's binding do.
        """

    @staticmethod
    def is_sparse(gradient: Any) -> bool:
        """Return whether a gradient has rows only for some positions."""

    @staticmethod
    def densify(gradient: Any) -> Any:
        """Return a sparse gradient as a plain tensor."""

    @staticmethod
    def divided_by_size(gradient: Any, process_set: ProcessSet) -> Any:
        """Return a gradient, which may be sparse, divided by the number of ranks when the step runs."""

    @staticmethod
    def is_tracing() -> bool:
        """Return whether what is called now becomes part of a graph, which other jobs may run as well."""

    @staticmethod
    def translated() -> AbstractContextManager[None]:
        """Return a context that raises a `HorovodInternalError` for what the backend makes of a broken job."""

    @staticmethod
    def join() -> int:
        """Say that this rank has no more data; return the rank that said so last."""


@lru_cache(maxsize=1)
def current() -> Backend:
    """Return the backend that Keras uses.

    Raises:
        NotImplementedError: Gradients of this backend cannot be reduced.
    """
    name = keras.backend.backend()
    if name not in MODULES:
        raise NotImplementedError(
            f"horovodlike.keras reduces gradients on the Keras backends {' and '.join(map(repr, MODULES))}, and Keras "
            f"uses {name!r}: set the environment variable KERAS_BACKEND to one of them"
        )
    return importlib.import_module(MODULES[name])  # type: ignore[return-value]  # a module with these functions


def with_those_alone(groups: Sequence[Sequence[int]], count: int) -> list[Sequence[int]]:
    """Return the groups that have members, and one for each of `count` positions that is in none of them."""
    grouped = {position for group in groups for position in group}
    return [*filter(None, groups), *([position] for position in range(count) if position not in grouped)]
