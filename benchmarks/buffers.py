"""The memory that is reduced: the same kind for every peer and library."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

ALIGNMENT = 64
ITEM_BYTES = {"float32": 4, "bfloat16": 2}

Buffer = NDArray[Any]


def allocate(nbytes: int, dtype: str) -> Buffer:
    """Return a touched array of zeros; bfloat16, which numpy does not have, as its bit patterns in uint16."""
    memory = np.empty(nbytes + ALIGNMENT, dtype=np.uint8)
    offset = -memory.ctypes.data % ALIGNMENT
    array = memory[offset : offset + nbytes].view(np.float32 if dtype == "float32" else np.uint16)
    array.fill(0)
    return array


def fill(buffer: Buffer, value: int, dtype: str) -> None:
    """Set every element to a small whole number."""
    buffer.fill(value if dtype == "float32" else _bfloat16_bits(value))


def first_value(buffer: Buffer, dtype: str) -> float:
    """Return the first element."""
    if dtype == "float32":
        return float(buffer[0])
    return float((buffer[:1].astype(np.uint32) << 16).view(np.float32)[0])


def _bfloat16_bits(value: int) -> int:
    """Return the upper half of the float32; exact for whole numbers up to 256."""
    return int(np.float32(value).view(np.uint32)) >> 16
