"""Gradients on their way: what happens between `backward` and `step` that is out of the ordinary."""

from __future__ import annotations

import gc
import time

import pytest
import torch

import horovodlike.torch as hvd
from horovodlike._engine.ops import counters
from horovodlike.torch._ops import handles
from horovodlike.torch._ops.sparse import SparseGathering
from horovodlike.torch.compression import NoneCompressor

OVERLAP = ("always", pytest.param("never", marks=pytest.mark.thorough))


def _optimizer(model: torch.nn.Module, **options: object) -> torch.optim.Optimizer:
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    return hvd.DistributedOptimizer(sgd, model.named_parameters(), op=hvd.Sum, **options)


def _ones(inputs: int = 3) -> torch.nn.Module:
    """A model whose gradients are what it is given."""
    model = torch.nn.Linear(inputs, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    return model


def _backward(model: torch.nn.Linear, value: float = 1.0) -> None:
    (model(torch.ones(1, model.in_features)).sum() * value).backward()


def _replaced_gradient() -> None:
    model = _ones()
    optimizer = _optimizer(model)
    _backward(model)
    model.weight.grad = model.weight.grad * 100
    with pytest.warns(UserWarning, match="changed between backward"):
        optimizer.step()
    assert torch.equal(model.weight, torch.full((1, 3), -float(hvd.size())))
    optimizer.zero_grad()
    _backward(model)
    model.weight.grad = None
    optimizer.synchronize()
    assert torch.equal(model.weight.grad, torch.full((1, 3), float(hvd.size())))


def _collected_in_flight() -> None:
    """The engine may use the gradients of an optimizer that is no more."""
    model = _ones(1 << 20)
    if hvd.rank() > 0:
        hvd.barrier()
    optimizer = _optimizer(model)
    _backward(model)
    if hvd.rank() == 0:
        del optimizer, model
        gc.collect()
        assert any(isinstance(held, torch.Tensor) and held.numel() == 1 << 20 for held in _held())
        hvd.barrier()
        hvd.barrier()  # the others have stepped
        return
    optimizer.step()
    assert torch.equal(model.weight, torch.full_like(model.weight, -float(hvd.size())))
    hvd.barrier()


def _held() -> list[object]:
    return [held for borrowed in handles._abandoned.values() for held in borrowed]


def _sparse_gradient_of_a_failed_step() -> None:
    """The engine may use a sparse gradient after an error in the step, and nothing of it is left when it has."""
    rows = 1 << 16
    positions = torch.arange(rows)
    in_flight = set(handles._in_flight)
    if hvd.rank() == 0:
        model = torch.nn.Embedding(rows, 16, sparse=True)
        wrong = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
        sgd = torch.optim.SGD([model.weight, wrong], lr=1.0)
        optimizer = hvd.DistributedOptimizer(sgd, [("sparse", model.weight), ("wrong", wrong)], op=hvd.Sum)
        model(positions).sum().backward()  # hands the gradient over
        wrong.sum().real.backward()
        with pytest.raises(ValueError, match="wrong.*complex64"):
            optimizer.step()
        address = model.weight.grad._values().data_ptr()
        del sgd, optimizer, model
        gc.collect()
        fresh = [torch.full((rows, 16), 2.0) for _ in range(4)]  # where the memory would be that was let go of
        assert address not in [tensor.data_ptr() for tensor in fresh]
        assert set(handles._in_flight) == in_flight  # no thread is going to wait for it
        hvd.barrier()
        hvd.barrier()  # the gradient has been gathered
        handles.abandon((), ())  # looks through what has been abandoned
        assert not handles._abandoned
        return
    hvd.barrier()
    mine = torch.sparse_coo_tensor(positions[None, :1], torch.zeros(1, 16), (rows, 16), check_invariants=True)
    gathering = SparseGathering("allreduce.sparse", mine, NoneCompressor, hvd.global_process_set)
    assert torch.equal(gathering.finish(1.0).to_dense(), torch.ones(rows, 16))
    hvd.barrier()


def _rules_in_progress() -> None:
    model = _ones()
    optimizer = _optimizer(model)
    _backward(model)
    with pytest.raises(AssertionError, match="add_param_group"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
    optimizer.step()
    optimizer.set_backward_passes_per_step(2)
    optimizer.zero_grad()
    _backward(model)
    optimizer.set_backward_passes_per_step(1)  # counting begins anew
    _backward(model)
    optimizer.step()
    assert torch.equal(model.weight, torch.full((1, 3), -3.0 * hvd.size()))


def _next_job() -> None:
    """Gradients in flight in one job have no influence on the next."""
    model = _ones()
    optimizer = _optimizer(model)
    _backward(model)
    hvd.barrier()
    hvd.shutdown()
    hvd.init()
    optimizer.zero_grad()
    _backward(model, 2.0)
    optimizer.step()
    assert torch.equal(model.weight, torch.full((1, 3), -2.0 * hvd.size()))


def _handed_over(during_backward: bool) -> None:
    layers = [torch.nn.Linear(512, 1024, bias=False), torch.nn.Linear(1024, 512, bias=False)]  # two mebibytes each
    seen = []
    layers[0].weight.register_post_accumulate_grad_hook(lambda _: seen.append(_some_completed(before, during_backward)))
    optimizer = _optimizer(torch.nn.Sequential(*layers))
    hvd.barrier()
    before = counters()["requests"]
    layers[1](layers[0](torch.ones(1, 512))).sum().backward()
    assert seen == [during_backward]
    optimizer.step()
    assert counters()["requests"] > before


def _some_completed(before: int, expected: bool) -> bool:
    deadline = time.monotonic() + 30 * expected
    while counters()["requests"] == before and time.monotonic() < deadline:
        time.sleep(0.001)
    return counters()["requests"] > before


CASES = (_replaced_gradient, _collected_in_flight, _sparse_gradient_of_a_failed_step, _rules_in_progress, _next_job)


@pytest.mark.parametrize("overlap", OVERLAP)
def test_between_backward_and_step(fresh_ranks, overlap):
    pool = fresh_ranks(2, {"HOROVODLIKE_OVERLAP": overlap})
    pool.run(_handed_over, overlap == "always")
    for case in CASES:
        pool.run(case)
