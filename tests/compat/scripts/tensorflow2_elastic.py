"""Elastic TensorFlow 2 with a loop of its own."""

import horovod.tensorflow as hvd
import tensorflow as tf

hvd.init()
features = tf.random.stateless_normal((64, 2), seed=(1, 2))[hvd.rank() :: hvd.size()]
targets = features @ tf.constant([[2.0], [-3.0]])
model = tf.keras.Sequential([tf.keras.layers.Input((2,)), tf.keras.layers.Dense(1, use_bias=False)])
optimizer = tf.optimizers.SGD(0.1 * hvd.size())


@tf.function
def train_one_batch():
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(features, training=True) - targets) ** 2)
    tape = hvd.DistributedGradientTape(tape)
    optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
    return loss


train_one_batch()  # so that the optimizer has its variables


@hvd.elastic.run
def train(state):
    for state.batch in range(state.batch, 40 // hvd.size()):
        loss = train_one_batch()
        if state.batch % 10 == 0:
            state.commit()
    return loss


def on_state_reset():
    optimizer.learning_rate.assign(0.1 * hvd.size())


state = hvd.elastic.TensorFlowKerasState(model, optimizer, batch=0, host="any")
state.register_reset_callbacks([on_state_reset])
loss = train(state)
assert loss < 1e-3, loss
if hvd.rank() == 0:
    print("tensorflow2_elastic: learned")
