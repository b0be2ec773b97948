"""The actor of an elastic job on a node: it calls in, and starts the workers there."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

from horovodlike.launcher.elastic.call_in import CallIn
from horovodlike.ray.worker import WorkerFacts

__all__ = ["NodeCaller", "NodeOptions"]

_VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class NodeOptions:
    """The arguments of a :class:`NodeCaller`.

    Attributes:
        key: The key of the job, in hexadecimal digits.
        address: The address of its driver.
        port: The port of its driver.
        start_timeout: How long to wait for the driver, in seconds.
        variables: Environment variables of the workers, besides the Ray node's own.
    """

    key: str = field(repr=False)
    address: str
    port: int
    start_timeout: float
    variables: Mapping[str, str]


class NodeCaller:
    """An actor that has the resources of the job's workers on one node, and starts them as the driver says."""

    def __init__(self) -> None:
        """Do nothing yet."""
        self._lock = threading.Lock()  # of the two
        self._caller: CallIn | None = None
        self._leaves: float | None = None

    def call_in(self, options: NodeOptions, name: str, slots: int) -> tuple[int, str]:
        """Offer slots to the job until it is over, or this node has left it.

        Args:
            options: The same for all.
            name: The name in the job, which no other actor has.
            slots: The number of workers.

        Returns:
            The exit code of the job, or 143 if this node has left it, and why.

        Raises:
            HostsError: The job cannot be reached, or refuses this node.
        """
        facts = WorkerFacts.collect()
        gpus = {_VISIBLE: ",".join(facts.gpus)} if facts.gpus else {}
        caller = CallIn(
            options.key,
            name,
            options.address,
            options.port,
            slots,
            environ={**os.environ, **gpus, **options.variables},
            prints=True,
            start_timeout=options.start_timeout,
        )
        with self._lock:
            self._caller = caller
            if self._leaves is not None:
                caller.leave(self._leaves)
        return caller.run(), caller.reason

    def leave(self, seconds: float) -> None:
        """Have this node leave the job at the next commit, or without one when that many seconds have passed."""
        with self._lock:
            self._leaves = seconds
            if self._caller is not None:
                self._caller.leave(seconds)
