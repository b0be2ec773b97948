"""Keras 2 as Horovod's own tests use it: models that are trained, saved, loaded and distributed in parts."""

import os
import tempfile

import horovod.keras as keras_hvd
import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf
from tensorflow import keras

hvd.init()
keras.utils.set_random_seed(42)
size, rank = hvd.size(), hvd.rank()


def make_model(optimizer, layers=()):
    model = keras.models.Sequential(
        [
            keras.layers.Dense(2, input_shape=(3,)),
            *layers,
            keras.layers.RepeatVector(3),
            keras.layers.TimeDistributed(keras.layers.Dense(3)),
        ]
    )
    model.compile(
        loss=keras.losses.mean_squared_error,
        optimizer=optimizer,
        metrics=[keras.metrics.categorical_accuracy],
        sample_weight_mode=None,
        experimental_run_tf_function=False,
    )
    return model


def train(model, callbacks=(), epochs=2):
    features, targets = np.random.random((4, 3)), np.random.random((4, 3, 3))
    return model.fit(features, targets, batch_size=2, epochs=epochs, verbose=0, callbacks=list(callbacks))


def round_trip(model, **options):
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.h5")
        model.save(path)
        return hvd.load_model(path, **options)


def test_training_with_callbacks():
    optimizer = hvd.DistributedOptimizer(keras.optimizers.legacy.RMSprop(lr=0.0001))
    model = make_model(optimizer)
    train(
        model,
        [
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
            hvd.callbacks.LearningRateScheduleCallback(
                initial_lr=0.1, multiplier=lambda epoch: 0.1**epoch, start_epoch=1
            ),
            hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.1, warmup_epochs=1, verbose=0),
        ],
    )
    everywhere = np.asarray(hvd.allgather(model.get_weights()[0][None]))
    assert np.ptp(everywhere, axis=0).max() == 0


def test_learning_rates_of_a_schedule():
    optimizer = hvd.DistributedOptimizer(keras.optimizers.legacy.SGD(lr=0.1, momentum=0.9))
    history = train(
        make_model(optimizer),
        [hvd.callbacks.LearningRateScheduleCallback(0.1, lambda epoch: 0.5**epoch, momentum_correction=True)],
        epochs=3,
    )
    np.testing.assert_allclose(history.history["lr"], [0.1, 0.05, 0.025], rtol=1e-6)
    assert float(keras.backend.get_value(optimizer.momentum)) == np.float32(0.9)


def test_models_are_loaded_with_wrapped_optimizers():
    class OwnOptimizer(keras.optimizers.legacy.RMSprop):
        def __init__(self, **options):
            super().__init__(**options)

    class OwnLayer(keras.layers.Dense):
        pass

    for make in (keras.optimizers.legacy.RMSprop, keras.optimizers.Adam):
        model = make_model(hvd.DistributedOptimizer(make(learning_rate=0.0001)))
        train(model)
        loaded = round_trip(model)
        assert loaded.optimizer.__class__.__name__ == model.optimizer.__class__.__name__ == make.__name__
        assert loaded.optimizer.get_config() == model.optimizer.get_config()
        assert isinstance(loaded.optimizer, make) and type(loaded.optimizer) is not make
        for one, other in (
            zip(model.optimizer.variables(), loaded.optimizer.variables()) if "legacy" in str(make) else ()
        ):
            np.testing.assert_array_equal(keras.backend.get_value(one), keras.backend.get_value(other))
    train(loaded)
    model = make_model(hvd.DistributedOptimizer(OwnOptimizer()))
    assert round_trip(model, custom_optimizers=[OwnOptimizer]).optimizer.__class__.__name__ == "OwnOptimizer"
    custom = {"OwnOptimizer": lambda **options: hvd.DistributedOptimizer(OwnOptimizer(**options))}
    assert round_trip(model, custom_objects=custom).optimizer.__class__.__name__ == "OwnOptimizer"
    model = make_model(hvd.DistributedOptimizer(keras.optimizers.legacy.SGD()), [OwnLayer(2)])
    assert isinstance(round_trip(model, custom_objects={"OwnLayer": OwnLayer}).layers[1], OwnLayer)


def test_values():
    np.testing.assert_allclose(np.asarray(hvd.allreduce(np.float32(rank + 1), average=False)), size * (size + 1) / 2)
    np.testing.assert_allclose(np.asarray(hvd.broadcast(np.float32(rank), 1)), 1)
    assert np.asarray(hvd.allgather(np.full((2, 3), rank, "float32"))).shape == (2 * size, 3)
    assert np.asarray(hvd.reducescatter(np.full((size, 3), rank + 1.0), op=hvd.Sum)).tolist() == [[3.0] * 3]


def test_embeddings_and_accumulation():
    optimizer = keras.optimizers.legacy.SGD(lr=1.0)
    optimizer = hvd.DistributedOptimizer(optimizer, backward_passes_per_step=2, sparse_as_dense=True)
    embedding = keras.layers.Embedding(10, 1, input_length=1, embeddings_initializer="zeros")
    model = keras.models.Sequential([embedding, keras.layers.Flatten()])
    model.compile(loss=lambda _, outputs: tf.reduce_sum(outputs), optimizer=optimizer)
    model.fit(np.array([[1], [2 + rank]]), np.zeros((2, 1)), batch_size=1, shuffle=False, verbose=0)
    assert model.get_weights()[0].ravel()[:4].tolist() == [0.0, -1.0, -0.5, -0.5], model.get_weights()


def test_from_config():
    wrapped = hvd.DistributedOptimizer(keras.optimizers.legacy.Adam())
    if hasattr(wrapped, "learning_rate"):
        assert wrapped.from_config(wrapped.get_config()).get_config() == wrapped.get_config()


def test_parts_stay_local():
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.models.Sequential([keras.layers.Input((1,)), layer])
    optimizer = keras_hvd.PartialDistributedOptimizer(
        keras.optimizers.legacy.SGD(1.0), local_layers=[layer], scale_local_gradients=False
    )
    model.compile(loss=lambda _, outputs: tf.reduce_sum(outputs) * (rank + 1.0), optimizer=optimizer)
    model.fit(np.ones((1, 1)), np.ones((1, 1)), verbose=0)
    assert model.get_weights()[0].item() == -(rank + 1.0)


def test_an_elastic_state():
    one, other = make_model("sgd"), make_model(keras.optimizers.legacy.Adam())
    other.set_weights(one.get_weights())
    state = hvd.elastic.KerasState(other, batch=20 + rank, epoch=10 + rank)
    state.sync()
    assert (state.batch, state.epoch) == (20, 10)
    saved = [weight.copy() for weight in other.get_weights()]
    other.set_weights([weight + 1 for weight in saved])
    state.batch = 21
    state.restore()
    assert state.batch == 20
    for weight, before in zip(other.get_weights(), saved):
        np.testing.assert_array_equal(weight, before)
    other.set_weights([weight + 1 for weight in saved])
    state.save()
    state.restore()
    np.testing.assert_array_equal(other.get_weights()[0], saved[0] + 1)


for name, test in [each for each in globals().items() if each[0].startswith("test_")]:
    test()
    if rank == 0:
        print(name.removeprefix("test_"), "passed")
if rank == 0:
    print("legacy_keras: learned")
