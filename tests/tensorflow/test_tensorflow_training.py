"""Training: tapes, optimizers, variables, objects and batch normalization, on ranks that have different data."""

from __future__ import annotations

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
    from keras import layers

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
    local, shared = tf.Variable(1.0), tf.Variable(1.0)
    optimizer = hvd.DistributedOptimizer(eager)
    optimizer.register_local_var(local)
    pairs = optimizer.compute_gradients(lambda: (local + shared) * float(hvd.rank()), [local, shared])
    assert [float(gradient) for gradient, _ in pairs] == pytest.approx([hvd.rank() / hvd.size(), (hvd.size() - 1) / 2])


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
    _tapes,
    _names_of_gradients,
    _ways_to_wrap_a_tape,
    _local_layers,
    _embeddings,
    _optimizer_of_tensorflow_1,
    _sums_of_several_passes,
    _variables_and_objects,
    _hook,
    _batch_normalization,
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
