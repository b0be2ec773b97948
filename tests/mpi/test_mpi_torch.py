"""Training with PyTorch through MPI."""

from __future__ import annotations

import hashlib

import pytest


def _train() -> list[str]:
    import torch

    import horovodlike.torch as hvd

    hvd.init()
    torch.manual_seed(hvd.rank())
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), named_parameters=model.named_parameters()
    )
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(32, 64)).square().mean().backward()
        optimizer.step()
    halves = [hvd.allreduce(torch.arange(999.0).to(dtype), name=str(dtype)) for dtype in (torch.bfloat16, torch.half)]
    objects = hvd.allgather_object({"rank": hvd.rank()})
    assert objects == [{"rank": rank} for rank in range(hvd.size())]
    results = [*model.state_dict().values(), *(half.float() for half in halves)]
    return [hashlib.sha256(result.numpy().tobytes()).hexdigest() for result in results]


@pytest.mark.thorough
def test_training_ends_with_the_same_bits(mpi, fresh_ranks):
    """Two ranks: their sum has one order only."""
    first, second = mpi.run(2, _train)
    assert first == second
    assert [first, second] == fresh_ranks(2).run(_train)
