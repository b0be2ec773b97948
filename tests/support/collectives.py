"""Collectives on NumPy arrays, for tests that run in ranks without a framework."""

from __future__ import annotations

import numpy as np

from horovodlike._engine import ops
from horovodlike._engine.ops import DType, Kind, ReduceOp

DTYPES = {
    "float32": DType.FLOAT32,
    "float64": DType.FLOAT64,
    "float16": DType.FLOAT16,
    "int32": DType.INT32,
    "int64": DType.INT64,
    "uint8": DType.UINT8,
    "int8": DType.INT8,
    "int16": DType.INT16,
    "bool": DType.BOOL,
}


def described(array):
    return DTYPES[str(array.dtype)], array.shape


def enqueue(kind, name, arrays, **options):
    """Enqueues in place; the caller keeps the arrays."""
    request = ops.Request(kind, name, [described(array) for array in arrays], **options)
    addresses = [array.ctypes.data for array in arrays]
    return request.enqueue(addresses, [] if kind in (Kind.ALLGATHER, Kind.BARRIER) else addresses)


def allreduce(name, array, op=ReduceOp.SUM):
    ops.wait(enqueue(Kind.ALLREDUCE, name, [array], op=op))
    return array


def gathered(handle, dtype):
    return [np.frombuffer(output.memory, dtype).reshape(output.shape) for output in ops.wait(handle)]
