"""The adapter of a job in this process, or in an actor for a process that is connected through Ray Client."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import ray

from horovodlike.ray.adapter import CLOSE_SECONDS, ends_with
from horovodlike.ray.elastic_adapter import ElasticAdapter

__all__ = ["LocalAdapter", "RemoteAdapter"]

_POLL_SECONDS = 0.1
_CLOSE_SECONDS = CLOSE_SECONDS + 5.0
"""The time limit for an adapter in an actor to close: the adapter's own limit, and time for the call."""


class LocalAdapter:
    """An adapter in this process, which is in the cluster."""

    def __init__(self, kind: type, *arguments: Any) -> None:
        """Make it of a class and its arguments."""
        self._adapter = kind(*arguments)

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method, and return its result."""
        return getattr(self._adapter, method)(*arguments)

    def call_and_poll(self, method: str, arguments: tuple[Any, ...], poll: Callable[[], None]) -> Any:
        """Call a method, and meanwhile a function again and again; return the result of the method."""
        return getattr(self._adapter, method)(*arguments, poll)

    def close(self) -> None:
        """End the job, and release all resources. May be called by any thread."""
        self._adapter.shutdown()


class RemoteAdapter:
    """An adapter in an actor of the cluster, for a process that is connected through Ray Client."""

    def __init__(self, kind: type, *arguments: Any) -> None:
        """Make it of a class and its arguments."""
        self._is_elastic = kind is ElasticAdapter
        # Two threads: one may wait for workers while the other ends them.
        self._actor = ray.remote(num_cpus=0, max_concurrency=2)(kind).remote(*arguments)

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method, and return its result."""
        with self._result(method, arguments) as result:
            return ray.get(result)

    def call_and_poll(self, method: str, arguments: tuple[Any, ...], poll: Callable[[], None]) -> Any:
        """Call a method, and meanwhile a function again and again; return the result of the method."""
        with self._result(method, arguments) as result, ends_with(poll):
            while not ray.wait([result], timeout=_POLL_SECONDS)[0]:
                poll()
            return ray.get(result)

    @contextlib.contextmanager
    def _result(self, method: str, arguments: tuple[Any, ...]) -> Iterator[Any]:
        """Begin a call; if the caller stops waiting for it, end the call of an elastic job."""
        result = getattr(self._actor, method).remote(*arguments)
        try:
            yield result
        except BaseException:
            if self._is_elastic:
                self._give_up(result)
            raise

    def _give_up(self, result: Any) -> None:
        end = time.monotonic() + _CLOSE_SECONDS
        with contextlib.suppress(Exception):  # the first error says more
            while time.monotonic() < end and not ray.wait([result], timeout=_POLL_SECONDS)[0]:
                ray.get(self._actor.cancel.remote(), timeout=_CLOSE_SECONDS)  # again, if it has come before the call

    def close(self) -> None:
        """End the job, and release all resources. May be called by any thread."""
        # Killed, the actor takes its workers with it, but its placement group stays until the connection ends.
        if not ray.is_initialized():
            return  # all of it has ended with the connection
        with contextlib.suppress(ConnectionError):
            with contextlib.suppress(ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
                ray.get(self._actor.shutdown.remote(), timeout=_CLOSE_SECONDS)
            ray.kill(self._actor)
