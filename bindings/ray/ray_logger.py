"""Values that rank 0 sends to the callbacks of the driver while a function runs."""

from __future__ import annotations

import os
from typing import Any, Protocol

from horovodlike._bootstrap import driver_client
from horovodlike._net.object_seal import dumps

__all__ = ["configure", "log"]


class LogQueue(Protocol):
    """The part of :class:`ray.util.queue.Queue` that a worker uses."""

    def put(self, item: Any) -> None:
        """Append a value; the call returns when the queue has it."""


_queue: LogQueue | None = None


def configure(queue: LogQueue | None) -> None:
    """Set the queue to which :func:`log` appends in this process; None: values are dropped."""
    global _queue
    _queue = queue


def log(info: dict[str, Any]) -> None:
    """Send a value to each callback of the driver's ``run(..., callbacks=[...])``.

    The call returns when the value has arrived in the cluster, so it is not lost if this rank dies afterwards; in an
    elastic job, when it has been sent. On ranks other than 0, and in a static job whose driver has given no callbacks,
    it does nothing.

    Args:
        info: The value; usually a dictionary of metrics. It must be picklable, in an elastic job to at most 3 MB.

    Raises:
        OSError: The driver of an elastic job is lost.
    """
    if _queue is not None:
        _queue.put(info)
        return
    worker = driver_client.current()
    if worker is not None and os.environ.get("HOROVOD_RANK") == "0":
        worker.log(dumps(info))
