"""The monitor of a job: a page that people watch, and metrics for Prometheus.

``hvdrun --monitor`` has it in the launcher. :func:`start` has it on rank 0, for jobs that are started otherwise. No job
imports any of this without being asked to.

* :mod:`horovodlike.monitor.collector`: takes the reports that each rank sends (``horovodlike._engine.reporter``)
* :mod:`horovodlike.monitor.board`, :mod:`horovodlike.monitor.delays`: the state of the job that follows from them
* :mod:`horovodlike.monitor.slow_ranks`: which ranks are slower than the others, and why
* :mod:`horovodlike.monitor.web`, :mod:`horovodlike.monitor.prometheus`: HTTP answers; ``page.html`` is the page
* :mod:`horovodlike.monitor.server`: the thread that runs all that; :mod:`horovodlike.monitor.metrics_file`: the one
  that writes a file of metrics
* :mod:`horovodlike.monitor.attach`: profiles and stacks for ``hvdrun --attach``
* :mod:`horovodlike.monitor.callbacks`: numbers for other trackers of experiments
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from horovodlike import basics
from horovodlike._bootstrap.environment import MONITOR_PORT
from horovodlike._bootstrap.job_key import monitor_key
from horovodlike._engine import reporter
from horovodlike._net.listen import LOOPBACK
from horovodlike._net.secure_channel import JobKey
from horovodlike.errors import RendezvousError

if TYPE_CHECKING:
    from horovodlike.monitor.server import Monitor

__all__ = ["start", "stop"]

_running: Monitor | None = None


def start(port: int = 0, host: str = LOOPBACK) -> str | None:
    """Start the monitor of a job that was started without ``hvdrun --monitor``, on rank 0.

    Collective: all ranks call it, after ``init()``. ``shutdown()`` ends it. The output of ranks and the reports on
    stalls that rank 0 prints do not pass through it, so the page lacks these.

    Args:
        port: The port of the page; 0: a free one.
        host: The address at which rank 0 answers readers. Others than a loopback address let other hosts read it,
            without encryption.

    Returns:
        On rank 0 the address of the page, with its token; on the other ranks None. Also None, and nothing is started,
        where ``hvdrun --monitor`` or ``--metrics-file`` has a monitor already.

    Raises:
        NotInitializedError: Not initialised.
        ValueError: ``port`` or ``host`` cannot be one.
        RendezvousError: Rank 0 cannot listen there; on all ranks.
    """
    global _running
    from horovodlike.objects import broadcast_object

    if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port < 65536:
        raise ValueError(f"monitor.start: port must be from 0 to 65535, got {port!r}")
    if not isinstance(host, str) or not host:
        raise ValueError(f"monitor.start: host must be a name or an address, got {host!r}")
    if os.environ.get(MONITOR_PORT):
        return None
    place, key = basics.place(), basics.object_key() or JobKey.random()
    stop()
    found: tuple[str, int] | str | None = None
    if place.rank == 0:
        try:
            _running = _serve(port, host, monitor_key(key), place.size)
            found = basics.address() or LOOPBACK, _running.port
        except Exception as error:  # any error: the other ranks wait for the answer
            found = str(error) if isinstance(error, RendezvousError) else f"the monitor cannot start: {error!r}"
    if place.size > 1:
        found = broadcast_object(found, name="horovodlike.monitor")
    if isinstance(found, str):
        raise RendezvousError(found)
    assert found is not None
    reporter.start(reporter.Target(*found, monitor_key(key)), place)
    return None if _running is None else _running.url


def _serve(port: int, host: str, key: JobKey, size: int) -> Monitor:
    import horovodlike
    from horovodlike.monitor.board import Board
    from horovodlike.monitor.server import Monitor

    monitor = Monitor(Board("", horovodlike.__version__), key, size=size, host=host, port=port)
    monitor.start([basics.address() or LOOPBACK])
    return monitor


def stop() -> None:
    """End the monitor on this rank; do nothing if there is none. May be called from any thread."""
    global _running
    monitor, _running = _running, None
    reporter.stop()
    if monitor is not None:
        monitor.close()


basics.on_shutdown(stop)
