"""TensorFlow's training step in a loop of its own: with a tape of horovodlike, with a strategy of TensorFlow, or alone.

`MirroredPeer` is `tf.distribute.MultiWorkerMirroredStrategy`, one worker for each rank, whose gradients go around a
ring over gRPC. The model, its batch and its optimizer are the same for all, and none is compiled by XLA.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from benchmarks.buffers import Buffer
from benchmarks.peers import Step
from benchmarks.training import MLP_WIDTHS

BATCH = 32


class AlonePeer:
    """Steps over the MLP of `benchmarks.models` in processes that do not communicate; what others change of it."""

    def __init__(self) -> None:
        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(1)
        self.rank, self.size = self._join()

    def _join(self) -> tuple[int, int]:
        return int(os.environ["BENCHMARK_RANK"]), int(os.environ["BENCHMARK_SIZE"])

    def _build(self) -> tuple[Any, Any]:
        """Return the model and its optimizer, alike on all ranks."""
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Dense(width, activation="relu") for width in MLP_WIDTHS[1:-1]]
        model = keras.Sequential([keras.Input([MLP_WIDTHS[0]]), *layers, keras.layers.Dense(MLP_WIDTHS[-1])])
        optimizer = keras.optimizers.SGD(1e-3)
        optimizer.build(model.trainable_variables)
        return model, optimizer

    def _gradients(self, tape: Any, loss: Any, variables: Sequence[Any]) -> Any:
        return tape.gradient(loss, variables)

    def _run(self, step: Any, batch: tuple[Any, Any]) -> None:
        step(*batch)

    def expected(self, total: int) -> int:
        return total

    def barrier(self) -> None:
        """Return at once: ranks that do not communicate cannot wait for each other."""

    def allreduce(self, buffer: Buffer, dtype: str) -> Step:
        raise NotImplementedError("measured through `training_step`")

    def many(self, buffers: list[Buffer]) -> Step:
        raise NotImplementedError("measured through `training_step`")

    def training_step(self, model: str) -> Step:
        if model != "mlp":
            raise NotImplementedError(f"there is no {model} for TensorFlow")
        network, optimizer = self._build()
        rng = np.random.default_rng(1 + self.rank)
        inputs = tf.constant(rng.standard_normal((BATCH, MLP_WIDTHS[0]), np.float32))
        targets = tf.constant(rng.integers(MLP_WIDTHS[-1], size=BATCH))

        def replica_step(x: Any, y: Any) -> None:
            with tf.GradientTape() as tape:
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, network(x, training=True))
                loss = tf.reduce_mean(losses)
            gradients = self._gradients(tape, loss, network.trainable_variables)
            optimizer.apply_gradients(zip(gradients, network.trainable_variables, strict=True))

        @tf.function
        def whole_step(x: Any, y: Any) -> None:
            self._run(replica_step, (x, y))

        return lambda: whole_step(inputs, targets)

    def close(self) -> None:
        """Leave nothing behind: there is no job."""


class TapePeer(AlonePeer):
    """The same step with a `DistributedGradientTape`, under hvdrun."""

    def _join(self) -> tuple[int, int]:
        import horovodlike.tensorflow as hvd

        hvd.init()
        self._hvd = hvd
        return hvd.rank(), hvd.size()

    def _gradients(self, tape: Any, loss: Any, variables: Sequence[Any]) -> Any:
        return self._hvd.DistributedGradientTape(tape).gradient(loss, variables)

    def barrier(self) -> None:
        self._hvd.barrier()

    def close(self) -> None:
        self._hvd.shutdown()


class MirroredPeer(AlonePeer):
    """The same step with a `MultiWorkerMirroredStrategy`, whose workers TF_CONFIG lists."""

    def _join(self) -> tuple[int, int]:
        ring = tf.distribute.experimental.CommunicationImplementation.RING
        options = tf.distribute.experimental.CommunicationOptions(implementation=ring)
        self._strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
        described = json.loads(os.environ["TF_CONFIG"])

        @tf.function
        def meet() -> Any:
            return self._strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("SUM", tf.ones([])))

        self._meet = meet
        return described["task"]["index"], len(described["cluster"]["worker"])

    def _build(self) -> tuple[Any, Any]:
        with self._strategy.scope():
            return super()._build()

    def _gradients(self, tape: Any, loss: Any, variables: Sequence[Any]) -> Any:
        # The optimizer sums the gradients of all workers.
        return [gradient / self.size for gradient in tape.gradient(loss, variables)]

    def _run(self, step: Any, batch: tuple[Any, Any]) -> None:
        self._strategy.run(step, args=batch)

    def barrier(self) -> None:
        if float(self._meet()) != self.size:
            raise RuntimeError("a worker is missing")
