"""The actor that is a rank of a job."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from horovodlike.ray import ray_logger

__all__ = ["BaseHorovodWorker", "WorkerFacts"]


@dataclass(frozen=True)
class WorkerFacts:
    """The facts that a worker reports once it runs.

    Attributes:
        node: The id of its Ray node.
        address: The IP address of its node.
        pid: The number of its process.
        gpus: The ids of the GPUs that Ray has given it.
    """

    node: str
    address: str
    pid: int
    gpus: tuple[str, ...] = ()

    @classmethod
    def collect(cls) -> WorkerFacts:
        """Collect the facts about this process."""
        context = ray.get_runtime_context()
        gpus = tuple(str(each) for each in context.get_accelerator_ids().get("GPU", ()))
        return cls(context.get_node_id(), ray.util.get_node_ip_address(), os.getpid(), gpus)


class BaseHorovodWorker:
    """A rank: a process of its own, in which the functions of :class:`horovodlike.ray.RayExecutor` run.

    Calls run one after the other, on the main thread of the process.
    """

    def __init__(self, world_rank: int | None = None, world_size: int = 1) -> None:
        """Keep the rank, which is shown in Ray's logs and tracebacks; None if it is not known yet."""
        self._rank = world_rank
        self._size = world_size
        self.executable: Any = None

    def __repr__(self) -> str:
        return "worker" if self._rank is None else f"rank {self._rank} of {self._size}"

    def facts(self) -> WorkerFacts:
        """Return where this worker runs."""
        return WorkerFacts.collect()

    def hostname(self) -> str:
        """Return the name of the worker's machine."""
        return socket.gethostname()

    def node_id(self) -> str:
        """Return the id of the worker's Ray node."""
        return str(ray.get_runtime_context().get_node_id())

    def get_gpu_ids(self) -> list[str]:
        """Return the ids of the GPUs that Ray has assigned to this worker, visible to it or not."""
        return list(WorkerFacts.collect().gpus)

    def set_up(self, rank: int, variables: Mapping[str, str]) -> None:
        """Set the rank and the environment variables, before anything of the job is imported."""
        self._rank = rank
        self.update_env_vars(variables)

    def update_env_vars(self, env_vars: Mapping[str, Any]) -> None:
        """Set environment variables of this process."""
        os.environ.update({name: str(value) for name, value in env_vars.items()})

    def env_vars(self) -> dict[str, str]:
        """Return the environment variables of this process."""
        return dict(os.environ)

    def start_executable(
        self,
        executable_cls: Callable[..., Any] | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Make the object that later calls of :meth:`execute` receive; without a class they receive None."""
        if executable_cls is not None:
            self.executable = executable_cls(*(executable_args or ()), **(executable_kwargs or {}))

    def execute(self, func: Callable[[Any], Any]) -> Any:
        """Call a function with the executable, and return its result."""
        return func(self.executable)

    def call(self, task: tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]) -> Any:
        """Call a function that needs no executable with its arguments, and return its result."""
        func, args, kwargs = task
        return func(*args, **kwargs)

    def set_queue(self, queue: ray_logger.LogQueue | None) -> None:
        """Set the queue to which :func:`horovodlike.ray.log` appends on this worker; None for none."""
        ray_logger.configure(queue)

    def leave(self, error: BaseException) -> None:
        """End the job of the engine, if it runs: collectives of the other ranks fail with this error.

        A worker outlives a function that fails, so the others would wait for it.
        """
        basics = sys.modules.get("horovodlike.basics")
        if basics is not None and basics.is_initialized():
            basics.shutdown(error)
