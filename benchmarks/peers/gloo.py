"""torch.distributed with the Gloo backend, and DistributedDataParallel with its default settings."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks import models
from benchmarks.buffers import Buffer
from benchmarks.peers import Step
from benchmarks.peers.tensors import as_tensor


class GlooPeer:
    """The ranks meet where BENCHMARK_STORE says: a file, or a port of the first rank's."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.rank = int(os.environ["BENCHMARK_RANK"])
        self.size = int(os.environ["BENCHMARK_SIZE"])
        dist.init_process_group("gloo", init_method=os.environ["BENCHMARK_STORE"], rank=self.rank, world_size=self.size)
        self._training: dict[str, Step] = {}

    def expected(self, total: int) -> int:
        return total

    def barrier(self) -> None:
        dist.barrier()

    def allreduce(self, buffer: Buffer, dtype: str) -> Step:
        tensor = as_tensor(buffer, dtype)

        def step() -> None:
            dist.all_reduce(tensor)

        return step

    def many(self, buffers: list[Buffer]) -> Step:
        tensors = [as_tensor(buffer, "float32") for buffer in buffers]

        def step() -> None:
            works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
            for work in works:
                work.wait()

        return step

    def training_step(self, model: str) -> Step:
        if model not in self._training:
            module = DistributedDataParallel(models.build(model))
            self._training[model] = models.step(model, module, models.sgd(module), self.rank)
        return self._training[model]

    def close(self) -> None:
        self._training.clear()
        dist.destroy_process_group()
