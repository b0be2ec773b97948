"""Gradients weighted by samples: equality with one process that has the whole batch, and the rules of weights."""

from __future__ import annotations

import numpy as np
import pytest

# The samples of the ranks in each batch. The last one is smaller, in another ratio.
SIZES = ((7, 17, 2), (8, 16, 3), (1, 24, 5), (3, 2, 5))


def _batches(whole, rank, size):
    random = np.random.default_rng(3)
    for sizes in SIZES:
        of_ranks = [random.standard_normal((each, 9)) for each in sizes[:size]]
        rows = np.concatenate(of_ranks) if whole else of_ranks[rank]
        yield rows[:, :6], rows[:, 6:]


def _model(base=None):
    import keras

    class Dense(keras.layers.Layer):
        """A dense layer; the product of matrices on torch, which Keras's own uses, is computed in float32."""

        def __init__(self, units):
            super().__init__(dtype="float64")
            self.units = units

        def build(self, shape):
            self.kernel = self.add_weight(shape=(shape[-1], self.units))
            self.bias = self.add_weight(shape=(self.units,))

        def call(self, x):
            return keras.ops.tanh(keras.ops.sum(x[:, :, None] * self.kernel, axis=1) + self.bias)

    keras.utils.set_random_seed(7)
    inputs = keras.Input((6,), dtype="float64")
    return (base or keras.Model)(inputs, Dense(3)(Dense(8)(inputs)))


def _loss(y, predicted):
    """Return the mean square; that of Keras is computed in float32 on torch."""
    import keras

    total = keras.ops.sum(keras.ops.square(predicted - y))
    return total / keras.ops.cast(keras.ops.size(predicted), "float64")


def _flat(model):
    return np.concatenate([weight.ravel() for weight in model.get_weights()])


def _trained(way, optimizer, traced, **options):
    """Train with weights on this rank's parts of the batches; with `way=None` on whole batches, alone."""
    import keras

    import horovodlike.keras as hvd
    from horovodlike import weighting

    class Model(keras.Model):
        def train_step(self, *data):
            hvd.set_batch_weight(keras.ops.shape(data[-1][0])[0])
            return super().train_step(*data)

    class Callback(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            hvd.set_batch_weight(next(sizes))

    rank, size = hvd.rank(), hvd.size()
    sizes = iter([of_ranks[rank] for of_ranks in SIZES])
    if way == "function":
        options["weight"] = lambda: next(sizes)
    elif way == "asked for":
        options["weight"] = hvd.batch_weight
    model = _model(Model if way in ("train_step", "asked for") else None)
    optimizer = optimizer if way is None else hvd.DistributedOptimizer(optimizer, **options)
    model.compile(optimizer=optimizer, loss=_loss, run_eagerly=not traced)
    for x, y in _batches(way is None, rank, size):
        callbacks = [Callback()] if way == "callback" else []
        model.fit(x, y, batch_size=len(x), verbose=0, callbacks=callbacks)
        assert not weighting.is_set()
    return _flat(model)


def _equal_the_whole_batch(chosen):
    import keras

    def sgd():
        return keras.optimizers.SGD(0.05, momentum=0.9)

    def adam():
        return keras.optimizers.Adam(0.01)

    variants = {
        "train_step": (sgd, {}),
        "callback": (sgd, {}),
        "function": (adam, {}),
        "asked for": (sgd, {"groups": 2}),
    }
    keras.config.set_floatx("float64")  # of the loss
    try:
        for way, traced in chosen:
            make, options = variants[way]
            _check(way, traced, make, options)
    finally:
        keras.config.set_floatx("float32")


def _check(way, traced, make, options):
    import horovodlike.keras as hvd

    trained, expected = _trained(way, make(), traced, **options), _trained(None, make(), False)
    everywhere = hvd.allgather(trained[None])
    assert all(np.array_equal(everywhere[0], other) for other in everywhere), way
    difference = np.linalg.norm(trained - expected) / np.linalg.norm(expected)
    assert difference < 1e-12, (way, traced, difference)


IN_THE_STEP = [("train_step", True)]
ELSEWHERE = [("callback", False), ("function", False), ("asked for", True)]


@pytest.mark.parametrize("size", (1, 2, 3))
@pytest.mark.parametrize(
    ("backend", "ways"),
    [
        ("tensorflow", IN_THE_STEP),
        pytest.param("tensorflow", ELSEWHERE, marks=pytest.mark.slow),
        pytest.param("torch", IN_THE_STEP + ELSEWHERE, marks=pytest.mark.slow),
    ],
    indirect=["backend"],
)
def test_uneven_batches_equal_one_process_with_the_whole_batch(keras_ranks, size, backend, ways):
    keras_ranks(size).run(_equal_the_whole_batch, ways, timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ("tensorflow", pytest.param("torch", marks=pytest.mark.thorough)), indirect=True)
def test_uneven_batches_in_every_way(keras_ranks, backend):
    ways = [("train_step", False), ("callback", True), ("function", True), ("asked for", False)]
    keras_ranks(2).run(_equal_the_whole_batch, ways, timeout=120)


def _applied(gradient, **options):
    """Return a variable that was 0 after one step with this rank's gradient."""
    import keras

    import horovodlike.keras as hvd

    variable = keras.Variable(0.0, name="weighted", dtype="float64")
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), **options)
    gradients = [None if gradient is None else keras.ops.convert_to_tensor(gradient, "float64")]
    for _ in range(options.get("backward_passes_per_step", 1)):
        optimizer.apply(gradients, [variable])
    return float(keras.ops.convert_to_numpy(variable))


def _rules():
    import keras

    import horovodlike.keras as hvd
    from horovodlike import weighting

    rank, size = hvd.rank(), hvd.size()
    mean = sum((each + 1) * each for each in range(size)) / sum(range(1, size + 1))
    assert _applied(rank, weight=rank + 1) == pytest.approx(-mean, abs=1e-14)
    assert _applied(rank, weight=rank + 1, gradient_predivide_factor=2.0) == pytest.approx(-mean, abs=1e-14)
    half = _applied(rank, weight=rank + 1, compression=hvd.Compression.fp16)
    assert half == pytest.approx(-mean, rel=1e-2)
    for passes in (2, 3):  # the weights of the passes add up, as do the gradients
        for _ in range(passes):
            hvd.set_batch_weight(rank + 1)
        assert _applied(rank, backward_passes_per_step=passes) == pytest.approx(-passes * mean, abs=1e-14)
        assert not weighting.is_set()
    for gradient in (None, float("nan"), 7.0):  # of a rank without samples
        mine = rank == size - 1
        assert _applied(gradient if mine else 3.0, weight=float(not mine)) == -3.0
    everywhere = [_applied(0.1 * (rank + 1), weight=weight) for weight in (None, 5)]
    assert everywhere[0] == everywhere[1]
    for bad in (-1, float("nan"), "4"):
        with pytest.raises(ValueError, match="must be a finite number >= 0"):
            hvd.set_batch_weight(bad)
        with pytest.raises(ValueError, match="must be a finite number >= 0"):
            _applied(1.0, weight=bad)
        with pytest.raises(ValueError, match="must be a finite number >= 0"):
            _applied(1.0, weight=lambda bad=bad: bad)
    with pytest.raises(ValueError, match="at least one rank must have samples"):
        _applied(1.0, weight=0)
    with pytest.raises(ValueError, match=r"need op=hvd\.Average, got hvd\.Sum"):
        _applied(1.0, op=hvd.Sum, weight=3)
    hvd.set_batch_weight(3)
    with pytest.raises(ValueError, match=r"need op=hvd\.Average, got hvd\.Sum"):
        _applied(1.0, op=hvd.Sum)
    hvd.set_batch_weight(None)
    with pytest.raises(RuntimeError, match="no weight has been set"):
        _applied(1.0, weight=hvd.batch_weight)
    scaled = hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0)), weight=rank + 1)
    variable = keras.Variable(0.0, dtype="float64")
    scaled.apply([keras.ops.convert_to_tensor(2.0**15 * rank, "float64")], [variable])
    assert float(keras.ops.convert_to_numpy(variable)) == pytest.approx(-mean, rel=1e-6)


@pytest.mark.parametrize("size", (2, 3))
@pytest.mark.parametrize("backend", ("tensorflow", "torch"), indirect=True)
def test_rules(keras_ranks, size, backend):
    keras_ranks(size).run(_rules, timeout=120)


def _disagreement():
    import horovodlike.keras as hvd

    for options in ({}, {"groups": 1}):
        with pytest.raises(Exception, match="rank 0 has") as raised:
            _applied(1.0, weight=3 if hvd.rank() == 0 else None, **options)
        assert ("do only some ranks weight" in str(raised.value)) == (hvd.rank() == 0)


@pytest.mark.parametrize("backend", ("tensorflow", "torch"), indirect=True)
def test_ranks_that_disagree_about_weights(keras_ranks, backend):
    keras_ranks(2).run(_disagreement)


def _tf_keras():
    import tf_keras

    import horovodlike.keras as hvd

    mean = sum((each + 1) * each for each in range(hvd.size())) / sum(range(1, hvd.size() + 1))
    for of in (tf_keras.optimizers, tf_keras.optimizers.legacy):
        import tensorflow as tf

        variable = tf.Variable(0.0, dtype=tf.float64)
        optimizer = hvd.DistributedOptimizer(of.SGD(1.0), weight=hvd.rank() + 1)
        optimizer.apply_gradients([(tf.constant(float(hvd.rank()), tf.float64), variable)])
        assert float(variable) == pytest.approx(-mean, abs=1e-14)
        with pytest.raises(ValueError, match="must be a finite number >= 0"):
            hvd.DistributedOptimizer(of.SGD(1.0), weight=-1)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ("tf_keras",), indirect=True)
def test_tf_keras(keras_ranks, backend):
    keras_ranks(2).run(_tf_keras)
