"""Warnings where ranks train from different weights or alone, `check_consistency`, and `evaluate()`."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

BACKENDS = pytest.mark.parametrize(
    "backend",
    ("tensorflow", *(pytest.param(other, marks=pytest.mark.thorough) for other in ("torch", "tf_keras"))),
    indirect=True,
)


def _model(seed, wrap=True, **options):
    import horovodlike.keras as hvd
    from horovodlike.keras._backend import keras

    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="first"), keras.layers.Dense(1)])
    sgd = keras.optimizers.SGD(0.1)
    model.compile(optimizer=hvd.DistributedOptimizer(sgd) if wrap else sgd, loss="mse", **options)
    return model


def _warnings_of_fit(model, callbacks=()):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(np.ones((6, 3)), np.ones((6, 1)), batch_size=1, verbose=0, callbacks=list(callbacks))
    return [str(each.message) for each in caught if issubclass(each.category, UserWarning)]


def _first_weights():
    import horovodlike.keras as hvd

    hvd.shutdown()  # a join() of an earlier test would end the comparison
    hvd.init()
    for eager in (False, True):
        (text,) = _warnings_of_fit(_model(hvd.rank(), run_eagerly=eager))
        assert "different first parameters: 0." in text and "first/kernel" in text and "2 of 4" in text, text
        assert "BroadcastGlobalVariablesCallback(0)" in text
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback
    assert not _warnings_of_fit(_model(hvd.rank(), run_eagerly=True), [broadcast(0)])
    plain = _warnings_of_fit(_model(0, wrap=False, run_eagerly=True), [broadcast(0)])
    assert ["DistributedOptimizer" in text for text in plain] == [True]


@BACKENDS
@pytest.mark.parametrize("size", (2, pytest.param(3, marks=pytest.mark.slow)))
def test_first_weights_that_differ_and_a_plain_optimizer_are_warned_of(keras_ranks, size):
    keras_ranks(size).run(_first_weights)


def _consistency():
    import horovodlike.keras as hvd
    from horovodlike.errors import MismatchError
    from horovodlike.keras._backend import keras

    if hvd.rank() == 1:
        _model(5)  # Keras counts on
    model = _model(0)
    hvd.check_consistency(model)
    hvd.check_consistency(model.trainable_variables)
    hvd.check_consistency({"a": np.ones(2)})
    with pytest.raises(MismatchError, match="0.*first/kernel: values: rank 1 differs from rank"):
        hvd.check_consistency(_model(hvd.rank() == 1))
    with pytest.raises(ValueError, match="has no variables yet"):
        hvd.check_consistency(keras.Sequential([keras.layers.Dense(1)]))


@BACKENDS
@pytest.mark.parametrize("size", (2, pytest.param(3, marks=pytest.mark.slow)))
def test_consistency(keras_ranks, size):
    keras_ranks(size).run(_consistency)


def _evaluate():
    import horovodlike.keras as hvd
    from horovodlike.keras._backend import keras

    floatx = keras.backend.floatx()
    keras.backend.set_floatx("float64")
    try:
        model = _model(0, metrics=["mae"])
        random = np.random.default_rng(0)
        x, y = random.standard_normal((6 * hvd.size(), 3)), random.standard_normal((6 * hvd.size(), 1))
        alone = model.evaluate(x, y, batch_size=2, verbose=0)
        share = slice(6 * hvd.rank(), 6 * hvd.rank() + 6)
        own = model.evaluate(x[share], y[share], batch_size=2, verbose=0)
        together = [hvd.allreduce(value, name=f"metric.{i}") for i, value in enumerate(own)]
        exact = keras.backend.backend() == "tensorflow"  # on torch the metrics of Keras are float32
        np.testing.assert_allclose(together, alone, rtol=1e-12 if exact else 1e-6)
        assert abs(own[0] - alone[0]) > 1e-6
        averaged = hvd.callbacks.MetricAverageCallback()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert model.evaluate(x[share], y[share], batch_size=2, verbose=0, callbacks=[averaged]) == own
        assert any("give them to hvd.allreduce" in str(each.message) for each in caught)
        history = model.fit(
            *(x[share], y[share]), batch_size=3, verbose=0, validation_data=(x[share], y[share]), callbacks=[averaged]
        )
        assert len(set(hvd.allgather(np.array(history.history["val_loss"])))) == 1
    finally:
        keras.backend.set_floatx(floatx)


@BACKENDS
@pytest.mark.parametrize("size", (2, pytest.param(3, marks=pytest.mark.slow)))
def test_evaluate_is_each_ranks_own(keras_ranks, size):
    keras_ranks(size).run(_evaluate)
