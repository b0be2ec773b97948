"""Weights of gradients: averages over the samples of all ranks, instead of over the ranks.

If rank r's gradient g_r is the mean over its n_r samples, the mean over all samples is sum(n_r * g_r) / sum(n_r). The
weight of a rank's step is n_r. Before the gradients of a step are reduced, the ranks add up their weights, and each
rank multiplies its gradients by a factor, so that the Average that follows is this mean. The bindings do both; this
module has the common parts: the argument `weight`, the weight that a script has set, and the factor.
"""

from __future__ import annotations

import threading
from typing import Any

from horovodlike import basics
from horovodlike._engine import arguments
from horovodlike._engine.ops import ReduceOp

__all__ = ["batch_weight", "set_batch_weight"]

Weight = Any
"""The argument `weight`: None, a number, or a function without arguments that returns the number in each step.

With TensorFlow, also a tensor.
"""

NO_AVERAGE = (
    "there is no average over the samples of all ranks: at least one rank must have samples in each step, and all "
    "weights must be finite numbers >= 0; skip a step without samples on all ranks. The sum of the ranks' weights is"
)

DISAGREE = (
    "(the sum of the ranks' weights, and a gradient or its mask, have one name: do only some ranks weight the "
    "gradients of this step? Either all of them call hvd.set_batch_weight() before a step or give weight= to the "
    "optimizer, or none does)"
)

_lock = threading.Lock()
_weight: float | None = None  # the sum of the weights set since the last step; guarded by _lock


def set_batch_weight(weight: Any) -> None:
    """Set the number of samples behind the gradients that this rank computes next, for the average over samples.

    Each rank's gradients must be means over its own samples, as most losses make them. The next step of a
    `DistributedOptimizer` without `weight=`, or of a distributed tape, then reduces gradients to the mean over the
    samples of all ranks. All ranks must set a weight before this step, or none. Call this before the backward pass.

    The step uses the weight up when it begins to reduce gradients, and the next step has none until it is set again;
    `init()` drops it as well. Weights that are set before that, as for the backward passes of one step, add up. May be
    called by any thread; the weight is one for all threads and optimizers.

    Args:
        weight: The number of samples, or another number >= 0 that is proportional to it; only the ratios between the
            ranks matter. 0: this rank has no samples, and its gradients do not count, even if they are NaN.
            None: drop the weight.

    Raises:
        ValueError: `weight` is no number, negative or not finite.
    """
    global _weight
    added = None if weight is None else checked(weight, "set_batch_weight")
    with _lock:
        _weight = added if added is None or _weight is None else _weight + added


def batch_weight() -> float:
    """Return the weight that `set_batch_weight` has set for this step, and use it up; for `weight=hvd.batch_weight`.

    An optimizer with this argument never takes a step without weights, as one without the argument may by mistake.

    Raises:
        RuntimeError: No weight has been set since the last step.
    """
    global _weight
    with _lock:
        weight, _weight = _weight, None
    if weight is None:
        raise RuntimeError(
            "no weight has been set for this step: call hvd.set_batch_weight() with the number of this rank's samples "
            "before each step, 0 if there are none"
        )
    return weight


def is_set() -> bool:
    """Return whether `set_batch_weight` has set a weight that no step has used."""
    return _weight is not None


def checked(weight: Any, operation: str) -> float:
    """Check a weight, and return it as a float.

    Raises:
        ValueError: The weight is no number, negative or not finite.
    """
    try:
        number = -1.0 if isinstance(weight, bool) else arguments.factor(weight, "weight", operation)
    except (TypeError, ValueError):
        number = -1.0
    if number < 0:
        raise ValueError(
            f"{operation}: weight must be a finite number >= 0, got {weight!r}: give the number of this rank's samples"
        )
    return number


def check_argument(weight: Weight, op: int, operation: str) -> None:
    """Check the argument `weight` of a wrapper.

    Raises:
        ValueError: It is neither a finite number >= 0 nor a function; or `op` is not Average.
    """
    if weight is None:
        return
    check_op(op, operation)
    if not callable(weight):
        checked(weight, operation)


def check_op(op: int, operation: str) -> None:
    """Make sure that gradients which are reduced by `op` can be weighted.

    Raises:
        ValueError: `op` is not Average.
    """
    if op != ReduceOp.AVERAGE:
        raise ValueError(
            f"{operation}: weights make an average over samples, and need op=hvd.Average, got "
            f"hvd.{ReduceOp(op).name.capitalize()}: leave out op, or the weights"
        )


def of_step(weight: Weight, op: int, operation: str) -> float | None:
    """Return this rank's weight in the step that begins; None if the gradients are not weighted.

    Args:
        weight: The argument of the wrapper; if it is None, the weight that `set_batch_weight` has set.
        op: The reduction of the gradients.
        operation: The wrapper, for messages.

    Raises:
        ValueError: The function `weight` returned no finite number >= 0; or a weight is set, and `op` is not Average.
        RuntimeError: `weight` is `batch_weight`, and no weight has been set.
    """
    if weight is None:
        if not is_set():
            return None
        check_op(op, operation)
        return batch_weight()
    return checked(weight() if callable(weight) else weight, operation)


def divisor(num_present: float, num_ranks: int) -> float:
    """Return the number by which the engine divides an Average.

    Args:
        num_present: The number of ranks that have not joined.
        num_ranks: The number of ranks of the process set.
    """
    return num_ranks if basics.average_counts_joined() else num_present


def factor(weight: float, total: float, divided_by: float) -> float:
    """Return the factor for this rank's gradients, with which their Average is the mean over all samples.

    If all ranks have the same weight, an integer, the factor is exactly 1, so gradients have the bits of an Average.

    Args:
        weight: This rank's weight.
        total: The sum of all ranks' weights.
        divided_by: The number by which the Average divides.

    Raises:
        ValueError: The sum is 0, or too large for a float. It is the same on all ranks, and so is the error.
    """
    if not 0 < total < float("inf"):
        raise ValueError(f"{NO_AVERAGE} {total}")
    return weight * divided_by / total if weight else 0.0


def _forget(_: object) -> None:
    set_batch_weight(None)


basics.on_init(_forget)
