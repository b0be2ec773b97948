"""Gather, scatter and reduce of NumPy arrays, and of other arrays, against NumPy's own results."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import horovodlike as hvd
from horovodlike._engine.ops import DType

SIZES = (1, 2, 3, 4)
DTYPES = [np.dtype(getattr(ml_dtypes, name, name)) for name in DType.__members__]
SHAPES = ((0,), (), (17,), (3, 0, 2), (3, 5, 2), (1, 2, 1, 2, 1, 2, 1, 2, 3), (300_007,))


def _values(rank, dtype, shape):
    return np.random.default_rng(rank).integers(0, 3, shape).astype(dtype)


def _same(actual, expected):
    assert type(actual) is np.ndarray and actual.dtype == expected.dtype and actual.shape == expected.shape
    assert actual.tobytes() == expected.tobytes()


def _on_root(result, expected, root):
    if hvd.rank() == root:
        _same(result, expected)
    else:
        assert result is None


def _grid():
    rank, size = hvd.rank(), hvd.size()
    for number, dtype in enumerate(DTYPES):
        root = number % size
        for shape in SHAPES:
            arrays = [_values(of, dtype, shape) for of in range(size)]
            name = [None, f"{dtype}.{shape}"][len(shape) % 2]
            largest = np.max([array.astype(np.float64) for array in arrays], axis=0).astype(dtype)
            _on_root(hvd.reduce(arrays[rank], root, name, op=hvd.Max), largest, root)
            _on_root(hvd.synchronize(hvd.reduce_async(arrays[rank], root, op=hvd.Max)), largest, root)
            target = arrays[rank].copy(order="F")
            assert hvd.reduce_(target, root, name, op=hvd.Max) is target
            assert np.array_equal(target, largest if rank == root else arrays[rank])
            parts = np.stack(arrays) if shape == () else np.concatenate(arrays)
            mine = parts if rank == root else np.empty((1, *shape)[-max(1, len(shape)) :], dtype)
            part = parts[rank : rank + 1] if shape == () else arrays[rank]
            _same(hvd.scatter(mine, root, name), part)
            _same(hvd.synchronize(hvd.scatter_async(mine, root)), part)
        rows = [_values(of, dtype, (of * 3 % 4, 2)) for of in range(size)]
        _on_root(hvd.gather(rows[rank], root), np.concatenate(rows), root)
        _on_root(
            hvd.synchronize(hvd.gather_async(rows[rank][::-1], root, "g")),
            np.concatenate([r[::-1] for r in rows]),
            root,
        )


def _others():
    import torch

    rank, size = hvd.rank(), hvd.size()
    total = hvd.reduce(torch.full((3,), 2.0), size - 1, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0)
    assert (total.tolist() == [3.0 * size] * 3) if rank == size - 1 else total is None
    target = bytearray([rank])
    assert hvd.reduce_(target, 0, op=hvd.Max) is target
    assert target == bytearray([size - 1 if rank == 0 else rank])
    joined = hvd.gather(torch.tensor([rank], dtype=torch.bfloat16), 0)
    assert joined is None or (joined.dtype is torch.bfloat16 and joined.tolist() == [*range(size)])
    part = hvd.scatter(torch.arange(size * 2.0) if rank == 0 else torch.empty(2), 0)
    assert type(part) is torch.Tensor and part.tolist() == [2.0 * rank, 2.0 * rank + 1]


def _on_a_set():
    some = hvd.add_process_set([0, 2])
    if some.included():
        place = some.rank()
        _on_root(hvd.gather(np.array([place]), 2, process_set=some), np.arange(2), 2)
        _on_root(hvd.reduce(np.array([place]), 2, op=hvd.Sum, process_set=some), np.array([1]), 2)
        part = hvd.scatter(np.arange(4) if place else np.empty(2, int), 2, process_set=some)
        assert part.tolist() == [2 * place, 2 * place + 1]
    hvd.remove_process_set(some)


def _bad_input():
    rank, size = hvd.rank(), hvd.size()
    for error, text, call in (
        (TypeError, "gather 'bad': root_rank must be an integer", lambda: hvd.gather(np.ones(1), "0", "bad")),
        (ValueError, "the root rank 99", lambda: hvd.reduce(np.ones(1), 99)),
        (ValueError, "got hvd.Adasum", lambda: hvd.reduce(np.ones(1), 0, op=hvd.Adasum)),
        (TypeError, "scatter: expected a NumPy array", lambda: hvd.scatter([1, 2], 0)),
        (ValueError, "a scalar has no rows", lambda: hvd.gather(np.array(1.0), 0)),
        (ValueError, f"{size + 1} rows cannot be divided evenly", lambda: hvd.scatter(np.ones(size + 1), rank)),
        (ValueError, "read-only", lambda: hvd.reduce_(b"bytes", rank, op=hvd.Sum)),
    ):
        with pytest.raises(error, match=text):
            call()
    for text, call in (
        ("root ranks for gather", lambda: hvd.gather(np.ones(1), rank, "roots")),
        ("shapes for scatter", lambda: hvd.scatter(np.ones(2 * size) if rank == 0 else np.ones(3), 0, "shapes")),
        ("data types for reduce", lambda: hvd.reduce(np.ones(1, ["f4", "f8"][rank % 2]), 0, "types")),
    ):
        with pytest.raises(hvd.MismatchError, match=text):
            call()


@pytest.fixture
def modules():
    return ("torch",)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", [_grid, _others])
def test_as_numpy_computes_it(ranks, case, size):
    ranks(size).run(case)


def test_process_sets(ranks):
    ranks(3).run(_on_a_set)


def test_bad_input(ranks):
    ranks(2).run(_bad_input)
