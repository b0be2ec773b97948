"""tf_keras, which is Keras 2: its optimizers of all kinds, beside what the other tests of Keras run with it too."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import warnings

import cloudpickle
import numpy as np
import pytest

TF_KERAS = pytest.mark.parametrize("backend", ("tf_keras",), indirect=True)
KERAS_3 = pytest.mark.parametrize("backend", ("tensorflow",), indirect=True)
BATCH, STEPS = 12, 2


def _optimizers(keras):
    """Return makers of optimizers of both kinds."""
    new, legacy = keras.optimizers, keras.optimizers.legacy
    return {
        "SGD": lambda rate: new.SGD(rate, momentum=0.9),
        "Adam": lambda rate: new.Adam(rate / 10),
        "legacy SGD": lambda rate: legacy.SGD(rate, momentum=0.9),
        "legacy Adam": lambda rate: legacy.Adam(rate / 10),
    }


def _data():
    random = np.random.default_rng(1)
    x = random.standard_normal((BATCH * STEPS, 4))
    return x, x[:, :3] * 2


def _share(array, rank, size):
    """Return the rows of a rank: its part of each batch."""
    part = BATCH // size
    return array.reshape(STEPS, size, part, -1)[:, rank].reshape(STEPS * part, -1)


def _fit(optimizer, rank=0, size=1, passes=1, **options):
    import tf_keras

    tf_keras.utils.set_random_seed(3)
    layers = [tf_keras.layers.Dense(5, dtype="float64"), tf_keras.layers.Dense(3, dtype="float64")]
    model = tf_keras.Sequential([tf_keras.Input((4,)), *layers])
    model.compile(optimizer=optimizer, loss="mse", **options)
    x, y = (_share(array, rank, size) for array in _data())
    model.fit(x, y, batch_size=BATCH // size // passes, shuffle=False, verbose=0)
    return model


def _flat(model):
    return np.concatenate([weight.ravel() for weight in model.get_weights()])


def _equals_one_rank():
    import sys

    import tensorflow as tf
    import tf_keras

    import horovodlike.tensorflow as of_tensorflow
    import horovodlike.tensorflow.keras as hvd

    assert tf.keras.optimizers.SGD is tf_keras.optimizers.SGD
    assert "keras" not in sys.modules, "Keras 3 is not imported"
    makers = _optimizers(tf_keras)
    size, scaled = hvd.size(), tf_keras.mixed_precision.LossScaleOptimizer
    averaged = {"backward_passes_per_step": 2, "average_aggregated_gradients": True}
    variants = [
        *((name, {}, 1.0) for name in makers),
        ("SGD", {"groups": 2, "compression": hvd.Compression.none, "gradient_predivide_factor": 2.0}, 1.0),
        ("legacy SGD", {"op": hvd.Sum, "groups": 2}, 1.0 / size),
        *((name, averaged, 1.0) for name in ("SGD", "legacy SGD")),
        ("SGD", {"backward_passes_per_step": 2}, 0.5),
    ]
    for number, (name, options, factor) in enumerate(variants):
        for scaling in ("none", "inside", "outside") if options == averaged else ("none",):
            optimizer = makers[name](0.1 * factor)
            if scaling == "inside":
                optimizer = scaled(optimizer)
            wrap = of_tensorflow.DistributedOptimizer if number == 0 else hvd.DistributedOptimizer
            wrapped = wrap(optimizer, **options)
            assert isinstance(wrapped, type(optimizer)) and type(wrapped).__name__ == type(optimizer).__name__
            if scaling == "outside":
                wrapped = scaled(wrapped)
            passes = options.get("backward_passes_per_step", 1)
            model = _fit(wrapped, hvd.rank(), size, passes, run_eagerly=bool(number % 2))
            case = (name, options, scaling)
            alone = _fit(makers[name](0.1), run_eagerly=True)
            np.testing.assert_allclose(_flat(model), _flat(alone), 1e-6, 1e-7, True, str(case))
            everywhere = hvd.allgather(_flat(model)[None])
            assert np.array_equal(everywhere[0], everywhere[1]), case
            assert int(wrapped.iterations) == STEPS * passes, case


@pytest.mark.slow
@TF_KERAS
def test_equals_one_rank_with_the_whole_batch(keras_ranks):
    keras_ranks(2).run(_equals_one_rank, timeout=240)


def _applied(wrapped, values, gradients):
    import tensorflow as tf

    variables = [tf.Variable(value, dtype="float32") for value in values]
    tensors = [None if gradient is None else tf.constant(gradient) for gradient in gradients]
    wrapped.apply_gradients(zip(tensors, variables, strict=True))
    return [float(variable) for variable in variables]


def _loops():
    import tensorflow as tf
    import tf_keras

    import horovodlike.keras as hvd

    mine = hvd.rank() + 1.0
    alone = hvd.add_process_set([1])
    for sgd in (tf_keras.optimizers.SGD, tf_keras.optimizers.legacy.SGD, tf.compat.v1.train.GradientDescentOptimizer):
        if "tf_keras" in sgd.__module__:
            assert _applied(hvd.DistributedOptimizer(sgd(1.0)), [0.0, 1.0], [mine, None]) == [-1.5, 1.0]
            assert _applied(hvd.DistributedOptimizer(sgd(1.0), process_set=alone), [0.0], [mine]) == [-mine]
            assert _applied(hvd.DistributedOptimizer(sgd(1.0), compression=hvd.Compression.fp16), [0.0], [mine]) == [
                -1.5
            ]
        # Rows of an embedding, which the ranks share in part.
        for dense in (False, True):
            table = tf.Variable(tf.zeros((4, 1)))
            optimizer = hvd.DistributedOptimizer(sgd(1.0), sparse_as_dense=dense)
            loss = lambda: tf.reduce_sum(tf.gather(table, [1, 2 + hvd.rank()]))  # noqa: B023, E731  # called below
            if "tf_keras" in sgd.__module__:
                optimizer.minimize(loss, [table])
            else:
                optimizer.minimize(loss, var_list=[table])
            assert table.numpy().ravel().tolist() == [0.0, -1.0, -0.5, -0.5]
        # Gradients that stay with their rank.
        for scale, factor in ((True, 0.5), (False, 1.0)):
            variables = [tf.Variable(0.0), tf.Variable(0.0)]
            optimizer = hvd.DistributedOptimizer(sgd(1.0), scale_local_gradients=scale, groups=[[variables[1]]])
            optimizer.register_local_var(variables[0])
            optimizer.minimize(lambda: (variables[0] + variables[1]) * mine, var_list=variables)  # noqa: B023  # called here
            assert [float(variable) for variable in variables] == [-mine * factor, -1.5]
    hvd.remove_process_set(alone)
    with pytest.raises(ValueError, match="`backward_passes_per_step` > 1 and `sparse_as_dense` is False"):
        optimizer = hvd.DistributedOptimizer(tf_keras.optimizers.SGD(1.0), backward_passes_per_step=2)
        optimizer.minimize(lambda: tf.reduce_sum(tf.gather(table, [1])), [table])
    with pytest.warns(UserWarning, match="use `learning_rate`"):
        optimizer = hvd.DistributedOptimizer(tf_keras.optimizers.legacy.SGD(lr=2.0))
    assert _applied(optimizer, [0.0], [mine]) == [-3.0] and float(optimizer.lr) == 2.0
    layer = tf_keras.layers.Dense(2)
    layer.build((None, 2))
    optimizer = hvd.PartialDistributedOptimizer(tf_keras.optimizers.legacy.SGD(1.0), local_layers=layer)
    layer.kernel.assign(tf.zeros((2, 2)))
    optimizer.minimize(lambda: tf.reduce_sum(layer.kernel) * mine, [layer.kernel])
    assert layer.kernel.numpy().max() == -mine / 2


@TF_KERAS
def test_training_loops_of_ones_own(keras_ranks):
    keras_ranks(2).run(_loops)


def _loss_scaling(passes):
    import tensorflow as tf
    import tf_keras

    import horovodlike.keras as hvd

    for sgd in (tf_keras.optimizers.SGD, tf_keras.optimizers.legacy.SGD):
        inner = hvd.DistributedOptimizer(sgd(1.0), backward_passes_per_step=passes)
        scaled = tf_keras.mixed_precision.LossScaleOptimizer(inner, initial_scale=8.0)
        scaled.get_scaled_loss(tf.constant(1.0)), scaled.get_unscaled_gradients([])  # or it warns
        variable = tf.Variable(0.0)
        values, scales = [], []
        mine = [2.0 * hvd.rank(), float("inf") if hvd.rank() == 1 else 1.0, 4.0]
        for gradient in np.repeat(np.float32(mine), passes):
            scaled.apply_gradients([(tf.constant(gradient), variable)])
            values.append(float(variable))
            scales.append(float(scaled.loss_scale))
        assert values[passes - 1 :: passes] == [-1.0 * passes, -1.0 * passes, -5.0 * passes]
        assert scales[passes - 1 :: passes] == [8.0, 4.0, 4.0], "the same on both ranks"
        assert scales[0] == 8.0 and int(scaled.iterations) == 3 * passes


def _mixed_precision():
    import tf_keras

    import horovodlike.keras as hvd

    tf_keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        for name, make in _optimizers(tf_keras).items():
            if name.endswith("SGD"):
                model = tf_keras.Sequential([tf_keras.Input((4,)), tf_keras.layers.Dense(3)])
                model.compile(hvd.DistributedOptimizer(make(0.01)), "mse")
                assert isinstance(model.optimizer, tf_keras.mixed_precision.LossScaleOptimizer)
                callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
                x, y = (_share(array, hvd.rank(), hvd.size()) for array in _data())
                model.fit(x, y, batch_size=4, verbose=0, callbacks=[callback])
                everywhere = hvd.allgather(_flat(model)[None])
                assert np.array_equal(everywhere[0], everywhere[1]), name
    finally:
        tf_keras.mixed_precision.set_global_policy("float32")


@pytest.mark.slow
@TF_KERAS
def test_loss_scaling_is_the_same_on_all_ranks(keras_ranks):
    keras_ranks(2).run(_loss_scaling, 1)
    keras_ranks(2).run(_loss_scaling, 2)
    keras_ranks(2).run(_mixed_precision)


def _copies():
    import tf_keras

    import horovodlike.keras as hvd
    from horovodlike.keras.functions import objects

    ways = [copy.copy, copy.deepcopy]
    ways += [lambda one, module=module: module.loads(module.dumps(one)) for module in (pickle, cloudpickle)]
    ways += [lambda one: type(one).from_config(one.get_config())]
    mine = hvd.rank() + 1.0
    for sgd in (tf_keras.optimizers.SGD, tf_keras.optimizers.legacy.SGD):
        optimizer = hvd.DistributedOptimizer(sgd(1.0, name="mine"), op=hvd.Sum)
        scaled = hvd.DistributedOptimizer(tf_keras.mixed_precision.LossScaleOptimizer(sgd(1.0), False, 1.0), op=hvd.Sum)
        for way in ways:
            again = way(optimizer)
            assert again.get_config() == optimizer.get_config()
            assert objects.gradients_of(again).options == objects.gradients_of(optimizer).options
            assert _applied(again, [0.0], [mine]) == [-3.0]
            assert objects.gradients_of(way(scaled)).options == objects.gradients_of(scaled).options


@pytest.mark.slow
@TF_KERAS
def test_copies_are_distributed(keras_ranks):
    keras_ranks(2).run(_copies)


def _saved(folder):
    import tf_keras

    import horovodlike.keras as hvd
    from horovodlike.keras.functions import objects

    class Mine(tf_keras.optimizers.legacy.SGD):
        pass

    makers = {**_optimizers(tf_keras), "Mine": lambda rate: Mine(rate, momentum=0.9)}
    for name, make in makers.items():
        model = _fit(hvd.DistributedOptimizer(make(0.1)), hvd.rank(), hvd.size(), run_eagerly=True)
        for ending in ("h5", "keras", "tf") if name in ("SGD", "legacy SGD") else ("h5",):
            path = f"{folder}/{hvd.rank()} {name}.{ending}"
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # h5 is called old
                model.save(path, save_format=ending)
            options = {"custom_optimizers": [Mine]} if name == "Mine" else {}
            loaded = hvd.load_model(path, legacy_opts="legacy" in name, **options)
            assert loaded.optimizer.get_config() == model.optimizer.get_config()
            assert type(loaded.optimizer).__bases__[0] is type(model.optimizer).__bases__[0]
            # What Keras restores: from a SavedModel, and of legacy optimizers from .keras, nothing of the state.
            expected = model if ending == "h5" else tf_keras.models.load_model(path)
            before, after = (objects.read(objects.variables_of(one.optimizer)) for one in (expected, loaded))
            assert len(before) == len(after) and all(map(np.array_equal, before, after)), path
            if ending != "tf" or name == "SGD":
                x, y = _data()
                loaded.fit(x[hvd.rank() :: 2], y[hvd.rank() :: 2], batch_size=4, verbose=0, shuffle=False)
                everywhere = hvd.allgather(_flat(loaded)[None])
                assert np.array_equal(everywhere[0], everywhere[1])
            if name != "Mine":  # without horovodlike
                assert type(tf_keras.models.load_model(path).optimizer).__module__.startswith("tf_keras.")


@pytest.mark.slow
@TF_KERAS
def test_models_are_saved_and_loaded(keras_ranks, tmp_path):
    keras_ranks(2).run(_saved, str(tmp_path), timeout=120)


def _legacy_state():
    import tf_keras

    import horovodlike.keras as hvd
    from horovodlike.keras.functions import objects

    def values(model):
        return objects.read([*model.weights, *objects.variables_of(model.optimizer)])

    for name, make in _optimizers(tf_keras).items():
        model = tf_keras.Sequential([tf_keras.Input((4,)), tf_keras.layers.Dense(3)])
        model.compile(hvd.DistributedOptimizer(make(0.1)), "mse", run_eagerly=True)
        state = hvd.elastic.KerasState(model, epoch=0)
        at_first = values(model)
        x, y = (_share(array, hvd.rank(), hvd.size()) for array in _data())
        model.fit(x, y, batch_size=4, verbose=0, callbacks=[hvd.elastic.UpdateEpochStateCallback(state)])
        assert state.epoch == 1
        state.restore()
        assert state.epoch == 0 and all(map(np.array_equal, values(model), at_first)), name
        state.sync()
        assert all(np.ptp(hvd.allgather(value[None]), axis=0).max() == 0 for value in values(model)), name

    # Variables of one's own, and what the optimizer remembers of them.
    for name, make in _optimizers(tf_keras).items():
        layers = [tf_keras.layers.Dense(3, name="mine"), tf_keras.layers.Dense(3, name="mine_too")]
        model = tf_keras.Sequential([tf_keras.Input((4,)), *layers])
        model.compile(hvd.PartialDistributedOptimizer(make(0.1), local_layers=layers[0]), "mse", run_eagerly=True)
        x, y = (_share(array, hvd.rank(), hvd.size()) for array in _data())
        model.fit(x, y, batch_size=4, verbose=0)
        again = hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=layers[0].trainable_variables)
        model.fit(x, y, initial_epoch=1, verbose=0, callbacks=[again])
        slots = [v for v in objects.variables_of(model.optimizer) if "mine" in v.name]
        assert len(slots) >= 4
        for variable in [*model.weights, *slots]:
            everywhere = hvd.allgather(variable.numpy()[None])
            assert np.array_equal(everywhere[0], everywhere[1]) == ("mine_too" in variable.name), (name, variable.name)


@pytest.mark.slow
@TF_KERAS
def test_states_of_all_optimizers(keras_ranks):
    keras_ranks(2).run(_legacy_state)


def _momentum_correction():
    """The same steps as when the coefficient is scaled for one batch, as Horovod does."""
    import tf_keras

    import horovodlike.keras as hvd

    x, y = _data()
    tf_keras.utils.set_random_seed(1)
    for name, make in _optimizers(tf_keras).items():
        if not name.endswith("SGD"):
            continue
        corrected, by_hand = (tf_keras.Sequential([tf_keras.Input((4,)), tf_keras.layers.Dense(3)]) for _ in range(2))
        by_hand.set_weights(corrected.get_weights())
        corrected.compile(hvd.DistributedOptimizer(make(0.1)), "mse", run_eagerly=True)
        callback = hvd.callbacks.LearningRateScheduleCallback(0.1, 0.5)
        corrected.fit(x, y, batch_size=len(x), epochs=3, shuffle=False, verbose=0, callbacks=[callback])
        by_hand.compile(make(0.1), "mse", run_eagerly=True)
        for step in range(3):
            by_hand.optimizer.lr = 0.1 * 0.5**step
            by_hand.optimizer.momentum = 0.9 if step == 0 else 0.9 * 0.5
            by_hand.train_on_batch(x, y)
        np.testing.assert_allclose(_flat(corrected), _flat(by_hand), 1e-5, 1e-6, True, name)


def _values():
    import tensorflow as tf
    import tf_keras

    import horovodlike.tensorflow as of_tensorflow
    import horovodlike.tensorflow.keras as hvd

    assert hvd.allreduce(hvd.rank() + 1.0) == 1.5 and hvd.broadcast(hvd.rank(), 1) == 1
    reduced = hvd.allreduce(tf.Variable([hvd.rank() + 1.0]), op=hvd.Sum, compression=hvd.Compression.fp16)
    assert tf.is_tensor(reduced) and reduced.numpy() == [3.0]
    assert hvd.allgather(tf.constant([hvd.rank()])).numpy().tolist() == [0, 1]
    tf_keras.utils.set_random_seed(hvd.rank())
    model = tf_keras.Sequential([tf_keras.layers.Dense(2)])
    with pytest.raises(ValueError, match="no variables yet"):
        hvd.broadcast_global_variables(0, model)
    model.build((None, 2))
    hvd.broadcast_global_variables(0, model)
    of_tensorflow.broadcast_variables(model.variables, root_rank=0)
    everywhere = hvd.allgather(_flat(model)[None])
    assert np.array_equal(everywhere[0], everywhere[1])

    # Batches of different sizes are normalized as one.
    batches = np.split(np.random.default_rng(1).standard_normal((6, 2, 3)).astype("float32"), [2])
    mine, together = tf.constant(batches[hvd.rank()]), tf.constant(np.concatenate(batches))
    for axis in (-1, 1, [1, 2]):
        synchronized = of_tensorflow.SyncBatchNormalization(axis=axis, momentum=0.5)
        plain = tf_keras.layers.BatchNormalization(axis=axis, momentum=0.5, fused=False)
        expected = np.split(plain(together, training=True).numpy(), [2])[hvd.rank()]
        np.testing.assert_allclose(synchronized(mine, training=True).numpy(), expected, 1e-4, 1e-5)
        for one, other in zip(synchronized.weights, plain.weights, strict=True):
            np.testing.assert_allclose(one.numpy(), other.numpy(), 1e-4, 1e-6)


@TF_KERAS
def test_learning_rates_and_values(keras_ranks):
    keras_ranks(2).run(_momentum_correction)
    keras_ranks(2).run(_values)


GRAPH = """
import numpy as np
import tensorflow as tf
tf.compat.v1.disable_eager_execution()
import horovodlike.tensorflow.keras as hvd

hvd.init()
for sgd in (tf.keras.optimizers.legacy.SGD, tf.compat.v1.train.GradientDescentOptimizer):
    model = tf.keras.Sequential([tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="ones", input_shape=(1,))])
    model.compile(hvd.DistributedOptimizer(sgd(0.5)), loss=lambda y, x: tf.reduce_mean(x * y))
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
    one = np.ones((1, 1))
    history = model.fit(one, one * (hvd.rank() + 1), verbose=0, callbacks=callbacks).history
    assert history["loss"] == [1.5], history
    assert model.get_weights()[0] == 1 - 0.5 * 1.5, model.get_weights()
print("trained", hvd.rank())
"""


@pytest.mark.slow
def test_graphs_of_tensorflow_1(tmp_path, monkeypatch):
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", "1")
    (tmp_path / "graph.py").write_text(GRAPH)
    done = subprocess.run(
        [sys.executable, "-m", "horovodlike.launcher", "-np", "2", sys.executable, tmp_path / "graph.py"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(line[-1] for line in done.stdout.splitlines() if "trained" in line) == ["0", "1"]


def _of_the_other(message, optimizer, layer, model):
    import horovodlike.keras as hvd

    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.JoinCallback(),
        hvd.callbacks.LearningRateScheduleCallback(0.1, 0.5),
        hvd.callbacks.LearningRateWarmupCallback(0.1),
        hvd.callbacks.BestModelCheckpoint(),
        hvd.elastic.CommitStateCallback(None),
        hvd.elastic.UpdateBatchStateCallback(None),
        hvd.elastic.UpdateEpochStateCallback(None),
    ]
    calls = {
        "DistributedOptimizer": [
            lambda: hvd.DistributedOptimizer(optimizer),
            lambda: hvd.PartialDistributedOptimizer(optimizer),
        ],
        "PartialDistributedOptimizer": [
            lambda: hvd.PartialDistributedOptimizer("sgd", local_layers=layer),
            lambda: hvd.PartialDistributedOptimizer("sgd", local_layers=[layer]),
        ],
        "broadcast_global_variables": [lambda: hvd.broadcast_global_variables(0, model)],
        "KerasState": [lambda: hvd.elastic.KerasState(model), lambda: hvd.elastic.KerasState(None, optimizer)],
    }
    calls |= {type(one).__name__: [lambda one=one: one.set_model(model)] for one in callbacks}
    for what, refused in calls.items():
        for call in refused:
            with pytest.raises(TypeError, match=f"{what} {message}"):
                call()


def _of_tf_keras():
    import tf_keras

    class Mine(tf_keras.optimizers.SGD):
        pass

    message = r"is for Keras 3 here, and this \w+ is of tf_keras \(Keras 2\): set TF_USE_LEGACY_KERAS=1"
    _of_the_other(message, Mine(), tf_keras.layers.Dense(1), tf_keras.Sequential())


def _of_keras_3():
    import keras

    message = r"is for tf_keras \(Keras 2\) here, and this \w+ is of Keras 3: unset TF_USE_LEGACY_KERAS"
    _of_the_other(message, keras.optimizers.SGD(), keras.layers.Dense(1), keras.Sequential())


@KERAS_3
def test_objects_of_tf_keras_are_refused_beside_keras_3(keras_ranks):
    keras_ranks(2).run(_of_tf_keras)


@pytest.mark.slow
@TF_KERAS
def test_objects_of_keras_3_are_refused_beside_tf_keras(fresh_keras_ranks):
    fresh_keras_ranks(1).run(_of_keras_3)


def _lr():
    import keras

    import horovodlike.keras as hvd

    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    assert not hasattr(optimizer, "lr")
    for call in (lambda: optimizer.lr, lambda: setattr(optimizer, "lr", 0.2)):
        with pytest.raises(AttributeError, match="SGD of Keras 3 has no attribute 'lr'.*use learning_rate"):
            call()
    with pytest.raises(ValueError, match=r"SGD of Keras 3 takes no lr=0.2: use learning_rate"):
        type(optimizer).from_config({"lr": 0.2})


@KERAS_3
def test_keras_3_says_that_lr_is_now_learning_rate(keras_ranks):
    keras_ranks(2).run(_lr)


def _twice():
    import tf_keras

    import horovodlike.keras as hvd

    for sgd in (tf_keras.optimizers.SGD, tf_keras.optimizers.legacy.SGD):
        wrapped = hvd.DistributedOptimizer(sgd(1.0))
        for twice in (wrapped, tf_keras.mixed_precision.LossScaleOptimizer(wrapped)):
            with pytest.raises(ValueError, match="distributed already: wrap an optimizer once"):
                hvd.DistributedOptimizer(twice)
        with pytest.raises(ValueError, match="op currently only supports Average and Sum"):
            hvd.DistributedOptimizer(sgd(1.0), op=hvd.Adasum)


@TF_KERAS
def test_bad_arguments(keras_ranks):
    keras_ranks(2).run(_twice)
