"""Collectives on NumPy arrays, for tests that run in ranks without a framework."""

from __future__ import annotations

import numpy as np

from horovodlike._engine import ops
from horovodlike._engine.ops import DType, Kind, ReduceOp

DTYPES = ("float32", "float64", "float16", "int32", "int64", "uint8", "int8", "int16", "bool")


def described(array):
    return DType[str(array.dtype)], array.shape


def enqueue(kind, name, arrays, **options):
    """Enqueue an operation in place; the caller keeps the arrays alive."""
    request = ops.Request(kind, name, [described(array) for array in arrays], **options)
    addresses = [array.ctypes.data for array in arrays]
    return request.enqueue(addresses, [] if kind in (Kind.ALLGATHER, Kind.GATHER, Kind.BARRIER) else addresses)


def allreduce(name, array, op=ReduceOp.SUM):
    ops.wait(enqueue(Kind.ALLREDUCE, name, [array], op=op))
    return array


def gathered(handle, dtype):
    return [np.frombuffer(output.memory, dtype).reshape(output.shape) for output in ops.wait(handle)]
