"""`DistributedOptimizer` for Keras: equality with one rank, its options, its rules, and what is saved of it."""

from __future__ import annotations

import numpy as np
import pytest

STEPS = 6
BATCH = 24  # each rank's part can be halved


def _model(dtype="float64", seed=7):
    import keras

    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((6,)), *layers])
    model.compile(dtype=dtype) if False else None
    return model
