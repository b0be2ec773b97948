"""Gradients weighted by samples: equality with one process that has the whole batch, and the rules of weights."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import horovodlike.tensorflow as hvd
from horovodlike import weighting

# The samples of the ranks in each batch. The last one is smaller, in another ratio, and has none for some of the ranks.
SIZES = ((7, 17, 2), (8, 16, 3), (1, 24, 5), (3, 0, 5))


def _batches(whole):
    """Yield the whole batches of this job, or this rank's parts of them."""
    random = np.random.default_rng(3)
    for sizes in SIZES:
        of_ranks = [random.normal(size=(size, 6)) for size in sizes[: hvd.size()]]
        yield tf.constant(np.concatenate(of_ranks) if whole else of_ranks[hvd.rank()])


def _variables():
    random = np.random.default_rng(5)
    return [tf.Variable(random.normal(size=shape)) for shape in ((6, 4), (4,), (4, 2))]


def _loss(variables, rows):
    kernel, bias, last = variables
    return tf.reduce_mean((tf.tanh(rows @ kernel + bias) @ last) ** 2)  # NaN without rows


def _train(tape_of, traced):
    """Train by SGD; `tape_of(tape, rows)` wraps a tape, or is None for whole batches, alone."""
    variables = _variables()

    def step(rows):
        with tf.GradientTape() as tape:
            loss = _loss(variables, rows)
        tape = tape if tape_of is None else tape_of(tape, rows)
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(0.1 * gradient)

    run = tf.function(step, autograph=False, reduce_retracing=True) if traced else step
    for rows in _batches(whole=tape_of is None):
        if tape_of is _set_before:
            hvd.set_batch_weight(len(rows))
        run(rows)
        assert not weighting.is_set()
    return np.concatenate([variable.numpy().ravel() for variable in variables])


def _set_before(tape, rows):
    return hvd.DistributedGradientTape(tape)


def _equal_the_whole_batch():
    def of_options(**options):
        return lambda tape, rows: hvd.DistributedGradientTape(tape, weight=tf.shape(rows)[0], **options)

    def set_within(tape, rows):
        hvd.set_batch_weight(tf.shape(rows)[0])
        return hvd.DistributedGradientTape(tape)

    def asked_for(tape, rows):
        hvd.set_batch_weight(tf.shape(rows)[0])
        return hvd.DistributedGradientTape(tape, weight=hvd.batch_weight)

    sizes = iter(())

    def by_function(tape, rows):
        return hvd.DistributedGradientTape(tape, weight=lambda: next(sizes))

    expected = _train(None, False)
    ways = {
        "tensor": of_options(),
        "set before": _set_before,
        "set within": set_within,
        "asked for": asked_for,
        "function": by_function,
        "one group": of_options(num_groups=1),
        "two groups": of_options(groups=2),
        "predivide": of_options(gradient_predivide_factor=4.0),
    }
    for traced in (False, True):
        for name, way in ways.items():
            sizes = iter([of_ranks[hvd.rank()] for of_ranks in SIZES])
            trained = _train(way, traced)
            everywhere = hvd.allgather(trained[None]).numpy()
            assert all(np.array_equal(everywhere[0], other) for other in everywhere), (name, traced)
            difference = np.linalg.norm(trained - expected) / np.linalg.norm(expected)
            assert difference < 1e-12, (name, traced, difference)


@pytest.mark.parametrize("size", (1, 2, 3))
def test_uneven_batches_equal_one_process_with_the_whole_batch(ranks, size):
    ranks(size).run(_equal_the_whole_batch)


def _reduced(gradient, op=hvd.Average, **options):
    """Return a gradient of this rank as a tape reduces it."""

    class Tape(tf.GradientTape):
        def gradient(self, *_):
            return [gradient]

    return hvd.DistributedGradientTape(Tape(), op=op, **options).gradient(None, [tf.constant(0.0)])[0]


def _in_both_modes(function):
    return [function(), tf.function(function, autograph=False)()]


def _rules():
    rank, size = hvd.rank(), hvd.size()
    mean = sum((each + 1) * each for each in range(size)) / sum(range(1, size + 1))
    for dtype in (tf.float16, tf.float32, tf.float64):
        for result in _in_both_modes(lambda dtype=dtype: _reduced(tf.cast(rank, dtype), weight=rank + 1)):
            assert result.dtype == dtype
            assert float(result) == pytest.approx(mean, rel=1e-3 if dtype is tf.float16 else 1e-6)
    # A rank without samples, whatever its gradient is.
    for bad in (float("nan"), float("inf")):
        gradient = tf.constant(bad if rank == size - 1 else 5.0)
        for result in _in_both_modes(lambda gradient=gradient: _reduced(gradient, weight=float(rank < size - 1))):
            assert float(result) == 5.0
    # Equal weights make the same bits as an average.
    odd = tf.constant(0.1 * (rank + 1), tf.float64)
    for result in _in_both_modes(lambda: (_reduced(odd, weight=7), _reduced(odd))):
        assert float(result[0]) == float(result[1])
    # Rows of an embedding.
    slices = tf.IndexedSlices(tf.fill([1, 1], float(rank)), tf.constant([0]), tf.constant([3, 1]))
    for as_dense in (True, False):
        for result in _in_both_modes(
            lambda as_dense=as_dense: tf.convert_to_tensor(_reduced(slices, weight=rank + 1, sparse_as_dense=as_dense))
        ):
            assert float(result[0, 0]) == pytest.approx(mean, rel=1e-6)
    result = _reduced(tf.constant(float(rank)), weight=rank + 1, compression=hvd.Compression.fp16)
    assert float(result) == pytest.approx(mean, rel=1e-2)


@pytest.mark.parametrize("size", (2, 3))
def test_rules(ranks, size):
    ranks(size).run(_rules)


def _bad_weights():
    one = tf.constant(1.0)
    for bad in (-1, float("nan"), "4", [1], tf.constant(-1.0)):
        with pytest.raises(ValueError, match="must be a finite number >= 0"):
            hvd.set_batch_weight(bad)
        runs = [_reduced] if tf.is_tensor(bad) else [_reduced, tf.function(_reduced, autograph=False)]
        for run in runs:
            with pytest.raises(ValueError, match="must be a finite number >= 0"):
                run(one, weight=bad)
        with pytest.raises(tf.errors.InvalidArgumentError, match="must be a finite number >= 0"):
            tf.function(lambda bad=bad: _reduced(one, weight=lambda: bad), autograph=False)()
    bad = tf.function(lambda weight: _reduced(one, weight=weight), autograph=False)
    for value in (-1.0, float("nan")):  # on one rank: an error on all
        weight = tf.constant(value if hvd.rank() == 0 else 1.0)
        with pytest.raises(tf.errors.InvalidArgumentError, match="there is no average over the samples"):
            bad(weight)
    assert float(bad(tf.constant(2.0))) == 1.0
    for op in (hvd.Sum, hvd.Max):
        for run in (_reduced, tf.function(_reduced, autograph=False)):
            with pytest.raises(ValueError, match=r"need op=hvd\.Average, got hvd\."):
                run(one, op=op, weight=3)
            hvd.set_batch_weight(3)
            with pytest.raises(ValueError, match=r"need op=hvd\.Average, got hvd\."):
                run(one, op=op)
            hvd.set_batch_weight(None)
    with pytest.raises(ValueError, match="at least one rank must have samples"):
        _reduced(one, weight=0)
    with pytest.raises(tf.errors.InvalidArgumentError, match="at least one rank must have samples"):
        tf.function(lambda: _reduced(one, weight=0), autograph=False)()
    with pytest.raises(RuntimeError, match="no weight has been set"):
        _reduced(one, weight=hvd.batch_weight)
    with pytest.raises(tf.errors.OpError, match="no weight has been set"):
        tf.function(lambda: _reduced(one, weight=hvd.batch_weight), autograph=False)()
    assert float(_reduced(one)) == 1.0


@pytest.mark.parametrize("size", (1, 2))
def test_bad_weights(ranks, size):
    ranks(size).run(_bad_weights)


def _disagreement(kind):
    first = hvd.rank() == 0
    slices = tf.IndexedSlices(tf.fill([1, 1], 1.0), tf.constant([0]), tf.constant([3, 1]))
    gradient = slices if kind == "sparse" else tf.constant(1.0)
    x = [tf.constant(0.0), tf.constant(0.0)][: 1 + (kind == "two")]

    class Tape(tf.GradientTape):
        def gradient(self, *_):
            return [gradient] * len(x)

    def reduce():
        return hvd.DistributedGradientTape(Tape(), weight=3 if first else None).gradient(None, x)

    expected = "do only some ranks weight" if first else "rank 0 has"
    with pytest.raises(tf.errors.FailedPreconditionError, match=expected):
        reduce()
    if kind != "two":  # in a graph, a rank without weights would wait for its second gradient until the others end
        with pytest.raises(tf.errors.FailedPreconditionError):
            tf.function(reduce, autograph=False)()
    assert float(hvd.allreduce(tf.constant(2.0))) == 2.0  # the job continues


@pytest.mark.parametrize("kind", ("one", "two", "sparse"))
def test_ranks_that_disagree_about_weights(ranks, kind):
    ranks(2).run(_disagreement, kind)


def _process_sets():
    mine = hvd.add_process_set([0, 2])
    try:
        for result in _in_both_modes(
            lambda: _reduced(tf.constant(float(hvd.rank())), process_set=mine, weight=hvd.rank() + 1)
        ):
            assert float(result) == (1.0 if hvd.rank() == 1 else 1.5)
        hvd.set_batch_weight(3)
        _reduced(tf.constant(1.0), process_set=mine)
        assert not weighting.is_set()
    finally:
        hvd.remove_process_set(mine)


def test_process_sets(ranks):
    ranks(3).run(_process_sets)


def _joined():
    for step in range(hvd.rank() + 1):
        left = range(step, hvd.size())
        mean = sum((rank + 1) * rank for rank in left) / sum(rank + 1 for rank in left)
        for result in _in_both_modes(lambda: _reduced(tf.constant(float(hvd.rank())), weight=hvd.rank() + 1)):
            assert float(result) == pytest.approx(mean, rel=1e-6)
    hvd.join()


def test_ranks_that_have_joined(ranks):
    ranks(3).run(_joined)


def _optimizers_of_tensorflow_1():
    for passes in (1, 2):
        with tf.Graph().as_default():
            x = tf.compat.v1.get_variable(f"x{passes}", initializer=0.0)
            loss = x * float(hvd.rank())
            optimizer = hvd.DistributedOptimizer(
                tf.compat.v1.train.GradientDescentOptimizer(1.0),
                weight=hvd.rank() + 1,
                backward_passes_per_step=passes,
            )
            step = optimizer.minimize(loss)
            with tf.compat.v1.Session() as session:
                session.run(tf.compat.v1.global_variables_initializer())
                for _ in range(passes):
                    session.run(step)
                size = hvd.size()
                mean = sum((each + 1) * each for each in range(size)) / sum(range(1, size + 1))
                assert session.run(x) == pytest.approx(-passes * mean, rel=1e-6)


def test_optimizers_of_tensorflow_1(ranks):
    ranks(3).run(_optimizers_of_tensorflow_1)
