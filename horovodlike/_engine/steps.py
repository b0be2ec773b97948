"""Steps of the training: how many there were, and how long they took. Optimizers and callbacks mark them.

A mark costs some hundred nanoseconds, and takes no lock: threads that mark at the same moment may lose one.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

__all__ = ["step"]

BY_OPTIMIZER, BY_CALLBACK, _BY_SCRIPT = range(3)

hook: Callable[[int], None] | None = None
"""Called at each step with its number while a profile is armed or recorded."""

_by = BY_OPTIMIZER
_count = 0
_samples = 0.0
_seconds = 0.0
_last = 0.0  # when the last step was marked; 0: there was none
_of_graphs: Callable[[], tuple[int, float]] | None = None


def step(samples: float = 0) -> None:
    """Mark a step, for the step time and the samples per second in `metrics()` and in the monitor.

    A script whose optimizer or callbacks mark its steps does not need it: optimizers of PyTorch and TensorFlow do, and
    `BroadcastGlobalVariablesCallback` does in Keras' `fit()`. From the first call on only these calls count, so a
    script with several optimizers calls it once for all of them. It sends nothing; may be called from any thread.

    Args:
        samples: How many samples this rank has processed in the step.
    """
    mark(_BY_SCRIPT, samples)


def mark(by: int = BY_OPTIMIZER, samples: float = 0) -> None:
    """Count a step, unless a more certain source has marked some already; for bindings."""
    global _by, _count, _samples, _seconds, _last
    if by < _by:
        return
    now = perf_counter()
    count, sum_of_samples, seconds = counted() if by > _by else (_count, _samples, _seconds)
    last, elapsed = _last, 0.0
    is_new = by == _by or not count  # else this step has been marked by a less certain source
    if is_new:
        elapsed = now - last if last else 0.0
        count, seconds, last = count + 1, seconds + elapsed, now
    # In one statement, which calls nothing: a thread that reads sees all of it or nothing.
    _by, _count, _samples, _seconds, _last = by, count, sum_of_samples + samples, seconds, last or now
    if is_new and (called := hook) is not None:
        called(counted()[0])


def count_graphs(read: Callable[[], tuple[int, float]]) -> None:
    """Also count the steps that graphs run without a call of Python, as those of an optimizer; for bindings.

    Args:
        read: Returns their number since ``init()``, and the seconds from the first to the last.
    """
    global _of_graphs
    _of_graphs = read


def reset() -> None:
    """Forget all steps; for ``init()``."""
    global _by, _count, _samples, _seconds, _last
    _by, _count, _samples, _seconds, _last = BY_OPTIMIZER, 0, 0.0, 0.0, 0.0


def counted() -> tuple[int, float, float]:
    """Return the number of steps, the number of their samples, and the seconds from the first mark to the last."""
    by, count, samples, seconds = _by, _count, _samples, _seconds
    if _of_graphs and by == BY_OPTIMIZER:
        of_graphs, duration = _of_graphs()
        return count + of_graphs, samples, seconds + duration
    return count, samples, seconds
