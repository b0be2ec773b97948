"""Bringing parameters, optimizer state and objects to the same value on all ranks."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import horovodlike.torch as hvd
from horovodlike.errors import MismatchError


def _same_everywhere(tensor: torch.Tensor) -> bool:
    everywhere = hvd.allgather(tensor.detach().to(torch.float64).reshape(1, -1))
    return all(torch.equal(everywhere[0], other) for other in everywhere)


def _model() -> torch.nn.Sequential:
    torch.manual_seed(hvd.rank())
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))


def _parameters() -> None:
    roots = {0, hvd.size() - 1}
    for root in roots:
        for params in (
            lambda m: m.state_dict(),
            lambda m: list(m.named_parameters()),
            lambda m: m.named_parameters(),
            lambda m: list(m.parameters()),
            lambda m: {**dict(reversed(list(m.state_dict().items()))), "nothing": None},
        ):
            model = _model()
            before = torch.cat([p.detach().flatten() for p in model.parameters()])
            hvd.broadcast_parameters(params(model), root)
            after = torch.cat([p.detach().flatten() for p in model.parameters()])
            assert _same_everywhere(after)
            assert torch.equal(before, after) == (hvd.rank() == root or hvd.size() == 1)
            assert all(p.requires_grad for p in model.parameters())
    model = _model()
    model(torch.randn(5, 3))
    hvd.broadcast_parameters(model.state_dict(), 0)
    assert _same_everywhere(model[1].running_mean)
    assert model[1].num_batches_tracked.dtype == torch.int64
    for wrong in (3, "weights", None, torch.ones(3), {"a": 3}, [("a", "b")]):
        with pytest.raises(ValueError, match="invalid params"):
            hvd.broadcast_parameters(wrong, 0)
    if hvd.size() > 1:
        with pytest.raises(hvd.HorovodInternalError, match="second"):
            odd = {"first": torch.ones(2), "second": torch.ones(3 if hvd.rank() == 0 else 4), "third": torch.ones(1)}
            hvd.broadcast_parameters(odd, 0)
    hvd.broadcast_parameters({"first": torch.ones(2), "third": torch.ones(1)}, 0)


def _unlike_parameters() -> None:
    """All ranks raise the same error, and can go on."""
    last = hvd.size() - 1
    lazy = {"weight": torch.ones(2), "cache": torch.ones(3) if hvd.rank() == 0 else None}
    others = re.escape(str([*range(1, hvd.size())]))
    with pytest.raises(MismatchError, match=rf"ranks {others} do not have cache: all need the same parameters"):
        hvd.broadcast_parameters(lazy, 0)
    with pytest.raises(MismatchError, match=r"the ranks give \[.*\] tensors; all must give as many"):
        hvd.broadcast_parameters([torch.ones(1)] * (1 + (hvd.rank() == last)), 0)
    weight = torch.full((2,), float(hvd.rank()))
    hvd.broadcast_parameters({"weight": weight}, last)
    assert weight.tolist() == [last, last]


@pytest.mark.parametrize("size", (2, 3))
def test_parameters_that_some_ranks_lack_are_an_error_that_names_them(ranks, size):
    ranks(size).run(_unlike_parameters)


OPTIMIZERS = {
    "SGD": lambda params, lr: torch.optim.SGD(params, lr=lr),
    "SGD momentum": lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9, weight_decay=0.1, nesterov=True),
    "Adam": lambda params, lr: torch.optim.Adam(params, lr=lr, amsgrad=True),
    "AdamW": lambda params, lr: torch.optim.AdamW(params, lr=lr),
    "Adadelta": lambda params, lr: torch.optim.Adadelta(params, lr=lr),
    "Adagrad": lambda params, lr: torch.optim.Adagrad(params, lr=lr),
    "RMSprop": lambda params, lr: torch.optim.RMSprop(params, lr=lr, momentum=0.5, centered=True),
    "Rprop": lambda params, lr: torch.optim.Rprop(params, lr=lr),
    "ASGD": lambda params, lr: torch.optim.ASGD(params, lr=lr),
    "NAdam": lambda params, lr: torch.optim.NAdam(params, lr=lr),
    "LBFGS": lambda params, lr: torch.optim.LBFGS(params, lr=lr, max_iter=2),
}


def _flat(state: object) -> list[object]:
    if isinstance(state, dict):
        return [leaf for key in sorted(state, key=str) for leaf in (key, *_flat(state[key]))]
    if isinstance(state, (list, tuple)):
        return [leaf for item in state for leaf in _flat(item)]
    return [(str(state.dtype), state.tolist()) if isinstance(state, torch.Tensor) else state]


def _optimizer_state(wrapped: bool) -> None:
    for name, make in OPTIMIZERS.items():
        for steps_on_root, steps_elsewhere in ((2, 0), (0, 2), (1, 2)):
            model = torch.nn.Linear(3, 2)
            root = hvd.size() - 1
            optimizer = make(model.parameters(), 0.1 * (hvd.rank() + 1))
            steps = steps_on_root if hvd.rank() == root else steps_elsewhere
            for _ in range(steps):

                def closure(model: torch.nn.Module = model, optimizer: Any = optimizer) -> torch.Tensor:
                    optimizer.zero_grad()
                    loss = model(torch.randn(4, 3)).square().sum()
                    loss.backward()
                    return loss

                optimizer.step(closure)
            if wrapped:
                optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
            parameters = torch.cat([p.detach().flatten() for p in model.parameters()])
            before = _flat(optimizer.state_dict())
            hvd.broadcast_optimizer_state(optimizer, root)
            after = _flat(optimizer.state_dict())
            assert hvd.allgather_object(after) == [after] * hvd.size(), name
            assert hvd.rank() != root or before == after, name
            assert torch.equal(parameters, torch.cat([p.detach().flatten() for p in model.parameters()])), name
            assert optimizer.param_groups[0]["lr"] == 0.1 * hvd.size(), name


def _plain_state() -> None:
    _optimizer_state(wrapped=False)


def _wrapped_state() -> None:
    _optimizer_state(wrapped=True)


def _state_of_another_dtype() -> None:
    """An optimizer that keeps float32 state for bfloat16 parameters has it so on every rank."""
    parameter = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    if hvd.rank() == 0:
        optimizer.state[parameter] = {"master": torch.tensor([1.001, 2.002, 3.003]), "name": "fp32"}
    hvd.broadcast_optimizer_state(optimizer, 0, None)
    assert optimizer.state[parameter]["master"].dtype == torch.float32
    assert _same_everywhere(optimizer.state[parameter]["master"])
    assert optimizer.state[parameter]["name"] == "fp32"
    # Options that are tensors.
    optimizer = torch.optim.Adam([parameter], lr=torch.tensor(0.1 * (hvd.rank() + 1)), capturable=False)
    hvd.broadcast_optimizer_state(optimizer, 0)
    assert optimizer.param_groups[0]["lr"].item() == torch.tensor(0.1).item()


class Unpicklable:
    def __reduce__(self) -> str:
        raise RuntimeError("no copies of this")


def _objects() -> None:
    rank, size = hvd.rank(), hvd.size()
    root = size - 1
    mine = {"rank": rank, "tensor": torch.full((3,), float(rank)), "function": lambda: rank}
    received = hvd.broadcast_object(mine, root)
    assert (received is mine) == (rank == root)
    assert received["rank"] == root
    assert received["tensor"].tolist() == [root] * 3
    assert received["function"]() == root
    # Another type on each rank.
    assert hvd.broadcast_object("text" if rank == 0 else rank, name="named") == "text"
    assert hvd.broadcast_object(None) is None
    big = hvd.broadcast_object(bytes(3_000_000) if rank == 0 else None)
    assert len(big) == 3_000_000

    gathered = hvd.allgather_object(("x" * 1000 * rank, rank) if rank % 2 else [rank])
    assert gathered == [("x" * 1000 * r, r) if r % 2 else [r] for r in range(size)]
    assert hvd.allgather_object(None, name="none") == [None] * size
    assert hvd.allgather_object(rank, process_set=hvd.global_process_set) == list(range(size))


def _objects_that_cannot_be_sent() -> None:
    if hvd.size() == 1:
        return
    expected = RuntimeError if hvd.rank() == 0 else hvd.HorovodInternalError
    words = "no copies" if hvd.rank() == 0 else "could not pickle"
    with pytest.raises(expected, match=words):
        hvd.broadcast_object(Unpicklable(), 0)
    with pytest.raises(expected, match=words):
        hvd.allgather_object(Unpicklable() if hvd.rank() == 0 else 1)
    assert hvd.allgather_object(1) == [1] * hvd.size()


CASES = (
    _parameters,
    _plain_state,
    _wrapped_state,
    _state_of_another_dtype,
    _objects,
    _objects_that_cannot_be_sent,
)


@pytest.mark.parametrize("size", (1, 2, 3))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.strip("_"))
def test_function(ranks, case, size):
    ranks(size).run(case)
