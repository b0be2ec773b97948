"""A CNN on scikit-learn's handwritten digits, trained with Horovod: `fit()` of Keras 2.

TF_USE_LEGACY_KERAS=1 horovodrun -np 2 python legacy_keras.py
"""

import math

import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from tensorflow import keras
from tensorflow.keras import layers

hvd.init()
keras.utils.set_random_seed(42 + hvd.rank())

images, labels = load_digits(return_X_y=True)
order = np.random.default_rng(42).permutation(len(images))
images, labels = (images.reshape(-1, 8, 8, 1).astype("float32") / 16)[order], labels[order]
train, test = slice(0, 1536), slice(1536, None)

batch_size, epochs = 32, int(math.ceil(24 / hvd.size()))
dataset = tf.data.Dataset.from_tensor_slices((images[train], labels[train]))
dataset = dataset.shard(hvd.size(), hvd.rank()).repeat().shuffle(1000).batch(batch_size)

model = keras.Sequential(
    [
        layers.Conv2D(16, 3, activation="relu", padding="same", input_shape=(8, 8, 1)),
        layers.MaxPooling2D(),
        layers.Flatten(),
        layers.Dense(64, activation="relu"),
        layers.Dropout(0.2),
        layers.Dense(10, activation="softmax"),
    ]
)

scaled_lr = 0.002 * hvd.size()
opt = keras.optimizers.legacy.Adam(lr=scaled_lr)
opt = hvd.DistributedOptimizer(opt, backward_passes_per_step=1, average_aggregated_gradients=True)
model.compile(
    loss=keras.losses.SparseCategoricalCrossentropy(),
    optimizer=opt,
    metrics=["accuracy"],
    experimental_run_tf_function=False,
)

callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=scaled_lr, warmup_epochs=3, verbose=1),
    keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=10),
]
if hvd.rank() == 0:
    callbacks.append(keras.callbacks.ModelCheckpoint("checkpoint.h5", save_weights_only=True))

steps = 1536 // batch_size // hvd.size()
model.fit(dataset, steps_per_epoch=steps, callbacks=callbacks, epochs=epochs, verbose=2 if hvd.rank() == 0 else 0)
if hvd.rank() == 0:
    _, accuracy = model.evaluate(images[test], labels[test], verbose=0)
    print(f"final accuracy on {hvd.size()} ranks: {accuracy:.4f}")
