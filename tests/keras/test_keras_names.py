"""The names by which the ranks match the reductions of an optimizer."""

from __future__ import annotations

import re

import numpy as np
import pytest


def _other_shapes():
    """The number of classes is what each rank has found in its own data."""
    import keras

    import horovodlike.keras as hvd

    classes = 3 + hvd.rank()
    for traced in (True, False):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(classes, use_bias=False)])
        model.compile(optimizer=hvd.DistributedOptimizer("sgd"), loss="mse", run_eagerly=not traced)
        message = r"Mismatched shapes .*kernel.*: rank 0 has \[3, 3\], rank 1 has \[3, 4\]"
        with pytest.raises(Exception, match=message):
            model.fit(np.zeros((4, 3)), np.zeros((4, classes)), verbose=0)


@pytest.mark.parametrize("backend", ("tensorflow", pytest.param("torch", marks=pytest.mark.thorough)), indirect=True)
def test_other_shapes_on_a_rank_are_an_error_on_all(keras_ranks):
    keras_ranks(2).run(_other_shapes)


def _prefixes():
    """Return how the reductions of optimizers begin, by the names of the variables that they train."""
    import keras

    import horovodlike
    import horovodlike.keras as hvd

    found = []
    for names in (["kernel", "bias"], ["kernel", "bias", "kernel"], ["kernel"], ["kern", "el"]):
        variables = [keras.Variable(0.0, dtype="float32", name=name) for name in names]
        hvd.DistributedOptimizer("sgd").apply([keras.ops.ones(())] * len(names), variables)
        found.append(re.search(r"DistributedOptimizer_\w+", horovodlike.flight_recorder()[-1]["name"])[0])
    return found


def test_optimizers_of_other_variables_have_other_names(keras_ranks):
    first, second = keras_ranks(2).run(_prefixes)
    assert first == second
    assert len(set(first)) == len(first)


def _without_names():
    """Rank 0 has made another model before, and Keras has counted on."""
    import keras

    import horovodlike.keras as hvd

    class Scale(keras.layers.Layer):
        def build(self, shape):
            self.factor = self.add_weight(shape=(), initializer="ones")
            self.built = True

        def call(self, x):
            return x * self.factor

    if hvd.rank() == 0:
        Scale().build((1, 1))
    for traced in (True, False):
        model = keras.Sequential([keras.Input((1,)), Scale()])
        model.compile(optimizer=hvd.DistributedOptimizer("sgd"), loss="mse", run_eagerly=not traced)
        model.fit(np.full((1, 1), hvd.rank()), np.zeros((1, 1)), verbose=0)
        np.testing.assert_allclose(model.get_weights(), [0.99])


def test_variables_without_names_are_matched_by_position(keras_ranks):
    keras_ranks(2).run(_without_names)
