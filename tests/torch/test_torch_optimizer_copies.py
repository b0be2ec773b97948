"""Copies and pickles of a `DistributedOptimizer` are refused; copies from before the wrapping are ordinary ones."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from support.ranks import RankPool
from support.training import flat_parameters, loss_of, make_batches, make_model, make_sgd, my_part

import horovodlike.torch as hvd


def _train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """Train, and return the parameters, which must be the same on all ranks."""
    for x, y in make_batches(2):
        optimizer.zero_grad()
        loss_of(model, my_part(x) + hvd.rank(), my_part(y)).backward()
        optimizer.step()
    everywhere = hvd.allgather(flat_parameters(model).unsqueeze(0))
    assert all(torch.equal(everywhere[0], other) for other in everywhere)
    return everywhere[0]


def _copies() -> None:
    for options in ({}, {"op": hvd.Adasum}, {"compression": hvd.Compression.fp16, "groups": 2}):
        model = make_model()
        sgd = make_sgd(model)
        copied_model, copied_sgd = copy.deepcopy((model, sgd))
        optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), **options)
        for make_copy in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(
                TypeError, match=r"copy the model and the optimizer before .* optimizer\.state_dict\(\)"
            ):
                make_copy(optimizer)
        trained = _train(model, optimizer)
        copied = hvd.DistributedOptimizer(copied_sgd, copied_model.named_parameters(), **options)
        assert torch.equal(trained, _train(copied_model, copied)), options


def test_copies(ranks: Callable[[int], RankPool]) -> None:
    ranks(2).run(_copies)
