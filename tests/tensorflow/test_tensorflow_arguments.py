"""Arguments of the collectives on TensorFlow tensors that are something else than meant, eagerly and in graphs."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import horovodlike.keras
import horovodlike.tensorflow as hvd
from horovodlike._engine.ops import counters
from horovodlike.errors import HorovodInternalError


def _refused(match, call, *errors):
    before = counters()
    for run in (call, tf.function(call)):
        for error in errors or (ValueError,):
            with pytest.raises(error, match=match):
                run()
    assert counters() == before, f"something was sent before {match!r}"


def _reductions():
    one = tf.ones([2])
    total = sum(range(hvd.size()))
    for op in (tf.distribute.ReduceOp.SUM, np.int64(hvd.Sum)):
        assert hvd.allreduce(one * hvd.rank(), op=op, name="s").numpy()[0] == total
    for op in (True, 1.0, "sum", 7):
        _refused("op must be one of", lambda: hvd.allreduce(one, op=op, name="s"))
        _refused("op must be one of", lambda: hvd.grouped_allreduce([one], op=op, name="s"))
        _refused("op must be one of", lambda: hvd.reducescatter(one, op=op, name="s"))
        with pytest.raises(ValueError, match="op must be one of"):
            hvd.DistributedGradientTape(tf.GradientTape(), op=op)
        with pytest.raises(ValueError, match="op must be one of"):
            hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1), op=op)
        with pytest.raises(ValueError, match="op must be one of"):
            horovodlike.keras.allreduce(np.ones(2), op=op)
    errors = (tf.errors.AbortedError, ValueError)
    _refused("got hvd.Adasum", lambda: hvd.reducescatter(one, op=hvd.Adasum), *errors)
    _refused("got hvd.Adasum", lambda: hvd.grouped_reducescatter([one], op=hvd.Adasum), *errors)
    for error in (HorovodInternalError, ValueError):
        with pytest.raises(error, match="got hvd.Adasum"):
            horovodlike.keras.reducescatter(np.ones(2), op=hvd.Adasum)


def _groups_are_refused_as_a_whole():
    one = tf.ones([2])
    for op, factor in ((hvd.Adasum, 1.0), (hvd.Max, 1.0), (hvd.Sum, 2.0)):

        def call(op=op, factor=factor):
            slices = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]), tf.constant([2, 2]))
            return hvd.grouped_allreduce([one, slices], op=op, prescale_factor=factor, name="whole")[0]

        _refused("IndexedSlices", call, NotImplementedError)
    _refused("list of tensors", lambda: hvd.grouped_allgather(one), TypeError)


def _names_splits_and_numbers():
    one = tf.ones([hvd.size()])
    for bad, error in ((5, TypeError), ("", ValueError), ("a\0b", ValueError), ("a" * 5000, ValueError)):
        _refused("name", lambda: hvd.allreduce(one, name=bad), error)
        _refused("name", lambda: hvd.alltoall(one, name=bad), error)
        _refused("name", lambda: hvd.broadcast(one, 0, name=bad), error)
        with pytest.raises(error, match="name"):
            horovodlike.keras.allgather(np.ones(2), name=bad)
    for bad in (1.0, True, 2**70, "1"):
        _refused("splits must be", lambda: hvd.alltoall(one, [bad] * hvd.size(), name="s"))
    for bad, error in ((float("nan"), ValueError), (float("inf"), ValueError), ("2", TypeError)):
        _refused("prescale_factor", lambda: hvd.allreduce(one, prescale_factor=bad, name="s"), error)
        with pytest.raises(error, match="postscale_factor"):
            horovodlike.keras.allreduce(np.ones(2), postscale_factor=bad)
    for bad in (True, 0.0, "0", None):
        _refused("root_rank must be an integer", lambda: hvd.broadcast(one, bad, name="s"), TypeError)
        with pytest.raises(TypeError, match="root_rank must be an integer"):
            hvd.broadcast_object(1, bad)
    _refused("compression must be", lambda: hvd.allreduce(one, compression="fp16", name="s"), TypeError)
    _refused("process_set must be", lambda: hvd.allreduce(one, process_set=0, name="s"), TypeError)


def _a_process_set_without_this_rank():
    added = hvd.add_process_set([0])
    if hvd.rank() == 1:
        one = tf.ones([2])
        errors = (tf.errors.InvalidArgumentError, ValueError)
        for call in (
            lambda: hvd.allreduce(one, process_set=added, name="p"),
            lambda: hvd.allgather(one, process_set=added, name="p"),
            lambda: hvd.broadcast(one, 0, process_set=added, name="p"),
            lambda: hvd.alltoall(one, process_set=added, name="p"),
            lambda: hvd.reducescatter(one, process_set=added, name="p"),
            lambda: hvd.grouped_allreduce([one], process_set=added, name="p"),
        ):
            _refused("rank 1 is not a member of", call, *errors)
    hvd.remove_process_set(added)


@pytest.mark.parametrize(
    "case",
    (_reductions, _groups_are_refused_as_a_whole, _names_splits_and_numbers, _a_process_set_without_this_rank),
)
def test_arguments(ranks, case):
    ranks(2).run(case)
