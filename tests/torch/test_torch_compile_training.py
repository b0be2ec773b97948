"""Training with models and steps that are compiled: the same parameters as without the compiler."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional

import horovodlike.torch as hvd
from horovodlike.torch._ops import custom_ops

pytestmark = pytest.mark.slow

BACKENDS = ("eager", "aot_eager")
INDUCTOR_SECONDS = 280
STEPS = 4


@contextlib.contextmanager
def _compiler() -> Iterator[None]:
    """A compiler that remembers nothing, and whose own warnings are no errors."""
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch._dynamo.reset()


def _without_a_rank(backend: str) -> None:
    """The gradients of rows that were sent to a rank which has joined stay where the rows are."""

    def exchange(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        one, _ = hvd.alltoall(first, [1, 1, 1], name="exchange")
        (two, _), even = hvd.grouped_alltoall([first, second], [[2, 1, 1], None], name="grouped")
        return (one.sum() + two.sum() + even.sum()) * (10 + hvd.rank())

    if hvd.rank() != 1:
        with _compiler():
            for function in (exchange, torch.compile(exchange, backend=backend, fullgraph=True)):
                first, second = torch.arange(5.0, requires_grad=True), torch.arange(3.0, requires_grad=True)
                function(first, second).backward()
                assert first.grad.tolist() == [20.0, 10.0, 12.0, 12.0, 0.0]
                assert second.grad.tolist() == [10.0, 0.0, 12.0]
    hvd.join()


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_while_a_rank_has_joined(ranks, backend):
    ranks(3).run(_without_a_rank, backend)


class _Model(torch.nn.Module):
    """One that may talk to the other ranks in the middle."""

    def __init__(self, talks: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = torch.nn.Linear(6, 8), torch.nn.Linear(8, 3)
        self.talks = talks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).tanh()
        if self.talks:
            hidden = hidden - hvd.allreduce(hidden.mean(0))
        return self.second(hidden)


def _train(backend: str | None, what: str, talks: bool) -> list[torch.Tensor]:
    model = _Model(talks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    used = torch.compile(model, backend=backend, fullgraph=talks) if backend and what == "model" else model
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=used.named_parameters())

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(used(x), y)

    if backend and what == "loss":
        loss_of = torch.compile(loss_of, backend=backend, fullgraph=talks)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss_of(x, y).backward()
        optimizer.step()

    if backend and what == "step":
        step = torch.compile(step, backend=backend)
    generator = torch.Generator().manual_seed(hvd.rank())
    for _ in range(STEPS):
        step(torch.randn(5, 6, generator=generator), torch.randint(3, (5,), generator=generator))
    return [parameter.detach() for parameter in model.parameters()]


def _same_parameters(backend: str, what: str, talks: bool) -> None:
    with _compiler():
        expected = _train(None, what, talks)
        for mine, theirs in zip(_train(backend, what, talks), expected, strict=True):
            torch.testing.assert_close(mine, theirs)
            torch.testing.assert_close(hvd.broadcast(mine, 0), mine, rtol=0, atol=0)


TALKING = pytest.param(True, marks=pytest.mark.skipif(not custom_ops.IS_AVAILABLE, reason="torch is too old"))
TALKS = (False, TALKING)


@pytest.mark.parametrize("talks", TALKS)
@pytest.mark.parametrize("what", ("model", "loss", "step"))
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled(ranks, backend, what, talks):
    ranks(2).run(_same_parameters, backend, what, talks)


@pytest.mark.thorough
@pytest.mark.parametrize("talks", TALKS)
def test_compiled_by_inductor(ranks, talks):
    ranks(2).run(_same_parameters, "inductor", "loss", talks, timeout=INDUCTOR_SECONDS)


def _compiled_autograd(talks: bool) -> None:
    from torch import _dynamo  # of `torch._dynamo.config`, cloudpickle would pickle the module, if it is imported here
    from torch._dynamo.utils import counters

    counters.clear()
    with _dynamo.config.patch(compiled_autograd=True):
        _same_parameters("aot_eager", "step", talks)
    assert counters["compiled_autograd"]["captures"] > 0


@pytest.mark.parametrize("talks", (pytest.param(False, marks=pytest.mark.thorough), TALKING))
def test_compiled_autograd(ranks, talks):
    ranks(2).run(_compiled_autograd, talks)


def _names() -> None:
    with _compiler():
        model = _Model(False)
        compiled = torch.compile(model, backend="eager")
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), compiled.named_parameters())
        assert min(optimizer._parameter_names.values()) == "_orig_mod.first.bias"
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        assert min(optimizer._parameter_names.values()) == "first.bias"


def test_names(ranks):
    ranks(1).run(_names)
