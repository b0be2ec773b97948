"""`DistributedOptimizer`: equality with one rank, its options, its rules, and what it keeps of what it wraps."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle

import pytest
import torch

import horovodlike.torch as hvd

STEPS = 20
BATCH = 24  # each rank's part can be halved


def _model(dtype: torch.dtype = torch.float64) -> torch.nn.Sequential:
    torch.manual_seed(7)
    layers = torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3)
    return torch.nn.Sequential(*layers).to(dtype)


def _batches(steps: int = STEPS, dtype: torch.dtype = torch.float64) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(11)
    random = [torch.randn(steps, BATCH, width, generator=generator, dtype=torch.float64) for width in (6, 3)]
    return list(zip(random[0].to(dtype), random[1].to(dtype), strict=True))


def _mine(whole: torch.Tensor) -> torch.Tensor:
    return whole.chunk(hvd.size())[hvd.rank()]


def _loss(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(x), y)


def _parameters(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def _sgd(model: torch.nn.Module, **options: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, **options)


def _train(wrap: dict[str, object] | None, passes: int = 1, make: object = _sgd) -> torch.Tensor:
    """Train on this rank's part of each batch, wrapped; or, with wrap=None, on the whole batch, alone."""
    model = _model()
    optimizer = make(model)
    if wrap is not None:
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), **wrap)
    for x, y in _batches():
        optimizer.zero_grad()
        part = (x, y) if wrap is None else (_mine(x), _mine(y))
        for px, py in zip(part[0].chunk(passes), part[1].chunk(passes), strict=True):
            (_loss(model, px, py) / passes).backward()
        optimizer.step()
    return _parameters(model)


def _relative_difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual - expected).norm() / expected.norm()).item()


def _equals_one_rank() -> list[tuple[str, float, bool]]:
    adam = lambda model: torch.optim.AdamW(model.parameters(), lr=0.01)  # noqa: E731
    variants = {
        "plain": ({}, 1, _sgd),
        "passes": ({"backward_passes_per_step": 2}, 2, _sgd),
        "one group": ({"groups": 1}, 1, _sgd),
        "many groups": ({"groups": 100}, 1, _sgd),
        "predivide": ({"gradient_predivide_factor": 2.0}, 1, _sgd),
        "predivide and groups": ({"gradient_predivide_factor": 4.0, "groups": 2}, 1, _sgd),
        "passes and groups": ({"backward_passes_per_step": 2, "groups": 2}, 2, _sgd),
        "AdamW": ({}, 1, adam),
    }
    report = []
    for name, (wrap, passes, make) in variants.items():
        trained = _train(wrap, passes, make)
        everywhere = hvd.allgather(trained.unsqueeze(0))
        same = all(torch.equal(everywhere[0], other) for other in everywhere)
        report.append((name, _relative_difference(trained, _train(None, passes, make)), same))
    return report


@pytest.mark.parametrize("size", (1, 2, 3, 4))
def test_equals_one_rank_with_the_whole_batch(ranks, size):
    for report in ranks(size).run(_equals_one_rank):
        for variant, difference, same_on_all_ranks in report:
            assert difference < 1e-6, variant
            assert same_on_all_ranks, variant


def _explicit_groups() -> None:
    model, alone = _model(), _train(None)
    weights = [m.weight for m in model if isinstance(m, torch.nn.Linear)]
    optimizer = hvd.DistributedOptimizer(_sgd(model), model.named_parameters(), groups=[weights, [model[0].bias]])
    assert [len(group) for group in optimizer._groups] == [3, 1]
    for x, y in _batches():
        optimizer.zero_grad()
        _loss(model, _mine(x), _mine(y)).backward()
        optimizer.step()
    assert _relative_difference(_parameters(model), alone) < 1e-6
    with pytest.warns(DeprecationWarning, match="groups"):
        optimizer = hvd.DistributedOptimizer(_sgd(_model()), num_groups=2)
    assert sorted(len(group) for group in optimizer._groups) == [3, 3]
    for wrong in (-1, 1.5, "two", [1, 2], [torch.ones(1)], [[1]]):
        with pytest.raises(ValueError, match="groups must"):
            hvd.DistributedOptimizer(_sgd(_model()), groups=wrong)
    with pytest.raises(ValueError, match="one group only"):
        hvd.DistributedOptimizer(_sgd(model), groups=[weights, weights])


def _compression() -> None:
    exact = _train(None)
    for compression, bound in ((hvd.Compression.fp16, 1e-3), (hvd.Compression.bf16, 1e-2)):
        for groups in (None, 2):
            difference = _relative_difference(_train({"compression": compression, "groups": groups}), exact)
            assert difference < bound
            assert difference > 0 or hvd.size() == 1  # fewer bits were sent


def _clipping() -> None:
    def train(distributed: bool) -> torch.Tensor:
        model = _model()
        optimizer = _sgd(model)
        if distributed:
            optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        for x, y in _batches():
            optimizer.zero_grad()
            if distributed:
                _loss(model, _mine(x), _mine(y)).backward()
                optimizer.synchronize()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                _loss(model, x, y).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                optimizer.step()
        return _parameters(model)

    assert _relative_difference(train(True), train(False)) < 1e-6
    model = _model()
    optimizer = hvd.DistributedOptimizer(_sgd(model), model.named_parameters())
    x, y = _batches(1)[0]
    _loss(model, _mine(x), _mine(y)).backward()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="skip_synchronize"):
        optimizer.step()


def _amp() -> None:
    """The pattern that scripts use with a gradient scaler; on the CPU, with autocast to bfloat16."""
    model = _model(torch.float32)
    optimizer = hvd.DistributedOptimizer(_sgd(model), model.named_parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    losses = []
    x, y = _batches(1, torch.float32)[0]
    for _ in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = _loss(model, _mine(x), _mine(y))
        scaler.scale(loss).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        losses.append(hvd.allreduce(loss.detach()).item())
    everywhere = hvd.allgather(_parameters(model).unsqueeze(0))
    assert all(torch.equal(everywhere[0], other) for other in everywhere)
    assert losses[-1] < losses[0]


def _closure() -> None:
    def train(distributed: bool) -> tuple[torch.Tensor, int]:
        model, calls = _model(), 0
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, line_search_fn="strong_wolfe")
        if distributed:
            optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        for x, y in _batches(3):
            part = (_mine(x), _mine(y)) if distributed else (x, y)

            def closure(part: tuple[torch.Tensor, torch.Tensor] = part) -> torch.Tensor:
                nonlocal calls
                calls += 1
                optimizer.zero_grad()
                loss = _loss(model, *part)
                loss.backward()
                return loss

            optimizer.step(closure)
        return _parameters(model), calls

    actual, calls = train(True)
    expected, calls_alone = train(False)
    assert calls == calls_alone > 6
    assert _relative_difference(actual, expected) < 1e-6

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


def _keeps_what_it_wraps() -> None:
    model = _model()
    plain = _sgd(model, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(plain, step_size=1, gamma=0.5)
    x, y = _batches(1)[0]
    _loss(model, x, y).backward()
    plain.step()
    calls = []
    plain.register_step_pre_hook(lambda *_: calls.append("pre"))
    plain.register_step_post_hook(lambda *_: calls.append("post"))
    momentum = [plain.state[p]["momentum_buffer"].clone() for p in model.parameters()]

    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
    assert type(optimizer) is not type(plain)
    assert type(optimizer).__name__ == "SGD"
    assert isinstance(optimizer, torch.optim.SGD)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert str(inspect.signature(optimizer.zero_grad)).replace("'", "") == str(inspect.signature(plain.zero_grad))
    for p, expected in zip(model.parameters(), momentum, strict=True):
        assert torch.equal(optimizer.state[p]["momentum_buffer"], expected)
    assert optimizer.defaults["weight_decay"] == 0.01
    optimizer.zero_grad(set_to_none=False)
    assert all(not p.grad.any() for p in model.parameters())
    _loss(model, _mine(x), _mine(y)).backward()
    optimizer.step()
    assert calls == ["pre", "post"]
    assert not torch.equal(optimizer.state[model[0].weight]["momentum_buffer"], momentum[0])
    scheduler.step()  # made for the optimizer inside
    assert optimizer.param_groups[0]["lr"] == 0.025
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.1)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.0125
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert type(copied) is torch.optim.SGD
        assert copied.param_groups[0]["weight_decay"] == 0.01
    saved = optimizer.state_dict()
    other = hvd.DistributedOptimizer(_sgd(_model()))
    other.load_state_dict(saved)
    assert other.param_groups[0]["weight_decay"] == 0.01
    with pytest.raises(ValueError, match="already"):
        hvd.DistributedOptimizer(optimizer)


def _scheduler_made_first() -> None:
    model = _model()
    plain = _sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(plain, step_size=1, gamma=0.5)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
    x, y = _batches(1)[0]
    _loss(model, x + hvd.rank(), y).backward()
    optimizer.step()
    scheduler.step()  # and no warning that step() has not been called
    assert optimizer.param_groups[0]["lr"] == 0.025
    everywhere = hvd.allgather(_parameters(model).unsqueeze(0))
    assert all(torch.equal(everywhere[0], other) for other in everywhere)


def _rules() -> None:
    model = _model()
    optimizer = hvd.DistributedOptimizer(_sgd(model), model.named_parameters())
    x, y = _batches(1)[0]
    _loss(model, x, y).backward()
    with pytest.raises(AssertionError, match="zero_grad"):
        optimizer.zero_grad()
    with pytest.raises(AssertionError, match="backward_passes_per_step"):
        _loss(model, x, y).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    hvd.broadcast_parameters(model.state_dict(), 0)  # the refused pass has changed gradients in flight

    optimizer.set_backward_passes_per_step(3)
    assert optimizer.backward_passes_per_step == 3
    assert set(optimizer._allreduce_delay.values()) == {3}
    _loss(model, x, y).backward()
    assert set(optimizer._allreduce_delay.values()) == {2}
    assert not optimizer._handles
    once = [p.grad.clone() for p in model.parameters()]
    optimizer.synchronize()  # fewer passes than announced
    assert all(torch.allclose(p.grad, g) for p, g in zip(model.parameters(), once, strict=True))
    optimizer.zero_grad()
    for _ in range(3):
        _loss(model, x, y).backward()
    assert set(optimizer._handles) == set(model.parameters())
    optimizer.synchronize()
    # Summed over the passes, averaged over the ranks.
    assert all(torch.allclose(p.grad, 3 * g) for p, g in zip(model.parameters(), once, strict=True))

    named = dict(model.named_parameters())
    assert optimizer._parameter_names == {p: name for name, p in named.items()}
    assert optimizer._requires_update == set(named.values())
    assert optimizer._groups is None
    default = hvd.DistributedOptimizer(torch.optim.SGD([{"params": [p]} for p in model.parameters()], lr=0.1))
    assert list(default._parameter_names.values()) == [f"noname.{i}.0" for i in range(6)]


def _arguments() -> None:
    model = _model()
    named = list(model.named_parameters())
    for wrong, options in (
        ("sequence of tuples", {"named_parameters": model.parameters()}),
        ("duplicates: 0.weight", {"named_parameters": [*named, named[0]]}),
        (str(id(named[0][1])), {"named_parameters": named[1:]}),
        ("backward_passes_per_step must be > 0", {"backward_passes_per_step": 0}),
        ("Average", {"gradient_predivide_factor": 2.0, "op": hvd.Sum}),
    ):
        with pytest.raises(ValueError, match=wrong):
            hvd.DistributedOptimizer(_sgd(model), **options)
    with pytest.raises(ValueError, match="Adasum knows no groups"):
        hvd.DistributedOptimizer(_sgd(model), op=hvd.Adasum, groups=2)
    with pytest.raises(ValueError, match="leave sparse_as_dense out"):
        hvd.DistributedOptimizer(_sgd(model), op=hvd.Adasum, sparse_as_dense=True)
    with pytest.raises(ValueError, match="not registered"):
        hvd.DistributedOptimizer(_sgd(model), process_set=hvd.ProcessSet([0]))


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


def _missing_gradients() -> None:
    """What one rank lacks counts as zero; what all ranks lack stays None and is moved by nothing."""
    for groups in (None, 1, 2):
        here, there, nowhere, everywhere = (torch.nn.Parameter(torch.ones(3)) for _ in range(4))
        names = zip(("here", "there", "nowhere", "everywhere"), (here, there, nowhere, everywhere), strict=True)
        plain = torch.optim.SGD([here, there, nowhere, everywhere], lr=1.0, weight_decay=0.5)
        optimizer = hvd.DistributedOptimizer(plain, names, groups=groups)
        for _ in range(3):
            optimizer.zero_grad()
            with torch.no_grad():
                for p in (here, there, nowhere, everywhere):
                    p.fill_(1.0)
            used = here if hvd.rank() == 0 else there
            (used * 2 + everywhere * 3).sum().backward()
            optimizer.step()
            n = hvd.size()
            assert nowhere.grad is None
            assert nowhere.tolist() == [1.0] * 3
            assert torch.allclose(here.grad, torch.full((3,), 2 / n))
            assert torch.allclose(everywhere.grad, torch.full((3,), 3.0))
            assert torch.allclose(here, torch.full((3,), 1 - (2 / n + 0.5)))
            if n > 1:
                assert torch.allclose(there, torch.full((3,), 1 - (2 * (n - 1) / n + 0.5)))
            else:
                assert there.grad is None
        optimizer.zero_grad()
        optimizer.step()  # no gradient at all
        assert all(p.grad is None for p in (here, there, nowhere, everywhere))
    # With Min a rank without a gradient takes no part, instead of holding it at zero.
    parameter, other = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter, other], lr=1.0), op=hvd.Min)
    (parameter * 5 + other if hvd.rank() == 0 else other).sum().backward()
    optimizer.step()
    assert parameter.tolist() == [-5.0] * 2


def _several_optimizers() -> None:
    models = {"generator": _model(), "discriminator": _model()}
    optimizers = {
        key: hvd.DistributedOptimizer(_sgd(model), [(f"{key}.{n}", p) for n, p in model.named_parameters()])
        for key, model in models.items()
    }
    x, y = _batches(1)[0]
    for _ in range(3):
        for key in models:
            optimizers[key].zero_grad()
            _loss(models[key], _mine(x), _mine(y)).backward()
        order = list(models) if hvd.rank() % 2 == 0 else list(models)[::-1]
        for key in order:  # both in flight, waited for in another order on each rank
            optimizers[key].step()
    assert torch.equal(_parameters(models["generator"]), _parameters(models["discriminator"]))
    # One that is gone leaves its parameters alone.
    gone = models["generator"]
    del optimizers["generator"]
    gc.collect()
    again = hvd.DistributedOptimizer(_sgd(gone), [(f"generator.{n}", p) for n, p in gone.named_parameters()])
    _loss(gone, x, y).backward()
    again.step()


def _strange_gradients() -> None:
    """Gradients that change their memory, layout or dtype from step to step."""
    conv = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    tied = torch.nn.Linear(4, 4)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([*conv.parameters(), *tied.parameters()], lr=0.1))
    for step in range(3):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        image = torch.full((2, 3, 5, 5), hvd.rank() + 1.0).to(memory_format=torch.channels_last)
        conv(image).sum().backward()
        tied(tied(torch.full((2, 4), hvd.rank() + 1.0))).sum().backward()
        optimizer.step()
        gradients = torch.cat([p.grad.flatten() for p in conv.parameters()])
        everywhere = hvd.allgather(gradients.unsqueeze(0))
        assert all(torch.equal(everywhere[0], other) for other in everywhere)
        assert torch.allclose(conv.weight.grad, torch.full_like(conv.weight, 18 * (hvd.size() + 1) / 2))
    transposed = torch.nn.Parameter(torch.zeros(2, 3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([transposed], lr=1.0))
    transposed.grad = torch.full((3, 2), hvd.rank() + 1.0).t()  # set by hand, without a backward pass
    optimizer.step()
    assert torch.allclose(transposed, torch.full((2, 3), -(hvd.size() + 1) / 2))
    changing = torch.nn.Parameter(torch.zeros(4))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([changing], lr=0.0))
    for size, dtype in ((4, torch.float32), (6, torch.float64), (2, torch.bfloat16)):
        changing.grad = None
        changing.data = torch.zeros(size, dtype=dtype)
        changing.sum().backward()
        optimizer.step()
        assert changing.grad.tolist() == [1.0] * size


def _added_later() -> None:
    first, second = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(4))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([first], lr=1.0))
    optimizer.add_param_group({"params": [second], "lr": 2.0})
    assert sorted(optimizer._parameter_names.values()) == ["noname.0.0", "noname.1.0"]
    ((first.sum() + second.sum()) * (hvd.rank() + 1)).backward()
    optimizer.step()
    assert torch.allclose(second, torch.full((4,), -2 * (hvd.size() + 1) / 2))


def _compiled_model() -> None:
    model = _model()
    optimizer = hvd.DistributedOptimizer(_sgd(model), model.named_parameters())
    compiled = torch.compile(model, backend="eager")

    def train(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        _loss(compiled, _mine(x), _mine(y)).backward()
        optimizer.step()

    for x, y in _batches():
        train(x, y)
    assert _relative_difference(_parameters(model), _train(None)) < 1e-6


CASES = (
    _explicit_groups,
    _compression,
    _clipping,
    _amp,
    _closure,
    _keeps_what_it_wraps,
    _scheduler_made_first,
    _rules,
    _arguments,
    _ops,
    _missing_gradients,
    _several_optimizers,
    _strange_gradients,
    _added_later,
)


@pytest.mark.parametrize("size", (1, 2, 3))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.strip("_"))
def test_optimizer(ranks, case, size):
    ranks(size).run(case)


@pytest.mark.parametrize("overlap", ("always", "never"))
def test_all_whether_the_engine_overlaps_or_not(fresh_ranks, overlap):
    pool = fresh_ranks(2, {"HOROVODLIKE_OVERLAP": overlap})
    for case in CASES:
        pool.run(case)


def test_compiled_model(ranks):
    ranks(2).run(_compiled_model)


def _different_models() -> str:
    layers = [torch.nn.Linear(2, 2) for _ in range(1 + hvd.rank())]
    model = torch.nn.Sequential(*layers)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(hvd.HorovodInternalError) as caught:
        optimizer.step()
    return str(caught.value)


def test_different_models_are_an_error_and_no_hang(fresh_ranks):
    for message in fresh_ranks(2).run(_different_models):
        assert "same model" in message
        assert "[2]" in message and "[4]" in message


def _mismatched_gradient() -> None:
    parameter, other = torch.nn.Parameter(torch.zeros(4 + hvd.rank())), torch.nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([parameter, other], lr=1.0), [("odd", parameter), ("even", other)]
    )
    (parameter.sum() + other.sum()).backward()
    with pytest.raises(hvd.HorovodInternalError, match=r"odd(?s:.*)\[4\](?s:.*)\[5\]"):
        optimizer.step()
    # The optimizer can be used again.
    with torch.no_grad():
        parameter.data = torch.zeros(4)
    optimizer.zero_grad()
    (parameter.sum() + other.sum()).backward()
    optimizer.step()
    assert parameter.tolist() == [-1.0] * 4


def test_after_an_error_the_optimizer_works_again(ranks):
    ranks(2).run(_mismatched_gradient)


def _survives_a_new_job() -> None:
    model = _model()
    optimizer = hvd.DistributedOptimizer(_sgd(model), model.named_parameters())
    x, y = _batches(1)[0]
    _loss(model, _mine(x), _mine(y)).backward()
    optimizer.step()
    optimizer.zero_grad()
    hvd.barrier()
    if hvd.rank() == 1:
        hvd.shutdown()
    with pytest.raises((hvd.HorovodInternalError, ValueError)):
        for _ in range(1000):
            _loss(model, _mine(x) if hvd.is_initialized() else x, _mine(y) if hvd.is_initialized() else y).backward()
            optimizer.step()
            optimizer.zero_grad()
    hvd.shutdown()
    hvd.init()
    hvd.broadcast_parameters(model.state_dict(), 0)
    hvd.broadcast_optimizer_state(optimizer, 0)
    optimizer.zero_grad()
    for _ in range(3):
        _loss(model, _mine(x), _mine(y)).backward()
        optimizer.step()
        optimizer.zero_grad()
    everywhere = hvd.allgather(_parameters(model).unsqueeze(0))
    assert all(torch.equal(everywhere[0], other) for other in everywhere)


def test_after_a_broken_job_the_optimizer_works_in_the_next(fresh_ranks):
    fresh_ranks(2).run(_survives_a_new_job)
