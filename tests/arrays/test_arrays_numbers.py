"""Collectives and messages of numbers of Python and NumPy, whose results are numbers."""

from __future__ import annotations

import numpy as np
import pytest

import horovodlike as hvd


def _reductions():
    rank, size = hvd.rank(), hvd.size()
    for name in (None, "number"):
        for _ in range(2):  # the second one takes the fast path, if it has a name
            mean = hvd.allreduce(rank + 0.5, name=name)
            assert type(mean) is float
            assert mean == (size - 1) / 2 + 0.5
    total = hvd.allreduce(rank + 1, op=hvd.Sum)
    assert type(total) is int
    assert total == size * (size + 1) // 2
    assert hvd.allreduce(rank == 0, op=hvd.Max, name="any") is True
    half = hvd.allreduce(np.float16(rank), op=hvd.Max, name="half")
    assert type(half) is np.float16
    assert half == size - 1
    assert hvd.synchronize(hvd.allreduce_async(rank, op=hvd.Min)) == 0
    pair = hvd.grouped_allreduce([rank, 0.5], op=hvd.Sum)
    assert pair == (size * (size - 1) // 2, size / 2)
    largest = hvd.reduce(rank, root_rank=0, op=hvd.Max)
    assert largest == (size - 1 if rank == 0 else None)


def _movements():
    rank, size = hvd.rank(), hvd.size()
    after, before = (rank + 1) % size, (rank - 1) % size
    assert hvd.broadcast(rank + 0.25, root_rank=size - 1) == size - 0.75
    assert type(hvd.broadcast(np.int16(rank), root_rank=0)) is np.int16
    message = hvd.sendrecv(rank + 0.5, after, source=before)
    assert type(message) is float
    assert message == before + 0.5
    assert hvd.sendrecv(np.uint8(rank), after, source=before).dtype == np.uint8
    rows = hvd.sendrecv(np.full((2, 3), rank), after, source=before)
    assert rows.tolist() == np.full((2, 3), before).tolist()


def _a_name_serves_numbers_and_arrays():
    """The same name, in turn with numbers of Python, of NumPy and arrays of the same dtype and shape."""
    size = hvd.size()
    for value, kind in ((1.0, float), (np.float64(1), np.float64), (np.array(1.0), np.ndarray), (1.0, float)):
        for _ in range(2):
            total = hvd.allreduce(value, name="mixed", op=hvd.Sum)
            assert type(total) is kind
            assert total == size
    array = np.array(1.0)
    assert hvd.allreduce_(array, name="mixed", op=hvd.Sum) is array
    assert array == size


def _refusals():
    with pytest.raises(ValueError, match="allreduce.*int64.*18446744073709551616"):
        hvd.allreduce(2**64)
    with pytest.raises(ValueError, match=r"broadcast.*int64"):
        hvd.broadcast(-(2**63) - 1, root_rank=0)
    with pytest.raises(ValueError, match="read-only"):
        hvd.allreduce_(1.5)
    with pytest.raises(ValueError, match="read-only"):
        hvd.recv(1.5)
    with pytest.raises(ValueError, match="a scalar has no rows"):
        hvd.allgather(1.5)
    for value in (1j, "1", None):
        with pytest.raises(TypeError, match="real number"):
            hvd.allreduce(value)
    with pytest.raises(ValueError, match="complex128"):
        hvd.allreduce(np.complex128(1))
    assert hvd.allreduce(1.5) == 1.5  # the counters of all ranks still agree


def _ranks_that_disagree():
    value = 1.5 if hvd.rank() == 0 else 1
    with pytest.raises(hvd.MismatchError, match="int64"):
        hvd.allreduce(value, op=hvd.Sum)


@pytest.mark.parametrize("test", [_reductions, _movements, _a_name_serves_numbers_and_arrays, _refusals])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_numbers(ranks, size, test):
    ranks(size).run(test)


def test_ranks_that_disagree(ranks):
    ranks(2).run(_ranks_that_disagree)
