"""The kinds of requests, reductions, element types, devices and orders of memory, as `hvl.h` numbers them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from horovodlike._engine.native import ffi, lib

MAX_COPIED_BYTES: int = lib.HVL_MAX_COPIED_BYTES  # the largest tensor that the engine copies, to work on the copy
MAX_DIMENSIONS = 8  # of a tensor


class Kind(IntEnum):
    """The kinds of requests."""

    ALLREDUCE = lib.HVL_ALLREDUCE
    ALLGATHER = lib.HVL_ALLGATHER
    BROADCAST = lib.HVL_BROADCAST
    BARRIER = lib.HVL_BARRIER
    REDUCESCATTER = lib.HVL_REDUCESCATTER
    ALLTOALL = lib.HVL_ALLTOALL
    JOIN = lib.HVL_JOIN
    ADD_PROCESS_SET = lib.HVL_ADD_PROCESS_SET
    REMOVE_PROCESS_SET = lib.HVL_REMOVE_PROCESS_SET
    GATHER = lib.HVL_GATHER
    SCATTER = lib.HVL_SCATTER
    REDUCE = lib.HVL_REDUCE


class ReduceOp(IntEnum):
    """The ways in which a reduction combines elements; the values are Horovod's."""

    AVERAGE = lib.HVL_AVERAGE
    SUM = lib.HVL_SUM
    ADASUM = lib.HVL_ADASUM
    MIN = lib.HVL_MIN
    MAX = lib.HVL_MAX
    PRODUCT = lib.HVL_PRODUCT


# The engine's element types, by their names in NumPy and the frameworks: `HVL_UINT8` is `uint8`.
DType = IntEnum(  # type: ignore[misc]
    "DType",
    {name.removeprefix("HVL_").lower(): number for number, name in sorted(ffi.typeof("hvl_dtype").elements.items())},
)


class Device(IntEnum):
    """The kinds of devices that the tensors of a request are on."""

    CPU = lib.HVL_CPU
    CUDA = lib.HVL_CUDA


class MemoryFormat(IntEnum):
    """The order in which the elements of a tensor lie in memory, without gaps."""

    ROW_MAJOR = lib.HVL_ROW_MAJOR
    CHANNELS_LAST = lib.HVL_CHANNELS_LAST
    COLUMN_MAJOR = lib.HVL_COLUMN_MAJOR


class GpuStream(NamedTuple):
    """A stream of a GPU, which executes its work in order.

    Attributes:
        device: The GPU's number, as the driver counts those that this process sees.
        pointer: The ``CUstream``; 0 is the default stream.
    """

    device: int
    pointer: int


def engine_shape(shape: Sequence[int]) -> Sequence[int]:
    """Return `shape`; if it has more dimensions than the engine takes, with the last ones merged into one."""
    if len(shape) <= MAX_DIMENSIONS:
        return shape
    return [*shape[: MAX_DIMENSIONS - 1], math.prod(shape[MAX_DIMENSIONS - 1 :])]


def rows_of(rows: int, place: int, parts: int) -> int:
    """Return the number of rows in part `place`; if the division leaves a remainder, the first parts have one more."""
    return (rows + parts - 1 - place) // parts  # arithmetic only: in a compiled function, `rows` may be a symbol
