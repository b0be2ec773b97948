"""Copies and pickles of a distributed optimizer: they are distributed, with the same options."""

from __future__ import annotations

import copy
import pickle

import cloudpickle
import numpy as np
import pytest

WAYS = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda optimizer: pickle.loads(pickle.dumps(optimizer)),
    "cloudpickle": lambda optimizer: cloudpickle.loads(cloudpickle.dumps(optimizer)),
}


def _stepped(optimizer, variables, gradient):
    """Apply the same gradient to each variable, beginning at 0; return what they are then."""
    import keras

    for variable in variables:
        variable.assign(np.zeros(variable.shape))
    optimizer.apply([keras.ops.full(variable.shape, gradient, "float32") for variable in variables], variables)
    return [float(variable.numpy().item()) for variable in variables]


def _copies():
    import keras

    import horovodlike.keras as hvd
    from horovodlike.keras._keras_3 import gradients_of

    def sgd():
        return keras.optimizers.SGD(1.0, name="mine")

    def scaled(optimizer):
        return keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=1.0)

    alone = hvd.add_process_set([1])
    options = {"op": hvd.Sum, "compression": hvd.Compression.fp16, "name": "d"}
    cases = {
        "plain": (hvd.DistributedOptimizer(sgd()), (-1.5, -1.5)),
        "options": (hvd.DistributedOptimizer(sgd(), groups=2, **options), (-3.0, -3.0)),
        "loss scaling inside": (hvd.DistributedOptimizer(scaled(sgd()), **options), (-3.0, -3.0)),
        "loss scaling outside": (scaled(hvd.DistributedOptimizer(sgd(), **options)), (-3.0, -3.0)),
        "process set": (hvd.DistributedOptimizer(sgd(), process_set=alone), (-1.0, -2.0)),
    }
    for name, (optimizer, expected) in cases.items():
        for way, copied in WAYS.items():
            for again in (copied(optimizer), copied(copied(optimizer))):
                assert gradients_of(again).options == gradients_of(optimizer).options, (name, way)
                assert again.get_config() == optimizer.get_config(), (name, way)
                variable = keras.Variable(0.0, dtype="float32")
                assert _stepped(again, [variable], hvd.rank() + 1.0) == [expected[hvd.rank()]], (name, way)
        assert not optimizer.built, "it shares nothing with its copies"
    pickled = pickle.dumps(cases["process set"][0])
    hvd.remove_process_set(alone)
    with pytest.raises(ValueError, match=r"no process set of the ranks \[1\] is registered"):
        pickle.loads(pickled)
    plain = keras.optimizers.LossScaleOptimizer(sgd())
    assert gradients_of(copy.deepcopy(plain)) is None


@pytest.mark.slow
def test_copies_are_distributed(keras_ranks):
    keras_ranks(2).run(_copies)


def _local_gradients():
    import keras

    import horovodlike.keras as hvd

    def partial(layer):
        return hvd.PartialDistributedOptimizer(
            keras.optimizers.SGD(1.0), local_layers=layer, scale_local_gradients=False
        )

    def dense():
        layer = keras.layers.Dense(1, dtype="float32", use_bias=False)
        layer.build((None, 1))
        return layer

    def variables_of(*layers):
        return [layer.kernel for layer in layers]

    mine = hvd.rank() + 1.0
    local, shared = dense(), dense()
    optimizer = partial(local)
    for way in (copy.copy, copy.deepcopy):
        assert _stepped(way(optimizer), variables_of(local, shared), mine) == [-mine, -1.5]
    # Together with the layer.
    for copied in WAYS.values():
        layer, again = copied([local, optimizer])
        assert _stepped(again, variables_of(layer, shared), mine) == [-mine, -1.5]

    # Variables that were registered, and groups of variables.
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), scale_local_gradients=False)
    optimizer.register_local_var(local.kernel)
    again = copy.deepcopy(optimizer)
    again.register_local_var(shared.kernel)
    assert _stepped(again, variables_of(local, shared), mine) == [-mine, -mine]
    assert _stepped(optimizer, variables_of(local, shared), mine) == [-mine, -1.5]
    with pytest.raises(TypeError, match=r"registered as local cannot be pickled.*make the optimizer where it is used"):
        pickle.dumps(optimizer)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), groups=[variables_of(local, shared)])
    assert _stepped(copy.deepcopy(optimizer), variables_of(local, shared), mine) == [-1.5, -1.5]
    with pytest.raises(TypeError, match="groups of variables cannot be pickled"):
        pickle.dumps(optimizer)


def test_copies_have_the_same_local_layers(keras_ranks):
    keras_ranks(2).run(_local_gradients)
