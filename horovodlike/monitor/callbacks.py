"""Metrics of rank 0 for trackers of experiments, such as Weights & Biases, MLflow and TensorBoard."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable

from horovodlike import basics
from horovodlike._engine.metrics import Metrics, metrics

__all__ = ["on_metrics"]

_FAREWELL_S = 2.0
_RATES = ("bytes", "requests", "batches", "steps", "samples")


def on_metrics(function: Callable[[dict[str, float]], object], seconds: float = 10.0) -> None:
    """Have a function called with the metrics of rank 0 again and again, until ``shutdown()``.

    Call it on all ranks, after ``init()``: on ranks other than 0 it does nothing. The function is called in a thread of
    its own. An exception of the function is printed, and it is not called again. ``shutdown()`` waits for it at most
    two seconds. In an elastic job, call it again in each generation: ``shutdown()`` is part of each change of the
    ranks.

    Args:
        function: Takes numbers by name: the counters of ``metrics()``; ``bytes_per_second``, ``requests_per_second``,
            ``batches_per_second``, ``steps_per_second`` and ``samples_per_second`` since the last call; and, if the
            ranks have waited for one since then, ``straggler_rank`` and ``straggler_seconds``: the one they have waited
            for longest, and for how long. With a monitor also ``slow_compute_rank``, ``slow_input_rank``,
            ``slow_network_rank`` and ``slow_unknown_rank`` while there is a verdict of this kind.
        seconds: The time between calls.

    Raises:
        NotInitializedError: Not initialised.
        ValueError: ``seconds`` is not positive.
    """
    if not seconds > 0:
        raise ValueError(f"on_metrics: seconds must be positive, got {seconds!r}")
    if basics.rank() == 0:
        thread = _Callback(function, seconds)
        thread.start()
        _threads.append(thread)


class _Callback(threading.Thread):
    def __init__(self, function: Callable[[dict[str, float]], object], seconds: float) -> None:
        super().__init__(name="horovodlike-metrics", daemon=True)
        self._function = function
        self._seconds = seconds
        self._before = metrics()
        self._at = time.monotonic()
        self.ends = threading.Event()

    def run(self) -> None:
        while not self.ends.wait(self._seconds):
            try:
                self._function(self._measure())
            except Exception:
                print("horovodlike warning: the function given to on_metrics() has failed:", file=sys.stderr)
                traceback.print_exc()
                return

    def _measure(self) -> dict[str, float]:
        before, now, at = self._before, metrics(), time.monotonic()
        elapsed, self._before, self._at = at - self._at, now, at
        earlier, values = _numbers(before), _numbers(now)
        for name in _RATES:
            values[f"{name}_per_second"] = (values[name] - earlier[name]) / elapsed
        waits = [
            after["seconds_waited_for"] - former["seconds_waited_for"]
            for former, after in zip(before["stragglers"], now["stragglers"], strict=False)
        ]
        if waits and max(waits) > 0:
            values["straggler_rank"] = waits.index(max(waits))
            values["straggler_seconds"] = max(waits)
        reporter = sys.modules.get("horovodlike._engine.reporter")
        for each in reporter.slow_ranks() if reporter is not None else ():
            values[f"slow_{each['kind']}_rank"] = each["ranks"][0]
        return values


def _numbers(counters: Metrics) -> dict[str, float]:
    return {name: value for name, value in counters.items() if isinstance(value, int | float)}


def _end() -> None:
    threads, deadline = [*_threads], time.monotonic() + _FAREWELL_S
    _threads.clear()
    for thread in threads:
        thread.ends.set()
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))


_threads: list[_Callback] = []
basics.on_shutdown(_end)
