"""horovodlike, under hvdrun."""

from __future__ import annotations

import torch

import horovodlike.torch as hvd
from benchmarks import models
from benchmarks.buffers import Buffer
from benchmarks.peers import Step
from benchmarks.peers.tensors import as_tensor, configure_torch


class HorovodlikePeer:
    """Named operations, as a training script's are."""

    def __init__(self) -> None:
        configure_torch()
        hvd.init()
        self.rank = hvd.rank()
        self.size = hvd.size()
        self._training: dict[str, Step] = {}

    def expected(self, total: int) -> int:
        return total

    def barrier(self) -> None:
        hvd.barrier()

    def allreduce(self, buffer: Buffer, dtype: str) -> Step:
        tensor = as_tensor(buffer, dtype)
        name = f"{dtype}.{tensor.numel()}"

        def step() -> None:
            hvd.allreduce_(tensor, name=name, op=hvd.Sum)

        return step

    def many(self, buffers: list[Buffer]) -> Step:
        named = [(f"many.{i}", as_tensor(buffer, "float32")) for i, buffer in enumerate(buffers)]

        def step() -> None:
            handles = [hvd.allreduce_async_(tensor, name=name, op=hvd.Sum) for name, tensor in named]
            for handle in handles:
                hvd.synchronize(handle)

        return step

    def small(self) -> Step:
        tensor = torch.zeros(1)

        def step() -> None:
            hvd.allreduce(tensor, name="small", op=hvd.Sum)

        return step

    def training_step(self, model: str) -> Step:
        if model not in self._training:
            module = models.build(model)
            hvd.broadcast_parameters(module.state_dict(), root_rank=0)
            optimizer = hvd.DistributedOptimizer(
                models.sgd(module),
                named_parameters=[(f"{model}.{name}", parameter) for name, parameter in module.named_parameters()],
            )
            self._training[model] = models.step(model, module, optimizer, self.rank)
        return self._training[model]

    def close(self) -> None:
        hvd.shutdown()
