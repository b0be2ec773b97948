"""Handles of calls to servers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from horovodlike._engine import parameters


class Handle:
    """A call to servers that may not be complete. Any thread; several may wait.

    A handle may be dropped without a wait: its call continues. While more than 1024 such calls are not complete, a
    further call waits for the oldest one.
    """

    def __init__(self, calls: Sequence[int]) -> None:
        """Take over handles of the core."""
        self._calls: list[int] = list(calls)
        self._finish: list[Callable[[Any], Any]] = []
        self._result: Any = None
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def then(self, finish: Callable[[Any], Any]) -> Handle:
        """Have `finish` make the result from the one so far; for a handle that no caller has yet."""
        self._finish.append(finish)
        return self

    def done(self) -> bool:
        """Return whether the call is complete, successful or not: then `wait` does not wait."""
        return parameters.are_complete(self._calls)

    def wait(self, timeout: float | None = None) -> Any:
        """Wait until the servers have carried out the call, and return its result. It may be called again.

        Args:
            timeout: Seconds; None: no limit.

        Returns:
            For `receive` and `receive_rows`, the array or the list of arrays; for `tick` and the sending calls, None.

        Raises:
            TimeoutError: The call is not complete in time. It continues, and `wait` may be called again.
            HorovodInternalError: A server is lost; the message names it.
            ValueError: A server has rejected the call, or an update rule of the user has raised an error there.
        """
        if not self._lock.acquire(timeout=-1 if timeout is None else timeout):
            raise TimeoutError(f"the servers have not carried out the call within {timeout:g} s")
        try:
            if self._calls:
                self._wait(timeout)
            if self._error is not None:
                raise self._error
            while self._finish:
                self._result = self._finish.pop(0)(self._result)
            return self._result
        finally:
            self._lock.release()

    def _wait(self, timeout: float | None) -> None:
        try:
            complete = parameters.wait(self._calls, timeout)
        except (RuntimeError, ValueError, KeyError) as error:
            self._calls, self._error = [], error
            self._finish.clear()
            return
        if not complete:
            raise TimeoutError(f"the servers have not carried out the call within {timeout:g} s")
        self._calls = []

    def __del__(self) -> None:
        """Leave the calls to the core."""
        if getattr(self, "_calls", None):
            parameters.abandon(self._calls)
