"""Processes that train side by side and do not communicate: the limit of any data parallel training."""

from __future__ import annotations

import os

from benchmarks import models
from benchmarks.buffers import Buffer
from benchmarks.peers import Step
from benchmarks.peers.tensors import configure_torch


class AlonePeer:
    """Training steps only; `barrier` does nothing, the driver starts all ranks together."""

    def __init__(self) -> None:
        configure_torch()
        self.rank = int(os.environ["BENCHMARK_RANK"])
        self.size = int(os.environ["BENCHMARK_SIZE"])
        self._training: dict[str, Step] = {}

    def expected(self, total: int) -> int:
        return self.rank + 1

    def barrier(self) -> None:
        pass

    def allreduce(self, buffer: Buffer, dtype: str) -> Step:
        raise NotImplementedError("processes that do not communicate reduce nothing")

    def many(self, buffers: list[Buffer]) -> Step:
        raise NotImplementedError("processes that do not communicate reduce nothing")

    def training_step(self, model: str) -> Step:
        if model not in self._training:
            module = models.build(model)
            self._training[model] = models.step(model, module, models.sgd(module), self.rank)
        return self._training[model]

    def close(self) -> None:
        pass
