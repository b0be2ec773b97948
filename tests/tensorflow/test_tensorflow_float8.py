"""Tensors of 8-bit floats, held against float32 and the conversions of ml_dtypes, which are TensorFlow's.

But for what is too large for float8_e4m3fn: it becomes the largest number, as in PyTorch, and not NaN.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tensorflow as tf

import horovodlike.tensorflow as hvd

DTYPES = (tf.dtypes.experimental.float8_e4m3fn, tf.dtypes.experimental.float8_e5m2)
OPS = (hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product)
SHAPES = ((0,), (), (17,), (30, 5, 2))


def _inputs(dtype, shape):
    """Any numbers of the type, NaN as well, in another order on each rank."""
    codes = [np.random.default_rng(1000 * rank + len(shape)).integers(0, 256, shape) for rank in range(hvd.size())]
    return [np.asarray(code, np.uint8).view(dtype.as_numpy_dtype) for code in codes]


def _reduced(arrays, op, prescale, postscale):
    combine = {hvd.Min: np.minimum, hvd.Max: np.maximum, hvd.Product: np.multiply}.get(op, np.add)
    with np.errstate(all="ignore"):
        result, *others = (array.astype(np.float32) * np.float32(prescale) for array in arrays)
        for other in others:
            result = combine(result, other)
        if op == hvd.Average:
            result = result / np.float32(len(arrays))
        result = np.asarray(result * np.float32(postscale))
        if arrays[0].dtype == DTYPES[0].as_numpy_dtype:
            result = np.clip(result, -448, 448)
        return result.astype(arrays[0].dtype)


def _check(actual, expected, what):
    array = actual.numpy()
    assert array.dtype == expected.dtype, what
    assert array.shape == expected.shape, what
    np.testing.assert_array_equal(array.astype(np.float32), expected.astype(np.float32), str(what))


def _reductions():
    for dtype in DTYPES:
        inputs = [_inputs(dtype, shape) for shape in SHAPES]
        every = list(itertools.product(range(len(SHAPES)), OPS, ((1.0, 1.0), (0.3, -7.0))))

        def reduce(tensors, every=every):
            return [
                hvd.allreduce(tensors[i], op=op, prescale_factor=prescale, postscale_factor=postscale, name=f"r.{n}")
                for n, (i, op, (prescale, postscale)) in enumerate(every)
            ]

        for run in (reduce, tf.function(reduce)):
            results = run([tf.constant(of_ranks[hvd.rank()], dtype) for of_ranks in inputs])
            for result, (i, op, factors) in zip(results, every, strict=True):
                _check(result, _reduced(inputs[i], op, *factors), (dtype, SHAPES[i], op, factors))


def _movements():
    rank, size = hvd.rank(), hvd.size()

    def move(tensor):
        return (
            hvd.broadcast(tensor, size - 1, name="b"),
            hvd.allgather(tensor[: rank + 1], name="g"),
            hvd.alltoall(tensor[:size], name="e"),
            hvd.reducescatter(tensor, op=hvd.Max, name="s"),
        )

    for dtype in DTYPES:
        inputs = _inputs(dtype, (30, 5, 2))
        expected = (
            inputs[-1],
            np.concatenate([array[: r + 1] for r, array in enumerate(inputs)]),
            np.stack([array[rank] for array in inputs]),
            np.array_split(_reduced(inputs, hvd.Max, 1.0, 1.0), size)[rank],
        )
        for run in (move, tf.function(move)):
            for result, wanted in zip(run(tf.constant(inputs[rank], dtype)), expected, strict=True):
                _check(result, wanted, dtype)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("work", [_movements, pytest.param(_reductions, marks=pytest.mark.slow)])
def test_collectives(ranks, work, size):
    ranks(size).run(work)
