"""Training: optimizers, variables, objects and batch normalization, on ranks that have different data."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import horovodlike.tensorflow as hvd

SIZES = (1, 2, 3)


def _optimizer_of_tensorflow_1():
    for passes, average in ((1, False), (2, False), (2, True)):
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            weight = tf.compat.v1.get_variable("w", initializer=tf.constant([1.0, 2.0]))
            fed = tf.compat.v1.placeholder(tf.float32, [])
            optimizer = hvd.DistributedOptimizer(
                tf.compat.v1.train.MomentumOptimizer(0.5, 0.0),
                backward_passes_per_step=passes,
                average_aggregated_gradients=average,
            )
            step = tf.compat.v1.train.get_or_create_global_step()
            train = optimizer.minimize(tf.reduce_sum(weight) * fed, global_step=step)
            session.run(tf.compat.v1.global_variables_initializer())
            expected = np.array([1.0, 2.0])
            for i in range(4):
                session.run(train, {fed: float(hvd.rank() + i)})
                if passes == 1:
                    expected -= 0.5 * ((hvd.size() - 1) / 2 + i)
                elif i % 2 == 1:
                    expected -= 0.5 * ((hvd.size() - 1) + 2 * i - 1) / (2 if average else 1)
                np.testing.assert_allclose(session.run(weight), expected, rtol=1e-6)
            assert session.run(step) == 4
            assert optimizer.get_slot_names() == ["momentum"]
            assert optimizer.get_slot(weight, "momentum") is not None
    eager = tf.compat.v1.train.GradientDescentOptimizer(0.5)
    with pytest.raises(ValueError, match="backward_passes_per_step > 1 is not supported eagerly"):
        hvd.DistributedOptimizer(eager, backward_passes_per_step=2)
    with pytest.raises(ValueError, match="Adasum does not support average_aggregated_gradients"):
        hvd.DistributedOptimizer(eager, op=hvd.Adasum, average_aggregated_gradients=True)
    with pytest.raises(ValueError, match="DistributedGradientDescentOptimizer is distributed already"):
        hvd.DistributedOptimizer(hvd.DistributedOptimizer(eager))
    local, shared = tf.Variable(1.0), tf.Variable(1.0)
    optimizer = hvd.DistributedOptimizer(eager)
    optimizer.register_local_var(local)
    pairs = optimizer.compute_gradients(lambda: (local + shared) * float(hvd.rank()), [local, shared])
    assert [float(gradient) for gradient, _ in pairs] == pytest.approx([hvd.rank() / hvd.size(), (hvd.size() - 1) / 2])


def _optimizer_of_keras():
    import keras

    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    assert type(optimizer).__name__ == "SGD"
    variable = keras.Variable([1.0, 2.0])

    def step(gradient):
        optimizer.apply([gradient], [variable])

    for run in (step, tf.function(step, autograph=False)):
        variable.assign([1.0, 2.0])
        run(tf.fill([2], float(hvd.rank())))
        mean = (hvd.size() - 1) / 2
        np.testing.assert_allclose(variable, [1.0 - mean, 2.0 - mean], rtol=1e-6)


def _sums_of_several_passes():
    def reduced(gradients, _):
        return [None if one is None else hvd.allreduce(one, op=hvd.Sum) for one in gradients]

    weight = tf.Variable([10.0, 20.0])
    for in_function in (False, True):
        weight.assign([10.0, 20.0])
        helper = hvd.LocalGradientAggregationHelper(3, reduced, average_aggregated_gradients=True)
        iterations = tf.Variable(0)

        def step(gradient, helper=helper, iterations=iterations):
            (result, _) = helper.compute_gradients([gradient, None], [weight, None])
            helper.apply_gradients(
                lambda: tf.group(weight.assign_sub(result), iterations.assign_add(1)), None, global_step=iterations
            )
            return result

        run = tf.function(step, autograph=False) if in_function else step
        for i in range(6):
            run(tf.fill([2], float(i)))
            expected = 0 if i < 2 else hvd.size() * 1.0 if i < 5 else hvd.size() * 5.0
            np.testing.assert_allclose(weight, [10.0 - expected, 20.0 - expected], rtol=1e-6)
        assert int(iterations) == 6
    _other_gradients_in_a_later_pass(reduced)
    slices = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]), tf.constant([5, 2]))
    with pytest.raises(ValueError, match="IndexedSlices are not supported when `backward_passes_per_step` > 1"):
        hvd.LocalGradientAggregationHelper(2, reduced).compute_gradients([slices], [weight])
    with pytest.raises(ValueError, match="must be > 0"):
        hvd.LocalGradientAggregationHelper(0, reduced)


def _other_gradients_in_a_later_pass(reduced):
    size, one = hvd.size(), tf.ones([2])
    variables = [tf.Variable(one), tf.Variable(one)]
    for in_function in (False, True):
        helper = hvd.LocalGradientAggregationHelper(2, reduced)

        def step(gradients, helper=helper):
            results = helper.compute_gradients(gradients, variables)
            helper.apply_gradients(tf.group, None)
            return results

        run = tf.function(step, autograph=False) if in_function else step
        second = run([one, tf.zeros([2]) if in_function else None])[1]
        assert in_function or second is None
        first, second = run([None, 2.0 * one])
        assert first.numpy().tolist() == [size] * 2 and second.numpy().tolist() == [2.0 * size] * 2
        run([None, one])
        first, second = run([None, 2.0 * one])
        assert first.numpy().tolist() == [0.0] * 2 and second.numpy().tolist() == [3.0 * size] * 2
    helper = hvd.LocalGradientAggregationHelper(2, reduced)
    run = tf.function(lambda gradients: helper.compute_gradients(gradients, variables), autograph=False)
    run([one, None])
    with pytest.raises(ValueError, match=r"gradients number \[1\] were None in the first pass"):
        run([None, one])


def _variables_and_objects():
    import keras

    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(4), keras.layers.BatchNormalization()])
    model.set_weights([np.full_like(value, hvd.rank() + 1.0) for value in model.get_weights()])
    hvd.broadcast_variables(model.variables, root_rank=hvd.size() - 1)
    assert all((value == hvd.size()).all() for value in model.get_weights())
    mixed = [tf.Variable(hvd.rank()), tf.Variable([hvd.rank() > 0]), tf.Variable(tf.ones([0, 3]))]
    hvd.broadcast_variables(mixed, root_rank=0)
    assert int(mixed[0]) == 0 and not bool(mixed[1][0])
    mixed[0].assign(hvd.rank())
    tf.function(lambda: hvd.broadcast_variables(mixed, root_rank=hvd.size() - 1), autograph=False)()
    assert int(mixed[0]) == hvd.size() - 1
    for variable in model.variables:
        variable.assign(tf.fill(variable.shape, float(hvd.rank())))
    returned = hvd.broadcast_([*model.variables, mixed[0]], root_rank=hvd.size() - 1)
    assert all(one is given for one, given in zip(returned, [*model.variables, mixed[0]], strict=True))
    assert all((value == hvd.size() - 1).all() for value in model.get_weights())
    root = hvd.size() - 1
    assert hvd.broadcast_object({"rank": hvd.rank()}, root_rank=root) == {"rank": root}
    assert hvd.broadcast_object_fn(root, name="fn")(hvd.rank()) == root
    objects = hvd.allgather_object(["x"] * hvd.rank())
    assert objects == [["x"] * rank for rank in range(hvd.size())]
    if hvd.rank() == root:
        with pytest.raises(TypeError, match="pickle"):
            hvd.broadcast_object((i for i in ()), root)
    else:
        with pytest.raises(hvd.HorovodInternalError, match=f"rank {root} could not pickle"):
            hvd.broadcast_object(None, root)
    with pytest.raises(ValueError, match="root rank 9"):
        hvd.broadcast_object(1, root_rank=9)


def _variables_of_unknown_shapes():
    def check(broadcast):
        variables = [
            tf.Variable(tf.fill([2, 3], hvd.rank()), shape=[None, 3]),
            tf.Variable(tf.fill([2, 2], hvd.rank()), shape=tf.TensorShape(None)),
        ]
        broadcast(variables)
        for variable in variables:
            assert (variable.numpy() == hvd.size() - 1).all()

    check(lambda variables: hvd.broadcast_variables(variables, root_rank=hvd.size() - 1))
    check(lambda variables: hvd.broadcast_(variables, root_rank=hvd.size() - 1))

    @tf.function
    def traced(variables):
        hvd.broadcast_variables(variables, root_rank=hvd.size() - 1)

    check(traced)


def _hook():
    with tf.Graph().as_default():
        variable = tf.compat.v1.get_variable("v", initializer=tf.constant([float(hvd.rank())]))
        tf.compat.v1.train.get_or_create_global_step()
        hook = hvd.BroadcastGlobalVariablesHook(hvd.size() - 1)
        with tf.compat.v1.train.MonitoredTrainingSession(hooks=[hook]) as session:
            assert session.run(variable).tolist() == [hvd.size() - 1]


def _batch_normalization():
    import keras

    assert hvd.SyncBatchNormalization is hvd.SyncBatchNormalization
    generator = np.random.default_rng(1)
    data = generator.normal(5.0, 3.0, size=(3 * hvd.size() + 1, 4, 2)).astype(np.float32)
    weights = generator.normal(size=data.shape).astype(np.float32)
    bounds = [0, *(3 * (rank + 1) for rank in range(hvd.size() - 1)), len(data)]  # the last rank has one more
    own = slice(bounds[hvd.rank()], bounds[hvd.rank() + 1])

    def results(layer, rows, factors):
        def compute(rows, factors):
            with tf.GradientTape() as tape:
                tape.watch(rows)
                normalized = layer(rows, training=True)
                loss = tf.reduce_sum(normalized * factors)
            return normalized, tape.gradient(loss, rows)

        return [compute(rows, factors), tf.function(compute)(rows, factors)]

    for axis in (-1, 1):
        whole = keras.layers.BatchNormalization(axis=axis, momentum=0.5)
        layer = hvd.SyncBatchNormalization(axis=axis, momentum=0.5)
        expected = results(whole, tf.constant(data), tf.constant(weights))
        actual = results(layer, tf.constant(data[own]), tf.constant(weights[own]))
        for (normalized, gradient), (all_normalized, all_gradient) in zip(actual, expected, strict=True):
            np.testing.assert_allclose(normalized, all_normalized[own], rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(gradient, all_gradient[own], rtol=1e-3, atol=1e-5)
        np.testing.assert_allclose(layer.moving_mean, whole.moving_mean, rtol=1e-5)
        np.testing.assert_allclose(layer.moving_variance, whole.moving_variance, rtol=1e-5)
    for fused in (True, None):
        with pytest.raises(ValueError, match="fused"):
            hvd.SyncBatchNormalization(fused=fused)


def _batch_normalization_after_another_model():
    """Rank 0 has made other layers before, and Keras has counted on: it is in names and name scopes."""
    import keras

    if hvd.rank() == 0:
        keras.Sequential([keras.Input([2]), keras.layers.Dense(2), hvd.SyncBatchNormalization()])
    twice = hvd.SyncBatchNormalization()
    layers = [keras.layers.Dense(2), twice, keras.layers.Dense(2), twice, hvd.SyncBatchNormalization()]
    model = keras.Sequential([keras.Input([2]), *layers])

    def step(rows):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(rows, training=True) ** 3)
        return tape.gradient(loss, model.trainable_variables)

    rows = tf.random.stateless_normal([4, 2], seed=[hvd.rank(), 0])
    inner = tf.function(step)
    for run in (step, tf.function(step), tf.function(lambda rows: inner(rows))):
        assert all(np.isfinite(gradient.numpy()).all() for gradient in run(rows))


def _process_sets():
    size, rank = hvd.size(), hvd.rank()
    members = [0, 2] if size == 3 else [1]
    some = hvd.add_process_set(members)
    assert int(hvd.process_set_included_op(some.process_set_id)) == (rank in members)
    assert int(hvd.size_op(some.process_set_id)) == len(members)
    x = tf.Variable(float(rank))
    with tf.GradientTape() as tape:
        y = x * float(rank)
    gradient = hvd.DistributedGradientTape(tape, process_set=some).gradient(y, x)
    if rank in members:
        assert float(gradient) == sum(members) / len(members)
        assert float(hvd.allreduce(x, op=hvd.Sum, process_set=some)) == sum(members)
        assert hvd.allgather(tf.constant([rank]), process_set=some).numpy().tolist() == members
        total = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum, process_set=some), autograph=False)
        assert float(total(x)) == sum(members)
        assert int(hvd.broadcast(tf.constant(rank), members[-1], process_set=some)) == members[-1]
        rows = hvd.reducescatter(tf.ones([len(members), 2]), op=hvd.Sum, process_set=some)
        assert rows.numpy().tolist() == [[len(members)] * 2]
        assert hvd.allgather_object(rank, process_set=some) == members
        hvd.barrier(process_set=some)
    else:
        assert float(gradient) == rank  # it keeps its own
        with pytest.raises(ValueError, match="is not a member"):
            hvd.allreduce(x, process_set=some)
    import keras

    layer = hvd.SyncBatchNormalization(process_set=some)
    model = keras.Sequential([keras.Input([2]), layer, hvd.SyncBatchNormalization()])
    copies = keras.models.clone_model(model).layers
    assert [copy.process_set for copy in copies] == [some, hvd.global_process_set]
    set_id = some.process_set_id
    assert hvd.remove_process_set(some)
    with pytest.raises(ValueError, match=r"no process set of the ranks \[.*add_process_set"):
        hvd.SyncBatchNormalization.from_config(layer.get_config())
    with pytest.raises(tf.errors.InvalidArgumentError, match="does not exist"):
        hvd.size_op(set_id)


def _join():
    # Each rank has one batch more than the one before.
    for i in range(hvd.rank() + 1):
        total = hvd.allreduce(tf.constant(1.0), op=hvd.Sum, name=f"batch.{i}")
        assert float(total) == hvd.size() - i
        slices = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([hvd.rank()]), tf.constant([5, 2]))
        mean = hvd.allreduce(slices, name=f"slices.{i}")
        assert mean.indices.numpy().tolist() == list(range(i, hvd.size()))
        np.testing.assert_allclose(mean.values, np.full((hvd.size() - i, 2), 1 / (hvd.size() - i)), rtol=1e-6)
        assert hvd.allgather_object(hvd.rank(), name=f"objects.{i}") == list(range(i, hvd.size()))
        last = hvd.size() - 1
        assert hvd.broadcast_object(hvd.rank(), last, name=f"object.{i}") == last
        if i > 0:
            with pytest.raises(hvd.HorovodInternalError, match="the root, rank 0, has joined"):
                hvd.broadcast_object(None, 0, name=f"joined.{i}")
            expected = TypeError if hvd.rank() == last else hvd.HorovodInternalError
            with pytest.raises(expected, match=f"pickle|ranks \\[{last}\\] could not"):
                hvd.allgather_object((j for j in ()) if hvd.rank() == last else 1, name=f"failed.{i}")
    assert hvd.join() == hvd.size() - 1
    assert float(hvd.allreduce(tf.constant(1.0), op=hvd.Sum)) == hvd.size()


def _sparse_average_over_all():
    if hvd.rank() == 0:
        slices = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]), tf.constant([5, 2]))
        for run in (hvd.allreduce, tf.function(hvd.allreduce)):
            assert run(slices, name="x").values.numpy().tolist() == [[0.5, 0.5]]
    hvd.join()


CASES = (
    _optimizer_of_tensorflow_1,
    _optimizer_of_keras,
    _sums_of_several_passes,
    _variables_and_objects,
    _variables_of_unknown_shapes,
    _hook,
    _batch_normalization,
    _batch_normalization_after_another_model,
    _join,
)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.strip("_"))
def test_training(ranks, case, size):
    ranks(size).run(case, timeout=120)


@pytest.mark.parametrize("size", (2, 3))
def test_process_sets(ranks, size):
    ranks(size).run(_process_sets)


def test_sparse_average_that_counts_those_that_have_joined(fresh_ranks):
    fresh_ranks(2, {"HOROVODLIKE_JOIN_AVERAGE": "all"}).run(_sparse_average_over_all, timeout=120)
