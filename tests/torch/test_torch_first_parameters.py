"""Ranks that begin to train from different parameters are warned of, once, whatever the order of their calls."""

from __future__ import annotations

import warnings

import pytest
import torch

import horovodlike.torch as hvd
from horovodlike._engine.ops import counters

HOW = ("plain", "compressed", "powersgd", "two passes", "unnamed")


def _optimizer(model, how="plain", **options):
    options |= {
        "compressed": {"compression": hvd.Compression.fp16},
        "powersgd": {"compression": hvd.Compression.powersgd(rank=1)},
        "two passes": {"backward_passes_per_step": 2},
    }.get(how, {})
    names = None if how == "unnamed" else model.named_parameters()
    return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), names, **options)


def _model(seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))


def _texts(*optimizers, steps=2):
    """Return the warnings of steps of optimizers, each of a model of its own."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            for model, optimizer in optimizers:
                optimizer.zero_grad()
                for _ in range(optimizer.backward_passes_per_step):
                    model(torch.ones(2, 3)).sum().backward()
            for _, optimizer in optimizers if hvd.rank() % 2 else optimizers[::-1]:
                optimizer.step()
    return [str(each.message) for each in caught]


def _differ() -> None:
    for how in HOW:
        model = _model(hvd.rank())
        (text,) = _texts((model, _optimizer(model, how)))
        name = "noname.0.0" if how == "unnamed" else "0.bias"
        assert f"different first parameters: {name} (4 of 4 differ)" in text and "hvd.broadcast_parameters" in text
    model = _model(0)
    with torch.no_grad():
        model[1].weight[0, 0] += float(hvd.rank() == 1)
    assert "1.weight (1 of 4 differ)" in _texts((model, _optimizer(model)))[0]
    several = [
        (model, _optimizer(model, "unnamed" if i else "plain")) for i, model in enumerate(map(_model, [hvd.rank()] * 2))
    ]
    assert len(_texts(*several)) == 2


def _agree() -> None:
    model = _model(hvd.rank())
    optimizer = _optimizer(model)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    before = counters()["requests"]
    assert _texts((model, optimizer), steps=1) == []
    first = counters()["requests"] - before
    assert _texts((model, optimizer), steps=1) == []
    assert counters()["requests"] - before == 2 * first - (hvd.size() > 1), "one request, in the first step"
    # A frozen parameter, and ranks of another set.
    model = _model(0)
    model[0].weight.requires_grad_(False).fill_(hvd.rank())
    own = hvd.add_process_set([0, 1]) if hvd.size() > 2 else hvd.global_process_set
    with torch.no_grad():
        model[1].bias += hvd.rank() == 2
    assert _texts((model, _optimizer(model, process_set=own))) == []
    hvd.remove_process_set(own)


def _without_data() -> None:
    """A rank makes its first step after a join, when the others have compared their parameters."""
    model = _model(0)
    optimizer = _optimizer(model)
    if hvd.rank():
        assert _texts((model, optimizer)) == []
    hvd.join()
    hvd.broadcast_parameters(model.state_dict(), root_rank=1)
    assert _texts((model, optimizer)) == []


@pytest.mark.parametrize("size", (2, 3))
@pytest.mark.parametrize("case", (_differ, _agree), ids=lambda case: case.__name__.strip("_"))
def test_first_parameters(fresh_ranks, case, size):
    fresh_ranks(size).run(case)


@pytest.mark.parametrize("overlap", ("always", "never"))
def test_a_rank_without_data(fresh_ranks, overlap):
    pool = fresh_ranks(3, {"HOROVODLIKE_OVERLAP": overlap})
    pool.run(_differ)
    pool.run(_without_data)
