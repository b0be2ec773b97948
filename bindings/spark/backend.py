"""Backends: they run the training of an estimator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from horovodlike.launcher.errors import UsageError
from horovodlike.spark import _driver
from horovodlike.spark.runner import run, run_elastic

__all__ = ["Backend", "SparkBackend"]


class Backend:
    """The interface that runs the training of an estimator. Your own one may start the ranks in another way."""

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """Run a function on all ranks; return its results by rank."""
        raise NotImplementedError

    def num_processes(self) -> int:
        """Return the number of ranks."""
        raise NotImplementedError


class SparkBackend(Backend):
    """Runs the training by :func:`horovodlike.spark.run`, or ``run_elastic`` if ``min_num_proc`` is among ``kwargs``.

    Args:
        num_proc: The number of ranks; ``spark.default.parallelism`` if None.
        env: Variables for the ranks.
        **kwargs: More arguments of the function that runs them.
    """

    def __init__(self, num_proc: int | None = None, env: Mapping[str, str] | None = None, **kwargs: Any) -> None:
        self._num_proc, self._env, self._kwargs = num_proc, dict(env or {}), kwargs

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """See :meth:`Backend.run`."""
        call = run_elastic if "min_num_proc" in self._kwargs else run
        variables = {**self._env, **(env or {})}
        return call(fn, args, kwargs, num_proc=self.num_processes(), env=variables, **self._kwargs)

    def num_processes(self) -> int:
        """See :meth:`Backend.num_processes`."""
        found = self._num_proc or _driver.find_cluster().default_parallelism
        if not found:
            raise UsageError(_driver.NO_NUM_PROC)
        return int(found)
