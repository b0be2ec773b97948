"""Libraries that stand on torch.distributed, over the backend `hvd`: they do the same as without it or over Gloo."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.process_groups import process_group
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import horovodlike.torch as hvd


def _model(width: int = 32) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.BatchNorm1d(width), nn.Linear(width, 4))


def _batch(step: int, rank: int, rows: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(rows, 8, generator=generator), torch.randn(rows, 4, generator=generator)


def _train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4) -> list[torch.Tensor]:
    for step in range(steps):
        inputs, targets = _batch(step, dist.get_rank())
        optimizer.zero_grad()
        nn.functional.mse_loss(module(inputs), targets).backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in module.parameters()]


def _sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


class _Recomputed(nn.Module):
    """Computes its first layers once more in a nested backward pass, which is where the last gradients are ready."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = _model()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        *first, last = self.layers
        return last(checkpoint(nn.Sequential(*first), x.requires_grad_(), use_reentrant=True))


def _ddp(store: Path) -> None:
    with process_group(store):
        reference = _model()
        optimizer = hvd.DistributedOptimizer(_sgd(reference), named_parameters=reference.named_parameters())
        wanted = _train(reference, optimizer)
        gloo = dist.new_group(backend="gloo")
        for options in (
            {},
            {"static_graph": True},
            {"gradient_as_bucket_view": True},
            {"bucket_cap_mb": 0.0001},
            {"find_unused_parameters": True},
        ):
            found = _train(module := DistributedDataParallel(_model(), **options), _sgd(module))
            for one, other in zip(found, wanted, strict=True):
                if dist.get_world_size() == 2:
                    assert torch.equal(one, other), options  # dividing by 2 before or after the sum is the same
                torch.testing.assert_close(one, other)
        for model in (_model, _Recomputed):
            results = []
            for group in (None, gloo):
                module = DistributedDataParallel(model(), process_group=group, static_graph=True, bucket_cap_mb=0.0001)
                results.append(_train(module, _sgd(module)))
            for one, other in zip(*results, strict=True):
                torch.testing.assert_close(one, other)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ddp_has_the_bits_of_the_distributed_optimizer(ranks, tmp_path, size):
    ranks(size).run(_ddp, tmp_path / "store", timeout=120)


@pytest.mark.slow
def test_ddp_while_the_engine_overlaps(fresh_ranks, tmp_path):
    pool = fresh_ranks(2, {"HOROVODLIKE_OVERLAP": "always"})
    pool.run(_ddp, tmp_path / "store", timeout=120)
    pool.run(_hooks, tmp_path / "another", timeout=120)


def _hooks(store: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)  # of the import
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    with process_group(store):
        plain = _train(module := DistributedDataParallel(_model()), _sgd(module))

        def own(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
            return work.get_future().then(lambda done: done.value()[0])

        own.__annotations__.clear()  # DDP expects types there, not texts
        for hook in (own, default_hooks.allreduce_hook):
            module = DistributedDataParallel(_model())
            module.register_comm_hook(None, hook)
            found = _train(module, _sgd(module))
            assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(found, plain, strict=True))
        module = DistributedDataParallel(_model())
        module.register_comm_hook(None, default_hooks.fp16_compress_hook)
        found = _train(module, _sgd(module))
        assert all(torch.allclose(one, other, atol=0.05) for one, other in zip(found, plain, strict=True))
        module = DistributedDataParallel(_model())
        state = powerSGD_hook.PowerSGDState(dist.group.WORLD, start_powerSGD_iter=2, min_compression_rate=0.5)
        module.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        found = _train(module, _sgd(module))
        for one in found:
            other = one.clone()
            dist.broadcast(other, 0)
            assert torch.equal(one, other)


def test_ddp_hooks(ranks, tmp_path):
    ranks(2).run(_hooks, tmp_path / "store", timeout=120)


def _uneven_inputs(store: Path) -> None:
    from torch.distributed.algorithms.join import Join

    with process_group(store):
        module = DistributedDataParallel(nn.Linear(8, 4))
        optimizer = _sgd(module)
        with Join([module]):
            for step in range(2 + dist.get_rank()):
                inputs, targets = _batch(step, dist.get_rank())
                nn.functional.mse_loss(module(inputs), targets).backward()
                optimizer.step()
        for parameter in module.parameters():
            everywhere = [torch.empty_like(parameter) for _ in range(dist.get_world_size())]
            dist.all_gather(everywhere, parameter.detach())
            assert all(torch.equal(one, everywhere[0]) for one in everywhere)


def test_join_with_uneven_inputs(ranks, tmp_path):
    ranks(3).run(_uneven_inputs, tmp_path / "store", timeout=120)


def _zero(store: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)  # of the import
        from torch.distributed.optim import ZeroRedundancyOptimizer

    with process_group(store):
        wanted = _train(module := DistributedDataParallel(_model()), torch.optim.Adam(module.parameters(), lr=0.01))
        module = DistributedDataParallel(_model())
        optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.Adam, lr=0.01)
        found = _train(module, optimizer)
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
        optimizer.consolidate_state_dict(to=0)


def test_zero_redundancy_optimizer(ranks, tmp_path):
    ranks(2).run(_zero, tmp_path / "store", timeout=120)


def _fsdp(store: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with process_group(store):
        size = dist.get_world_size()
        torch.manual_seed(3)
        plain = nn.Sequential(nn.Linear(8, 31), nn.ReLU(), nn.Linear(31, 4))
        sharded = copy.deepcopy(plain)
        wanted = _train(module := DistributedDataParallel(plain), _sgd(module))
        mesh = init_device_mesh("cpu", (size,))
        for layer in sharded:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        _train(sharded, _sgd(sharded))
        for parameter, one in zip(sharded.parameters(), wanted, strict=True):
            torch.testing.assert_close(parameter.full_tensor(), one)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_fsdp(ranks, tmp_path, size):
    ranks(size).run(_fsdp, tmp_path / "store", timeout=120)


def _hybrid(store: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    with process_group(store):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        assert [mesh.get_group(name).size() for name in mesh.mesh_dim_names or ()] == [2, 2]
        torch.manual_seed(3)
        plain = nn.Linear(8, 4)
        sharded = copy.deepcopy(plain)
        wanted = _train(module := DistributedDataParallel(plain), _sgd(module))
        fully_shard(sharded, mesh=mesh)
        _train(sharded, _sgd(sharded))
        for parameter, one in zip(sharded.parameters(), wanted, strict=True):
            torch.testing.assert_close(parameter.full_tensor(), one)
        whole = torch.arange(64.0).view(8, 8)
        spread = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
        assert isinstance(spread, DTensor) and torch.equal(spread.full_tensor(), whole)
        assert torch.equal((spread @ spread).full_tensor(), whole @ whole)
        moved = spread.redistribute(mesh, [Replicate(), Shard(0)])
        assert torch.equal(moved.full_tensor(), whole)


def test_device_mesh_and_hybrid_sharding(ranks, tmp_path):
    ranks(4).run(_hybrid, tmp_path / "store", timeout=120)


def _functional(store: Path, compiles: bool) -> None:
    import torch.distributed._functional_collectives as functional

    with process_group(store):
        rank, size = dist.get_rank(), dist.get_world_size()
        group = dist.group.WORLD

        def use(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            total = functional.all_reduce(x * 2, "sum", group)
            gathered = functional.all_gather_single(x, 0, group)
            scattered = functional.reduce_scatter_single(gathered, "avg", 0, group)
            swapped = functional.all_to_all_single(gathered, None, None, group)
            both = functional.all_reduce_coalesced([x, x + 1], "max", group)
            return total + 1, gathered, scattered, swapped, *both

        if compiles:
            use = torch.compile(use, fullgraph=True, backend="aot_eager")
        mine = torch.full((2, 3), float(rank))
        total, gathered, scattered, swapped, first, second = use(mine)
        everything = torch.arange(float(size)).repeat_interleave(2)[:, None].expand(-1, 3)
        assert torch.equal(total, torch.full((2, 3), size * (size - 1) + 1.0))
        assert torch.equal(gathered, everything) and torch.equal(scattered, mine)
        assert torch.equal(swapped, torch.full((2 * size, 3), float(rank)))
        assert torch.equal(first, torch.full((2, 3), size - 1.0)) and torch.equal(second, first + 1)


@pytest.mark.parametrize("compiles", [False, True])
def test_functional_collectives(ranks, tmp_path, compiles):
    ranks(2).run(_functional, tmp_path / "store", compiles, timeout=200)


def _checkpoint(store: Path) -> None:
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.fsdp import fully_shard

    with process_group(store):
        model = nn.Linear(8, 4)
        fully_shard(model)
        state = get_model_state_dict(model)
        checkpoint.save(state, checkpoint_id=f"{store}-checkpoint")
        other = nn.Linear(8, 4)
        fully_shard(other)
        loaded = get_model_state_dict(other)
        checkpoint.load(loaded, checkpoint_id=f"{store}-checkpoint")
        set_model_state_dict(other, loaded)
        for one, two in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(one.full_tensor(), two.full_tensor())


def test_checkpoint(ranks, tmp_path):
    ranks(2).run(_checkpoint, tmp_path / "store", timeout=120)
