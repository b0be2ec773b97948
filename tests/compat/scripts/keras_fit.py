"""Keras, `fit()` with callbacks; the model that rank 0 saves is loaded with its optimizer wrapped again."""

import os
import tempfile

import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf
from tensorflow import keras

hvd.init()
keras.utils.set_random_seed(42 + hvd.rank())
features = np.random.default_rng(1).standard_normal((64, 2)).astype("float32")
dataset = tf.data.Dataset.from_tensor_slices((features, features @ np.array([[2.0], [-3.0]], "float32")))
dataset = dataset.shard(hvd.size(), hvd.rank()).repeat().batch(8)

scaled_lr = 0.05 * hvd.size()
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(learning_rate=scaled_lr, momentum=0.5))
model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1, use_bias=False)])
model.compile(optimizer=optimizer, loss="mse", metrics=["mae"])
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=scaled_lr, warmup_epochs=2, verbose=0),
]
history = model.fit(dataset, steps_per_epoch=8 // hvd.size(), epochs=8, callbacks=callbacks, verbose=0)
losses = hvd.allgather(np.array(history.history["loss"][-1:]))
assert np.max(losses) < 0.05 and np.ptp(np.asarray(losses)) == 0, losses

if hvd.rank() == 0:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.keras")
        model.save(path)
        loaded = hvd.load_model(path)
    np.testing.assert_array_equal(loaded.get_weights()[0], model.get_weights()[0])
    assert isinstance(loaded.optimizer, keras.optimizers.SGD) and type(loaded.optimizer) is not keras.optimizers.SGD
    print("keras_fit: learned with", keras.Model.__module__.partition(".")[0])
