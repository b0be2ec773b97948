"""A job whose workers come and go with the nodes of the cluster: its calls, and its workers' logged values."""

from __future__ import annotations

import functools
import logging
import pickle
import queue as queues
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import ray

from horovodlike.launcher.errors import RankFailedError
from horovodlike.launcher.run import run
from horovodlike.ray.adapter import CLOSE_SECONDS, StartOptions, ends_with
from horovodlike.ray.callers import Callers, JobHosts
from horovodlike.ray.node_caller import NodeOptions
from horovodlike.ray.ray_logger import LogQueue
from horovodlike.ray.strategy import Demand, Reservation, offered, reserve

__all__ = ["ElasticAdapter", "ElasticOptions"]

_logger = logging.getLogger(__name__)
_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class ElasticOptions:
    """The limits of an elastic job.

    Attributes:
        max_workers: The most workers; None for as many as there is room for.
        reset_limit: How often the set of workers may change; None for any number of times.
        cooldown_range: The first and the longest back-off of a node where a worker has failed, in seconds; or None.
        elastic_timeout: How long the job waits for enough workers, in seconds.
        discovery: An object that says which nodes may be used; None for all.
    """

    max_workers: int | None = None
    reset_limit: int | None = None
    cooldown_range: Sequence[int] | None = None
    elastic_timeout: float = 600
    discovery: Any = None


class ElasticAdapter:
    """A job whose workers are processes that live as long as a call.

    One thread at a time may use it; another one may call :meth:`cancel` and :meth:`shutdown`, after which it is of no
    more use. It lives where :class:`StaticAdapter` does.
    """

    def __init__(self, demand: Demand, options: StartOptions, elastic: ElasticOptions) -> None:
        """Keep the arguments; ``demand`` has the fewest workers."""
        self._demand = demand
        self._options = options
        self._elastic = elastic
        self._executable: tuple[Any, ...] | None = None
        self._variables: dict[str, str] = {}
        self._busy = threading.RLock()  # held by start() and the calls; a callback of a call may call shutdown()
        self._is_shut_down = False
        self._reservation: Reservation | None = None  # while start() runs
        self._hosts: JobHosts | None = None  # while a call runs

    def start(
        self,
        executable_cls: Callable[..., Any] | None,
        executable_args: Sequence[Any] | None,
        executable_kwargs: Mapping[str, Any] | None,
        extra_env_vars: Mapping[str, Any] | None,
    ) -> None:
        """Wait until there is room for the fewest workers. They are started by the calls.

        Raises:
            TimeoutError: There was none in time.
            RuntimeError: Another thread has called :meth:`shutdown`.
        """
        if executable_cls is not None:
            self._executable = executable_cls, tuple(executable_args or ()), dict(executable_kwargs or {})
        cpus = str(max(1, int(self._demand.per_worker["CPU"])))  # Ray counts the processors of all workers of the node
        extra = {name: str(value) for name, value in (extra_env_vars or {}).items()}
        self._variables = {"OMP_NUM_THREADS": cpus, **extra}
        with self._alone(), ExitStack() as stack:
            self._reservation = reservation = reserve(self._demand)
            stack.callback(setattr, self, "_reservation", None)
            stack.callback(reservation.release)
            self._check()  # shutdown() may have come before there was something to release
            reservation.wait(time.monotonic() + self._elastic.elastic_timeout, "a greater elastic_timeout")

    def node(self) -> str:
        """Return the id of the Ray node of this process."""
        return str(ray.get_runtime_context().get_node_id())

    def run_remote(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Raise an error: the workers of an elastic job are not known before it ends."""
        raise NotImplementedError("run_remote() is not for elastic jobs: call run()")

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Raise an error, likewise."""
        raise NotImplementedError("execute_single() is not for elastic jobs: call execute()")

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        queue: LogQueue | None = None,
        poll: Callable[[], None] | None = None,
    ) -> list[Any]:
        """Call a function on each worker. See :meth:`StaticAdapter.run`."""
        if self._executable is None:
            return self._run(fn, args, kwargs, queue, poll)
        return self._run(_call_beside, (self._executable, functools.partial(fn, *args, **kwargs)), {}, queue, poll)

    def execute(
        self, fn: Callable[[Any], Any], queue: LogQueue | None = None, poll: Callable[[], None] | None = None
    ) -> list[Any]:
        """Call a function with an executable, which each worker makes for this call."""
        if self._executable is None:
            return self._run(fn, (None,), {}, queue, poll)
        return self._run(_call_with, (self._executable, fn), {}, queue, poll)

    def cancel(self) -> None:
        """End :meth:`start` or the call that runs soon, with a RuntimeError. May be called by any thread."""
        if (reservation := self._reservation) is not None:
            reservation.release()
        if (hosts := self._hosts) is not None:
            hosts.cancel()

    def shutdown(self) -> None:
        """End the job, and every later call. May be called again, and by any thread."""
        self._is_shut_down = True
        self.cancel()
        if self._busy.acquire(timeout=CLOSE_SECONDS):
            self._busy.release()
        else:
            kind = type(self._elastic.discovery).__name__
            why = "" if self._elastic.discovery is None else f"; the discovery {kind} may not have answered"
            _logger.warning("the job has not ended within %g s of shutdown()%s", CLOSE_SECONDS, why)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other threads from a start or a call, and :meth:`shutdown` waiting for its end."""
        if self._hosts is not None or not self._busy.acquire(blocking=False):
            raise RuntimeError("a call of this executor runs: wait until it has ended, or call shutdown()")
        try:
            self._check()
            yield
        finally:
            self._busy.release()

    def _check(self) -> None:
        if self._is_shut_down:
            raise RuntimeError("shutdown() has ended the job")

    def _run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        queue: LogQueue | None,
        poll: Callable[[], None] | None,
    ) -> list[Any]:
        with self._alone(), ExitStack() as stack:  # neither an error nor an interrupt keeps the rest from its end
            self._hosts = hosts = JobHosts(ray.util.get_node_ip_address())
            stack.callback(setattr, self, "_hosts", None)
            stack.callback(hosts.close)
            self._check()  # shutdown() may have come before there was something to cancel
            callers = self._callers(hosts)
            stack.callback(callers.close)
            pool = stack.enter_context(ThreadPoolExecutor(2, "horovodlike-ray"))
            stack.callback(hosts.cancel)
            stack.callback(callers.stop)
            job = pool.submit(self._launch, fn, args, kwargs, hosts)
            watch = pool.submit(callers.watch)

            def pass_on() -> None:
                _pass_on(hosts, queue)
                if poll is not None:
                    poll()

            with ends_with(pass_on):
                running: list[Future[Any]] = [job, watch]
                while not wait(running, _POLL_SECONDS, FIRST_COMPLETED).done:
                    pass_on()
        if job.exception() is not None:
            watch.result()  # of the two errors, its own is the cause
        return job.result()

    def _callers(self, hosts: JobHosts) -> Callers:
        options, elastic = self._options, self._elastic
        node = NodeOptions(hosts.key.hex(), hosts.address, hosts.port, options.start_timeout, self._variables)
        return Callers(self._demand, elastic.max_workers, hosts, node, options.placement_timeout, elastic.discovery)

    def _launch(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], hosts: JobHosts
    ) -> list[Any]:
        options, elastic, least = self._options, self._elastic, self._demand.workers
        try:
            return run(
                fn,
                tuple(args),
                dict(kwargs),
                least,
                start_timeout=options.start_timeout,
                network_interfaces=options.network_interface,
                gpus_per_rank=0 if options.share_gpus else int(self._demand.per_worker.get("GPU", 0)),
                host_discovery=hosts,
                min_np=least,
                max_np=elastic.max_workers,
                reset_limit=elastic.reset_limit,
                cooldown_range=elastic.cooldown_range,
                elastic_timeout=elastic.elastic_timeout,
            )
        except RankFailedError as error:
            if "enough resources" not in str(error):
                raise
            asked = f"at least {self._demand}"
            raise RankFailedError(f"{error} Asked for: {asked}; {offered()}", error.rank, error.exit_code) from None


def _pass_on(hosts: JobHosts, queue: LogQueue | None) -> None:
    """Append the values that the workers have logged to the queue of the callbacks."""
    while True:
        try:
            data = hosts.values.get_nowait()
        except queues.Empty:
            return
        if queue is not None:
            queue.put(pickle.loads(data))  # from a frame that was authenticated


def _call_beside(executable: tuple[Any, ...], fn: Callable[[], Any]) -> Any:
    """Call a function in a worker, beside an executable."""
    return _call_with(executable, lambda _: fn())


def _call_with(executable: tuple[Any, ...], fn: Callable[[Any], Any]) -> Any:
    """Make an executable in a worker, and call a function with it."""
    cls, args, kwargs = executable
    return fn(cls(*args, **kwargs))
