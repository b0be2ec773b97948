"""Checks of the arguments of collectives and wrappers, the same for all bindings.

Each error names the operation, the argument, the value given and the values allowed. A caller that caches results by
arguments checks these before it looks into the cache: for a dictionary, and so for `functools.lru_cache`, True, 1 and
1.0 are the same key.
"""

from __future__ import annotations

import math
import numbers
import warnings
from collections.abc import Iterable
from typing import Any

from horovodlike._engine.ops import ReduceOp
from horovodlike.errors import UnsupportedReductionError

MAX_NAME_BYTES = 4000
"""The most bytes of a tensor's name, in UTF-8. The engine takes 4096; the package's additions to names need a few."""

_MAX_COUNT = 2**63 - 1
# Names of the reductions of torch.distributed and tf.distribute, which are not integers.
_BY_NAME = {
    **{"AVERAGE": ReduceOp.AVERAGE, "AVG": ReduceOp.AVERAGE, "MEAN": ReduceOp.AVERAGE, "SUM": ReduceOp.SUM},
    **{"MIN": ReduceOp.MIN, "MAX": ReduceOp.MAX, "PRODUCT": ReduceOp.PRODUCT, "ADASUM": ReduceOp.ADASUM},
}
_SMALLEST, _LARGEST = int(min(ReduceOp)), int(max(ReduceOp))


def called(operation: str, name: object) -> str:
    """Return an operation as messages name it: with the name that it was given, if any."""
    return operation if name is None else f"{operation} {name!r}"


def check_name(name: object, operation: str) -> None:
    """Make sure that ranks can match an operation by this name; without a name (None), operations are counted.

    Raises:
        TypeError: The name is no string.
        ValueError: The name is empty or too long, or has characters that cannot be sent.
    """
    if name is None:
        return
    if not isinstance(name, str):
        raise TypeError(f"{operation}: name must be a string or None, got {name!r} ({type(name).__name__})")
    if not name:
        raise ValueError(f"{operation}: name is empty; leave it out to have the operation counted")
    if "\0" in name:
        raise ValueError(f"{operation}: name {name!r} holds a NUL character")
    try:
        size = len(name) if name.isascii() else len(name.encode())
    except UnicodeEncodeError as error:
        raise ValueError(f"{operation}: name {name!r} cannot be encoded: {error}") from error
    if size > MAX_NAME_BYTES:
        raise ValueError(f"{operation}: name {name[:40]!r}... has {size} bytes; {MAX_NAME_BYTES} are the limit")


def reduce_op(op: Any, operation: str, *, adasum: bool = True) -> int:
    """Return `hvd.Average`, `Sum` and so on as an integer; members of another library's enumeration count by name.

    The members of torch.distributed equal integers that have other meanings here: its SUM is 0, as is Average.

    Raises:
        UnsupportedReductionError: `op` is Adasum, which this operation does not support.
        ValueError: `op` is none of the known reductions.
    """
    if type(op) is not int:
        op = _known(op)
    if type(op) is not int or not _SMALLEST <= op <= _LARGEST:
        also = ", Product and Adasum" if adasum else " and Product"
        raise ValueError(f"{operation}: op must be one of hvd.Average, Sum, Min, Max{also}, got {_shown(op)}")
    if op == ReduceOp.ADASUM and not adasum:
        raise UnsupportedReductionError(no_adasum(operation))
    return op


def op_of_average(op: int | None, average: bool, stacklevel: int = 4) -> int:
    """Return the reduction that the deprecated argument `average` asks for; the warning has this `stacklevel`.

    Raises:
        ValueError: `op` is given as well.
    """
    if op is not None:
        raise ValueError("op supersedes average: give only one of them")
    warnings.warn("average is deprecated: use op=Average or op=Sum", DeprecationWarning, stacklevel=stacklevel)
    return int(ReduceOp.AVERAGE if average else ReduceOp.SUM)


def no_adasum(operation: str) -> str:
    """Return the error message for Adasum in an operation that does not support it."""
    return f"{operation}: op must be one of hvd.Average, Sum, Min, Max and Product, got hvd.Adasum"


def _known(op: Any) -> Any:
    """Return the integer of a reduction in any accepted form; return any other object itself."""
    if isinstance(op, ReduceOp):
        return int(op)
    member = getattr(op, "op", op)  # a torch.distributed.ReduceOp holds a member of its enumeration
    name = getattr(member, "name", None)
    if isinstance(name, str):
        return int(_BY_NAME[name]) if name in _BY_NAME else op
    return int(op) if _is_integer(op) else op


def _is_integer(value: Any) -> bool:
    """Return whether a value is an integer of Python or NumPy; a bool is none."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _shown(value: object) -> str:
    return f"{value!r} ({type(value).__name__})"


def factor(value: Any, argument: str, operation: str) -> float:
    """Check a factor, and return it as a float.

    Raises:
        TypeError: The value is no number.
        ValueError: The value is not finite.
    """
    if type(value) is not float:
        if isinstance(value, (str, bytes)) or not (hasattr(value, "__float__") or hasattr(value, "__index__")):
            raise TypeError(f"{operation}: {argument} must be a number, got {_shown(value)}")
        try:
            value = float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise TypeError(f"{operation}: {argument} must be a number, got {_shown(value)}: {error}") from error
    if not math.isfinite(value):
        raise ValueError(f"{operation}: {argument} must be finite, got {value}")
    return float(value)


def predivide_factor(value: Any, op: int, operation: str) -> float:
    """Check the `gradient_predivide_factor` of a wrapper, and return it as a float.

    Raises:
        TypeError: The value is no number.
        ValueError: The value is not finite or not positive; or it is not 1, and `op` is not Average.
    """
    chosen = factor(value, "gradient_predivide_factor", operation)
    if chosen <= 0:
        raise ValueError(f"{operation}: gradient_predivide_factor must be > 0, got {value!r}")
    if chosen != 1.0 and op != ReduceOp.AVERAGE:
        raise ValueError(f"{operation}: gradient_predivide_factor not supported with op != Average, got {value!r}")
    return chosen


def integer(value: Any, argument: str, operation: str) -> int:
    """Return an integer of Python or NumPy as an ``int``; a bool is none.

    Raises:
        TypeError: The value is no integer.
    """
    if type(value) is int:
        return value
    if not _is_integer(value):
        raise TypeError(f"{operation}: {argument} must be an integer, got {_shown(value)}")
    return int(value)


def passes_per_step(value: Any, operation: str) -> int:
    """Check the `backward_passes_per_step` of a wrapper, and return it as an ``int``.

    Raises:
        TypeError: The value is no integer.
        ValueError: The value is not positive.
    """
    passes = integer(value, "backward_passes_per_step", operation)
    if passes <= 0:
        raise ValueError(f"{operation}: backward_passes_per_step must be > 0, got {passes}")
    return passes


def split_counts(values: Iterable[Any], size: int | None, operation: str) -> list[int]:
    """Return how many rows of an alltoall go to each rank; if ``size`` is None, any number of values is accepted.

    Raises:
        TypeError: The values are no sequence.
        ValueError: There are not ``size`` values; or one is no integer or does not fit into 64 bits.
    """
    if isinstance(values, (str, bytes)) or not hasattr(values, "__iter__"):
        raise TypeError(f"{operation}: splits must be a sequence of integers, one for each rank, got {_shown(values)}")
    counts = list(values)
    if size is not None and len(counts) != size:
        raise ValueError(f"{operation}: {len(counts)} splits for {size} ranks")
    for place, count in enumerate(counts):
        if not _is_integer(count):
            raise ValueError(f"{operation}: splits must be integers, got {_shown(count)} for place {place}")
        if abs(count) > _MAX_COUNT:  # the engine refuses negative counts, and names the tensor
            raise ValueError(f"{operation}: splits must be from 0 to 2**63 - 1, got {count} for place {place}")
    return [int(count) for count in counts]


def check_compression(compression: Any, operation: str) -> None:
    """Make sure that an object has the methods of a `Compressor`.

    Raises:
        TypeError: A method is missing.
    """
    if not (callable(getattr(compression, "compress", None)) and callable(getattr(compression, "decompress", None))):
        raise TypeError(
            f"{operation}: compression must be hvd.Compression.none, hvd.Compression.fp16 or another class with "
            f"compress() and decompress(), got {compression!r}"
        )
