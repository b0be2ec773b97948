"""torch.distributed with the backends gloo and hvd: DistributedDataParallel, and FSDP."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks import models
from benchmarks.buffers import Buffer
from benchmarks.peers import Step
from benchmarks.peers.tensors import as_tensor, configure_torch


class GlooPeer:
    """The ranks meet where BENCHMARK_STORE says: a file, or a port of the first rank's."""

    BACKEND = "gloo"

    def __init__(self) -> None:
        configure_torch()
        self.rank = int(os.environ["BENCHMARK_RANK"])
        self.size = int(os.environ["BENCHMARK_SIZE"])
        store = os.environ["BENCHMARK_STORE"]
        dist.init_process_group(self.BACKEND, init_method=store, rank=self.rank, world_size=self.size)
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

    def round_trip(self, buffer: Buffer) -> Step:
        tensor = as_tensor(buffer, "float32")

        def there_and_back() -> None:
            dist.send(tensor, 1)
            dist.recv(tensor, 1)

        def back() -> None:
            dist.recv(tensor, 0)
            dist.send(tensor, 0)

        return back if self.rank else there_and_back

    def many(self, buffers: list[Buffer]) -> Step:
        tensors = [as_tensor(buffer, "float32") for buffer in buffers]

        def step() -> None:
            works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
            for work in works:
                work.wait()

        return step

    def training_step(self, model: str) -> Step:
        if model not in self._training:
            name, _, views = ("gpt" if model == "fsdp" else model).partition(".")
            module = self._sharded(name) if model == "fsdp" else self._replicated(name, as_views=bool(views))
            self._training[model] = models.step(name, module, models.sgd(module), self.rank)
        return self._training[model]

    def _replicated(self, model: str, *, as_views: bool) -> nn.Module:
        return DistributedDataParallel(models.build(model), gradient_as_bucket_view=as_views)

    def _sharded(self, model: str) -> nn.Module:
        module = models.build(model)
        for block in module.blocks:
            fully_shard(block)
        return fully_shard(module)

    def close(self) -> None:
        self._training.clear()
        dist.destroy_process_group()


class HvdBackendPeer(GlooPeer):
    """The same with horovodlike's backend."""

    BACKEND = "hvd"


class DdpAlonePeer(GlooPeer):
    """DDP whose steps exchange nothing: each rank keeps its own gradients."""

    def _replicated(self, model: str, *, as_views: bool) -> nn.Module:
        module = DistributedDataParallel(models.build(model), gradient_as_bucket_view=as_views, broadcast_buffers=False)
        module.register_comm_hook(None, lambda _, bucket: _unreduced(bucket))  # torch would read annotations
        return module


def _unreduced(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future
