"""Elastic Keras: `fit()` with the callbacks that keep the state."""

import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf
from tensorflow import keras

hvd.init()
features = np.random.default_rng(1).standard_normal((64, 2)).astype("float32")
dataset = tf.data.Dataset.from_tensor_slices((features, features @ np.array([[2.0], [-3.0]], "float32")))
dataset = dataset.repeat().shuffle(64, seed=hvd.rank()).batch(8)

optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(learning_rate=0.05 * hvd.size()))
model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1, use_bias=False)])
model.compile(optimizer=optimizer, loss="mse")
model.fit(dataset, steps_per_epoch=1, epochs=1, verbose=0)  # so that the optimizer has its variables


@hvd.elastic.run
def train(state):
    state.model.fit(
        dataset,
        steps_per_epoch=8 // hvd.size(),
        epochs=8 - state.epoch,
        callbacks=[
            hvd.elastic.UpdateEpochStateCallback(state),
            hvd.elastic.UpdateBatchStateCallback(state),
            hvd.elastic.CommitStateCallback(state, 2),
        ],
        verbose=0,
    )


def on_state_reset():
    keras.backend.set_value(state.model.optimizer.learning_rate, 0.05 * hvd.size())


state = hvd.elastic.KerasState(model, batch=0, epoch=0)
state.register_reset_callbacks([on_state_reset])
train(state)
loss = model.evaluate(dataset, steps=2, verbose=0)
assert state.epoch == 8 and loss < 0.05, (state.epoch, loss)
if hvd.rank() == 0:
    print("keras_elastic: learned with", keras.Model.__module__.partition(".")[0])
