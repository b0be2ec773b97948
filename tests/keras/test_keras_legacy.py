"""Objects of tf_keras, which is Keras 2. Stand-ins: tf_keras is not installed."""

from __future__ import annotations

import sys
import types

import pytest


def _of_tf_keras(name):
    """Return an object of a class that a script has made of one of tf_keras."""
    base = type(name, (), {"__module__": f"tf_keras.src.{name.lower()}"})
    return type(f"My{name}", (base,), {})()


def _objects():
    import horovodlike.keras as hvd

    optimizer, layer, model = map(_of_tf_keras, ("Adam", "Dense", "Sequential"))
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
            with pytest.raises(
                TypeError, match=rf"{what} is for Keras 3.*tf_keras .Keras 2.*unset TF_USE_LEGACY_KERAS"
            ):
                call()


def test_objects_of_tf_keras_are_refused(keras_ranks):
    keras_ranks(2).run(_objects)


def _tensorflow():
    import tensorflow as tf

    import horovodlike.tensorflow as hvd

    with pytest.raises(TypeError, match="DistributedGradientTape"):
        hvd.DistributedOptimizer(_of_tf_keras("Adam"))
    hvd.SyncBatchNormalization()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "tf_keras", types.ModuleType("tf_keras"))
        hvd.SyncBatchNormalization()
        patch.setenv("TF_USE_LEGACY_KERAS", "1")
        with pytest.raises(TypeError, match="SyncBatchNormalization is for Keras 3, and tf.keras is tf_keras"):
            hvd.SyncBatchNormalization()

    # Layers whose gradients stay with their rank may be of any kind.
    layer, shared = _of_tf_keras("Dense"), tf.Variable(1.0)
    type(layer).trainable_variables = [tf.Variable(1.0)]
    with tf.GradientTape() as tape:
        loss = (layer.trainable_variables[0] + shared) * float(hvd.rank() + 1)
    tape = hvd.PartialDistributedGradientTape(tape, local_layers=layer, scale_local_gradients=False)
    gradients = tape.gradient(loss, [*layer.trainable_variables, shared])
    assert [float(gradient) for gradient in gradients] == [hvd.rank() + 1, 1.5]


@pytest.mark.parametrize("backend", ("tensorflow",), indirect=True)
def test_tensorflow_says_so_too(keras_ranks):
    keras_ranks(2).run(_tensorflow)
