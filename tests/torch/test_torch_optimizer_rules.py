"""`DistributedOptimizer`: its rules, and what it keeps of what it wraps."""

from __future__ import annotations

import contextlib
import gc
import inspect

import pytest
import torch
from support.training import (
    flat_parameters,
    loss_of,
    make_batches,
    make_model,
    make_sgd,
    my_part,
)
from torch.utils.checkpoint import checkpoint

import horovodlike.torch as hvd
from horovodlike._engine.ops import counters


def _keeps_what_it_wraps() -> None:
    model = make_model()
    plain = make_sgd(model, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(plain, step_size=1, gamma=0.5)
    x, y = make_batches(1)[0]
    loss_of(model, x, y).backward()
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
    loss_of(model, my_part(x), my_part(y)).backward()
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
    saved = optimizer.state_dict()
    other = hvd.DistributedOptimizer(make_sgd(make_model()))
    other.load_state_dict(saved)
    assert other.param_groups[0]["weight_decay"] == 0.01
    with pytest.raises(ValueError, match="already"):
        hvd.DistributedOptimizer(optimizer)


def _scheduler_made_first() -> None:
    model = make_model()
    plain = make_sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(plain, step_size=1, gamma=0.5)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
    x, y = make_batches(1)[0]
    loss_of(model, x + hvd.rank(), y).backward()
    optimizer.step()
    scheduler.step()  # and no warning that step() has not been called
    assert optimizer.param_groups[0]["lr"] == 0.025
    everywhere = hvd.allgather(flat_parameters(model).unsqueeze(0))
    assert all(torch.equal(everywhere[0], other) for other in everywhere)


def _warned() -> contextlib.AbstractContextManager[object]:
    """That gradients have been changed while they were being reduced, if they were."""
    told = r"changed between .* Call optimizer\.synchronize\(\) before"
    return pytest.warns(UserWarning, match=told) if hvd.size() > 1 else contextlib.nullcontext()


def _rules() -> None:
    model = make_model()
    optimizer = hvd.DistributedOptimizer(make_sgd(model), model.named_parameters())
    x, y = make_batches(1)[0]
    loss_of(model, x, y).backward()
    with pytest.raises(AssertionError, match="zero_grad"):
        optimizer.zero_grad()
    with pytest.raises(AssertionError, match="backward_passes_per_step"):
        loss_of(model, x, y).backward()
    with _warned():
        optimizer.step()
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    hvd.broadcast_parameters(model.state_dict(), 0)  # the refused pass has changed gradients in flight

    optimizer.set_backward_passes_per_step(3)
    assert optimizer.backward_passes_per_step == 3
    assert set(optimizer._allreduce_delay.values()) == {3}
    loss_of(model, x, y).backward()
    assert set(optimizer._allreduce_delay.values()) == {2}
    assert not optimizer._handles
    once = [p.grad.clone() for p in model.parameters()]
    optimizer.synchronize()  # fewer passes than announced
    assert all(torch.allclose(p.grad, g) for p, g in zip(model.parameters(), once, strict=True))
    optimizer.zero_grad()
    for _ in range(3):
        loss_of(model, x, y).backward()
    assert set(optimizer._handles) == set(model.parameters())
    optimizer.synchronize()
    # Summed over the passes, averaged over the ranks.
    assert all(torch.allclose(p.grad, 3 * g) for p, g in zip(model.parameters(), once, strict=True))

    # As scripts filter it that were written for Horovod.
    with pytest.warns(UserWarning, match=r"^optimizer\.step\(\) called without optimizer\.skip_synchronize"):
        optimizer.step()

    named = dict(model.named_parameters())
    assert optimizer._parameter_names == {p: name for name, p in named.items()}
    assert optimizer._requires_update == set(named.values())
    assert optimizer._groups is None
    default = hvd.DistributedOptimizer(torch.optim.SGD([{"params": [p]} for p in model.parameters()], lr=0.1))
    assert list(default._parameter_names.values()) == [f"noname.{i}.0" for i in range(6)]


def _arguments() -> None:
    model = make_model()
    named = list(model.named_parameters())
    for wrong, options in (
        ("sequence of tuples", {"named_parameters": model.parameters()}),
        ("duplicates: 0.weight", {"named_parameters": [*named, named[0]]}),
        (str(id(named[0][1])), {"named_parameters": named[1:]}),
        ("backward_passes_per_step must be > 0", {"backward_passes_per_step": 0}),
        ("Average", {"gradient_predivide_factor": 2.0, "op": hvd.Sum}),
    ):
        with pytest.raises(ValueError, match=wrong):
            hvd.DistributedOptimizer(make_sgd(model), **options)
    with pytest.raises(ValueError, match="Adasum knows no groups"):
        hvd.DistributedOptimizer(make_sgd(model), op=hvd.Adasum, groups=2)
    with pytest.raises(ValueError, match="leave sparse_as_dense out"):
        hvd.DistributedOptimizer(make_sgd(model), op=hvd.Adasum, sparse_as_dense=True)
    with pytest.raises(ValueError, match="not registered"):
        hvd.DistributedOptimizer(make_sgd(model), process_set=hvd.ProcessSet([0]))


def _several_optimizers() -> None:
    models = {"generator": make_model(), "discriminator": make_model()}
    optimizers = {
        key: hvd.DistributedOptimizer(make_sgd(model), [(f"{key}.{n}", p) for n, p in model.named_parameters()])
        for key, model in models.items()
    }
    x, y = make_batches(1)[0]
    for _ in range(3):
        for key in models:
            optimizers[key].zero_grad()
            loss_of(models[key], my_part(x), my_part(y)).backward()
        order = list(models) if hvd.rank() % 2 == 0 else list(models)[::-1]
        for key in order:  # both in flight, waited for in another order on each rank
            optimizers[key].step()
    assert torch.equal(flat_parameters(models["generator"]), flat_parameters(models["discriminator"]))
    # One that is gone leaves its parameters alone.
    gone = models["generator"]
    del optimizers["generator"]
    gc.collect()
    again = hvd.DistributedOptimizer(make_sgd(gone), [(f"generator.{n}", p) for n, p in gone.named_parameters()])
    loss_of(gone, x, y).backward()
    again.step()


def _added_later() -> None:
    first, second = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(4))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([first], lr=1.0))
    optimizer.add_param_group({"params": [second], "lr": 2.0})
    assert sorted(optimizer._parameter_names.values()) == ["noname.0.0", "noname.1.0"]
    ((first.sum() + second.sum()) * (hvd.rank() + 1)).backward()
    optimizer.step()
    assert torch.allclose(second, torch.full((4,), -2 * (hvd.size() + 1) / 2))


def _alone() -> None:
    """Nothing is sent if only this rank reduces."""
    sets = [hvd.add_process_set([rank]) for rank in range(hvd.size())] if hvd.size() > 1 else [hvd.global_process_set]
    model = make_model()
    optimizer = hvd.DistributedOptimizer(make_sgd(model), model.named_parameters(), process_set=sets[hvd.rank()])
    before = counters()["requests"]
    for x, y in make_batches(2):
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()
    assert counters()["requests"] == before
    assert [hvd.remove_process_set(one) for one in sets] == [hvd.size() > 1] * hvd.size()


def _equal_everywhere(value: torch.Tensor) -> bool:
    everywhere = hvd.allgather(value.detach().reshape(1, -1))
    return all(torch.equal(everywhere[0], other) for other in everywhere)


def _state_broadcast_amid_a_step() -> None:
    """Ranks that load a state reduce the same gradients as the root, which loads none."""
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.1, momentum=0.9), [("weight", parameter)])
    for step in range(4):
        optimizer.zero_grad()
        (parameter * 10.0**step).sum().backward()
        if step == 1:
            hvd.broadcast_optimizer_state(optimizer, 0)
        optimizer.step()
        assert parameter.grad.tolist() == [10.0**step] * 3


def _the_optimizer_inside_is_used() -> None:
    """A state that is loaded into it, and parameters that are added to it, count for the one around it."""
    first, second = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))
    plain = torch.optim.SGD([first], lr=1.0)
    optimizer = hvd.DistributedOptimizer(plain)
    scheduler = torch.optim.lr_scheduler.StepLR(plain, step_size=1, gamma=0.5)
    hvd.broadcast_optimizer_state(plain, 0)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups is plain.param_groups and optimizer.state is plain.state
    assert optimizer.param_groups[0]["lr"] == 0.5
    plain.add_param_group({"params": [second], "lr": 1.0})
    for _ in range(2):
        optimizer.zero_grad()
        ((first + second) * (hvd.rank() + 1.0)).sum().backward()
        optimizer.step()
    assert torch.allclose(second, torch.full((2,), -(hvd.size() + 1.0)))
    assert _equal_everywhere(first) and _equal_everywhere(second)
    third = torch.nn.Parameter(torch.zeros(2))
    optimizer.param_groups[1]["params"] = [third]  # in the place of the second
    for _ in range(2):
        optimizer.zero_grad()
        ((first + third) * (hvd.rank() + 1.0)).sum().backward()
        optimizer.step()
    assert torch.allclose(third, torch.full((2,), -(hvd.size() + 1.0)))
    optimizer.backward_passes_per_step = 2
    assert optimizer.backward_passes_per_step == 2


def _too_many_passes_that_are_caught() -> None:
    """Gradients handed over before are reduced once, and the pass too many is forgotten."""
    parameters = [torch.nn.Parameter(torch.zeros(3)) for _ in range(3)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1), op=hvd.Sum)
    sum(parameter.sum() for parameter in parameters).backward()
    parameters[-1].sum().backward()
    with pytest.raises(AssertionError, match="more backward passes"):
        optimizer.step()
    with _warned():
        optimizer.step()
    assert [parameter.grad.tolist() for parameter in parameters[:2]] == [[float(hvd.size())] * 3] * 2


def _a_parameter_in_two_checkpoints() -> None:
    """Reentrant ones make a backward pass of each checkpoint; the error names the remedy."""
    layer = torch.nn.Linear(2, 2)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(layer.parameters(), lr=0.1), layer.named_parameters())
    for reentrant in (False, True):
        x = torch.ones(1, 2, requires_grad=True)
        for _ in range(2):
            x = checkpoint(layer, x, use_reentrant=reentrant)
        with pytest.raises(AssertionError, match="use_reentrant=False") if reentrant else contextlib.nullcontext():
            x.sum().backward()
            optimizer.step()
    with _warned():
        optimizer.step()


def _gradients_changed_while_they_are_reduced() -> None:
    parameters = [torch.nn.Parameter(torch.ones(4)) for _ in range(3)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1))

    def backward() -> None:
        optimizer.zero_grad()
        sum(parameter.sum() for parameter in parameters).backward()

    for _ in range(2):
        backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        with _warned():
            optimizer.step()
    backward()
    optimizer.synchronize()
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    with optimizer.skip_synchronize():
        optimizer.step()


def _another_default_device() -> None:
    """Nothing is made on the device that the script has chosen for what it makes itself."""
    parameter, rows = torch.nn.Parameter(torch.ones(4, 3)), torch.ones(hvd.rank() + 1, 3, requires_grad=True)
    image = torch.ones(2, 3, 4, 4, requires_grad=True)
    norm = hvd.SyncBatchNorm(3)
    with torch.device("meta"):  # where no tensor has values
        for compression in (hvd.Compression.none, hvd.Compression.powersgd(rank=1), hvd.Compression.topk(ratio=0.5)):
            plain = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
            optimizer = hvd.DistributedOptimizer(plain, [("weight", parameter)], compression)
            for _ in range(2):
                optimizer.zero_grad()
                parameter.sum().backward()
                optimizer.step()
            hvd.broadcast_optimizer_state(optimizer, 0)
            optimizer.step(lambda: 1.5)
        hvd.broadcast_parameters([("weight", parameter.data)], 0)
        assert hvd.broadcast_object({"a": hvd.rank()}, 0) == {"a": 0}
        assert hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))
        hvd.check_consistency({"weight": parameter})
        hvd.allgather(rows).sum().backward()
        hvd.alltoall(rows, splits=[1] + [0] * (hvd.size() - 1))[0].sum().backward()
        norm(image).sum().backward()
        hvd.barrier()
        state = hvd.elastic.TorchState(torch.nn.ParameterList([parameter]), optimizer, epoch=0)
        state.sync()
        state.commit()
    assert not any(tensor.is_meta for tensor in (parameter.grad, rows.grad, image.grad))


CASES = (
    _keeps_what_it_wraps,
    _scheduler_made_first,
    _state_broadcast_amid_a_step,
    _the_optimizer_inside_is_used,
    _too_many_passes_that_are_caught,
    _a_parameter_in_two_checkpoints,
    _gradients_changed_while_they_are_reduced,
    _rules,
    _arguments,
    _several_optimizers,
    _added_later,
    _alone,
)


@pytest.mark.parametrize("size", (1, 2, 3))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.strip("_"))
def test_optimizer(ranks, case, size):
    ranks(size).run(case)


@pytest.mark.parametrize("size", (1, 2, 3))
def test_another_default_device(ranks, size):
    ranks(size).run(_another_default_device)


@pytest.mark.thorough
@pytest.mark.parametrize("overlap", ("always", "never"))
def test_all_whether_the_engine_overlaps_or_not(fresh_ranks, overlap):
    pool = fresh_ranks(2, {"HOROVODLIKE_OVERLAP": overlap})
    for case in CASES:
        pool.run(case)
