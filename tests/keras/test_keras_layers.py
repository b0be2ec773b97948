"""Split layers of Keras: output, gradients and first weights are those of `Dense`; other splits are loaded."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest


def _gradients(run, weights, x):
    """Return the output of a layer, and the gradients of the input and of the weights, for a loss."""
    import keras

    def loss_of(tensor):
        output = run(tensor * 1.5)
        factors = keras.ops.convert_to_tensor(np.linspace(-1, 2, int(np.prod(output.shape))).reshape(output.shape))
        return output, keras.ops.sum(output * factors) + keras.ops.sum(tensor * tensor)

    tensor = keras.ops.convert_to_tensor(x)
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            tape.watch(tensor)
            output, loss = loss_of(tensor)
        found = tape.gradient(loss, [tensor, *(weight.value for weight in weights)])
    else:
        import torch

        tensor.requires_grad_()
        output, loss = loss_of(tensor)
        found = torch.autograd.grad(loss, [tensor, *(weight.value for weight in weights)])
        output = output.detach()
    return [keras.ops.convert_to_numpy(one) for one in (output, *found)]


def _assert_close(result, expected, tensorflow=1e-12):
    import keras

    # On torch, Keras multiplies matrices of float64 in float32, those of `Dense` too.
    tolerance = tensorflow if keras.backend.backend() == "tensorflow" else 1e-5
    np.testing.assert_allclose(result, expected, rtol=tolerance, atol=tolerance)


def _part(layer, weight, whole):
    """Return this rank's part of a value of the unsplit layer's weight."""
    from horovodlike.keras.layers import _with_splits

    ((owner, split),) = [(owner, split) for one, owner, split in _with_splits(layer) if one is weight]
    return whole if split is None else split.part(whole, owner.region.place, owner.region.num_ranks, np.concatenate)


def _pairs(chosen):
    """Return split layers and the unsplit ones."""
    import keras

    import horovodlike.keras as hvd

    options = {"dtype": "float64"}
    split = {"process_set": chosen, **options}
    dense, layers = keras.layers.Dense, hvd.layers
    random = keras.initializers.RandomNormal(seed=5)

    def both(first, second):
        return keras.Sequential([first, second])

    return [
        (lambda: layers.ColumnParallelLinear(12, **split), lambda: dense(12, **options)),
        (
            lambda: layers.ColumnParallelLinear(12, "softmax", bias_initializer=random, **split),
            lambda: dense(12, "softmax", bias_initializer=random, **options),
        ),
        (
            lambda: layers.RowParallelLinear(5, "tanh", bias_initializer=random, **split),
            lambda: dense(5, "tanh", bias_initializer=random, **options),
        ),
        (
            lambda: layers.RowParallelLinear(5, use_bias=False, kernel_initializer=random, **split),
            lambda: dense(5, use_bias=False, kernel_initializer=random, **options),
        ),
        (
            lambda: layers.ParallelMLP(24, activation="relu", **split),
            lambda: both(dense(24, "relu", **options), dense(12, **options)),
        ),
        (
            lambda: layers.ParallelMLP(24, 3, use_bias=False, **split),
            lambda: both(dense(24, "gelu", use_bias=False, **options), dense(3, use_bias=False, **options)),
        ),
    ]


def _as_dense(ranks_of_set):
    import keras

    import horovodlike.keras as hvd

    chosen = hvd.global_process_set if ranks_of_set is None else hvd.add_process_set(ranks_of_set)
    if chosen.included():
        for make, make_plain in _pairs(chosen):
            keras.utils.set_random_seed(7)
            layer = make()
            layer.build((None, 12))
            keras.utils.set_random_seed(7)
            plain = make_plain()
            plain.build((None, 12))
            wholes = [weight.numpy() for weight in plain.weights]
            model = keras.Sequential([layer])
            model.build((None, 12))
            for own, whole in zip(hvd.layers.full_weights(model), wholes, strict=True):
                np.testing.assert_array_equal(own, whole)
            x = np.random.default_rng(3).standard_normal((4, 12))
            output, of_input, *of_weights = _gradients(layer, layer.weights, x)
            expected, expected_of_input, *expected_of_weights = _gradients(plain, plain.weights, x)
            _assert_close(output, expected)
            _assert_close(of_input, expected_of_input)
            for weight, own, whole in zip(layer.weights, of_weights, expected_of_weights, strict=True):
                _assert_close(own, _part(model, weight, whole))
            deep = keras.ops.convert_to_numpy(layer(np.stack([x, x + 1])))
            _assert_close(deep[0], keras.ops.convert_to_numpy(layer(x)))
    if ranks_of_set is not None:
        hvd.allreduce(0.0)  # all ranks are done with the set
        hvd.remove_process_set(chosen)


def _fits():
    """Train in `fit()`, in functions that are compiled and not, beside the unsplit model; save, load with no split."""
    import keras

    import horovodlike.keras as hvd

    alone = [hvd.add_process_set([rank]) for rank in range(hvd.size())]
    x = np.random.default_rng(1).standard_normal((16, 6))
    y = x @ np.random.default_rng(2).standard_normal((6, 3))
    for eagerly in (False, True):

        def model_of(middle, eagerly=eagerly):
            keras.utils.set_random_seed(9)
            inputs = keras.Input((6,), dtype="float64")
            model = keras.Model(inputs, keras.layers.Dense(3, dtype="float64")(middle(inputs)))
            model.compile(keras.optimizers.Adam(0.01), "mse", run_eagerly=eagerly)
            return model

        def split(chosen):
            options = {"process_set": chosen, "dtype": "float64"}
            column, row = hvd.layers.ColumnParallelLinear(12, "tanh", **options), hvd.layers.ParallelMLP(24, **options)
            shared = hvd.layers.RowParallelLinear(12, **options)
            return lambda inputs: shared(shared(row(column(inputs))))

        def plain(inputs):
            dense = keras.layers.Dense
            hidden = dense(24, "gelu", dtype="float64")(dense(12, "tanh", dtype="float64")(inputs))
            shared = dense(12, dtype="float64")
            return shared(shared(dense(12, dtype="float64")(hidden)))

        def fitted(model, epochs):
            return model.fit(x, y, 8, epochs, verbose=0, shuffle=False).history["loss"]

        model, unsplit = model_of(split(hvd.global_process_set)), model_of(plain)
        assert not model.jit_compile
        unsplit.set_weights(hvd.layers.full_weights(model))
        losses, expected = fitted(model, 3), fitted(unsplit, 3)
        _assert_close(losses, expected, 1e-10)
        full = hvd.layers.full_weights(model)
        for own, whole in zip(full, unsplit.get_weights(), strict=True):
            _assert_close(own, whole, 1e-8)
        other = model_of(split(alone[hvd.rank()]))
        hvd.layers.load_full_weights(other, full)
        for own, whole in zip(hvd.layers.full_weights(other), full, strict=True):
            np.testing.assert_array_equal(own, whole)
        hvd.layers.load_full_weights(model, full)
        _assert_close(other.predict(x, verbose=0), model.predict(x, verbose=0))
    hvd.allreduce(0.0)
    for one in alone:
        hvd.remove_process_set(one)


def _configurations(folder):
    """Save a model and make it again; a process set is found by its ranks."""
    import keras

    import horovodlike.keras as hvd

    pair = hvd.add_process_set([0])
    if pair.included():
        layers = [
            hvd.layers.ColumnParallelLinear(4, "relu", gather_output=False, process_set=pair, name="a"),
            hvd.layers.RowParallelLinear(4, input_is_parallel=True, use_bias=False, process_set=pair, name="b"),
            hvd.layers.ParallelMLP(8, activation="tanh", use_bias=False, process_set=pair, name="c"),
        ]
        model = keras.Sequential([keras.Input((4,)), *layers])
        model.save(f"{folder}/model.keras")
        again = keras.saving.load_model(f"{folder}/model.keras")
        assert [layer.get_config() for layer in again.layers] == [layer.get_config() for layer in model.layers]
        assert all(layer.process_set is pair for layer in again.layers)
        x = np.ones((2, 4), np.float32)
        np.testing.assert_array_equal(again.predict(x, verbose=0), model.predict(x, verbose=0))
    hvd.allreduce(0.0)
    hvd.remove_process_set(pair)
    if hvd.rank() == 0:
        with pytest.raises(ValueError, match=r"no process set of the ranks \[0\]"):
            keras.saving.load_model(f"{folder}/model.keras")
    clone = keras.models.clone_model(keras.Sequential([keras.Input((6,)), hvd.layers.ParallelMLP(6)]))
    assert clone.layers[0].process_set is hvd.global_process_set


def _errors():
    import keras

    import horovodlike.keras as hvd

    layers, first = hvd.layers, hvd.add_process_set([0])
    row = layers.RowParallelLinear(3)
    row.build((None, 6))
    model = keras.Sequential([keras.Input((6,)), layers.ColumnParallelLinear(6)])
    for call, message in (
        (lambda: layers.ColumnParallelLinear(10), r"units=10 cannot be split evenly among 3 ranks: .* 9 or 12"),
        (lambda: layers.ParallelMLP(10), r"units=10 .* among 3 ranks"),
        (lambda: layers.RowParallelLinear(4).build((None, 10)), r"inputs=10 .* among 3 ranks"),
        (lambda: layers.ColumnParallelLinear(6).build((2, None)), r"last dimension .* must be known"),
        (lambda: row(np.zeros((2, 9))), r"expected axis -1 of input shape to have value 6"),
        (lambda: layers.load_full_weights(model, []), r"has 2 weights, got 0"),
        (
            lambda: layers.load_full_weights(model, [np.zeros((6, 2)), np.zeros(6)]),
            r"the shape \(6, 6\), got \(6, 2",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    if hvd.rank():
        with pytest.raises(ValueError, match="is not a member of ProcessSet"):
            layers.ColumnParallelLinear(6, process_set=first)
    with pytest.raises(TypeError, match="process_set must be a ProcessSet"):
        layers.ParallelMLP(6, process_set=[0])
    hvd.allreduce(0.0)
    hvd.remove_process_set(first)
    with pytest.raises(ValueError, match="not registered"):
        layers.RowParallelLinear(6, process_set=first)


def _refused():
    import keras

    import horovodlike.keras as hvd

    model = keras.Sequential([keras.Input((6,)), hvd.layers.ColumnParallelLinear(6, name="split")])
    plain = keras.Sequential([keras.Input((6,)), keras.layers.Dense(6)])
    optimizers = keras.optimizers
    for optimizer in (
        optimizers.Adam(clipnorm=1.0),
        optimizers.SGD(global_clipnorm=1.0),
        optimizers.Adafactor(),
        optimizers.Lamb(),
        optimizers.Muon(),
    ):
        wrapped = hvd.DistributedOptimizer(optimizer)
        with pytest.raises(ValueError, match="whole variables, and each rank has only its part of .*split/kernel"):
            wrapped.build(model.trainable_variables)
        wrapped.build(plain.trainable_variables)
    hvd.DistributedOptimizer(optimizers.Adam(clipvalue=1.0)).build(model.trainable_variables)


BOTH = pytest.mark.parametrize(
    "backend", ("tensorflow", pytest.param("torch", marks=pytest.mark.thorough)), indirect=True
)


@BOTH
@pytest.mark.parametrize("ranks_of_set", [None, [0, 2]], ids=["all", "some"])
def test_as_dense(keras_ranks, ranks_of_set):
    keras_ranks(3).run(_as_dense, ranks_of_set)


@BOTH
def test_fit(keras_ranks):
    keras_ranks(3).run(_fits)


@BOTH
def test_configurations(keras_ranks, tmp_path):
    keras_ranks(3).run(_configurations, str(tmp_path))


def test_errors(keras_ranks):
    keras_ranks(3).run(_errors)


@BOTH
@pytest.mark.parametrize("size", [2, 3])
def test_optimizers_that_look_at_whole_variables(keras_ranks, size):
    keras_ranks(size).run(_refused)


@pytest.mark.slow
def test_not_on_tf_keras():
    script = "import horovodlike.keras as hvd; hvd.layers"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={"TF_USE_LEGACY_KERAS": "1", "PATH": ""},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "is for Keras 3, and this process uses tf_keras: unset TF_USE_LEGACY_KERAS" in done.stderr
