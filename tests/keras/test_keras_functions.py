"""Collectives on values, saved models, and what the module exports."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]


def _values():
    import keras
    import ml_dtypes

    import horovodlike.keras as hvd

    rank = hvd.rank()
    mine = np.arange(6, dtype=np.float32).reshape(3, 2) * (rank + 1)
    whole = np.arange(6, dtype=np.float32).reshape(3, 2)
    for make in (np.array, keras.ops.convert_to_tensor, lambda value: keras.Variable(value)):
        value = make(mine)
        results = [
            (hvd.allreduce(value, name="a"), whole * 1.5),
            (hvd.allreduce(value, op=hvd.Sum), whole * 3),
            (hvd.allreduce(value, average=False), whole * 3),
            (hvd.allreduce(value, op=hvd.Max), whole * 2),
            (hvd.allreduce(value, prescale_factor=2.0, postscale_factor=0.5), whole * 1.5),
            (hvd.allreduce(value, compression=hvd.Compression.fp16), whole * 1.5),
            (hvd.allgather(value), np.concatenate([whole, whole * 2])),
            (hvd.broadcast(value, 1), whole * 2),
            (hvd.reducescatter(value, op=hvd.Sum), (whole * 3)[2 * rank : 2 + rank]),
        ]
        for result, expected in results:
            assert isinstance(result, np.ndarray) == isinstance(value, np.ndarray)
            assert keras.ops.is_tensor(result) != isinstance(value, np.ndarray)
            np.testing.assert_array_equal(keras.ops.convert_to_numpy(result), expected)
    assert hvd.allreduce(float(rank)) == 0.5
    assert hvd.allgather(np.arange(rank + 1)).tolist() == [0, 0, 1]
    half = keras.ops.cast(keras.ops.ones((2,)), "bfloat16")
    assert keras.ops.convert_to_numpy(hvd.allreduce(half, op=hvd.Sum)).tolist() == [2.0, 2.0]
    eighth = np.array([0.125, 224], ml_dtypes.float8_e4m3fn)
    assert hvd.allreduce(eighth, op=hvd.Sum).astype(float).tolist() == [0.25, 448.0]
    alone = hvd.add_process_set([1])
    if alone.included():
        assert hvd.allreduce(3.0, process_set=alone) == 3.0
    hvd.remove_process_set(alone)
    with pytest.raises(ValueError, match="not both"):
        hvd.allreduce(1.0, average=True, op=hvd.Sum)
    with pytest.raises(ValueError, match="cannot be sent"):
        hvd.allreduce(np.array(["text"]))
    with pytest.raises(ValueError, match="no rows"):
        hvd.reducescatter(1.0)
    with pytest.raises(hvd.HorovodInternalError, match="shape"):
        hvd.allreduce(np.zeros(rank + 1), name="differs")
    assert hvd.join() in (0, 1)


def _refused_on_one_rank():
    """A call that one rank refuses is not counted: the next unnamed ones have the same name on all ranks."""
    import horovodlike.keras as hvd

    refused = (
        lambda: hvd.allreduce(np.array(["text"])),
        lambda: hvd.allreduce(1.0, op=99),
        lambda: hvd.allgather(np.array(["text"])),
        lambda: hvd.allgather(1.0),
        lambda: hvd.broadcast(np.array(["text"]), 0),
        lambda: hvd.broadcast(1.0, 99),
        lambda: hvd.reducescatter(1.0),
        lambda: hvd.reducescatter(np.array(["text"])),
    )
    for call in refused:
        if hvd.rank() == 1:
            with pytest.raises(ValueError):
                call()
        assert hvd.allreduce(float(hvd.rank())) == 0.5


def _global_variables():
    import keras

    import horovodlike.keras as hvd

    keras.utils.set_random_seed(hvd.rank())
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dropout(0.5)])
    model.compile(optimizer=hvd.DistributedOptimizer("adam"), loss="mse")
    seeds = [v.numpy() for layer in model.layers for v in layer.variables if "seed" in v.name]
    hvd.broadcast_global_variables(0, model)
    everywhere = hvd.allgather(model.get_weights()[0][None])
    assert np.array_equal(everywhere[0], everywhere[1])
    after = [v.numpy() for layer in model.layers for v in layer.variables if "seed" in v.name]
    assert len(seeds) == 1 and np.array_equal(seeds, after)
    with pytest.raises(ValueError, match="broadcast_global_variables.root_rank, model."):
        hvd.broadcast_global_variables(0)
    with pytest.raises(ValueError, match="no variables yet"):
        hvd.broadcast_global_variables(0, keras.Sequential([keras.layers.Dense(3)]))


def _objects_and_barriers(path):
    import horovodlike.keras as hvd

    rank, last = hvd.rank(), hvd.size() - 1
    if rank == last:
        Path(path).write_text("complete")
    hvd.barrier()
    assert Path(path).read_text() == "complete"
    assert hvd.broadcast_object({"epoch": rank}) == {"epoch": 0}
    assert hvd.broadcast_object([rank], last, name="progress") == [last]
    own = hvd.add_process_set([last])
    if own.included():
        hvd.barrier(process_set=own)
        assert hvd.broadcast_object(rank, last, process_set=own) == last
    hvd.remove_process_set(own)


@pytest.mark.parametrize("size", [2, 3])
def test_objects_and_barriers(keras_ranks, size, tmp_path):
    keras_ranks(size).run(_objects_and_barriers, str(tmp_path / "file"))


def _gone_with_keras_2():
    """Keras 3's own messages for what scripts for Keras 2 do, and what hvdrun says below them."""
    import keras

    from horovodlike.launcher.supervisor.failure_attribution import Failure, describe

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    said = []
    for call in (
        lambda: model.compile("sgd", "mse", experimental_run_tf_function=False),
        lambda: keras.backend.set_value(model.optimizer.learning_rate, 0.5),
        lambda: keras.optimizers.SGD(lr=0.1),
        lambda: model.compile("sgd", "mse", something_else=False),
    ):
        with pytest.raises((TypeError, AttributeError, ValueError)) as raised:
            call()
        last = f"{raised.type.__name__}: {raised.value}".encode()
        said.append(b" ".join(describe(Failure(0, 9, 1, (last, b"the end")))).decode().partition("the end ")[2])
    model.compile("sgd", "mse")
    model.optimizer.learning_rate = 0.5
    assert float(model.optimizer.learning_rate) == 0.5
    return said


def test_hvdrun_says_what_keras_3_takes_instead(keras_ranks):
    compiled, set_value, rate, other = keras_ranks(2).run(_gone_with_keras_2)[0]
    assert compiled.startswith(
        "hvdrun: for Keras 3 remove experimental_run_tf_function=... from compile(); TF_USE_LEGACY"
    )
    assert "optimizer.learning_rate = value in place of set_value()" in set_value
    assert "write learning_rate=... in place of lr=..." in rate
    assert not other


def test_values(keras_ranks):
    keras_ranks(2).run(_values)
    keras_ranks(2).run(_refused_on_one_rank)
    keras_ranks(2).run(_global_variables)


def _saved(folder):
    import keras

    import horovodlike.keras as hvd

    def trained(optimizer, name):
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        model.compile(optimizer=optimizer, loss="mse", run_eagerly=True)
        x = np.random.default_rng(1).standard_normal((8, 4))
        model.fit(x, x[:, :3], batch_size=4, verbose=0)
        path = f"{folder}/{name}-{hvd.rank()}.keras"
        model.save(path)
        return model, path

    wrapped, path = trained(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01, name="it")), "wrapped")
    plain, _ = trained(keras.optimizers.Adam(0.01, name="it"), "plain")
    assert wrapped.get_compile_config() == plain.get_compile_config()
    again = hvd.load_model(path)
    state = [v.numpy() for v in wrapped.optimizer.variables]
    assert all(map(np.array_equal, state, (v.numpy() for v in again.optimizer.variables)))
    assert type(again.optimizer).__bases__[0] is type(wrapped.optimizer).__bases__[0]
    x = np.full((4, 4), 1.0 + hvd.rank())
    again.fit(x, x[:, :3], verbose=0)
    everywhere = hvd.allgather(again.get_weights()[0][None])
    assert np.array_equal(everywhere[0], everywhere[1]), "the loaded model's gradients are reduced"

    scaled, scaled_path = trained(
        keras.optimizers.LossScaleOptimizer(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01, momentum=0.5))),
        "scaled",
    )
    again = hvd.load_model(scaled_path, compression=hvd.Compression.fp16)
    assert float(again.optimizer.dynamic_scale.numpy()) == float(scaled.optimizer.dynamic_scale.numpy())
    again.fit(x, x[:, :3], verbose=0)
    everywhere = hvd.allgather(again.get_weights()[0][None])
    assert np.array_equal(everywhere[0], everywhere[1])

    class Own(keras.optimizers.SGD):
        pass

    _, own_path = trained(hvd.DistributedOptimizer(Own(0.25)), "own")
    again = hvd.load_model(own_path, custom_optimizers=[Own])
    assert isinstance(again.optimizer, Own) and float(again.optimizer.learning_rate.numpy()) == 0.25
    return path, float(sum(np.abs(value).sum() for value in state))


# A program that cannot find horovodlike.
WITHOUT = """
import sys
sys.modules["horovodlike"] = None
import keras, numpy
model = keras.saving.load_model(sys.argv[1])
print(type(model.optimizer).__name__, float(sum(numpy.abs(v.numpy()).sum() for v in model.optimizer.variables)))
model.fit(numpy.ones((4, 4)), numpy.ones((4, 3)), verbose=0)
"""


def _python(backend, *argv):
    environment = {**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
    return subprocess.run(
        [sys.executable, *argv], env=environment, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.thorough
def test_saved_models(keras_ranks, backend, tmp_path):
    path, state = keras_ranks(2).run(_saved, str(tmp_path))[0]
    done = _python(backend, "-c", WITHOUT, path)
    assert done.returncode == 0, done.stderr
    name, loaded = done.stdout.split()[:2]
    assert name == "Adam"
    assert float(loaded) == pytest.approx(state)


# An optimizer that would train on one rank alone if it did not notice.
TOO_EARLY = """
import keras
import horovodlike.keras as hvd
variable = keras.Variable(0.0)
hvd.DistributedOptimizer(keras.optimizers.SGD()).apply([keras.ops.ones(())], [variable])
"""


@pytest.mark.thorough
def test_init_has_to_be_called(backend):
    done = _python(backend, "-c", TOO_EARLY)
    assert done.returncode != 0 and "use hvd.init()" in done.stderr


def _other_backend():
    """Keras has no others without further packages."""
    import keras

    import horovodlike.keras as hvd
    from horovodlike.keras import _backend as backend_module

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keras.backend, "backend", lambda: "jax")
        backend_module.current.cache_clear()
        with pytest.raises(NotImplementedError, match="'tensorflow' and 'torch', and Keras uses 'jax'"):
            hvd.DistributedOptimizer("sgd")
    backend_module.current.cache_clear()
    assert hvd.allreduce(1.0) == 1.0


def test_other_backends_are_refused(keras_ranks):
    keras_ranks(2).run(_other_backend)


def _signatures(names):
    """Return the parameters of each name; None where there is no such name, and [] where it is not callable."""
    import importlib

    import horovodlike.keras

    def parameters(name):
        module, _, attribute = name.rpartition(".")
        try:
            found = getattr(importlib.import_module(".".join(filter(None, ["horovodlike.keras", module]))), attribute)
        except (AttributeError, ModuleNotFoundError):
            return None
        try:
            return list(inspect.signature(found).parameters)
        except (TypeError, ValueError):
            return []

    return {name: parameters(name) for name in names}, list(horovodlike.keras.__all__)


def test_every_name_of_horovods_is_there_or_said_to_be_missing(keras_ranks):
    page = (ROOT / "docs" / "users" / "keras.md").read_text()
    table = page[page.index("## Horovod's names") :]
    listed, missing, new = set(), set(), set(re.findall(r"`([\w.]+)`", table.split("New are")[1].split(";")[0]))
    for row in re.findall(r"^\| `.*$", table, flags=re.MULTILINE):
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        names = set(re.findall(r"`([\w.]+)`", cells[0]))
        if "not in this release" in cells[2]:
            missing |= names
            continue
        listed |= names
        assert cells[1], names
        for test in re.findall(r"`(\w+)`", cells[1]):
            assert list((ROOT / "tests").rglob(f"{test}.py")), test
    mentioned = set(re.findall(r"\bhvd\.([A-Za-z_.]+\w)", page))
    found, exported = keras_ranks(2).run(_signatures, listed | missing | new | mentioned)[0]
    assert {name for name, parameters in found.items() if parameters is None} == missing
    assert {name for name in listed | new if "." not in name} >= set(exported)


# Parameters in Horovod's order; ours may have more behind them.
SIGNATURES = {
    "DistributedOptimizer": "optimizer name device_dense device_sparse compression sparse_as_dense "
    "gradient_predivide_factor op backward_passes_per_step average_aggregated_gradients num_groups groups process_set "
    "scale_local_gradients",
    "PartialDistributedOptimizer": "optimizer name device_dense device_sparse compression sparse_as_dense "
    "backward_passes_per_step op gradient_predivide_factor average_aggregated_gradients num_groups groups process_set "
    "local_layers scale_local_gradients",
    "broadcast_global_variables": "root_rank",
    "allreduce": "value name average prescale_factor postscale_factor op compression",
    "allgather": "value name",
    "broadcast": "value root_rank name",
    "reducescatter": "value name op",
    "load_model": "filepath custom_optimizers custom_objects compression legacy_opts",
    "callbacks.BroadcastGlobalVariablesCallback": "root_rank device local_variables",
    "callbacks.MetricAverageCallback": "device",
    "callbacks.LearningRateScheduleCallback": "initial_lr multiplier start_epoch end_epoch staircase "
    "momentum_correction steps_per_epoch",
    "callbacks.LearningRateWarmupCallback": "initial_lr warmup_epochs momentum_correction steps_per_epoch verbose",
    "callbacks.BestModelCheckpoint": "monitor verbose save_weights_only mode save_freq",
}


def test_parameters_are_horovods(keras_ranks):
    found, _ = keras_ranks(2).run(_signatures, list(SIGNATURES))[0]
    for name, parameters in SIGNATURES.items():
        expected = parameters.split()
        assert found[name][: len(expected)] == expected, name


def _horovods_module():
    import horovodlike.compat
    import horovodlike.keras
    import horovodlike.tensorflow.keras as hvd
    import horovodlike.tensorflow.keras.callbacks
    import horovodlike.tensorflow.keras.elastic

    assert hvd.callbacks is horovodlike.tensorflow.keras.callbacks
    pairs = [(hvd, horovodlike.keras), (hvd.callbacks, horovodlike.keras.callbacks)]
    pairs += [(hvd.elastic, horovodlike.keras.elastic)]
    for ours, same in pairs:
        assert ours.__all__ == same.__all__
        assert all(
            getattr(ours, name) is getattr(same, name) for name in ours.__all__ if name not in ("callbacks", "elastic")
        )
    horovodlike.compat.install()
    import horovod.keras.callbacks
    import horovod.tensorflow.keras

    assert horovod.tensorflow.keras is hvd
    assert horovod.keras is horovodlike.keras
    import horovod.keras.elastic
    import horovod.tensorflow.elastic
    import horovod.tensorflow.keras.elastic

    assert horovod.keras.elastic is horovodlike.keras.elastic
    assert hvd.elastic is horovod.tensorflow.keras.elastic is horovodlike.tensorflow.keras.elastic
    assert issubclass(horovod.tensorflow.elastic.TensorFlowKerasState, hvd.elastic.KerasState)


@pytest.mark.parametrize("backend", ("tensorflow",), indirect=True)
def test_the_module_under_horovods_name(keras_ranks):
    keras_ranks(2).run(_horovods_module)


@pytest.mark.thorough
def test_horovods_name_is_for_tensorflow():
    # Import Keras before TensorFlow: with PyTorch it may import Triton, which crashes after TensorFlow.
    done = _python("torch", "-c", "import keras, horovodlike.tensorflow.keras")
    assert "ImportError" in done.stderr and "KERAS_BACKEND=tensorflow" in done.stderr
