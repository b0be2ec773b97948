"""`DistributedOptimizer`: equality with one rank, and its options."""

from __future__ import annotations

import pytest
import torch
from support.training import (
    STEPS,
    flat_parameters,
    loss_of,
    make_batches,
    make_model,
    make_sgd,
    my_part,
    relative_difference,
    train_model,
)

import horovodlike.torch as hvd
from horovodlike.torch.compression import Compressor


def _equals_one_rank() -> list[tuple[str, float, bool]]:
    adam = lambda model: torch.optim.AdamW(model.parameters(), lr=0.01)  # noqa: E731  # used once
    variants = {
        "plain": ({}, 1, make_sgd),
        "passes": ({"backward_passes_per_step": 2}, 2, make_sgd),
        "one group": ({"groups": 1}, 1, make_sgd),
        "many groups": ({"groups": 100}, 1, make_sgd),
        "predivide": ({"gradient_predivide_factor": 2.0}, 1, make_sgd),
        "predivide and groups": ({"gradient_predivide_factor": 4.0, "groups": 2}, 1, make_sgd),
        "passes and groups": ({"backward_passes_per_step": 2, "groups": 2}, 2, make_sgd),
        "AdamW": ({}, 1, adam),
    }
    report = []
    for name, (wrap, passes, make) in variants.items():
        trained = train_model(wrap, passes, make)
        everywhere = hvd.allgather(trained.unsqueeze(0))
        same = all(torch.equal(everywhere[0], other) for other in everywhere)
        report.append((name, relative_difference(trained, train_model(None, passes, make)), same))
    return report


@pytest.mark.parametrize("size", (1, 2, 3, 4))
def test_equals_one_rank_with_the_whole_batch(ranks, size):
    for report in ranks(size).run(_equals_one_rank):
        for variant, difference, same_on_all_ranks in report:
            assert difference < 1e-6, variant
            assert same_on_all_ranks, variant


def _marked_steps() -> int:
    from horovodlike._engine import steps

    steps.reset()
    train_model({"backward_passes_per_step": 2}, 2)
    return hvd.metrics()["steps"]


def test_each_step_is_marked(ranks):
    assert ranks(2).run(_marked_steps) == [STEPS, STEPS]


def _explicit_groups() -> None:
    model, alone = make_model(), train_model(None)
    weights = [m.weight for m in model if isinstance(m, torch.nn.Linear)]
    optimizer = hvd.DistributedOptimizer(make_sgd(model), model.named_parameters(), groups=[weights, [model[0].bias]])
    assert [len(group) for group in optimizer._groups] == [3, 1]
    for x, y in make_batches():
        optimizer.zero_grad()
        loss_of(model, my_part(x), my_part(y)).backward()
        optimizer.step()
    assert relative_difference(flat_parameters(model), alone) < 1e-6
    with pytest.warns(DeprecationWarning, match="groups"):
        optimizer = hvd.DistributedOptimizer(make_sgd(make_model()), num_groups=2)
    assert sorted(len(group) for group in optimizer._groups) == [3, 3]
    for wrong in (-1, 1.5, "two", [1, 2], [torch.ones(1)], [[1]]):
        with pytest.raises(ValueError, match="groups must"):
            hvd.DistributedOptimizer(make_sgd(make_model()), groups=wrong)
    with pytest.raises(ValueError, match="one group only"):
        hvd.DistributedOptimizer(make_sgd(model), groups=[weights, weights])


class Doubled(Compressor):
    """A compression of one's own."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, object]:
        return tensor.float() * 2, tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: object) -> torch.Tensor:
        assert tensor.dtype is torch.float32
        return (tensor / 2).to(ctx)


def _compression() -> None:
    exact = train_model(None)
    for compression, bound in ((hvd.Compression.fp16, 1e-3), (hvd.Compression.bf16, 1e-2), (Doubled, 1e-5)):
        for groups in (None, 2):
            difference = relative_difference(train_model({"compression": compression, "groups": groups}), exact)
            assert difference < bound
            assert difference > 0 or hvd.size() == 1  # fewer bits were sent


def _clipping() -> None:
    def train(distributed: bool) -> torch.Tensor:
        model = make_model()
        optimizer = make_sgd(model)
        if distributed:
            optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        for x, y in make_batches():
            optimizer.zero_grad()
            if distributed:
                loss_of(model, my_part(x), my_part(y)).backward()
                optimizer.synchronize()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                loss_of(model, x, y).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                optimizer.step()
        return flat_parameters(model)

    assert relative_difference(train(True), train(False)) < 1e-6
    model = make_model()
    optimizer = hvd.DistributedOptimizer(make_sgd(model), model.named_parameters())
    x, y = make_batches(1)[0]
    loss_of(model, my_part(x), my_part(y)).backward()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="skip_synchronize"):
        optimizer.step()


def _amp() -> None:
    """The pattern that scripts use with a gradient scaler; on the CPU, with autocast to bfloat16."""
    model = make_model(torch.float32)
    optimizer = hvd.DistributedOptimizer(make_sgd(model), model.named_parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    losses = []
    x, y = make_batches(1, torch.float32)[0]
    for _ in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model, my_part(x), my_part(y))
        scaler.scale(loss).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        losses.append(hvd.allreduce(loss.detach()).item())
    everywhere = hvd.allgather(flat_parameters(model).unsqueeze(0))
    assert all(torch.equal(everywhere[0], other) for other in everywhere)
    assert losses[-1] < losses[0]


def _closure() -> None:
    def train(distributed: bool) -> tuple[torch.Tensor, int]:
        model, calls = make_model(), 0
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, line_search_fn="strong_wolfe")
        if distributed:
            optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        for x, y in make_batches(3):
            part = (my_part(x), my_part(y)) if distributed else (x, y)

            def closure(part: tuple[torch.Tensor, torch.Tensor] = part) -> torch.Tensor:
                nonlocal calls
                calls += 1
                optimizer.zero_grad()
                loss = loss_of(model, *part)
                loss.backward()
                return loss

            optimizer.step(closure)
        return flat_parameters(model), calls

    actual, calls = train(True)
    expected, calls_alone = train(False)
    assert calls == calls_alone > 6
    assert relative_difference(actual, expected) < 1e-6

    # The loss that step() returns is the average; gradients of before step(closure) are waited for.
    model = torch.nn.Linear(1, 1).double()
    hvd.broadcast_parameters(model.state_dict(), 0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters())
    model(torch.ones(1, 1).double()).sum().backward()

    def constant() -> float:
        optimizer.zero_grad()
        model(torch.ones(1, 1).double()).sum().backward()
        return float(hvd.rank())

    assert optimizer.step(constant) == (hvd.size() - 1) / 2


def _ops() -> None:
    weights = [rank + 2.0 for rank in range(hvd.size())]
    expected = {
        hvd.Average: sum(weights) / hvd.size(),
        hvd.Sum: sum(weights),
        hvd.Min: min(weights),
        hvd.Max: max(weights),
        hvd.Product: torch.tensor(weights).prod().item(),
    }
    for op, gradient in expected.items():
        parameter = torch.nn.Parameter(torch.zeros(5))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), op=op)
        (parameter * weights[hvd.rank()]).sum().backward()
        optimizer.step()
        assert torch.allclose(parameter, torch.full((5,), -gradient))


def _compiled_model() -> None:
    model = make_model()
    optimizer = hvd.DistributedOptimizer(make_sgd(model), model.named_parameters())
    compiled = torch.compile(model, backend="eager")

    def train(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss_of(compiled, my_part(x), my_part(y)).backward()
        optimizer.step()

    for x, y in make_batches():
        train(x, y)
    assert relative_difference(flat_parameters(model), train_model(None)) < 1e-6


CASES = (
    _explicit_groups,
    _compression,
    _clipping,
    _amp,
    _closure,
    _ops,
)


@pytest.mark.parametrize("size", (1, 2, 3))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.strip("_"))
def test_optimizer(ranks, case, size):
    ranks(size).run(case)


@pytest.mark.slow
@pytest.mark.parametrize("overlap", (pytest.param("always", marks=pytest.mark.thorough), "never"))
def test_all_whether_the_engine_overlaps_or_not(fresh_ranks, overlap):
    pool = fresh_ranks(2, {"HOROVODLIKE_OVERLAP": overlap})
    for case in CASES:
        pool.run(case)


def test_compiled_model(ranks):
    ranks(2).run(_compiled_model)
