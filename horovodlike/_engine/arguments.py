"""Checks of the arguments of collectives and wrappers, the same for all bindings.

Each names the operation, the argument, what was given and what is meant. A caller that keeps what it has made of its
arguments checks before it looks: to a dictionary, and so to `functools.lru_cache`, True, 1 and 1.0 are the same key.
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
"""Of the name of a tensor, in UTF-8. The engine takes 4096, of which its own additions to a name need a few."""

_MAX_COUNT = 2**63 - 1
# Names of the reductions of torch.distributed and tf.distribute, which are not integers.
_BY_NAME = {
    **{"AVERAGE": ReduceOp.AVERAGE, "AVG": ReduceOp.AVERAGE, "MEAN": ReduceOp.AVERAGE, "SUM": ReduceOp.SUM},
    **{"MIN": ReduceOp.MIN, "MAX": ReduceOp.MAX, "PRODUCT": ReduceOp.PRODUCT, "ADASUM": ReduceOp.ADASUM},
}
_SMALLEST, _LARGEST = int(min(ReduceOp)), int(max(ReduceOp))


def called(operation: str, name: object) -> str:
    """Return how messages call an operation: with the name that it was given, if any."""
    return operation if name is None else f"{operation} {name!r}"


def check_name(name: object, operation: str) -> None:
    """Make sure that ranks can match an operation by this name; None stands for a counted one.

    Raises:
        TypeError: It is no string.
        ValueError: It is empty or too long, or has characters that cannot be sent.
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
    """Return one of `hvd.Average`, `Sum` and so on; a member of another library's enumeration means what it is called.

    Those of torch.distributed are equal to integers that mean something else here: its SUM is 0, as is Average.

    Raises:
        UnsupportedReductionError: It is Adasum, of which this operation knows nothing.
        ValueError: It is none of the known ones.
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
    """Return what a script asks for in the old way, by `average`; `stacklevel` is that of the warning.

    Raises:
        ValueError: `op` is given as well.
    """
    if op is not None:
        raise ValueError("op supersedes average: give only one of them")
    warnings.warn("average is deprecated: use op=Average or op=Sum", DeprecationWarning, stacklevel=stacklevel)
    return int(ReduceOp.AVERAGE if average else ReduceOp.SUM)


def no_adasum(operation: str) -> str:
    """Return the message for Adasum where it has no meaning."""
    return f"{operation}: op must be one of hvd.Average, Sum, Min, Max and Product, got hvd.Adasum"


def _known(op: Any) -> Any:
    """Return an integer for what means one of the reductions, else the object itself."""
    if isinstance(op, ReduceOp):
        return int(op)
    member = getattr(op, "op", op)  # a torch.distributed.ReduceOp holds one of its own enumeration
    name = getattr(member, "name", None)
    if isinstance(name, str):
        return int(_BY_NAME[name]) if name in _BY_NAME else op
    return int(op) if _is_integer(op) else op


def _is_integer(value: Any) -> bool:
    """Return whether a value is an integer, which NumPy's are as well, but no bool is."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _shown(value: object) -> str:
    return f"{value!r} ({type(value).__name__})"


def factor(value: Any, argument: str, operation: str) -> float:
    """Return a factor as a float.

    Raises:
        TypeError: It is no number.
        ValueError: It is not finite.
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
    """Return the `gradient_predivide_factor` of a wrapper.

    Raises:
        TypeError: It is no number.
        ValueError: It is not finite, or not positive, or `op` is not Average.
    """
    chosen = factor(value, "gradient_predivide_factor", operation)
    if chosen <= 0:
        raise ValueError(f"{operation}: gradient_predivide_factor must be > 0, got {value!r}")
    if chosen != 1.0 and op != ReduceOp.AVERAGE:
        raise ValueError(f"{operation}: gradient_predivide_factor not supported with op != Average, got {value!r}")
    return chosen


def integer(value: Any, argument: str, operation: str) -> int:
    """Return an integer, which NumPy's are as well, but no bool is.

    Raises:
        TypeError: It is none.
    """
    if type(value) is int:
        return value
    if not _is_integer(value):
        raise TypeError(f"{operation}: {argument} must be an integer, got {_shown(value)}")
    return int(value)


def passes_per_step(value: Any, operation: str) -> int:
    """Return the `backward_passes_per_step` of a wrapper.

    Raises:
        TypeError: It is no integer.
        ValueError: It is not positive.
    """
    passes = integer(value, "backward_passes_per_step", operation)
    if passes <= 0:
        raise ValueError(f"{operation}: backward_passes_per_step must be > 0, got {passes}")
    return passes


def split_counts(values: Iterable[Any], size: int | None, operation: str) -> list[int]:
    """Return how many rows of an alltoall go to each rank; with ``size`` None their number is checked elsewhere.

    Raises:
        TypeError: They are no sequence.
        ValueError: There are more or fewer; or one is no integer or does not fit into 64 bits.
    """
    if isinstance(values, (str, bytes)) or not hasattr(values, "__iter__"):
        raise TypeError(f"{operation}: splits must be a sequence of integers, one for each rank, got {_shown(values)}")
    counts = list(values)
    if size is not None and len(counts) != size:
        raise ValueError(f"{operation}: {len(counts)} splits for {size} ranks")
    for place, count in enumerate(counts):
        if not _is_integer(count):
            raise ValueError(f"{operation}: splits must be integers, got {_shown(count)} for place {place}")
        if abs(count) > _MAX_COUNT:  # the engine refuses those that are negative, and names the tensor
            raise ValueError(f"{operation}: splits must be from 0 to 2**63 - 1, got {count} for place {place}")
    return [int(count) for count in counts]


def check_compression(compression: Any, operation: str) -> None:
    """Make sure that something has what a `Compressor` has.

    Raises:
        TypeError: It has not.
    """
    if not (callable(getattr(compression, "compress", None)) and callable(getattr(compression, "decompress", None))):
        raise TypeError(
            f"{operation}: compression must be hvd.Compression.none, hvd.Compression.fp16 or another class with "
            f"compress() and decompress(), got {compression!r}"
        )
