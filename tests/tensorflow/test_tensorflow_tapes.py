"""Tapes whose gradients are reduced, on ranks that have different data."""

from __future__ import annotations

import time
import warnings

import numpy as np
import pytest
import tensorflow as tf

import horovodlike.tensorflow as hvd

SIZES = (1, 2, 3)


def _data(rows=4):
    """The rows of all ranks; each has as many."""
    generator = np.random.default_rng(0)
    return generator.normal(size=(rows * hvd.size(), 3)).astype(np.float32)


def _own(data):
    return tf.constant(np.array_split(data, hvd.size())[hvd.rank()])


def _loss(weight, bias, rows):
    return tf.reduce_mean((rows @ weight + bias) ** 2)


def _gradients(tape_of, data, weight, bias):
    with tape_of(tf.GradientTape()) as tape:
        loss = _loss(weight, bias, data)
    return tape.gradient(loss, {"weight": weight, "bias": [bias]})


def _tapes():
    weight, bias = tf.Variable(tf.ones([3, 2])), tf.Variable(tf.zeros([2]))
    data = _data()
    expected = _gradients(lambda tape: tape, tf.constant(data), weight, bias)
    options = (
        {},
        {"op": hvd.Sum},
        {"num_groups": 1},
        {"groups": 2},
        {"groups": [[weight, bias]]},
        {"groups": [[bias]]},
        {"gradient_predivide_factor": 2.0},
    )
    for chosen in options:

        def tape_of(tape, chosen=chosen):
            return hvd.DistributedGradientTape(tape, **chosen)

        scale = hvd.size() if chosen.get("op") == hvd.Sum else 1
        for run in (_gradients, tf.function(_gradients, autograph=False)):
            actual = run(tape_of, _own(data), weight, bias)
            for one, other in zip(tf.nest.flatten(actual), tf.nest.flatten(expected), strict=True):
                np.testing.assert_allclose(one, scale * other, rtol=1e-5, atol=1e-6)
    compressed = _gradients(
        lambda tape: hvd.DistributedGradientTape(tape, compression=hvd.Compression.fp16), _own(data), weight, bias
    )
    assert compressed["weight"].dtype is tf.float32
    np.testing.assert_allclose(compressed["weight"], expected["weight"], rtol=1e-2, atol=1e-2)
    with pytest.raises(ValueError, match="gradient_predivide_factor not supported with op != Average"):
        hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Sum, gradient_predivide_factor=2.0)
    with pytest.raises(ValueError, match="non-negative"):
        hvd.DistributedGradientTape(tf.GradientTape(), num_groups=-1)
    with pytest.raises(TypeError, match=r"expected a tf\.GradientTape, got list"):
        hvd.DistributedGradientTape([])


def _names_of_gradients():
    import keras

    if hvd.rank() == 0:
        keras.layers.Dense(1).build([None, 2])  # Keras counts it: the paths of later ones differ between the ranks
    keras.utils.set_random_seed(0)
    first, second = keras.layers.Dense(2), keras.layers.Dense(2)
    rows = tf.fill([1, 2], float(hvd.rank() + 1))
    first(rows), second(rows)

    def gradients(generic):
        results = []
        for factor in (1.0, 2.0):
            with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
                loss = factor * (tf.reduce_sum(first(rows)) + tf.reduce_sum(second(rows)))
            results += tape.gradient(loss, [first.kernel, second.kernel], use_generic_names=generic)
        return results

    mean = (hvd.size() + 1) / 2
    for generic in (False, True):
        for run in (gradients, tf.function(gradients, autograph=False)):
            for one, factor in zip(run(generic), (1.0, 1.0, 2.0, 2.0), strict=True):
                np.testing.assert_allclose(one, np.full((2, 2), factor * mean), rtol=1e-6)


class _OwnTape(tf.GradientTape):
    def __init__(self, note):
        super().__init__(persistent=True)
        self.note = note


def _ways_to_wrap_a_tape():
    warnings.filterwarnings("ignore", "the ranks train from different first parameters")
    x = tf.Variable(float(hvd.rank() + 1))
    mean = (hvd.size() + 1) / 2
    with tf.GradientTape() as tape:  # afterwards
        y = x * x
    wrapped = hvd.DistributedGradientTape(tape)
    assert type(wrapped).__name__ == "GradientTape" and isinstance(wrapped, tf.GradientTape)
    np.testing.assert_allclose(wrapped.gradient(y, x), 2 * mean, rtol=1e-6)
    with tf.GradientTape() as tape:  # while it records
        tape = hvd.DistributedGradientTape(tape)
        y = x * x
    np.testing.assert_allclose(tape.gradient(y, x), 2 * mean, rtol=1e-6)
    with hvd.DistributedGradientTape(_OwnTape("mine")) as tape:
        y, z = x * x, 3.0 * x
        assert tape.watched_variables()[0] is x
    assert type(tape).__name__ == "_OwnTape"
    for _ in range(2):  # persistent
        np.testing.assert_allclose(tape.gradient(y, [x], use_generic_names=True)[0], 2 * mean, rtol=1e-6)
    np.testing.assert_allclose(tape.gradient([y, z], x, output_gradients=[1.0, 1.0]), 2 * mean + 3, rtol=1e-6)
    unconnected = tf.Variable(1.0)
    assert tape.gradient(y, [x, unconnected])[1] is None
    zero = tape.gradient(y, [unconnected], unconnected_gradients=tf.UnconnectedGradients.ZERO)
    assert float(zero[0]) == 0.0


def _local_layers():
    from keras import layers, utils

    utils.set_random_seed(0)
    local, shared = layers.Dense(2), layers.Dense(2)
    rows = tf.fill([1, 2], float(hvd.rank() + 1))
    local(rows), shared(rows)
    size = hvd.size()
    for scale in (True, False):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(local(rows)) + tf.reduce_sum(shared(rows))
        tape = hvd.PartialDistributedGradientTape(tape, local_layers=local, scale_local_gradients=scale)
        kernel, bias, other = tape.gradient(loss, [local.kernel, local.bias, shared.kernel])
        divisor = size if scale else 1
        np.testing.assert_allclose(kernel, np.full((2, 2), (hvd.rank() + 1) / divisor), rtol=1e-6)
        np.testing.assert_allclose(bias, np.full(2, 1 / divisor), rtol=1e-6)
        np.testing.assert_allclose(other, np.full((2, 2), (size + 1) / 2), rtol=1e-6)
    late = layers.Dense(2)  # which is built while the tape records
    with hvd.PartialDistributedGradientTape(tf.GradientTape(), local_layers=late, scale_local_gradients=False) as tape:
        loss = tf.reduce_sum(late(rows))
    np.testing.assert_allclose(tape.gradient(loss, late.kernel), np.full((2, 2), hvd.rank() + 1), rtol=1e-6)
    with pytest.raises(ValueError, match=r"All local layers must be of tf\.keras\.layers\.Layer type"):
        hvd.PartialDistributedGradientTape(tf.GradientTape(), local_layers=[local, "nonsense"])


def _embeddings():
    table, other = tf.Variable(tf.zeros([5, 2])), tf.Variable(tf.zeros([4, 1]))
    dense = tf.Variable(1.0)
    rows = [hvd.rank()] * (hvd.rank() + 1)  # a different number on each rank

    def gradients(sparse_as_dense):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, rows)) * dense + tf.reduce_sum(tf.gather(other, [0, 3]))
        tape = hvd.DistributedGradientTape(tape, sparse_as_dense=sparse_as_dense, num_groups=1)
        return tape.gradient(loss, [table, dense, other])

    expected = np.zeros((5, 2), np.float32)
    expected[: hvd.size()] = (np.arange(hvd.size()) + 1)[:, np.newaxis] / hvd.size()
    for sparse_as_dense in (False, True):
        for run in (gradients, tf.function(gradients)):
            first, scalar, second = run(sparse_as_dense)
            assert isinstance(first, tf.IndexedSlices) is isinstance(second, tf.IndexedSlices) is not sparse_as_dense
            np.testing.assert_allclose(tf.convert_to_tensor(first), expected, rtol=1e-6)
            np.testing.assert_allclose(tf.convert_to_tensor(second), [[1], [0], [0], [1]], rtol=1e-6)
            assert float(scalar) == 0.0
    slices = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([hvd.rank()]), tf.constant([5, 2]))
    total = hvd.allreduce(slices, op=hvd.Sum)
    assert total.dense_shape.numpy().tolist() == [5, 2]
    assert total.indices.numpy().tolist() == list(range(hvd.size()))


def _weights_without_names():
    """Keras counts them up, and rank 0 has made one more."""
    import keras

    keras.utils.set_random_seed(0)

    class Scaling(keras.layers.Layer):
        def build(self, shape):
            self.weight = self.add_weight(shape=(shape[-1],), initializer="ones")

        def call(self, rows):
            return rows * self.weight

    layers = [Scaling() for _ in range(2 if hvd.rank() == 0 else 1)]
    for layer in layers:
        layer.build((1, 3))

    @tf.function
    def gradient(rows):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layers[-1](rows))
        return hvd.DistributedGradientTape(tape).gradient(loss, layers[-1].trainable_variables)[0]

    assert gradient(tf.fill([2, 3], hvd.rank() + 1.0)).numpy().tolist() == [hvd.size() + 1.0] * 3


def _steps_are_marked():
    """By eager steps, by functions, and in a loop of a function; not by the tracing of one."""
    from horovodlike import metrics

    dense, table = tf.Variable([1.0, 2.0]), tf.Variable(tf.ones([4, 2]))

    def step(variables):
        with tf.GradientTape() as tape:
            used = [tf.gather(variable, [0]) if variable.shape.rank == 2 else variable for variable in variables]
            loss = sum(tf.reduce_sum(each * 2.0) for each in used)
        for variable, gradient in zip(
            variables, hvd.DistributedGradientTape(tape).gradient(loss, variables), strict=True
        ):
            variable.assign_sub(tf.convert_to_tensor(gradient))

    def steps(variables):
        for _ in tf.range(3):
            tf.autograph.experimental.set_loop_options(parallel_iterations=1)
            step(variables)

    for variables in ([dense, table], [table, dense]):  # the gradient of the table is slices
        for run, marked in ((step, 1), (tf.function(step), 1), (tf.function(steps), 3)):
            for _ in range(2):
                before = metrics()
                run(variables)
                after = metrics()
                assert after["steps"] - before["steps"] == marked
                assert after["step_seconds"] >= before["step_seconds"]
    hvd.shutdown()
    hvd.init()
    assert metrics()["steps"] == 0
    tf.function(step)([dense])
    assert metrics()["steps"] == 1


def _blocked_in_a_graph():
    """Return the seconds for which this rank was blocked, and all seconds, in steps for which the last rank is late."""
    from horovodlike import metrics

    weights = [tf.Variable(tf.ones([4])) for _ in range(3)]

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = sum(tf.reduce_sum(weight * 2.0) for weight in weights)
        for weight, gradient in zip(weights, hvd.DistributedGradientTape(tape).gradient(loss, weights), strict=True):
            weight.assign_sub(gradient)
        return loss

    step()
    hvd.barrier()
    began, before = time.perf_counter(), metrics()["blocked_seconds"]
    for _ in range(5):
        if hvd.rank() == hvd.size() - 1:
            time.sleep(0.2)  # this is what is measured
        hvd.allreduce(step(), name="loss")
    return metrics()["blocked_seconds"] - before, time.perf_counter() - began


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_knows_how_long_its_graphs_were_blocked(ranks, size):
    """Also if something is averaged eagerly after each step, and with many gradients at the same time."""
    *results, last = ranks(size).run(_blocked_in_a_graph, timeout=120)
    for blocked, seconds in results:
        assert 0.6 < blocked <= seconds
        assert last[0] < blocked / 2


CASES = (
    _steps_are_marked,
    _tapes,
    _names_of_gradients,
    _weights_without_names,
    _ways_to_wrap_a_tape,
    _local_layers,
    _embeddings,
)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.strip("_"))
def test_tapes(ranks, case, size):
    ranks(size).run(case, timeout=120)
