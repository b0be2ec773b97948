"""Parameter servers for modules and tensors of PyTorch."""

from __future__ import annotations

import pytest
import torch

import horovodlike.torch as hvd
from horovodlike.torch.parameter_server import ParameterServer


def _model(seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))


def _train():
    """One rank after the other makes a step: the same as one process that makes all of them."""
    rank, size = hvd.rank(), hvd.size()
    model, alone = _model(rank), _model(0)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.25, momentum=0.5)
    batches = torch.Generator().manual_seed(1)
    addresses = [each.data_ptr() for each in model.parameters()]
    with ParameterServer(model) as server:
        for step in range(3 * size):
            batch, target = torch.randn(4, 5, generator=batches), torch.randn(4, 3, generator=batches)
            for each in (model, alone):
                each.zero_grad()
            if step % size == rank:
                assert [id(each) for each in server.receive().wait()] == [id(each) for each in model.parameters()]
                torch.nn.functional.mse_loss(model(batch), target).backward()
                server.send(rule="momentum", lr=0.25, momentum=0.5).wait()
            torch.nn.functional.mse_loss(alone(batch), target).backward()
            optimizer.step()
            hvd.barrier()
        server.receive().wait()
        hvd.barrier()
    assert addresses == [each.data_ptr() for each in model.parameters()]
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        assert mine.requires_grad
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_training_is_that_of_one_process(ranks, size):
    ranks(size).run(_train)


def _tensors(dtype):
    mine = torch.full((4, 3), float(hvd.rank() + 1)).to(dtype)
    with ParameterServer(mine, root=hvd.size() - 1) as server:
        assert server.receive().wait() is mine
        assert bool((mine == hvd.size()).all())
        hvd.barrier()
        server.send(torch.ones(3, 4, dtype=dtype).t()).wait()  # with other strides
        hvd.barrier()
        out = torch.empty(3, 4, dtype=dtype).t()
        assert server.receive(out).wait() is out
        assert bool((out == 2 * hvd.size()).all())
        server.prefetch()
        assert bool((server.receive().wait() == 2 * hvd.size()).all())
        hvd.barrier()
        if hvd.rank() == 0:
            server.send_rows(torch.tensor([3, 1]), torch.zeros(2, 3, dtype=dtype), "copy").wait()
        hvd.barrier()
        rows = server.receive_rows(torch.tensor([1, 2, 3])).wait()
        assert rows.dtype == dtype and rows[:, 0].tolist() == [0, 2 * hvd.size(), 0]
        out = torch.empty(1, 3, dtype=dtype)
        assert server.receive_rows([2], out).wait() is out and bool((out == 2 * hvd.size()).all())
        hvd.barrier()
        if hvd.rank() == 0:
            server.send(None, "zero").wait()
        hvd.barrier()
        assert not server.receive().wait().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_a_tensor(ranks, dtype):
    ranks(2).run(_tensors, dtype)


def _wrong():
    model = _model(0)
    for value in (torch.nn.Tanh(), [], 3, [1.0], "text"):
        with pytest.raises(TypeError, match="expected a module with parameters, or tensors"):
            ParameterServer(value)
    with ParameterServer(model) as server:
        with pytest.raises(TypeError, match="expected a list of 4 arrays"):
            server.send([torch.zeros(7, 5)])
        with pytest.raises(ValueError, match="array 0 must have the shape \\(7, 5\\), got \\(5, 7\\)"):
            server.send([each.t() if each.dim() > 1 else each for each in model.parameters()])
        assert server.send(rule="add").wait() is None  # no gradients: zeros
        hvd.barrier()


def test_wrong_tensors(ranks):
    ranks(2).run(_wrong)
