"""``RayExecutor``: functions on workers of a Ray cluster that form a job, with Horovod's signatures."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.queue import Empty, Queue
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from horovodlike import config
from horovodlike.compat import named
from horovodlike.launcher.options import setting_variables, take_elastic
from horovodlike.ray.adapter import StartOptions, StaticAdapter
from horovodlike.ray.elastic_adapter import ElasticAdapter, ElasticOptions
from horovodlike.ray.proxies import LocalAdapter, RemoteAdapter
from horovodlike.ray.strategy import Demand, kill

__all__ = ["MiniSettings", "RayExecutor", "at_least", "warn_of"]


@dataclass
class MiniSettings:
    """The settings of a job, as :meth:`RayExecutor.create_settings` makes them.

    Attributes:
        nics: The network between the ranks: names of interfaces; None for the one by which they reach the driver.
        verbose: Has no effect.
        timeout_s: How long ``init()`` waits for all ranks, in seconds.
        placement_group_timeout_s: How long ``start()`` waits for resources and workers, in seconds.
        ssh_identity_file: Has no effect, as Ray starts the workers.
    """

    nics: str | Iterable[str] | None = None
    verbose: int = 1
    timeout_s: float = 300
    placement_group_timeout_s: float = 100
    ssh_identity_file: str | None = None


class RayExecutor:
    """A job on a Ray cluster.

    Either ``num_workers`` is given: as few nodes as possible are used; or ``num_hosts``: as many nodes run
    ``num_workers_per_host`` workers each; or ``min_workers``: the job is elastic, see below. Ranks of one node are
    neighbours. One thread at a time may use an executor.

    In an elastic job, workers use all free resources, up to ``max_workers``. They live as long as a call of :meth:`run`
    or :meth:`execute`: during it, nodes may come and be lost, and workers too, and the training continues from its last
    commit. The function calls ``init()`` and a function that ``elastic.run`` has wrapped.

    Args:
        settings: The result of :meth:`create_settings`.
        num_workers: The number of workers.
        num_hosts: The number of nodes, instead of ``num_workers``.
        num_workers_per_host: The number of workers on each of these nodes.
        cpus_per_worker: Ray's CPUs for each worker.
        use_gpu: Whether workers get GPUs.
        gpus_per_worker: GPUs for each worker; None for one. Needs ``use_gpu``.
        use_current_placement_group: With ``num_workers``, in a task or actor that runs in a placement group: whether
            the workers run in that group, too. Otherwise a group is made, and removed by :meth:`shutdown`.
        min_workers: The fewest workers of an elastic job, below which it waits for more. The other arguments of elastic
            jobs have no effect without it.
        max_workers: The most workers of an elastic job; None for as many as there is room for.
        reset_limit: How often the set of workers may change; None for any number of times.
        cooldown_range: The least and the most seconds without workers for a node on which a worker has failed.
        elastic_timeout: How long to wait for ``min_workers``, at the start and later, in seconds.
        override_discovery: Whether an elastic job may use all nodes; False: those that ``settings.discovery`` names.
        share_gpus: Whether a worker sees all GPUs that the job has on its node, in the order of local ranks, as scripts
            expect that call ``torch.cuda.set_device(hvd.local_rank())``. False: it sees its own only, so device 0.

    Raises:
        ValueError: The arguments contradict each other.
    """

    @classmethod
    def create_settings(
        cls,
        timeout_s: float = 30,
        ssh_identity_file: str | None = None,
        ssh_str: str | None = None,
        placement_group_timeout_s: float = 100,
        nics: str | Iterable[str] | None = None,
        verbose: int = 1,
    ) -> MiniSettings:
        """Return settings for the constructor.

        Args:
            timeout_s: How long ``init()`` waits for all ranks, in seconds.
            ssh_identity_file: Has no effect: Ray starts the workers.
            ssh_str: Has no effect.
            placement_group_timeout_s: How long :meth:`start` waits for resources and workers, in seconds.
            nics: The network between the ranks: names of interfaces, or networks such as ``10.0.0.0/8``.
            verbose: Has no effect.
        """
        warn_of({"ssh_identity_file": ssh_identity_file, "ssh_str": ssh_str})
        return MiniSettings(nics, verbose, timeout_s, placement_group_timeout_s, ssh_identity_file)

    def __init__(
        self,
        settings: Any,
        num_workers: int | None = None,
        num_hosts: int | None = None,
        num_workers_per_host: int = 1,
        cpus_per_worker: int = 1,
        use_gpu: bool = False,
        gpus_per_worker: int | None = None,
        use_current_placement_group: bool = True,
        min_workers: int | None = None,
        max_workers: int | None = None,
        reset_limit: int | None = None,
        cooldown_range: Sequence[int] | None = None,
        elastic_timeout: float = 600,
        override_discovery: bool = True,
        *,
        share_gpus: bool = True,
    ) -> None:
        """Check the arguments; nothing is started."""
        if gpus_per_worker and not use_gpu:
            raise ValueError(
                "gpus_per_worker is set, but use_gpu is False. use_gpu must be True if gpus_per_worker is set."
            )
        if max_workers and not min_workers:
            raise ValueError("`max_workers` provided without any positive `min_workers`")
        if min_workers and num_workers:
            raise ValueError("Both `min_workers` and `num_workers` provided.")
        if min_workers and num_hosts:
            raise ValueError("Both `min_workers` and `num_hosts` provided.")
        is_elastic = min_workers is not None and not num_workers and not num_hosts
        if not is_elastic and (num_workers is None) == (num_hosts is None):
            raise ValueError("Either num_workers or num_hosts must be given, and not both.")
        per_worker = {"CPU": at_least(0, "cpus_per_worker", cpus_per_worker)}
        if use_gpu:
            per_worker["GPU"] = at_least(1, "gpus_per_worker", 1 if gpus_per_worker is None else gpus_per_worker)
        if not any(per_worker.values()):
            raise ValueError("cpus_per_worker must be >= 1 where workers have no GPU: Got 0.")
        workers = at_least(1, "num_workers", num_workers) if num_workers is not None else 0
        if num_hosts is not None:
            hosts = at_least(1, "num_hosts", num_hosts)
            workers = hosts * at_least(1, "num_workers_per_host", num_workers_per_host)
        nics = settings.nics
        options = StartOptions(
            start_timeout=settings.timeout_s,
            placement_timeout=settings.placement_group_timeout_s,
            network_interface=nics if nics is None or isinstance(nics, str) else ",".join(nics),
            share_gpus=share_gpus,
        )
        self._kind: tuple[Any, ...] = (
            StaticAdapter,
            Demand(workers, per_worker, num_hosts, use_current_placement_group),
            options,
        )
        if is_elastic:
            least = at_least(1, "min_workers", min_workers)
            discovery = None if override_discovery else _discovery(settings)
            elastic = ElasticOptions(
                None if max_workers is None else at_least(least, "max_workers", max_workers),
                reset_limit,
                cooldown_range,
                elastic_timeout,
                discovery,
            )
            given = {"reset_limit": reset_limit, "cooldown_range": cooldown_range}
            take_elastic(given, True, config.load(setting_variables({"elastic_timeout": elastic_timeout})))
            self._kind = ElasticAdapter, Demand(least, per_worker, use_current=False), options, elastic
        self._adapter: LocalAdapter | RemoteAdapter | None = None

    def start(
        self,
        executable_cls: Callable[..., Any] | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, Any] | None = None,
    ) -> None:
        """Start the workers; of an elastic job, wait until there is room for the fewest, for ``elastic_timeout``.

        May be called again after :meth:`shutdown`.

        Args:
            executable_cls: A class, of which each worker makes an object for :meth:`execute`.
            executable_args: The positional arguments of the class.
            executable_kwargs: The keyword arguments of the class.
            extra_env_vars: Environment variables of the workers; they replace those that this class sets.

        Raises:
            TimeoutError: The resources were not available, or the workers did not start, within
                ``placement_group_timeout_s``; of an elastic job, within ``elastic_timeout``. The message says what
                was asked for. Nothing is left of the job.
            RankFailedError: A worker died when it started. Nothing is left of the job.
            RuntimeError: The workers have been started already, or another thread has called :meth:`shutdown`.
        """
        if self._adapter is not None:
            raise RuntimeError("the workers have been started already; call shutdown() before the next start()")
        is_client = ray.util.client.ray.is_connected()  # then this process is not in the cluster, and has no server
        adapter: LocalAdapter | RemoteAdapter = (RemoteAdapter if is_client else LocalAdapter)(*self._kind)
        self._adapter = adapter  # at once, so that another thread's shutdown() finds it
        executable = None if executable_cls is None else named(executable_cls)
        try:
            adapter.call("start", executable, executable_args, executable_kwargs, extra_env_vars)
        except BaseException as error:
            is_shut_down = self._adapter is not adapter
            if not is_shut_down:
                self._adapter = None
            with contextlib.suppress(Exception):  # the first error says more
                adapter.close()
            if is_shut_down and isinstance(error, Exception):
                raise RuntimeError("shutdown() has ended the start") from error
            raise

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callable[[Any], Any]] | None = None,
    ) -> list[Any]:
        """Call a function on each worker, and wait for the results.

        If the function raises on some ranks of a static job, the others have ten seconds to end. Then they are left
        alone, as they are if this call is interrupted or a callback raises. As long as they run, the next call is a
        RuntimeError that names them; :meth:`shutdown` ends them. The workers of an elastic job end with the call.

        Args:
            fn: The function. It calls ``init()`` if it wants to communicate; each call of :meth:`run` may do so.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            callbacks: Functions of this process that receive each value that rank 0 gives to
                :func:`horovodlike.ray.log`.

        Returns:
            The results, by rank; in an elastic job, the last members' results.

        Raises:
            RankFailedError: A worker died. The message names its rank, its node and Ray's reason. The executor can be
                shut down and started again.
            ray.exceptions.RayTaskError: The function raised an error, of which this is a subclass, too; or its result
                cannot be pickled. Of the errors of several ranks, the one that is no consequence of others.
            RuntimeError: There are no workers, some still run an earlier call, or :meth:`shutdown` has ended this one.
            Exception: In an elastic job, the error of the function on the worker that failed first, after attempts
                to replace it; its cause is a ``horovodlike.launcher.run.RemoteTraceback``. Also HostsError, a
                RuntimeError: no node can take part.
        """
        return self._with_callbacks("run", (named(fn), tuple(args or ()), dict(kwargs or {})), callbacks)

    def run_remote(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Begin a call of a function on each worker, and return at once.

        Nothing watches these calls: if a worker fails, ``ray.get`` raises Ray's error.

        Returns:
            The references for ``ray.get``, by rank.

        Raises:
            NotImplementedError: The job is elastic.
        """
        references: list[Any] = self._started().call("run_remote", named(fn), tuple(args or ()), dict(kwargs or {}))
        return references

    def execute(self, fn: Callable[[Any], Any], callbacks: Sequence[Callable[[Any], Any]] | None = None) -> list[Any]:
        """Call a function with each worker's object of ``executable_cls``, or None; otherwise as :meth:`run`.

        The workers of an elastic job make a new object for each call.
        """
        return self._with_callbacks("execute", (named(fn),), callbacks)

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Call a function with the object of rank 0, or None, and return its result; otherwise as :meth:`run`.

        Raises:
            NotImplementedError: The job is elastic.
        """
        return self._started().call("execute_single", named(fn))

    def shutdown(self) -> None:
        """End the workers and release their resources. May be called again, at any time and by any thread."""
        adapter, self._adapter = self._adapter, None
        if adapter is not None:
            adapter.close()

    def _started(self) -> LocalAdapter | RemoteAdapter:
        if self._adapter is None:
            raise RuntimeError("there are no workers: call start() first")
        return self._adapter

    def _with_callbacks(
        self, method: str, arguments: tuple[Any, ...], callbacks: Sequence[Callable[[Any], Any]] | None
    ) -> list[Any]:
        adapter = self._started()
        if not callbacks:
            results: list[Any] = adapter.call(method, *arguments)
            return results
        here = NodeAffinitySchedulingStrategy(adapter.call("node"), soft=False)  # so that no other node can lose it
        queue = Queue(actor_options={"num_cpus": 0, "scheduling_strategy": here})

        def poll() -> None:
            while True:
                try:
                    value = queue.get_nowait()
                except Empty:
                    return
                for callback in callbacks:
                    callback(value)

        try:
            results = adapter.call_and_poll(method, (*arguments, queue), poll)
            return results
        finally:
            kill(queue.actor)


def warn_of(without_effect: Mapping[str, Any]) -> None:
    """Warn the caller of a ``create_settings()`` of arguments that are given, but have no effect."""
    for name, value in without_effect.items():
        if value is not None:
            warnings.warn(f"create_settings(): {name} has no effect", DeprecationWarning, stacklevel=3)


def _discovery(settings: Any) -> Any:
    discovery = getattr(settings, "discovery", None)
    if not callable(getattr(discovery, "find_available_hosts_and_slots", None)):
        raise ValueError(f"override_discovery=False needs a RayHostDiscovery as settings.discovery: Got {discovery!r}.")
    return discovery


def at_least(least: int, name: str, value: Any) -> int:
    """Return a number of workers or resources.

    Raises:
        ValueError: It is none, or less than the least.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be >= {least}: Got {value!r}.")
    return value
