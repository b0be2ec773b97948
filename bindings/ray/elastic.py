"""``ElasticRayExecutor``, Horovod's older name for ``RayExecutor`` with ``min_workers``, and its settings."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from horovodlike.ray.runner import MiniSettings, RayExecutor, at_least, warn_of
from horovodlike.ray.strategy import room_for

__all__ = ["ElasticRayExecutor", "ElasticSettings", "RayHostDiscovery"]

_NO_EFFECT = frozenset(
    {
        *("binding_args", "elastic", "extra_mpi_args", "output_filename", "prefix_output_with_timestamp"),
        *("run_func_mode", "ssh_port", "tcp_flag"),
    }
)
"""Horovod's other settings."""


@dataclass
class ElasticSettings(MiniSettings):
    """The settings of an elastic job, as :meth:`ElasticRayExecutor.create_settings` makes them.

    Attributes:
        min_num_proc: The fewest workers.
        max_num_proc: The most workers; None for as many as there is room for.
        reset_limit: How often the set of workers may change; None for any number of times.
        elastic_timeout: How long to wait for enough workers, in seconds.
        discovery: The object that says which nodes may be used, with ``override_discovery=False``.
        cooldown_range: The least and the most seconds without workers for a node on which a worker has failed.
    """

    min_num_proc: int = 1
    max_num_proc: int | None = None
    reset_limit: int | None = None
    elastic_timeout: float = 600
    discovery: Any = None
    cooldown_range: Sequence[int] | None = None


class RayHostDiscovery:
    """Finds the nodes of the cluster; derive from it to choose among them."""

    def __init__(self, use_gpu: bool = False, cpus_per_slot: int = 1, gpus_per_slot: int = 1) -> None:
        """Take the resources of one worker; ``gpus_per_slot`` counts with ``use_gpu`` only."""
        self._per_worker = {"CPU": cpus_per_slot, "GPU": gpus_per_slot if use_gpu else 0}

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Return the most workers of each node, by its address; the workers of nodes with one address are added up."""
        found: dict[str, int] = {}
        for node in ray.nodes():
            if node["Alive"] and (slots := room_for(self._per_worker, [node["Resources"]])):
                address = node["NodeManagerAddress"]
                found[address] = found.get(address, 0) + slots
        return found


class ElasticRayExecutor:
    """An elastic job on the cluster's free resources; :class:`RayExecutor` with ``min_workers`` is the same.

    Args:
        settings: The result of :meth:`create_settings`.
        use_gpu: Whether workers get GPUs.
        cpus_per_slot: Ray's CPUs for each worker.
        gpus_per_slot: GPUs for each worker; None for one. Needs ``use_gpu``.
        env_vars: Environment variables of the workers.
        override_discovery: Whether all nodes with free resources are used; False: those that ``settings.discovery``
            names, an object such as a :class:`RayHostDiscovery`.

    Raises:
        ValueError: The arguments contradict each other.
    """

    @staticmethod
    def create_settings(
        min_num_proc: int = 1,
        max_num_proc: int | None = None,
        reset_limit: int | None = None,
        elastic_timeout: float = 600,
        timeout_s: float = 30,
        ssh_identity_file: str | None = None,
        nics: str | Iterable[str] | None = None,
        min_np: int | None = None,
        max_np: int | None = None,
        verbose: int = 1,
        placement_group_timeout_s: float = 100,
        cooldown_range: Sequence[int] | None = None,
        **horovod: Any,
    ) -> ElasticSettings:
        """Return settings for the constructor.

        Args:
            min_num_proc: The fewest workers; with fewer, the training waits for more.
            max_num_proc: The most workers; None for as many as there is room for.
            reset_limit: How often the set of workers may change; None for any number of times.
            elastic_timeout: How long to wait for enough workers, at the start and later, in seconds.
            timeout_s: How long ``init()`` waits for all ranks, in seconds.
            ssh_identity_file: Has no effect: Ray starts the workers.
            nics: The network between the ranks: names of interfaces, or networks such as ``10.0.0.0/8``.
            min_np: Deprecated name of ``min_num_proc``.
            max_np: Deprecated name of ``max_num_proc``.
            verbose: Has no effect.
            placement_group_timeout_s: How long Ray may take to start an actor on a node, in seconds.
            cooldown_range: The least and the most seconds without workers for a node on which a worker has failed.
            **horovod: Horovod's other settings, which have no effect.

        Raises:
            TypeError: Horovod has no such setting.
        """
        if unknown := sorted(horovod.keys() - _NO_EFFECT):
            raise TypeError(f"create_settings() got an unexpected keyword argument {unknown[0]!r}")
        for name, value in (("min_np", min_np), ("max_np", max_np)):
            if value is not None:
                instead = name.replace("np", "num_proc")
                warnings.warn(f"{name} is deprecated, use {instead} instead", DeprecationWarning, stacklevel=2)
        warn_of({"ssh_identity_file": ssh_identity_file, **horovod})
        return ElasticSettings(
            nics,
            verbose,
            timeout_s,
            placement_group_timeout_s,
            ssh_identity_file,
            min_num_proc=min_num_proc if min_np is None else min_np,
            max_num_proc=max_num_proc if max_np is None else max_np,
            reset_limit=reset_limit,
            elastic_timeout=elastic_timeout,
            cooldown_range=cooldown_range,
        )

    def __init__(
        self,
        settings: Any,
        use_gpu: bool = False,
        cpus_per_slot: int = 1,
        gpus_per_slot: int | None = None,
        env_vars: Mapping[str, Any] | None = None,
        override_discovery: bool = True,
    ) -> None:
        """Check the arguments; nothing is started."""
        if gpus_per_slot and not use_gpu:
            raise ValueError(
                "gpus_per_slot is set, but use_gpu is False. use_gpu must be True if gpus_per_slot is set."
            )
        least, most = at_least(1, "min_num_proc", settings.min_num_proc), settings.max_num_proc
        self._env_vars = env_vars
        self._executor = RayExecutor(
            settings,
            min_workers=least,
            max_workers=None if most is None else at_least(least, "max_num_proc", most),
            cpus_per_worker=cpus_per_slot,
            use_gpu=use_gpu,
            gpus_per_worker=gpus_per_slot,
            reset_limit=settings.reset_limit,
            cooldown_range=getattr(settings, "cooldown_range", None),
            elastic_timeout=settings.elastic_timeout,
            override_discovery=override_discovery,
        )

    def start(self) -> None:
        """Wait until there is room for the fewest workers; see :meth:`RayExecutor.start`."""
        self._executor.start(extra_env_vars=self._env_vars)

    def run(self, worker_fn: Callable[[], Any], callbacks: Sequence[Callable[[Any], Any]] | None = None) -> list[Any]:
        """Call a function on each worker, as long as the training takes; see :meth:`RayExecutor.run`.

        Args:
            worker_fn: The function: ``init()``, and a function that ``elastic.run`` has wrapped.
            callbacks: Functions of this process that receive each value that rank 0 gives to
                :func:`horovodlike.ray.log`.

        Returns:
            The results of the last members, by rank.
        """
        return self._executor.run(worker_fn, callbacks=callbacks)

    def shutdown(self) -> None:
        """End the job; another thread may call it. Not needed after :meth:`run`, which leaves nothing."""
        self._executor.shutdown()
