"""Messages of arrays from one rank to another: content, order, sources, and what cannot be sent or received."""

from __future__ import annotations

import array as array_module
import os
import threading

import ml_dtypes
import numpy as np
import pytest

import horovodlike as hvd
from horovodlike._engine.ops import DType

DTYPES = [np.dtype(getattr(ml_dtypes, name, name)) for name in DType.__members__]
SHAPES = ((0,), (), (17,), (3, 5, 2), (1, 2, 1, 2, 1, 2, 1, 2, 3), (300_007,))


@pytest.fixture
def modules():
    return ("torch",)


def _ring():
    return (hvd.rank() + 1) % hvd.size(), (hvd.rank() - 1) % hvd.size()


def _values(rank, dtype, shape):
    return np.random.default_rng(rank).integers(0, 2, shape).astype(dtype)


def _grid():
    after, before = _ring()
    for dtype in DTYPES:
        for tag, shape in enumerate(SHAPES):
            mine, expected = _values(hvd.rank(), dtype, shape), _values(before, dtype, shape)
            target = np.empty(shape, dtype)
            assert hvd.sendrecv(mine, after, target, before, sendtag=tag, recvtag=tag) == before
            assert target.tobytes() == expected.tobytes()
            receiving = hvd.irecv(target, before)
            sending = hvd.isend(mine, after)
            assert hvd.synchronize(sending) is None
            assert hvd.synchronize(receiving) == before
            assert target.tobytes() == expected.tobytes()


def _layouts():
    after, before = _ring()
    for lay in (np.asfortranarray, lambda array: np.repeat(array, 2, axis=0)[::2], lambda array: array[:, ::-1]):
        mine, expected = lay(np.arange(12.0).reshape(3, 4) + hvd.rank()), lay(np.arange(12.0).reshape(3, 4) + before)
        target = lay(np.zeros((3, 4)))
        hvd.sendrecv(mine, after, target, before)
        assert np.array_equal(target, expected)


def _libraries():
    import torch

    after, before = _ring()
    tensor = torch.zeros(3, dtype=torch.bfloat16)
    hvd.sendrecv(torch.full((3,), float(hvd.rank()), dtype=torch.bfloat16), after, tensor, before)
    assert tensor.tolist() == [float(before)] * 3
    memory = array_module.array("d", [0.0])
    hvd.sendrecv(memoryview(array_module.array("d", [hvd.rank()])), after, memory)
    assert memory[0] == before


def _order_and_sources():
    """Rank 0 gets from each of the others, in the order of each, whichever comes first."""
    rank, size = hvd.rank(), hvd.size()
    if rank > 0:
        for number in range(5):
            hvd.send(np.array([rank, number]), 0, tag=7)
        return
    numbers = {source: 0 for source in range(1, size)}
    for _ in range(5 * (size - 1)):
        target = np.empty(2, int)
        source = hvd.recv(target, hvd.ANY_SOURCE, tag=7)
        assert target.tolist() == [source, numbers[source]]
        numbers[source] += 1


def _a_rank_that_waits_for_a_message():
    assert hvd.metrics()["in_flight"] == 0
    if hvd.rank() == 0:
        thread = threading.Thread(target=hvd.recv, args=(np.empty(2), hvd.size() - 1))
        thread.start()
        while not hvd.metrics()["in_flight"]:
            os.sched_yield()
    hvd.barrier()
    if hvd.rank() == hvd.size() - 1:
        hvd.send(np.ones(2), 0)
    if hvd.rank() == 0:
        thread.join()
        assert hvd.metrics()["in_flight"] == 0


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_that_waits_for_a_message_is_in_the_metrics(ranks, size):
    ranks(size).run(_a_rank_that_waits_for_a_message)


def _on_a_set():
    some = hvd.add_process_set([0, 2])
    if some.included():
        other = 2 - hvd.rank()
        target = np.empty(1, int)
        assert hvd.sendrecv(np.array([hvd.rank()]), other, target, process_set=some) == other
        assert target[0] == other
    else:
        with pytest.raises(ValueError, match="not a member"):
            hvd.send(np.ones(1), 0, process_set=some)
    hvd.barrier()
    hvd.remove_process_set(some)


def _bad_input():
    ones, rank = np.ones(4), hvd.rank()
    overlapping = np.lib.stride_tricks.as_strided(ones, (2, 2), (8, 8))
    for error, text, call in (
        (TypeError, "send: expected a NumPy array", lambda: hvd.send([1], 0)),
        (TypeError, "send: dest must be an integer", lambda: hvd.send(ones, "0")),
        (TypeError, "recv: tag must be an integer", lambda: hvd.recv(ones, 0, 1.5)),
        (ValueError, "9", lambda: hvd.send(ones, 9)),
        (ValueError, "tag", lambda: hvd.send(ones, 0, tag=-1)),
        (ValueError, "recv: .*read-only", lambda: hvd.recv(b"bytes", 0)),
        (ValueError, "recv: elements of an array share memory", lambda: hvd.recv(overlapping, 0)),
        (ValueError, "sendrecv: two of the arrays share memory", lambda: hvd.sendrecv(ones[:2], 0, ones[1:])),
    ):
        with pytest.raises(error, match=text):
            call()
    hvd.barrier()
    if rank == 0:
        hvd.send(np.ones(3), 1)
        hvd.send(np.ones(2, np.int64), 1)
    else:
        for _ in range(2):
            with pytest.raises(hvd.MismatchError):
                hvd.recv(np.ones(2))
    hvd.barrier()


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("case", [_grid, _layouts, _libraries, _order_and_sources])
def test_messages(ranks, case, size):
    ranks(size).run(case)


def test_process_sets(ranks):
    ranks(3).run(_on_a_set)


def test_bad_input(ranks):
    ranks(2).run(_bad_input)
