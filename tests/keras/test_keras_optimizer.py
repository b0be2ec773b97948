"""`DistributedOptimizer` for Keras: equality with one rank, its options and its rules."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

STEPS = 6
BATCH = 24  # each rank's part can be halved


def _model(layer_dtype="float64"):
    import keras

    keras.utils.set_random_seed(7)
    dense = [keras.layers.Dense(units, activation="tanh", dtype=layer_dtype) for units in (16, 16, 3)]
    return keras.Sequential([keras.Input((6,), dtype=layer_dtype), *dense])


def _data(steps=STEPS):
    random = np.random.default_rng(11)
    return random.standard_normal((steps * BATCH, 6)), random.standard_normal((steps * BATCH, 3))


def _shares(array, batch, rank, size):
    """Return this rank's share of each batch, one behind the other."""
    return np.concatenate([whole[rank::size] for whole in np.split(array, len(array) // batch)])


def _fit(optimizer, rank=0, size=1, passes=1, traced=False):
    model = _model()
    model.compile(optimizer=optimizer, loss="mse", run_eagerly=not traced)
    x, y = (_shares(array, BATCH // passes, rank, size) for array in _data())
    model.fit(x, y, batch_size=BATCH // passes // size, shuffle=False, verbose=0)
    return model


def _flat(model):
    return np.concatenate([weight.ravel() for weight in model.get_weights()])


def _difference(actual, expected):
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


def _equals_one_rank(chosen=None):
    import keras

    import horovodlike.keras as hvd

    def sgd(scale=1.0, **options):
        return keras.optimizers.SGD(0.05 * scale, momentum=0.9, **options)

    def adam(**options):
        return keras.optimizers.Adam(0.01, **options)

    size = hvd.size()
    schedule = keras.optimizers.schedules.ExponentialDecay(0.05, decay_steps=2, decay_rate=0.5)
    by_pass = keras.optimizers.schedules.PiecewiseConstantDecay([5], [0.05, 0.01])
    by_step = keras.optimizers.schedules.PiecewiseConstantDecay([2], [0.05, 0.01])
    # The optimizer that is wrapped and how, and the one that trains alone on the whole batch.
    variants = {
        "plain": (sgd(), {}, sgd()),
        "by name": ("adam", {}, keras.optimizers.get("adam")),
        "groups": (sgd(), {"groups": 2}, sgd()),
        "more groups than variables": (sgd(), {"groups": 100}, sgd()),
        "predivide": (sgd(), {"gradient_predivide_factor": 4.0}, sgd()),
        "predivide and groups": (sgd(), {"gradient_predivide_factor": 4.0, "groups": 2}, sgd()),
        "Sum": (sgd(1 / size), {"op": hvd.Sum}, sgd()),
        "clipped": (sgd(global_clipnorm=0.1), {}, sgd(global_clipnorm=0.1)),
        "AdamW": (keras.optimizers.AdamW(0.01), {}, keras.optimizers.AdamW(0.01)),
        "moving average": (sgd(use_ema=True), {}, sgd(use_ema=True)),
        "schedule": (keras.optimizers.SGD(schedule), {}, keras.optimizers.SGD(schedule)),
        "static loss scale": (sgd(loss_scale_factor=64.0), {}, sgd(loss_scale_factor=64.0)),
        "loss scale": (keras.optimizers.LossScaleOptimizer(sgd()), {}, sgd()),
        "passes": (sgd(0.5), {"backward_passes_per_step": 2}, sgd()),
        "averaged passes": (adam(), {"backward_passes_per_step": 2, "average_aggregated_gradients": True}, adam()),
        "passes and groups": (sgd(0.5), {"backward_passes_per_step": 2, "groups": 2}, sgd()),
        "loss scale and passes": (
            keras.optimizers.LossScaleOptimizer(adam()),
            {"backward_passes_per_step": 2, "average_aggregated_gradients": True},
            adam(),
        ),
        "schedule by passes": (
            keras.optimizers.SGD(by_pass),
            {"backward_passes_per_step": 2, "average_aggregated_gradients": True},
            keras.optimizers.SGD(by_step),
        ),
        "Keras's passes": (adam(gradient_accumulation_steps=2), {}, adam()),
    }
    report = {}
    for name in chosen or variants:
        optimizer, options, alone = variants[name]
        passes = 2 if "passes" in name else 1
        wrapped = hvd.DistributedOptimizer(optimizer, **options)
        # The others in a fraction of the time; what is traced is the same.
        traced = name in ("plain", "groups", "averaged passes", "loss scale and passes")
        trained = _flat(_fit(wrapped, hvd.rank(), size, passes, traced))
        everywhere = hvd.allgather(trained[None])
        same = all(np.array_equal(everywhere[0], other) for other in everywhere)
        report[name] = (_difference(trained, _flat(_fit(alone))), same, int(wrapped.iterations))
    return report


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "chosen"), ((2, None), (3, ["plain", "Sum", "predivide and groups", "averaged passes"]))
)
@pytest.mark.parametrize("backend", ("tensorflow", pytest.param("torch", marks=pytest.mark.thorough)), indirect=True)
def test_equals_one_rank_with_the_whole_batch(keras_ranks, size, chosen):
    for report in keras_ranks(size).run(_equals_one_rank, chosen, timeout=240):
        for variant, (difference, same_on_all_ranks, steps) in report.items():
            assert difference < 1e-6, variant
            assert same_on_all_ranks, variant
            assert steps == STEPS, variant


def _is_what_it_was():
    """State, class and name of the wrapped optimizer are those that it had."""
    import keras

    import horovodlike.keras as hvd

    optimizer = keras.optimizers.Adam(0.01, name="mine")
    model = _fit(optimizer)
    before = [variable.numpy() for variable in optimizer.variables]
    wrapped = hvd.DistributedOptimizer(optimizer)
    assert isinstance(wrapped, keras.optimizers.Adam) and wrapped.name == "mine"
    assert type(wrapped).__name__ == "Adam"
    assert all(map(np.array_equal, before, (variable.numpy() for variable in wrapped.variables)))
    assert all(mine is theirs for mine, theirs in zip(wrapped.variables, optimizer.variables, strict=True))
    model.compile(optimizer=wrapped, loss="mse")
    x, y = (_shares(array, BATCH, hvd.rank(), hvd.size()) for array in _data())
    model.fit(x, y, batch_size=BATCH // hvd.size(), shuffle=False, verbose=0)
    assert int(wrapped.iterations) == 2 * STEPS
    alone = _fit(keras.optimizers.Adam(0.01))
    x, y = _data()
    alone.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    assert _difference(_flat(model), _flat(alone)) < 1e-6
    again = type(wrapped).from_config(wrapped.get_config())
    assert type(again).__bases__ == type(wrapped).__bases__
    assert again.get_config() == optimizer.get_config()


@pytest.mark.slow
def test_state_and_class_are_kept(keras_ranks):
    keras_ranks(2).run(_is_what_it_was)


def _applied(wrapped, values, gradients):
    """Apply gradients to variables of these values; return what they are then."""
    import keras

    variables = [keras.Variable(value, dtype="float32", name=f"v{i}") for i, value in enumerate(values)]
    tensors = [None if g is None else keras.ops.convert_to_tensor(np.float32(g)) for g in gradients]
    wrapped.apply_gradients(zip(tensors, variables, strict=True))
    return [float(variable.numpy()) for variable in variables]


def _own_loops():
    import keras

    import horovodlike.keras as hvd

    def sgd():
        return keras.optimizers.SGD(1.0)

    mine = hvd.rank() + 1.0  # 1 and 2
    assert _applied(hvd.DistributedOptimizer(sgd()), [0.0, 1.0], [mine, 3 * mine]) == [-1.5, -3.5]
    assert _applied(hvd.DistributedOptimizer(sgd(), op=hvd.Sum), [0.0], [mine]) == [-3.0]
    assert _applied(hvd.DistributedOptimizer(sgd(), compression=hvd.Compression.fp16), [0.0], [mine]) == [-1.5]
    # A gradient that the ranks do not have.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert _applied(hvd.DistributedOptimizer(sgd()), [0.0, 1.0], [mine, None]) == [-1.5, 1.0]
    gradient = keras.ops.convert_to_tensor(np.float32(mine))
    variable = keras.Variable(0.0, dtype="float32")
    hvd.DistributedOptimizer(sgd()).apply([gradient], [variable])
    assert float(gradient) == mine, "what a script has is not overwritten"
    # Process sets.
    alone = hvd.add_process_set([1])
    assert _applied(hvd.DistributedOptimizer(sgd(), process_set=alone), [0.0], [mine]) == [-mine]
    hvd.remove_process_set(alone)
    # Explicit groups.
    variables = [keras.Variable(0.0, dtype="float32", name=name) for name in "abc"]
    wrapped = hvd.DistributedOptimizer(sgd(), groups=[[variables[2], variables[0]]])
    wrapped.apply([keras.ops.convert_to_tensor(np.float32(mine * k)) for k in (1, 2, 4)], variables)
    assert [float(variable.numpy()) for variable in variables] == [-1.5, -3.0, -6.0]
    # Two optimizers in one process.
    first, second = hvd.DistributedOptimizer(sgd()), hvd.DistributedOptimizer(sgd(), name="second")
    assert _applied(second, [0.0], [mine]) == _applied(first, [0.0], [mine]) == [-1.5]
    assert hvd.DistributedOptimizer(sgd()).apply([]) is None


def test_training_loops_of_ones_own(keras_ranks):
    keras_ranks(2).run(_own_loops)


def _local_gradients():
    import keras

    import horovodlike.keras as hvd

    mine = hvd.rank() + 1.0
    for scale, factor in ((True, 0.5), (False, 1.0)):
        variables = [keras.Variable(0.0, dtype="float32", name=name) for name in "ab"]
        wrapped = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), scale_local_gradients=scale)
        wrapped.register_local_var(variables[0])
        wrapped.apply([keras.ops.convert_to_tensor(np.float32(mine))] * 2, variables)
        assert [float(variable.numpy()) for variable in variables] == [-mine * factor, -1.5]

    local = keras.layers.Dense(4, dtype="float64")
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((6,)), local, keras.layers.Dense(3, dtype="float64")])
    wrapped = hvd.PartialDistributedOptimizer(
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)), local_layers=local
    )
    model.compile(optimizer=wrapped, loss="mse")
    x, y = (_shares(array, BATCH, hvd.rank(), hvd.size()) for array in _data())
    model.fit(x, y, batch_size=BATCH // hvd.size(), shuffle=False, verbose=0)
    everywhere = [hvd.allgather(weight[None]) for weight in model.get_weights()]
    same = [np.array_equal(weight[0], weight[1]) for weight in everywhere]
    assert same == [False, False, True, True]
    with pytest.raises(ValueError, match=r"All local layers must be of keras.layers.Layer type"):
        hvd.PartialDistributedOptimizer(keras.optimizers.SGD(), local_layers=["dense"])


def test_local_gradients_stay_with_their_rank(keras_ranks):
    keras_ranks(2).run(_local_gradients)


def _loss_scaling(outside):
    """An infinity on one rank has all ranks skip the step and halve the scale."""
    import keras

    import horovodlike.keras as hvd

    sgd = keras.optimizers.SGD(1.0)
    if outside:
        scaled = keras.optimizers.LossScaleOptimizer(hvd.DistributedOptimizer(sgd), initial_scale=8.0)
    else:
        scaled = hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(sgd, initial_scale=8.0))
    variable = keras.Variable(0.0, dtype="float32")
    values, scales = [], []
    for gradient in (8.0 * (hvd.rank() + 1), float("inf") if hvd.rank() == 1 else 8.0, 4.0):
        scaled.apply([keras.ops.convert_to_tensor(np.float32(gradient))], [variable])
        values.append(float(variable.numpy()))
        scales.append(float(scaled.dynamic_scale.numpy()))
    assert values == [-1.5, -1.5, -2.5]
    assert scales == [8.0, 4.0, 4.0]
    assert int(scaled.iterations) == 2


def _loop_with_scaled_loss(kind):
    """The loops of docs/users/keras.md: an infinity of one rank has all ranks skip the step and halve the scale."""
    import tensorflow as tf

    import horovodlike.keras as hvd
    import horovodlike.tensorflow
    from horovodlike.keras._backend import keras

    sgd = keras.optimizers.SGD(1.0)
    scaling = (keras.mixed_precision if kind == "tf_keras" else keras.optimizers).LossScaleOptimizer
    optimizer = scaling(sgd if kind == "tape" else hvd.DistributedOptimizer(sgd), initial_scale=8.0)
    variable = tf.Variable(0.0)
    optimizer.build([variable])

    @tf.function
    def step(factor):
        with tf.GradientTape() as tape:
            loss = variable * factor
            scaled = optimizer.get_scaled_loss(loss) if kind == "tf_keras" else optimizer.scale_loss(loss)
        if kind == "tape":
            tape = horovodlike.tensorflow.DistributedGradientTape(tape)
        gradients = tape.gradient(scaled, [variable])
        if kind == "tf_keras":
            gradients = optimizer.get_unscaled_gradients(gradients)
        optimizer.apply_gradients(zip(gradients, [variable], strict=True))

    seen = []
    for factor in (hvd.rank() + 1.0, float("inf") if hvd.rank() == 1 else 1.0, 0.5):
        step(tf.constant(factor))
        scale = optimizer.loss_scale if kind == "tf_keras" else optimizer.dynamic_scale
        seen.append((float(variable.numpy()), float(scale.numpy())))
    assert seen == [(-1.5, 8.0), (-1.5, 4.0), (-2.0, 4.0)]


@pytest.mark.parametrize("backend", ("tensorflow", "tf_keras"), indirect=True)
def test_loops_with_a_scaled_loss(keras_ranks, backend):
    for kind in ("tf_keras",) if backend == "tf_keras" else ("tape", "optimizer"):
        keras_ranks(2).run(_loop_with_scaled_loss, kind)


def _loss_scaling_with_passes():
    import keras

    import horovodlike.keras as hvd

    scaled = keras.optimizers.LossScaleOptimizer(
        hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=2), initial_scale=8.0
    )
    variable = keras.Variable(0.0, dtype="float32")
    values = []
    for gradient in (float("inf") if hvd.rank() == 1 else 8.0, 8.0, 4.0, 4.0):
        scaled.apply([keras.ops.convert_to_tensor(np.float32(gradient))], [variable])
        values.append(float(variable.numpy()))
    assert values == [0.0, 0.0, 0.0, -2.0], "the infinity is gone after its step"
    assert float(scaled.dynamic_scale.numpy()) == 4.0


def _mixed_precision():
    import keras

    import horovodlike.keras as hvd

    policy = keras.mixed_precision.dtype_policy()
    keras.mixed_precision.set_dtype_policy("mixed_float16")
    try:
        model = _model(None)
    finally:
        keras.mixed_precision.set_dtype_policy(policy)
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), loss="mse")
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    x, y = (_shares(array, BATCH, hvd.rank(), hvd.size()) for array in _data())
    before = _flat(model)
    model.fit(x, y, batch_size=BATCH // hvd.size(), shuffle=False, verbose=0)
    assert not np.array_equal(_flat(model), before)
    everywhere = hvd.allgather(_flat(model)[None])
    assert np.array_equal(everywhere[0], everywhere[1])


def test_loss_scaling_is_the_same_on_all_ranks(keras_ranks):
    keras_ranks(2).run(_loss_scaling, True)
    keras_ranks(2).run(_loss_scaling, False)
    keras_ranks(2).run(_loss_scaling_with_passes)
    keras_ranks(2).run(_mixed_precision)


def _missing_on_one_rank():
    import keras

    import horovodlike.keras as hvd

    wrapped = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0, weight_decay=0.5))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        values = _applied(wrapped, [0.0, 0.0, 1.0], [1.0, 4.0 if hvd.rank() == 0 else None, None])
    assert values == [-1.0, -2.0, 1.0]


def test_ranks_may_lack_different_gradients(keras_ranks):
    keras_ranks(2).run(_missing_on_one_rank)


def _embedding(sparse_as_dense, passes=1):
    import keras

    import horovodlike.keras as hvd

    keras.utils.set_random_seed(5)
    model = keras.Sequential([keras.Input((2,), dtype="int32"), keras.layers.Embedding(8, 3), keras.layers.Flatten()])
    wrapped = hvd.DistributedOptimizer(
        keras.optimizers.SGD(1.0), sparse_as_dense=sparse_as_dense, backward_passes_per_step=passes
    )
    model.compile(optimizer=wrapped, loss="mse")
    before = model.get_weights()[0]
    # The ranks share row 1.
    model.fit(np.array([[1, 2 + hvd.rank()]]), np.zeros((1, 6)), verbose=0, epochs=passes)
    return before, model.get_weights()[0]


def _embeddings():
    for sparse_as_dense in (False, True):
        before, after = _embedding(sparse_as_dense)
        expected = before.copy()
        expected[1] *= 1 - 2 / 6
        expected[2:4] *= 1 - 1 / 6
        np.testing.assert_allclose(after, expected, rtol=1e-5)
    before, after = _embedding(True, passes=2)
    assert not np.array_equal(before, after)


def test_embeddings(keras_ranks):
    keras_ranks(2).run(_embeddings)


def _sparse_passes():
    with pytest.raises(ValueError, match="sparse_as_dense=True"):
        _embedding(False, passes=2)


@pytest.mark.parametrize("backend", ("tensorflow",), indirect=True)
def test_sparse_gradients_are_not_accumulated(keras_ranks):
    keras_ranks(2).run(_sparse_passes)


def _compiled_with_xla():
    import keras
    import tensorflow as tf

    import horovodlike.keras as hvd

    model = _model()
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), loss="mse", jit_compile=True)
    with pytest.raises(tf.errors.InvalidArgumentError, match="jit_compile=False"):
        model.fit(*_data(), batch_size=BATCH, verbose=0)


@pytest.mark.parametrize("backend", ("tensorflow",), indirect=True)
def test_xla_is_refused(keras_ranks):
    keras_ranks(2).run(_compiled_with_xla)


def _bad_arguments():
    import keras

    import horovodlike.keras as hvd

    variable = keras.Variable(0.0)
    cases = [
        ({"op": hvd.Adasum}, "op currently only supports Average and Sum"),
        ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "gradient_predivide_factor not supported with op"),
        ({"gradient_predivide_factor": 0.0}, "gradient_predivide_factor must be > 0"),
        ({"backward_passes_per_step": 0}, "backward_passes_per_step must be > 0"),
        ({"groups": -1}, "groups must be a non-negative integer"),
        ({"groups": [variable]}, "groups must be a non-negative integer or a list of lists"),
        ({"groups": [["kernel"]]}, "groups must be made of variables"),
        ({"groups": [[variable], [variable]]}, "one group only"),
        ({"process_set": hvd.ProcessSet([0])}, "is not registered"),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=message):
            hvd.DistributedOptimizer(keras.optimizers.SGD(), **options)
    accumulating = keras.optimizers.SGD(gradient_accumulation_steps=2)
    with pytest.raises(ValueError, match="gradient_accumulation_steps=2"):
        hvd.DistributedOptimizer(accumulating, backward_passes_per_step=2)
    wrapped = hvd.DistributedOptimizer(keras.optimizers.SGD())
    for twice in (wrapped, keras.optimizers.LossScaleOptimizer(wrapped)):
        with pytest.raises(ValueError, match="distributed already"):
            hvd.DistributedOptimizer(twice)
    with pytest.raises(ValueError, match="pass the variables"):
        wrapped.apply([keras.ops.zeros(())])
    with pytest.warns(DeprecationWarning, match="use groups"):
        hvd.DistributedOptimizer(keras.optimizers.SGD(), num_groups=2)


def test_bad_arguments(keras_ranks):
    keras_ranks(2).run(_bad_arguments)
