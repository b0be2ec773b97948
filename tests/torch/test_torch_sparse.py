"""Sparse tensors: their allreduce, and sparse gradients in an optimizer and in DDP; parameters unfrozen later."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.process_groups import process_group
from torch.nn.parallel import DistributedDataParallel

import horovodlike.torch as hvd

LR = 0.5


def _mine(rank: int, elements: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """With repeated positions, and another number of elements on each rank."""
    generator = torch.Generator().manual_seed(rank)
    positions = torch.randint(0, 7, (1, elements * rank), generator=generator)
    values = torch.randint(-4, 5, (elements * rank, 3), generator=generator).to(dtype)
    return torch.sparse_coo_tensor(positions, values, (7, 3), check_invariants=True)


def _allreduce() -> None:
    size = hvd.size()
    for elements in (0, 1, 17, 50_021):
        for dtype in (torch.float32, torch.float64, torch.float16):
            everybody = torch.stack([_mine(rank, elements, torch.float64).to_dense() for rank in range(size)])
            waits = [
                hvd.sparse_allreduce_async(_mine(hvd.rank(), elements, dtype), f"{op}", op)
                for op in (hvd.Sum, hvd.Average)
            ]
            if dtype is torch.float16 and elements > 17:
                [wait() for wait in waits]
                continue
            summed, average = (wait().to_dense() for wait in waits)
            with pytest.raises(ValueError, match="its result has been returned before"):
                waits[0]()
            assert summed.dtype is dtype
            assert torch.equal(summed.double(), everybody.sum(0))
            assert torch.allclose(average.double(), everybody.mean(0), rtol=2e-3, atol=1e-2)
    with pytest.raises(ValueError, match="coordinate format"):
        hvd.sparse_allreduce_async(torch.ones(3), None, hvd.Sum)
    with pytest.raises(ValueError, match="op=Average and op=Sum"):
        hvd.sparse_allreduce_async(_mine(1, 1), None, hvd.Max)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_sparse_allreduce(ranks, size):
    ranks(size).run(_allreduce)


def _allreduce_of_a_group(store: Path) -> None:
    with process_group(store):
        rank, size = dist.get_rank(), dist.get_world_size()
        for elements in (0, 1, 17, 5_003):
            for dtype in (torch.float64, torch.bfloat16, torch.int32):
                everybody = torch.stack([_mine(each, elements, torch.float64).to_dense() for each in range(size)])
                for is_async in (False, True):
                    tensor = _mine(rank, elements, dtype)
                    work = dist.all_reduce(tensor, async_op=is_async)
                    assert work is None or work.get_future().wait()[0] is tensor
                    assert tensor.is_coalesced() and tensor.dtype is dtype
                    if dtype is not torch.bfloat16 or elements <= 17:
                        assert torch.equal(tensor.to_dense().double(), everybody.sum(0))
        for op in (dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist._make_nccl_premul_sum(0.5)):
            with pytest.raises(ValueError, match="by SUM only"):
                dist.all_reduce(_mine(rank, 1), op)
        for shape, error in ((8, 3), "shapes of sparse"), ((7, 3, 2), "dimensions"):
            other = torch.zeros(shape if rank == size - 1 else (7, 3)).to_sparse()
            with pytest.raises(hvd.HorovodInternalError, match=f"Mismatched .*{error}"):
                dist.all_reduce(other)
        dist.all_reduce(tensor := torch.ones(1))
        assert tensor.item() == size


@pytest.mark.parametrize("size", [2, 3])
def test_sparse_allreduce_of_a_process_group(ranks, tmp_path, size):
    ranks(size).run(_allreduce_of_a_group, tmp_path / "store")


def _model() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Embedding(9, 4, sparse=True), torch.nn.Linear(4, 2)).double()


def _tokens(rank: int, step: int) -> torch.Tensor:
    return torch.tensor([(rank + step) % 9, (2 * rank + step) % 9, 3])


def _expected(size: int, steps: int, op: int) -> list[torch.Tensor]:
    """One process with the data of all ranks."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step in range(steps):
        optimizer.zero_grad()
        loss = sum(model(_tokens(rank, step)).square().sum() for rank in range(size))
        (loss / size if op == hvd.Average else loss).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def _training(op: int, options: dict[str, object]) -> None:
    model = _model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=LR), model.named_parameters(), op=op, **options
    )
    for step in range(4):
        optimizer.zero_grad()
        model(_tokens(hvd.rank(), step)).square().sum().backward()
        optimizer.synchronize()
        assert model[0].weight.grad.is_sparse
        with optimizer.skip_synchronize():
            optimizer.step()
    for actual, expected in zip(model.parameters(), _expected(hvd.size(), 4, op), strict=True):
        assert torch.allclose(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"sparse_as_dense": True}, {"gradient_predivide_factor": 2.0}])
def test_training_with_a_sparse_embedding(ranks, size, options):
    ranks(size).run(_training, hvd.Average, options)


def test_sum_of_sparse_gradients(ranks):
    ranks(2).run(_training, hvd.Sum, {})


def _training_with_ddp(store: Path) -> None:
    with process_group(store):
        model = DistributedDataParallel(_model())
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        for step in range(4):
            optimizer.zero_grad()
            model(_tokens(dist.get_rank(), step)).square().sum().backward()
            assert model.module[0].weight.grad.is_sparse
            optimizer.step()
        for actual, expected in zip(model.parameters(), _expected(hvd.size(), 4, hvd.Average), strict=True):
            assert torch.allclose(actual, expected, rtol=1e-12, atol=1e-12)


def test_training_of_ddp_with_a_sparse_embedding(ranks, tmp_path):
    ranks(3).run(_training_with_ddp, tmp_path / "store")


def _some_ranks_lack_it() -> None:
    model = torch.nn.Embedding(5, 2, sparse=True)
    torch.nn.init.zeros_(model.weight)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
    for step in range(3):
        optimizer.zero_grad()
        if step > 0 and hvd.rank() == step % hvd.size():
            model(torch.tensor([step])).sum().backward()
        optimizer.step()
        assert (model.weight.grad is None) == (step == 0)
    expected = torch.zeros(5, 2)
    expected[1:3] = -1.0 / hvd.size()
    assert torch.allclose(model.weight.detach(), expected)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_without_a_sparse_gradient(ranks, size):
    ranks(size).run(_some_ranks_lack_it)


def _mixed() -> None:
    model = torch.nn.Embedding(5, 2, sparse=hvd.rank() == 0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(hvd.HorovodInternalError, match="Mismatched operations for 'allreduce.weight'"):
        optimizer.step()
    with pytest.raises(ValueError, match="op=Average or op=Sum"):
        sparse = torch.nn.Embedding(5, 2, sparse=True)
        largest = hvd.DistributedOptimizer(
            torch.optim.SGD(sparse.parameters(), lr=1.0), [("largest", sparse.weight)], op=hvd.Max
        )
        sparse(torch.tensor([1])).sum().backward()
        largest.step()


def test_sparse_and_dense_gradients_of_one_parameter(ranks):
    ranks(2).run(_mixed)


def _unfrozen(groups: int | None) -> None:
    torch.manual_seed(2)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2), torch.nn.Linear(2, 1)).double()
    reference = torch.nn.Sequential(*(torch.nn.Linear(*shape) for shape in ((3, 4), (4, 2), (2, 1)))).double()
    reference.load_state_dict(model.state_dict())
    for one in (model, reference):
        one[0].requires_grad_(False)
        one[1].weight.requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters(), groups=groups
    )
    plain = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for step in range(6):
        if step == 2:
            model[0].requires_grad_(True)
            reference[0].requires_grad_(True)
        if step == 4:
            model[1].requires_grad_(True)
            reference[1].requires_grad_(True)
        inputs = [torch.full((2, 3), 0.1 * (rank + step), dtype=torch.float64) for rank in range(hvd.size())]
        optimizer.zero_grad()
        model(inputs[hvd.rank()]).square().mean().backward()
        optimizer.step()
        plain.zero_grad()
        (sum(reference(one).square().mean() for one in inputs) / hvd.size()).backward()
        plain.step()
    for actual, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(actual, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("groups", [None, 2])
def test_parameters_unfrozen_after_wrapping(ranks, groups):
    ranks(2).run(_unfrozen, groups)
