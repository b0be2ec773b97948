"""Keras on either backend, with a `DistributedOptimizer` under hvdrun, or in processes that do not communicate."""

from __future__ import annotations

import importlib
import os
import time
from typing import Any

import keras
import numpy as np

from benchmarks.buffers import Buffer
from benchmarks.peers import Step
from benchmarks.training import MLP_WIDTHS

BATCH = 32


class KerasPeer:
    """Steps of `fit` over the MLP of `benchmarks.models`; with TensorFlow also eager operations.

    No XLA: it cannot compile operations of other libraries, so peers that communicate go without, and the others do the
    same step.
    """

    def __init__(self, communicates: bool) -> None:
        if keras.backend.backend() == "tensorflow":
            import tensorflow as tf

            tf.config.threading.set_intra_op_parallelism_threads(1)
            tf.config.threading.set_inter_op_parallelism_threads(1)
        else:
            import torch

            torch.set_num_threads(1)
        self._communicates = communicates
        if communicates:
            import horovodlike.keras as hvd

            hvd.init()
            self.rank, self.size = hvd.rank(), hvd.size()
        else:
            self.rank, self.size = int(os.environ["BENCHMARK_RANK"]), int(os.environ["BENCHMARK_SIZE"])
        self._model: Any = None

    def expected(self, total: int) -> int:
        return total

    def barrier(self) -> None:
        if self._communicates:
            importlib.import_module(f"horovodlike.{keras.backend.backend()}").barrier()

    def allreduce(self, buffer: Buffer, dtype: str) -> Step:
        raise NotImplementedError("measured through `small`")

    def many(self, buffers: list[Buffer]) -> Step:
        raise NotImplementedError("measured through `fit`")

    def training_step(self, model: str) -> Step:
        raise NotImplementedError("measured through `fit`")

    def small(self) -> Step:
        import tensorflow as tf

        import horovodlike.tensorflow as hvd

        tensor = tf.zeros([1], tf.float32)

        def step() -> None:
            hvd.allreduce(tensor, op=hvd.Sum, name="small")

        return step

    def fit(self, steps: int) -> float:
        if self._model is None:
            self._model = self._compiled_model()
        rng = np.random.default_rng(1 + self.rank)
        inputs = np.tile(rng.standard_normal((BATCH, MLP_WIDTHS[0]), np.float32), (steps, 1))
        targets = np.tile(rng.integers(MLP_WIDTHS[-1], size=BATCH), steps)
        clock = _EpochClock()
        # The first epoch warms up.
        self._model.fit(inputs, targets, batch_size=BATCH, epochs=2, verbose=0, shuffle=False, callbacks=[clock])
        return clock.seconds / steps

    def _compiled_model(self) -> Any:
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Dense(width, activation="relu") for width in MLP_WIDTHS[1:-1]]
        model = keras.Sequential([keras.Input([MLP_WIDTHS[0]]), *layers, keras.layers.Dense(MLP_WIDTHS[-1])])
        optimizer = keras.optimizers.SGD(1e-3)
        if self._communicates:
            import horovodlike.keras as hvd

            optimizer = hvd.DistributedOptimizer(optimizer)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer=optimizer, loss=loss, jit_compile=False)
        return model

    def close(self) -> None:
        if self._communicates:
            import horovodlike.keras as hvd

            hvd.shutdown()


class _EpochClock(keras.callbacks.Callback):  # type: ignore[misc]
    """How long the last epoch took."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0
        self._begin = 0.0

    def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        self._begin = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        self.seconds = time.perf_counter() - self._begin
