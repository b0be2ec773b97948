"""Messages about a launcher's waits: none in a start without delay, and each only once."""

import sys
import time
from collections.abc import Callable
from typing import ClassVar

_QUIET_S = 3.0


def print_message(text: str) -> None:
    """Print a message of the launcher before there are ranks, whose output other messages are mixed with."""
    print(f"hvdrun: {text}", file=sys.stderr, flush=True)


class Waiting:
    """The messages of one wait: after the first seconds, one whenever its object changes.

    Attributes:
        hint: The end of the first message of each wait: facts that the launcher has found out by itself about its node.
    """

    hint: ClassVar[str] = ""

    def __init__(
        self,
        say: Callable[[str], None] = print_message,
        quiet: float = _QUIET_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin to wait.

        Args:
            say: Prints a message.
            quiet: How long nothing is printed, in seconds.
            clock: Returns the time, in seconds.
        """
        self._say, self._clock = say, clock
        self._loud_at = clock() + quiet
        self._said: str | None = None

    def note(self, what: str) -> None:
        """Name the object of the wait, unless that was printed already, or it is too early."""
        if what != self._said and self._clock() >= self._loud_at:
            self._say(what if self._said else what + self.hint)
            self._said = what

    def end(self, what: str) -> None:
        """Say that the wait is over, if it was mentioned."""
        if self._said is not None:
            self._say(what)

    def next_look(self, deadline: float) -> float:
        """Return when to call :meth:`note` again if nothing happens before, and at the latest the deadline."""
        return min(deadline, max(self._loud_at, self._clock() + 1.0))
