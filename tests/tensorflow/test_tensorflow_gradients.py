"""Gradients of the collectives, eagerly and in functions: what all ranks read is averaged on its way back."""

from __future__ import annotations

import pytest
import tensorflow as tf

import horovodlike.tensorflow as hvd

SIZES = (1, 2, 3)


def _both(fn, *tensors):
    """Return the gradients that `fn(*tensors)`, a scalar, has eagerly; they are the same in a function."""

    def gradients(*given):
        with tf.GradientTape() as tape:
            tape.watch(given)
            loss = fn(*given)
        return tape.gradient(loss, given)

    eagerly = [gradient.numpy().tolist() for gradient in gradients(*tensors)]
    in_function = [gradient.numpy().tolist() for gradient in tf.function(gradients)(*tensors)]
    assert eagerly == in_function
    return eagerly


def _weights(count):
    """Different on each rank: 1 more than the rank in the first place, and so on."""
    return tf.range(1.0 + hvd.rank(), 1.0 + hvd.rank() + count)


def _mean_weights(count):
    return [1.0 + (hvd.size() - 1) / 2 + i for i in range(count)]


def _sums():
    size = hvd.size()
    mean = _mean_weights(3)
    expected = {hvd.Average: mean, hvd.Sum: [size * value for value in mean]}
    for op, gradient in expected.items():
        assert _both(lambda x, op=op: tf.reduce_sum(hvd.allreduce(x, op=op) * _weights(3)), tf.ones([3])) == [gradient]
    scaled = _both(
        lambda x: tf.reduce_sum(hvd.allreduce(x, prescale_factor=2.0, postscale_factor=4.0) * _weights(3)), tf.ones([3])
    )
    assert scaled == [[8 * value for value in mean]]

    def group(x, y):
        first, second, _ = hvd.grouped_allreduce([x, y, tf.range(3)])
        return tf.reduce_sum(first * _weights(3)) + 2 * tf.reduce_sum(second * _weights(2))

    assert _both(group, tf.ones([3]), tf.ones([2])) == [mean, [2 * value for value in _mean_weights(2)]]
    with pytest.raises(NotImplementedError, match="op=Average and op=Sum only"):
        _both(lambda x: tf.reduce_sum(hvd.allreduce(x, op=hvd.Max)), tf.ones([3]))


def _gathered():
    size, rank = hvd.size(), hvd.rank()
    begin = sum(other + 1 for other in range(rank))
    rows = sum(other + 1 for other in range(size))
    mean = _mean_weights(rows)
    own = mean[begin : begin + rank + 1]
    assert _both(lambda x: tf.reduce_sum(hvd.allgather(x) * _weights(rows)), tf.ones([rank + 1])) == [own]

    def group(x, y):
        first, second = hvd.grouped_allgather([x, y])
        return tf.reduce_sum(first * _weights(rows)) + tf.reduce_sum(second * _weights(size))

    assert _both(group, tf.ones([rank + 1]), tf.ones([1])) == [own, [_mean_weights(size)[rank]]]


def _broadcast():
    expected = [_mean_weights(2) if hvd.rank() == 0 else [0.0, 0.0]]
    assert _both(lambda x: tf.reduce_sum(hvd.broadcast(x, 0) * _weights(2)), tf.ones([2])) == expected


def _exchanged():
    size, rank = hvd.size(), hvd.rank()

    def loss(x):
        result, _ = hvd.alltoall(x, [1] * size)
        return tf.reduce_sum(result * _weights(size)[:, tf.newaxis])

    # Row i of this rank becomes row `rank` of rank i; the last one stays where it is.
    expected = [[float(other + 1 + rank)] * 2 for other in range(size)] + [[0.0, 0.0]]
    assert _both(loss, tf.ones([size + 1, 2])) == [expected]


def _scattered():
    size, rank = hvd.size(), hvd.rank()
    rows = size + 1  # the first rank has two
    counts = [2] + [1] * (size - 1)
    whole = [float(place + 1) for place in range(size) for _ in range(counts[place])]
    for op, factor in ((hvd.Average, 1), (hvd.Sum, size)):

        def loss(x, op=op):
            return tf.reduce_sum(hvd.reducescatter(x, op=op, prescale_factor=0.5) * (1.0 + rank))

        assert _both(loss, tf.ones([rows])) == [[0.5 * factor * value for value in whole]]


def _twice():
    @tf.function
    def second(x):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                loss = tf.reduce_sum(hvd.allreduce(x, op=hvd.Sum) ** 3)
            gradient = inner.gradient(loss, x)
        return outer.gradient(gradient, x)

    size = hvd.size()
    total = float(size)  # x is 1 everywhere
    assert second(tf.ones([2])).numpy().tolist() == [6 * total * size * size] * 2


def _forward():
    tensor, tangent = tf.constant([1.0, 2.0]), tf.constant([1.0, 3.0])

    def of_square(tensor):
        with tf.autodiff.ForwardAccumulator(tensor, tangent) as accumulator:
            square = hvd.allreduce(tensor * tensor, op=hvd.Sum)
        return accumulator.jvp(square)

    for call in (of_square, tf.function(of_square)):
        assert call(tensor).numpy().tolist() == [2.0 * hvd.size(), 12.0 * hvd.size()]


def _in_a_branch():
    @tf.function
    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.cond(tf.reduce_sum(x) > 0, lambda: hvd.allreduce(x), lambda: x)
            for _ in tf.range(2):
                y = hvd.allreduce(y) * 2.0
            loss = tf.reduce_sum(y)
        return tape.gradient(loss, x)

    assert gradient(tf.ones([2])).numpy().tolist() == [4.0, 4.0]


CASES = (_sums, _gathered, _broadcast, _exchanged, _scattered, _twice, _forward, _in_a_branch)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.strip("_"))
def test_gradient(ranks, case, size):
    ranks(size).run(case, timeout=120)
