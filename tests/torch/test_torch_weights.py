"""Gradients weighted by samples: equality with one process that has the whole batch, and the rules of weights."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.training import flat_parameters, loss_of, make_model, make_sgd, relative_difference

import horovodlike.torch as hvd
from horovodlike import weighting
from horovodlike.errors import MismatchError

# The samples of the ranks in each batch. The last one is smaller, in another ratio, and has none for some of the ranks.
SIZES = ((7, 17, 2, 5), (8, 16, 3, 5), (1, 24, 5, 2), (6, 16, 4, 0), (3, 0, 5, 1))


def _batches(whole: bool) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the whole batches of this job, or this rank's parts of them."""
    generator = torch.Generator().manual_seed(3)
    for sizes in SIZES:
        of_ranks = [torch.randn(size, 9, generator=generator, dtype=torch.float64) for size in sizes[: hvd.size()]]
        rows = torch.cat(of_ranks) if whole else of_ranks[hvd.rank()]
        yield rows[:, :6], rows[:, 6:]


def _train(make: Any, model: torch.nn.Module, wrap: dict[str, Any] | None, passes: int = 1) -> torch.Tensor:
    """Train with a wrapped optimizer on this rank's parts of the batches; with `wrap=None` on whole batches, alone."""
    optimizer = make(model)
    if wrap is not None:
        optimizer = hvd.DistributedOptimizer(
            optimizer, model.named_parameters(), backward_passes_per_step=passes, **wrap
        )
    for x, y in _batches(whole=wrap is None):
        optimizer.zero_grad()
        for px, py in zip(x.tensor_split(passes), y.tensor_split(passes), strict=True):
            if wrap is not None and "weight" not in wrap:
                hvd.set_batch_weight(len(px))
            (loss_of(model, px, py) * (len(px) / max(1, len(x)))).backward()  # NaN without samples
        optimizer.step()
        assert not weighting.is_set()
    return flat_parameters(model)


def _adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def _large_model() -> torch.nn.Module:
    """Return a model with gradients that are handed over during the backward pass, where the engine overlaps."""
    torch.manual_seed(5)
    layers = torch.nn.Linear(6, 500), torch.nn.Tanh(), torch.nn.Linear(500, 500), torch.nn.Linear(500, 3)
    return torch.nn.Sequential(*layers).double()


def _check(make: Any, make_model: Any, wrap: dict[str, Any], passes: int = 1) -> None:
    if wrap.get("weight") == "sizes":
        sizes = iter(SIZES)
        wrap = {**wrap, "weight": lambda: next(sizes)[hvd.rank()]}
    trained = _train(make, make_model(), wrap, passes)
    everywhere = hvd.allgather(trained.unsqueeze(0))
    assert all(torch.equal(everywhere[0], other) for other in everywhere)
    assert relative_difference(trained, _train(make, make_model(), None)) < 1e-12, (wrap, passes)


def _equal_the_whole_batch() -> None:
    _check(make_sgd, make_model, {})
    _check(_adam, make_model, {})
    _check(make_sgd, make_model, {"weight": "sizes"})
    for options in ({"groups": 2}, {"groups": 1}, {"gradient_predivide_factor": 4.0}):
        _check(make_sgd, make_model, options)
    _check(make_sgd, make_model, {}, passes=2)
    _check(make_sgd, make_model, {"weight": "sizes"}, passes=2)


@pytest.mark.parametrize("size", (1, 2, 3, 4))
def test_uneven_batches_equal_one_process_with_the_whole_batch(ranks, size):
    ranks(size).run(_equal_the_whole_batch)


def _large_models_equal_the_whole_batch() -> None:
    _check(make_sgd, _large_model, {})
    _check(_adam, _large_model, {"groups": 2})
    _check(make_sgd, _large_model, {"weight": "sizes"}, passes=2)
    _check(make_sgd, _large_model, {}, passes=3)


def _several_passes() -> None:
    """A parameter that only the last pass reaches, one that all reach, and a collective after each pass."""
    params = _parameters(0.0, 0.0)
    optimizer = _optimizer(params, backward_passes_per_step=3)
    counts = torch.tensor([[2.0 + rank, 5.0 - rank, 1.0] for rank in range(hvd.size())]).double()
    for _ in range(2):
        optimizer.zero_grad()
        for number, own in enumerate(counts[hvd.rank()]):
            hvd.set_batch_weight(own)
            loss = params[1] * own + (params[0] if number == 2 else 0.0)
            (loss.sum() * own / counts[hvd.rank()].sum()).backward()
            hvd.barrier()
        optimizer.step()
        assert not weighting.is_set()
        expected = counts[:, -1].sum() / counts.sum(), counts.square().sum() / counts.sum()
        for param, mean in zip(params, expected, strict=True):
            assert param.grad.item() == pytest.approx(mean.item(), rel=1e-12)


def _handed_over_early() -> bool:
    """Return whether a weighted gradient was handed over before `step`."""
    model = _large_model()
    optimizer = hvd.DistributedOptimizer(make_sgd(model), model.named_parameters())
    hvd.set_batch_weight(hvd.rank() + 1)
    loss_of(model, torch.ones(1, 6).double(), torch.ones(1, 3).double()).backward()
    reduction, deadline = optimizer._reduction, time.monotonic() + 30
    while not reduction._submission.borrowed and time.monotonic() < deadline:
        reduction.hand_over(but_small=True)  # as hooks do
    early = bool(reduction._submission.borrowed)
    optimizer.step()
    assert not reduction._submission.borrowed
    return early


def _equal_weights_have_the_bits_of_an_average() -> None:
    results = []
    for weight in (None, 3, 12345.0):
        torch.manual_seed(hvd.rank())
        x, y = torch.randn(4, 6), torch.randn(4, 3)
        model = make_model(torch.float32)
        optimizer = hvd.DistributedOptimizer(make_sgd(model), model.named_parameters(), weight=weight)
        for _ in range(3):
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()
        results.append(flat_parameters(model))
    assert all(torch.equal(results[0], other) for other in results)


@pytest.mark.parametrize("size", (1, 2, 3))
def test_equal_weights_have_the_bits_of_an_average(ranks, size):
    ranks(size).run(_equal_weights_have_the_bits_of_an_average)


def _parameters(*values: float) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.tensor([value], dtype=torch.float64)) for value in values]


def _optimizer(params: list[torch.nn.Parameter], **options: Any) -> Any:
    return hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0), **options)


def _no_samples() -> None:
    """A rank with weight 0 contributes nothing, whatever its gradients are: None, NaN, or those of an older step."""
    mine = hvd.rank() == hvd.size() - 1
    for own in (None, float("nan"), float("inf"), 7.0):
        params = _parameters(0.0, 0.0)
        optimizer = _optimizer(params)
        hvd.set_batch_weight(0 if mine else 5)
        params[0].grad = torch.tensor([float(hvd.rank())]).double()
        if mine:
            params[0].grad = None if own is None else torch.tensor([own]).double()
            params[1].grad = torch.tensor([own or 1.0]).double()  # no rank with samples has this one
        optimizer.step()
        mean = sum(range(hvd.size() - 1)) / (hvd.size() - 1)
        assert params[0].grad.item() == pytest.approx(mean, abs=1e-15)
        assert params[0].item() == pytest.approx(-mean, abs=1e-15)
        assert params[1].grad is None


@pytest.mark.parametrize("size", (2, 3))
def test_a_rank_without_samples(ranks, size):
    ranks(size).run(_no_samples)


def _no_samples_anywhere() -> None:
    params = _parameters(1.0)
    optimizer = _optimizer(params)
    for _ in range(2):
        params[0].grad = torch.ones(1).double()
        hvd.set_batch_weight(0)
        with pytest.raises(ValueError, match=r"at least one rank must have samples.*weights is 0\.0"):
            optimizer.step()
        assert params[0].item() == 1.0
    hvd.set_batch_weight(hvd.rank())
    if hvd.size() > 1:  # the optimizer works after the error
        params[0].grad = torch.full((1,), float(hvd.rank())).double()
        optimizer.step()
        ranks = torch.arange(hvd.size()).double()
        assert params[0].item() == pytest.approx(1.0 - ((ranks * ranks).sum() / ranks.sum()).item())
    hvd.set_batch_weight(None)
    hvd.set_batch_weight(1.7e308)
    params[0].grad = torch.ones(1).double()
    if hvd.size() > 1:
        with pytest.raises(ValueError, match="weights is inf"):
            optimizer.step()
    hvd.set_batch_weight(None)


@pytest.mark.parametrize("size", (1, 2, 3))
def test_no_rank_has_samples(ranks, size):
    ranks(size).run(_no_samples_anywhere)


def _bad_weights() -> None:
    for bad in (-1, float("nan"), float("inf"), "4", None, True, [], [1, 2], 1j, torch.ones(2)):
        if bad is not None:
            with pytest.raises(ValueError, match=r"set_batch_weight: weight must be a finite number >= 0, got"):
                hvd.set_batch_weight(bad)
            if bad is not True:
                with pytest.raises(ValueError, match=r"DistributedOptimizer: weight must be a finite number >= 0"):
                    _optimizer(_parameters(0.0), weight=bad)
        params = _parameters(0.0)
        optimizer = _optimizer(params, weight=lambda bad=bad: bad)
        params[0].grad = torch.ones(1).double()
        with pytest.raises(ValueError, match="must be a finite number"):
            optimizer.step()
    assert not weighting.is_set()
    for good in (3, 3.0, torch.tensor(3), torch.tensor([3.0])[0], torch.tensor(3).numpy()):
        hvd.set_batch_weight(good)
        assert hvd.batch_weight() == 3.0
    hvd.set_batch_weight(2)
    hvd.set_batch_weight(3)
    assert hvd.batch_weight() == 5.0
    with pytest.raises(RuntimeError, match=r"call hvd\.set_batch_weight"):
        hvd.batch_weight()
    for op in (hvd.Sum, hvd.Min, hvd.Max, hvd.Product, hvd.Adasum):
        with pytest.raises(ValueError, match=r"need op=hvd\.Average, got hvd\."):
            _optimizer(_parameters(0.0), op=op, weight=3)
        params = _parameters(0.0)
        optimizer = _optimizer(params, op=op)
        params[0].grad = torch.ones(1).double()
        hvd.set_batch_weight(3)
        with pytest.raises(ValueError, match=r"need op=hvd\.Average, got hvd\."):
            optimizer.step()
        hvd.set_batch_weight(None)
        optimizer.step()
    params = _parameters(0.0)
    optimizer = _optimizer(params, weight=hvd.batch_weight)
    params[0].grad = torch.ones(1).double()
    with pytest.raises(RuntimeError, match="no weight has been set"):
        optimizer.step()


@pytest.mark.parametrize("size", (1, 2))
def test_bad_weights(ranks, size):
    ranks(size).run(_bad_weights)


def _disagreement(with_weights: list[int]) -> float:
    """Only some ranks weight their gradients; return how long the error takes."""
    model = make_model()
    named = [(f"disagreement.{name}", param) for name, param in model.named_parameters()]
    optimizer = hvd.DistributedOptimizer(make_sgd(model), named)
    if hvd.rank() in with_weights:
        hvd.set_batch_weight(3)
    start = time.monotonic()
    loss_of(model, torch.ones(1, 6).double(), torch.ones(1, 3).double()).backward()
    with pytest.raises(MismatchError, match="do only some ranks weight"):
        optimizer.step()
    return time.monotonic() - start


def _too_late() -> None:
    model = _large_model()
    optimizer = hvd.DistributedOptimizer(make_sgd(model), model.named_parameters())
    loss_of(model, torch.ones(1, 6).double(), torch.ones(1, 3).double()).backward()
    hvd.set_batch_weight(3)
    with pytest.raises(ValueError, match=r"call it before backward\(\)"):
        optimizer.step()
    assert hvd.batch_weight() == 3.0  # not used


def _too_many() -> None:
    """A third pass reaches another parameter, when the first one's gradient has been handed over."""
    for weight in (None, hvd.batch_weight):
        params = [torch.nn.Parameter(torch.zeros(1 << 18).double()) for _ in range(2)]
        named = [(f"too_many.{weight is None}.{index}", param) for index, param in enumerate(params)]
        optimizer = _optimizer(params, named_parameters=named, backward_passes_per_step=2, weight=weight)
        for reached in (params[:1], params, params[1:]):
            hvd.set_batch_weight(3)
            sum(param.sum() for param in reached).backward()
        with pytest.raises(ValueError, match="with several passes before each of backward_passes_per_step"):
            optimizer.step()
        assert hvd.batch_weight() == 3.0  # not used


@pytest.mark.parametrize("size", (2, 3))
def test_gradients_that_are_handed_over_during_the_backward_pass(fresh_ranks, size):
    pool = fresh_ranks(size, {"HOROVODLIKE_OVERLAP": "always"})
    pool.run(_large_models_equal_the_whole_batch)
    pool.run(_several_passes)
    assert pool.run(_handed_over_early) == [True] * size
    pool.run(_too_late)
    pool.run(_too_many)
    assert all(seconds < 20 for seconds in pool.run(_disagreement, [0]))


def _process_sets(sets: list[hvd.ProcessSet]) -> None:
    params = _parameters(0.0)
    mine = next((each for each in sets if each.included()), sets[0])
    optimizer = _optimizer(params, process_set=mine)
    for step in (1, 2):
        params[0].grad = torch.full((1,), float(hvd.rank())).double()
        hvd.set_batch_weight(hvd.rank() + step)
        optimizer.step()
        ranks = mine.ranks if mine.included() else [hvd.rank()]
        mean = sum((rank + step) * rank for rank in ranks) / sum(rank + step for rank in ranks)
        assert params[0].grad.item() == pytest.approx(mean, abs=1e-14)
        assert not weighting.is_set()


def _in_process_sets() -> None:
    sets = [hvd.add_process_set([0, 2]), hvd.add_process_set([1])]
    try:
        _process_sets(sets)
        _process_sets(sets[:1])
    finally:
        for each in sets:
            hvd.remove_process_set(each)


def test_process_sets(ranks):
    ranks(3).run(_in_process_sets)


def _sparse(options: dict[str, Any]) -> None:
    """An embedding with sparse gradients, which a rank without samples lacks."""
    results = []
    for whole in (False, True):
        torch.manual_seed(5)
        model = torch.nn.Sequential(torch.nn.Embedding(9, 4, sparse=True), torch.nn.Linear(4, 2)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        if not whole:
            optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)
        for step, sizes in enumerate(SIZES):
            all_rows = torch.arange(sum(sizes[: hvd.size()])) * (step + 2) % 9
            rows = all_rows if whole else all_rows.split(sizes[: hvd.size()])[hvd.rank()]
            optimizer.zero_grad()
            if not whole:
                hvd.set_batch_weight(len(rows))
            if len(rows):
                model(rows).square().mean().backward()
            optimizer.step()
        results.append(flat_parameters(model))
    assert relative_difference(*results) < 1e-12


@pytest.mark.parametrize("options", [{}, {"sparse_as_dense": True}])
def test_sparse_gradients(ranks, options):
    ranks(3).run(_sparse, options)


def _compressed() -> None:
    exact = _train(make_sgd, make_model(), None)
    reducers = (hvd.Compression.topk(ratio=1.0), hvd.Compression.powersgd(rank=64, start_step=0))
    for compression, bound in (
        (hvd.Compression.fp16, 1e-2),
        (hvd.Compression.bf16, 1e-1),
        *((each, 1e-6) for each in reducers),
    ):
        difference = relative_difference(_train(make_sgd, make_model(), {"compression": compression}), exact)
        assert difference < bound, compression
    assert relative_difference(_train(make_sgd, make_model(), {"weight": 1}), exact) > 0.01  # without the weights


def test_compression(ranks):
    ranks(2).run(_compressed)


def _joined() -> None:
    """Ranks run out of data one after the other: the weights of those that have joined do not count."""
    for sparse in (False, True):
        model = torch.nn.Embedding(3, 1, sparse=sparse).double()
        torch.nn.init.zeros_(model.weight)
        optimizer = _optimizer(list(model.parameters()))
        for step in range(hvd.rank() + 1):
            optimizer.zero_grad()
            hvd.set_batch_weight(hvd.rank() + 1)
            model(torch.tensor([0])).sum().mul(float(hvd.rank())).backward()
            optimizer.step()
            left = range(step, hvd.size())
            mean = sum((rank + 1) * rank for rank in left) / sum(rank + 1 for rank in left)
            assert model.weight.grad.to_dense()[0].item() == pytest.approx(mean, abs=1e-14)
        hvd.join()


def test_ranks_that_have_joined(ranks):
    ranks(3).run(_joined)


@pytest.mark.parametrize("size", (2, 3))
def test_with_the_other_settings(fresh_ranks, size):
    pool = fresh_ranks(size, {"HOROVODLIKE_OVERLAP": "never", "HOROVODLIKE_JOIN_AVERAGE": "all"})
    pool.run(_joined)
    pool.run(_large_models_equal_the_whole_batch)
    pool.run(_several_passes)
    assert all(seconds < 20 for seconds in pool.run(_disagreement, [1, 2]))


def _lbfgs() -> None:
    """A closure is called several times in a step, and gets the loss over all samples, too."""
    results = []
    for whole in (False, True):
        model = make_model()
        optimizer: Any = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, line_search_fn="strong_wolfe")
        if not whole:
            optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        for x, y in list(_batches(whole))[:2]:

            def closure(x: torch.Tensor = x, y: torch.Tensor = y, whole: bool = whole) -> torch.Tensor:
                optimizer.zero_grad()  # noqa: B023  # called in this iteration only
                if not whole:
                    hvd.set_batch_weight(len(x))
                loss = loss_of(model, x, y)  # noqa: B023
                loss.backward()
                return loss

            optimizer.step(closure)
        results.append(flat_parameters(model))
    assert relative_difference(*results) < 1e-9


def test_closures(ranks):
    ranks(2).run(_lbfgs)


def _unfrozen() -> None:
    """A parameter that requires a gradient later is weighted in its first step, too."""
    for weight in (None, hvd.batch_weight):
        params = _parameters(0.0, 0.0)
        params[1].requires_grad_(False)
        optimizer = _optimizer(params, weight=weight)
        for step in range(3):
            if step == 1:
                params[1].requires_grad_(True)
            for param in params[: 1 + (step > 0)]:
                param.grad = torch.full((1,), float(hvd.rank())).double()
            hvd.set_batch_weight(hvd.rank() + 1)
            optimizer.step()
            everyone = range(hvd.size())
            mean = sum((rank + 1) * rank for rank in everyone) / sum(rank + 1 for rank in everyone)
            for param in params[: 1 + (step > 0)]:
                assert param.grad.item() == pytest.approx(mean, abs=1e-14)


def test_a_parameter_that_is_unfrozen(ranks):
    ranks(2).run(_unfrozen)
    ranks(1).run(_unfrozen)


def _forgotten() -> bool:
    hvd.set_batch_weight(3)
    hvd.shutdown()
    hvd.init()
    return weighting.is_set()


def test_init_drops_the_weight(fresh_ranks):
    assert fresh_ranks(1).run(_forgotten) == [False]
