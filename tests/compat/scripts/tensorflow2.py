"""TensorFlow 2 with a loop of its own: the first step broadcasts the variables of rank 0."""

import horovod.tensorflow as hvd
import tensorflow as tf

hvd.init()
tf.random.set_seed(42)
features = tf.random.stateless_normal((64, 2), seed=(1, 2))[hvd.rank() :: hvd.size()]
targets = features @ tf.constant([[2.0], [-3.0]])

weights = tf.Variable(tf.random.normal((2, 1), seed=hvd.rank()))
optimizer = tf.optimizers.SGD(0.1 * hvd.size())
checkpoint = tf.train.Checkpoint(weights=weights)


@tf.function
def training_step(first_batch):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((features @ weights - targets) ** 2)
    tape = hvd.DistributedGradientTape(tape, compression=hvd.Compression.none)
    optimizer.apply_gradients(zip(tape.gradient(loss, [weights]), [weights]))
    if first_batch:
        hvd.broadcast_variables([weights], root_rank=0)
        variables = optimizer.variables  # a method in Keras 2
        hvd.broadcast_variables(variables() if callable(variables) else variables, root_rank=0)
    return loss


for step in range(40 // hvd.size()):
    loss = training_step(step == 0)

loss = hvd.allreduce(loss, name="loss")
assert loss < 1e-3, loss
assert hvd._executing_eagerly() and not hvd.gpu_available("tensorflow")
if hvd.rank() == 0:
    print("tensorflow2: learned")
