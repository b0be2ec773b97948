"""A job of a fixed number of workers: its start, its calls, and how they fail."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from horovodlike.launcher.errors import RankFailedError, counted, listed
from horovodlike.ray.failures import SECONDS_TO_EXPLAIN, Failures, described, first_line, is_consequence
from horovodlike.ray.ray_logger import LogQueue
from horovodlike.ray.rendezvous import WorkerJob
from horovodlike.ray.strategy import Demand, Reservation, kill, offered, order_by_node, reserve
from horovodlike.ray.worker import BaseHorovodWorker, WorkerFacts

__all__ = ["CLOSE_SECONDS", "StartOptions", "StaticAdapter", "ends_with"]

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_POLL_SECONDS = 0.1
CLOSE_SECONDS = 20.0
"""How long ``shutdown()`` waits for the workers and actors that it has ended."""


@dataclass(frozen=True)
class StartOptions:
    """The time limits and environment of a job.

    Attributes:
        start_timeout: How long ``init()`` waits for all ranks, in seconds.
        placement_timeout: How long :meth:`StaticAdapter.start` waits for resources and workers, in seconds.
        network_interface: The network between the ranks, or None.
        share_gpus: Whether each worker sees all GPUs that the job has on its node.
    """

    start_timeout: float
    placement_timeout: float
    network_interface: str | None = None
    share_gpus: bool = True


@dataclass(frozen=True)
class _Worker:
    handle: ActorHandle[BaseHorovodWorker]
    facts: WorkerFacts

    def __str__(self) -> str:
        return f"process {self.facts.pid} on node {self.facts.node} ({self.facts.address})"


class StaticAdapter:
    """A job that consists of the same workers from :meth:`start` to :meth:`shutdown`.

    One thread at a time may use it; another one may call :meth:`shutdown`, after which it is of no more use. It lives
    in the process of the driver, or in an actor of its own if the driver is connected through Ray Client.
    """

    def __init__(self, demand: Demand, options: StartOptions) -> None:
        """Keep the arguments; nothing is started."""
        self._demand = demand
        self._options = options
        self._workers: list[_Worker] = []
        self._reservation: Reservation | None = None
        self._session: str | None = None
        self._job: WorkerJob | None = None
        self._pending: dict[Any, int] = {}  # the ranks that have not answered the last call
        self._trouble = ""  # why no more calls can be made
        self._is_shut_down = False
        self._starting = threading.RLock()  # held by start()

    def start(
        self,
        executable_cls: Callable[..., Any] | None,
        executable_args: Sequence[Any] | None,
        executable_kwargs: Mapping[str, Any] | None,
        extra_env_vars: Mapping[str, Any] | None,
    ) -> None:
        """Reserve resources, start the workers, and tell each its rank. If that fails, nothing is left."""
        extra = {name: str(value) for name, value in (extra_env_vars or {}).items()}
        with self._starting:
            try:
                self._set_up(extra)
                if executable_cls is not None:
                    task = executable_cls, executable_args, executable_kwargs
                    self._collect([worker.handle.start_executable.remote(*task) for worker in self._workers])
                self._check_shutdown()
            except BaseException:
                with contextlib.suppress(Exception):  # the first error says more
                    self._end()
                raise

    def _set_up(self, extra: Mapping[str, str]) -> None:
        options, deadline = self._options, time.monotonic() + self._options.placement_timeout
        self._session = _session()
        self._reservation = reservation = reserve(self._demand)
        self._check_shutdown()  # shutdown() may have come before there was something to release
        reservation.wait(deadline)
        self._workers = workers = _start_workers(self._demand, reservation, deadline)
        self._check_shutdown()
        facts = [worker.facts for worker in workers]
        self._job = job = WorkerJob.open(
            [each.node for each in facts], "RayExecutor", options.start_timeout, options.network_interface
        )
        settings = zip(workers, job.variables, visible_gpus(facts, options.share_gpus), strict=True)
        self._collect(
            [
                worker.handle.set_up.remote(rank, {**variables, **({_VISIBLE: seen} if seen else {}), **extra})
                for rank, (worker, variables, seen) in enumerate(settings)
            ]
        )

    def node(self) -> str:
        """Return the id of the Ray node of this process."""
        return str(ray.get_runtime_context().get_node_id())

    def run_remote(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Begin a call of a function on each worker. Returns a reference to each result, by rank."""
        self._check()
        task = ray.put((fn, tuple(args), dict(kwargs)))
        return [worker.handle.call.remote(task) for worker in self._workers]

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        queue: LogQueue | None = None,
        poll: Callable[[], None] | None = None,
    ) -> list[Any]:
        """Call a function on each worker. Returns the results by rank.

        Args:
            fn: The function.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            queue: Where rank 0 logs.
            poll: A function to call again and again meanwhile, and once at the end.
        """
        return self._with_queue(queue, poll, lambda: self.run_remote(fn, args, kwargs))

    def execute(
        self, fn: Callable[[Any], Any], queue: LogQueue | None = None, poll: Callable[[], None] | None = None
    ) -> list[Any]:
        """Call a function with the executable of each worker; otherwise as :meth:`run`."""

        def begin() -> list[Any]:
            task = ray.put(fn)
            return [worker.handle.execute.remote(task) for worker in self._workers]

        return self._with_queue(queue, poll, begin)

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Call a function with the executable of rank 0. Returns its result."""
        self._check()
        return self._collect([self._workers[0].handle.execute.remote(fn)])[0]

    def shutdown(self) -> None:
        """Close the server, end the workers and release their resources. May be called again, and at any time."""
        self._is_shut_down = True
        self._end()  # a start() that waits for it fails, and ends the workers that it has started meanwhile
        if self._starting.acquire(timeout=CLOSE_SECONDS):
            self._starting.release()

    def _end(self) -> None:
        workers, reservation, job = self._workers, self._reservation, self._job
        self._workers, self._reservation, self._job, self._pending, self._trouble = [], None, None, {}, ""
        with contextlib.ExitStack() as stack:  # one error does not keep the rest from its end
            if self._session == _session():  # else Ray has ended all with the session
                if reservation is not None:
                    stack.callback(reservation.release)
                for worker in workers:
                    stack.callback(kill, worker.handle)
            if job is not None:
                job.close()

    def _check_shutdown(self) -> None:
        if self._is_shut_down:
            raise RuntimeError("shutdown() has ended the job")

    def _check(self) -> None:
        if self._trouble:
            raise RuntimeError(f"{self._trouble}; call shutdown(), and then start() for new workers")
        if not self._workers:
            raise RuntimeError("there are no workers: call start() first")
        pending = dict(self._pending)
        if pending and (running := ray.wait(list(pending), num_returns=len(pending), timeout=0)[1]):
            where = listed("rank", [pending[call] for call in running])
            raise RuntimeError(
                f"an earlier call, which was given up, still runs on {where}: wait until it ends, or call shutdown(), "
                "and then start() for new workers"
            )

    def _with_queue(
        self, queue: LogQueue | None, poll: Callable[[], None] | None, begin: Callable[[], list[Any]]
    ) -> list[Any]:
        self._check()
        chief = self._workers[0].handle
        if queue is not None:
            self._collect([chief.set_queue.remote(queue)])
        with ends_with(poll):
            try:
                return self._collect(begin(), poll)
            finally:
                if queue is not None:
                    with contextlib.suppress(Exception):  # the first error, or an interrupt, says more
                        chief.set_queue.remote(None)

    def _collect(self, calls: Sequence[Any], poll: Callable[[], None] | None = None) -> list[Any]:
        """Return the results of calls of ranks 0, 1 and so on; if one fails, raise the error of the first cause."""
        workers = self._workers  # another thread's shutdown() ends them
        self._pending = pending = {call: rank for rank, call in enumerate(calls)}
        results: list[Any] = [None] * len(calls)
        failures = Failures()
        while pending and not failures.is_over():
            patience = _POLL_SECONDS if poll is not None or failures else None
            ended, _ = ray.wait(list(pending), timeout=patience)
            for call in ended:
                rank = pending.pop(call)
                try:
                    results[rank] = ray.get(call)
                except Exception as error:
                    failures.add(rank, error)
                    if isinstance(error, RayActorError):
                        self._lost(rank, error)
            if poll is not None:
                poll()
            self._check_shutdown()
            if pending and failures.may_leave():
                _leave([workers[rank] for rank in failures.errors], failures.cause()[1])
        if failures:
            if failures.end_the_job():  # those that have not failed would communicate with those that have
                _leave(workers[: len(calls)], failures.cause()[1])
            self._raise(failures, workers, sorted(pending.values()))
        return results

    def _lost(self, rank: int, error: RayActorError) -> None:
        reason = f"rank {rank} is lost: {first_line(error)}"
        self._trouble = self._trouble or reason
        if self._job is not None:
            self._job.server.exited(rank, reason)

    def _raise(self, failures: Failures, workers: Sequence[_Worker], silent: Sequence[int]) -> None:
        rank, error = failures.cause()
        if isinstance(error, RayActorError):
            raise RankFailedError(f"rank {rank} is lost, {workers[rank]}: {error}", rank, -1) from error
        if silent and is_consequence(error):
            where = "; ".join(f"rank {each}: {workers[each]}" for each in silent)
            self._trouble = f"{listed('rank', silent)} did not answer when others had failed"
            raise RankFailedError(
                f"{listed('rank', silent)} of {len(workers)} did not answer for {SECONDS_TO_EXPLAIN:g} s after "
                f"rank {rank} had failed with {first_line(error)} ({where})",
                silent[0],
                -1,
            ) from error
        raise error


def _leave(workers: Iterable[_Worker], error: Exception) -> None:
    for worker in workers:
        worker.handle.leave.remote(described(error))  # does nothing if the worker is lost


def _session() -> str | None:
    """Return the id of this process's connection to Ray, None without one."""
    return str(ray.get_runtime_context().get_job_id()) if ray.is_initialized() else None


@contextlib.contextmanager
def ends_with(poll: Callable[[], None] | None) -> Iterator[None]:
    """Call a function at the end, too; that its queue is lost does not replace another error."""
    try:
        yield
    except BaseException:
        if poll is not None:
            with contextlib.suppress(RayActorError):
                poll()
        raise
    if poll is not None:
        poll()


def visible_gpus(workers: Sequence[WorkerFacts], share: bool) -> list[str]:
    """Return the GPUs that each worker sees, as a value of ``CUDA_VISIBLE_DEVICES``; empty if it has none. Pure.

    Args:
        workers: The workers by rank.
        share: Whether a worker sees the GPUs of all workers of its node: the first one of each in the order of their
            local ranks, then the second ones. So the one with its local rank is its own. Else it sees its own only.
    """
    given: dict[str, list[tuple[str, ...]]] = {}
    for worker in workers:
        given.setdefault(worker.node, []).append(worker.gpus)
    seen = {
        node: dict.fromkeys(gpu for turn in itertools.zip_longest(*each) for gpu in turn if gpu is not None)
        for node, each in given.items()
    }
    return [",".join(seen[worker.node] if share and worker.gpus else worker.gpus) for worker in workers]


def _start_workers(demand: Demand, reservation: Reservation, deadline: float) -> list[_Worker]:
    """Start the workers, and wait until all run. Returns them by rank; workers of one node are neighbours.

    Raises:
        RankFailedError: A worker died before it ran.
        TimeoutError: Some did not run in time.
    """
    resources = {"num_cpus": demand.per_worker.get("CPU", 0), "num_gpus": demand.per_worker.get("GPU", 0)}
    actor = ray.remote(**resources)(BaseHorovodWorker)
    handles = [
        actor.options(
            scheduling_strategy=PlacementGroupSchedulingStrategy(reservation.group, bundle),
        ).remote(number if reservation.is_own else None, demand.workers)
        for number, bundle in enumerate(reservation.bundles)
    ]
    try:
        facts = _facts_of(handles, demand, deadline)
    except BaseException:
        for handle in handles:
            kill(handle)
        raise
    return [_Worker(handles[position], facts[position]) for position in order_by_node([each.node for each in facts])]


def _facts_of(handles: Sequence[Any], demand: Demand, deadline: float) -> list[WorkerFacts]:
    pending = {handle.facts.remote(): number for number, handle in enumerate(handles)}
    facts: dict[int, WorkerFacts] = {}
    while pending:
        ended, _ = ray.wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
        if not ended:
            raise TimeoutError(
                f"{counted(len(pending), 'worker')} of {len(handles)} did not start in time; asked for: {demand}; "
                f"{offered()}. See Ray's logs for why, whether a node was lost, and raise placement_group_timeout_s in "
                "RayExecutor.create_settings() if they only need longer"
            )
        for call in ended:
            number = pending.pop(call)
            try:
                facts[number] = ray.get(call)
            except RayActorError as error:
                raise RankFailedError(
                    f"worker {number} of {len(handles)} died when it started: {error}", number, -1
                ) from error
    return [facts[number] for number in range(len(handles))]
