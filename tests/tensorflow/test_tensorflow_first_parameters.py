"""Ranks that train from different variables are warned of; `check_consistency` compares them at any time."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import tensorflow as tf

import horovodlike.tensorflow as hvd
from horovodlike.errors import MismatchError


def _step(variables, **options):
    def step():
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(one * one) for one in variables])
        gradients = hvd.DistributedGradientTape(tape, **options).gradient(loss, variables)
        for one, gradient in zip(variables, gradients, strict=True):
            one.assign_sub(0.1 * gradient)

    return step


def _texts(step, after_first=lambda: None):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step()
        after_first()
        step()
        step()
    return [str(each.message) for each in caught]


def _variables(second):
    return [tf.Variable(tf.ones([3]), name="first"), tf.Variable(tf.fill([2], float(second)), name="second")]


def _first_variables():
    for traced in (tf.function, lambda step: step):
        (text,) = _texts(traced(_step(_variables(hvd.rank()))))
        assert "different first parameters: 1.second (1 of 2 differ)" in text and "broadcast_variables" in text
        assert not _texts(traced(_step(_variables(1))))
        # As Horovod's examples do: broadcast after the first step.
        variables = _variables(hvd.rank())
        assert not _texts(traced(_step(variables)), lambda late=variables: hvd.broadcast_variables(late, root_rank=0))
    (text,) = _texts(_step(_variables(hvd.rank()), compression=hvd.Compression.fp16))
    assert "1.second" in text


@pytest.mark.parametrize("size", (2, 3))
def test_first_variables_that_differ_are_warned_of(fresh_ranks, size):
    fresh_ranks(size).run(_first_variables)


def _export(folder):
    """Nothing of the comparison keeps a module with a traced step from being exported."""
    module = tf.Module()
    module.variables_ = _variables(1)
    module.step = tf.function(_step(module.variables_))
    module.step()
    tf.saved_model.save(module, f"{folder}/{hvd.rank()}")


def test_a_traced_step_can_be_exported(ranks, tmp_path):
    ranks(2).run(_export, str(tmp_path))


def _without_data():
    """A rank makes its first steps after a join, when the others have compared their variables."""
    variables = _variables(1)
    step = tf.function(_step(variables))
    if hvd.rank():
        assert not _texts(step)
    hvd.join()
    hvd.broadcast_variables(variables, root_rank=1)
    assert not _texts(step)


def test_a_rank_without_data(fresh_ranks):
    fresh_ranks(3).run(_without_data)


def _consistency():
    hvd.check_consistency(_variables(1))
    hvd.check_consistency({"a": tf.ones([2], tf.bfloat16), "b": np.ones(3)})
    with pytest.raises(MismatchError, match=r"1.second: values: rank 1 differs from ranks? 0") as caught:
        hvd.check_consistency(_variables(hvd.rank() == 1))
    assert "(1 of 2 tensors differ)" in str(caught.value)
    with pytest.raises(MismatchError, match="a: dtype is float"):
        hvd.check_consistency({"a": tf.ones([2], tf.float32 if hvd.rank() else tf.float64)})
    module = tf.Module()
    module.weight = tf.Variable(1.0)
    hvd.check_consistency(module)


@pytest.mark.parametrize("size", (1, 2, 3))
def test_consistency(ranks, size):
    if size > 1:
        ranks(size).run(_consistency)
    else:
        ranks(1).run(lambda: hvd.check_consistency(_variables(1)))
