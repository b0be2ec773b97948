"""The errors of a call's ranks: which of them is the cause, and how long the other ranks may take to end."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from ray.exceptions import RayActorError

from horovodlike.errors import HorovodInternalError, JobBrokenError, RendezvousError, ShutDownError

__all__ = ["SECONDS_TO_EXPLAIN", "Failures", "described", "first_line", "is_consequence"]

_SECONDS_BEFORE_LEAVING = 1.0
"""How long the ranks have to fail alike, before one that has failed leaves the job of those that have not."""
_SECONDS_TO_FOLLOW = 10.0
"""How long the other ranks have to end after one has failed."""
SECONDS_TO_EXPLAIN = 30.0
"""How long, if all that is known is that ranks have lost another one: Ray may need this to notice that a node died."""


@dataclass
class Failures:
    """The errors of a call's ranks, in the order in which they came."""

    errors: dict[int, Exception] = field(default_factory=dict)
    _first: float = 0.0
    _has_left: bool = False

    def __bool__(self) -> bool:
        return bool(self.errors)

    def add(self, rank: int, error: Exception) -> None:
        """Add the error of a rank."""
        self._first = self._first or time.monotonic()
        self.errors[rank] = error

    def cause(self) -> tuple[int, Exception]:
        """Return the rank that has failed first, and its error: a lost worker before errors of functions."""

        def weight(item: tuple[int, Exception]) -> int:
            return 0 if isinstance(item[1], RayActorError) else 1 + is_consequence(item[1])

        return min(self.errors.items(), key=weight)  # of equal ones, the first

    def is_over(self) -> bool:
        """Return whether the other ranks have had their time to end."""
        if not self.errors:
            return False
        limit = SECONDS_TO_EXPLAIN if is_consequence(self.cause()[1]) else _SECONDS_TO_FOLLOW
        return time.monotonic() - self._first > limit

    def may_leave(self) -> bool:
        """Return True once: when it is time for the ranks that have failed to leave the job."""
        if not self.errors or self._has_left or time.monotonic() - self._first < _SECONDS_BEFORE_LEAVING:
            return False
        self._has_left = True
        return True

    def end_the_job(self) -> bool:
        """Return whether the engines cannot be used any more: ranks have left, or say that the job is broken."""
        broken = (JobBrokenError, ShutDownError)
        return self._has_left or any(isinstance(described(error), broken) for error in self.errors.values())


def is_consequence(error: Exception) -> bool:
    """Return whether an error usually follows from the failure of another rank."""
    return isinstance(described(error), HorovodInternalError | RendezvousError)


def described(error: Exception) -> Exception:
    """Return the error of a function as it was raised, without Ray's traceback around it."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, Exception) else error


def first_line(error: Exception) -> str:
    """Return the class of an error and the first line of its message."""
    lines = str(described(error)).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
