"""The callbacks for `fit()`, and what ranks with different numbers of batches do."""

from __future__ import annotations

import numpy as np
import pytest

# Keras 3 on its backends, and Keras 2.
KERAS = pytest.mark.parametrize(
    "backend",
    ("tensorflow", *(pytest.param(other, marks=pytest.mark.thorough) for other in ("tf_keras", "torch"))),
    indirect=True,
)


def _model(seed, optimizer, layers=None, **options):
    from horovodlike.keras._backend import keras

    keras.utils.set_random_seed(seed)
    model = keras.Sequential(layers or [keras.Input((4,)), keras.layers.Dense(3)])
    # Tracing takes longer than the few steps that are made here.
    model.compile(optimizer=optimizer, loss="mse", run_eagerly=True, **options)
    return model


def _data(rows, seed=1):
    random = np.random.default_rng(seed)
    return random.standard_normal((rows, 4)), random.standard_normal((rows, 3))


def _on_all_ranks_equal(variables):
    import horovodlike.keras as hvd

    everywhere = [hvd.allgather(np.asarray(variable)[None]) for variable in variables]
    return [all(np.array_equal(value[0], other) for other in value) for value in everywhere]


class _Watching:
    """Makes a callback that notes something at the end of each batch."""

    def __new__(cls, look):
        from horovodlike.keras._backend import keras

        class Watching(keras.callbacks.Callback):
            def __init__(self):
                super().__init__()
                self.seen = []

            def on_train_batch_end(self, batch, logs=None):
                self.seen.append(look(self.model))

        return Watching()


def _broadcast():
    import horovodlike
    import horovodlike.keras as hvd
    from horovodlike.keras._backend import keras

    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
    model = _model(hvd.rank(), optimizer)
    theirs = hvd.broadcast(model.get_weights()[0], root_rank=1)
    assert np.array_equal(theirs, model.get_weights()[0]) == (hvd.rank() == 1)
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(1)
    model.fit(*_data(4), initial_epoch=1, verbose=0, callbacks=[callback])
    assert np.array_equal(model.get_weights()[0], theirs), "before the first batch"
    before = horovodlike.metrics()["steps"]
    model.fit(*_data(8, seed=hvd.rank()), batch_size=4, verbose=0, callbacks=[callback])
    assert horovodlike.metrics()["steps"] == before + 2
    assert all(_on_all_ranks_equal([*model.get_weights(), *(v.numpy() for v in optimizer.variables)]))

    # A model that is built on one rank only.
    unbuilt = _model(hvd.rank(), hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), [keras.layers.Dense(3)])
    if hvd.rank() == 0:
        unbuilt.build((None, 4))
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    unbuilt.fit(*_data(8), batch_size=4, verbose=0, callbacks=[callback])
    assert all(_on_all_ranks_equal(unbuilt.get_weights()))

    # Variables of one's own, and what the optimizer remembers of them.
    layers = [keras.Input((4,)), keras.layers.Dense(5, name="mine"), keras.layers.Dense(3, name="mine_too")]
    optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.Adam(0.1), local_layers=layers[1])
    model = _model(hvd.rank(), optimizer, layers)
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=[layers[1].kernel])
    callback.register_local_var(layers[1].bias)
    model.fit(*_data(8, seed=hvd.rank()), batch_size=4, verbose=0, callbacks=[callback])
    again = hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=layers[1].trainable_variables)
    model.fit(*_data(4), initial_epoch=1, verbose=0, callbacks=[again])
    assert _on_all_ranks_equal(model.get_weights()) == [False, False, True, True]
    slots = [v for v in optimizer.variables if "mine" in v.name]
    assert len(slots) == 8
    assert _on_all_ranks_equal(v.numpy() for v in slots) == ["mine_too" in v.name for v in slots]


@pytest.mark.slow
@KERAS
def test_broadcast(keras_ranks):
    keras_ranks(2).run(_broadcast)


def _metrics():
    import horovodlike.keras as hvd
    from horovodlike.keras._backend import keras

    callback = hvd.callbacks.MetricAverageCallback()
    logs = {"loss": 1.0 + hvd.rank(), "accuracy": float(hvd.rank())}
    callback.on_epoch_end(0, logs)
    assert logs == {"loss": 1.5, "accuracy": 0.5}
    with pytest.raises(ValueError, match=r"different metrics to average: \['a'\] on rank 0, \['b'\] on rank 1"):
        callback.on_epoch_end(0, {"ab"[hvd.rank()]: 1.0})
    callback.on_epoch_end(0, None)

    # Later callbacks, and the history, have the averages.
    model = _model(0, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    x, y = _data(8, seed=hvd.rank())
    history = model.fit(x, y, batch_size=8, verbose=0, callbacks=[callback], validation_data=(x[:4], y[:4]))
    assert len(set(hvd.allgather(np.array(history.history["loss"])))) == 1
    assert len(set(hvd.allgather(np.array(history.history["val_loss"])))) == 1


@pytest.mark.slow
@KERAS
def test_metric_average(keras_ranks):
    keras_ranks(2).run(_metrics)


def _progress():
    from unittest import mock

    import horovodlike.keras as hvd
    from horovodlike.keras._backend import keras

    model = _model(0, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    callbacks = [hvd.callbacks.MetricAverageCallback(), hvd.callbacks.ReportProgressCallback()]
    with mock.patch("horovodlike.keras.callbacks.report_progress") as report:
        history = model.fit(*_data(8), batch_size=4, epochs=2, initial_epoch=1, verbose=0, callbacks=callbacks)
    loss = history.history["loss"][0]
    assert [call.args for call in report.call_args_list] == [(1.5, 2), (2.0, 2), (2, 2, {"loss": loss})]


@pytest.mark.slow
@KERAS
def test_the_progress_is_reported(keras_ranks):
    keras_ranks(2).run(_progress)


def _rate(model):
    from horovodlike.keras.functions import objects

    return float(objects.to_numpy(model.optimizer.learning_rate))


def _schedule():
    import horovodlike.keras as hvd
    from horovodlike.keras._backend import keras

    def rates(callbacks, epochs=4, optimizer=None):
        model = _model(0, hvd.DistributedOptimizer(optimizer or keras.optimizers.SGD(0.5)))
        watching = _Watching(_rate)
        history = model.fit(*_data(8), batch_size=4, epochs=epochs, verbose=0, callbacks=[*callbacks, watching]).history
        return watching.seen, history["lr"]

    schedule = hvd.callbacks.LearningRateScheduleCallback
    seen, logged = rates([schedule(0.5, 0.1, start_epoch=1)])
    np.testing.assert_allclose(seen, [0.5, 0.5, 0.5, 0.5, 0.05, 0.05, 0.005, 0.005], rtol=1e-6)
    np.testing.assert_allclose(logged, seen[1::2])
    seen, _ = rates([schedule(0.5, lambda epoch: 1 / (1 + epoch), end_epoch=2, staircase=False)])
    np.testing.assert_allclose(seen, [0.5, 1 / 3, 0.25, 0.2, 0.2, 0.2, 0.2, 0.2], rtol=1e-6)
    two = [schedule(0.5, 1.0, end_epoch=2), schedule(0.5, lambda epoch: 0.1, start_epoch=2)]
    seen, _ = rates(two)
    np.testing.assert_allclose(seen, [0.5] * 4 + [0.05] * 4, rtol=1e-6)
    seen, _ = rates([schedule(0.5, 0.1)], optimizer=keras.mixed_precision.LossScaleOptimizer(keras.optimizers.SGD(0.5)))
    np.testing.assert_allclose(seen[-1], 0.0005, rtol=1e-6)

    warmup = hvd.callbacks.LearningRateWarmupCallback(0.8, warmup_epochs=2, verbose=1)
    seen, _ = rates([warmup], epochs=3)
    np.testing.assert_allclose(seen, [0.5, 0.6, 0.7, 0.8, 0.8, 0.8], rtol=1e-6)

    with pytest.raises(ValueError, match="Parameter `initial_lr` is required"):
        schedule(None, 0.1)
    decay = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    with pytest.raises(ValueError, match="with a number as its learning_rate"):
        rates([schedule(0.1, 0.1)], optimizer=keras.optimizers.SGD(decay))
    batches = iter([_data(4)] * 2)
    with pytest.raises(ValueError, match="pass steps_per_epoch"):
        model = _model(0, hvd.DistributedOptimizer(keras.optimizers.SGD(0.5)))
        model.fit(
            (batch for batch in batches), shuffle=False, verbose=0, callbacks=[schedule(0.5, 0.1, staircase=False)]
        )


def _momentum_correction(correct):
    """Make two steps at 0.5 and one at 0.05; return where momentum alone would take the variable."""
    import horovodlike.keras as hvd
    from horovodlike.keras._backend import keras

    model = _model(0, hvd.DistributedOptimizer(keras.optimizers.SGD(0.5, momentum=0.5)))
    callback = hvd.callbacks.LearningRateScheduleCallback(0.5, 0.1, momentum_correction=correct)
    model.fit(*_data(4), batch_size=4, epochs=2, verbose=0, callbacks=[callback])
    return model.get_weights()[0]


def _momenta():
    """In proportion to the learning rate: what SGD has that multiplies its momenta by it only when it uses them."""
    from horovodlike.keras._backend import keras

    layers = _model(0, "sgd")
    weights, momenta = layers.get_weights(), None
    x, y = _data(4)
    for rate in (0.5, 0.05):
        gradients = [
            2 / 12 * x.T @ (x @ weights[0] + weights[1] - y),
            2 / 12 * (x @ weights[0] + weights[1] - y).sum(0),
        ]
        momenta = gradients if momenta is None else [0.5 * m + g for m, g in zip(momenta, gradients, strict=True)]
        weights = [weight - rate * m for weight, m in zip(weights, momenta, strict=True)]
    np.testing.assert_allclose(_momentum_correction(True), weights[0], rtol=1e-4)
    assert not np.allclose(_momentum_correction(False), weights[0], rtol=1e-3)

    class Strange(keras.optimizers.SGD):
        @property
        def momentums(self):
            return None

        @momentums.setter
        def momentums(self, value):
            pass

    import horovodlike.keras as hvd

    callback = hvd.callbacks.LearningRateScheduleCallback(0.5, 0.1)
    callback.set_model(_model(0, Strange(0.1, momentum=0.9)))
    callback.model.optimizer.built = callback.model.optimizer._built = True
    with pytest.raises(ValueError, match="momentum_correction=False"):
        callback.on_epoch_begin(1)


@pytest.mark.slow
@KERAS
def test_learning_rates(keras_ranks):
    pool = keras_ranks(2)
    pool.run(_schedule)
    pool.run(_momenta)
    assert pool.output(0).count("Epoch 2: finished gradual learning rate warmup to 0.8.") == 1
    assert "finished gradual" not in pool.output(1)


def _uneven(batches, validation):
    """Rank r trains on the first batches[r] of the same batches in each of two epochs."""
    import horovodlike.keras as hvd
    from horovodlike.keras._backend import keras

    rank = hvd.rank()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
    model = _model(0, optimizer)
    x, y = _data(4 * max(batches))
    mine = slice(0, 4 * batches[rank])
    history = model.fit(
        x[mine],
        y[mine],
        batch_size=4,
        shuffle=False,
        epochs=2,
        verbose=0,
        validation_data=_data(4) if validation else None,
        callbacks=[
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.JoinCallback(),
            hvd.callbacks.MetricAverageCallback(),
        ],
    ).history
    # While both have batches the average is what each of them would do alone; then it is over the one that is left, or
    # its gradients would be halved.
    alone = _model(0, keras.optimizers.SGD(0.1, momentum=0.9))
    alone.fit(x, y, batch_size=4, shuffle=False, epochs=2, verbose=0)
    for mine, theirs in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5)
    assert all(_on_all_ranks_equal([*model.get_weights(), *(v.numpy() for v in optimizer.variables)]))
    assert int(optimizer.iterations) == 2 * max(batches)
    if validation:
        expected = alone.evaluate(*_data(4), verbose=0)
        assert history["val_loss"][-1] == pytest.approx(expected, rel=1e-5), "of the weights after the join"


def _short_batches():
    """The last batch of rank 1 is short: its gradient counts as much as that of rank 0."""
    import horovodlike.keras as hvd
    from horovodlike.keras._backend import keras

    model = _model(0, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    x, y = (array[: 8 - hvd.rank()] for array in _data(8))
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    assert all(_on_all_ranks_equal(model.get_weights()))
    # The average of a mean of 4 and of one of the first 3 of them, as weights in a mean of 4.
    alone = _model(0, keras.optimizers.SGD(0.1))
    weights = np.array([1.0] * 4 + [4 / 8 + 4 / 6] * 3 + [4 / 8])
    alone.fit(*_data(8), sample_weight=weights, batch_size=4, shuffle=False, verbose=0)
    for mine, theirs in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5)


@pytest.mark.slow
@KERAS
def test_uneven_data(keras_ranks):
    keras_ranks(2).run(_uneven, (2, 4), True)
    keras_ranks(2).run(_uneven, (3, 1), False)
    keras_ranks(2).run(_short_batches)


def _checkpoint(folder):
    import horovodlike.keras as hvd
    from horovodlike.keras._backend import keras

    model = _model(0, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    checkpoint = hvd.callbacks.BestModelCheckpoint(monitor="loss")
    with pytest.raises(ValueError, match="filepath"):
        model.fit(*_data(4), verbose=0, callbacks=[checkpoint])
    checkpoint.filepath = f"{folder}/{hvd.rank()}.keras"
    model.fit(*_data(4), epochs=3, verbose=0, callbacks=[hvd.callbacks.MetricAverageCallback(), checkpoint])
    x, y = _data(4)
    best = keras.saving.load_model(checkpoint.filepath)
    assert all(map(np.array_equal, best.get_weights(), model.get_weights()))
    assert best.evaluate(x, y, verbose=0) < checkpoint.best


@pytest.mark.slow
@KERAS
def test_best_model_checkpoint(keras_ranks, tmp_path):
    keras_ranks(2).run(_checkpoint, str(tmp_path))
