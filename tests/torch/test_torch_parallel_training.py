"""Models of split layers: training beside the unsplit model, with data parallelism, checkpoints, dropout, compiled."""

from __future__ import annotations

import contextlib
import copy
import pickle

import pytest
import torch
from support.parallel_layers import Gpt, assert_close, assert_same_parameters, compiler, parts_of, tokens
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import horovodlike.torch as hvd
from horovodlike.errors import MismatchError
from horovodlike.torch._ops import custom_ops
from horovodlike.torch.nn._region import Region, own_random_stream

STEPS = 4


def _seeded(*arguments, **options) -> Gpt:
    torch.manual_seed(11)
    return Gpt(*arguments, **options)


def _sets(width: int) -> list[hvd.ProcessSet]:
    """Register sets of neighbouring ranks; the global set if that has all of them."""
    if width == hvd.size():
        return [hvd.global_process_set]
    return [hvd.add_process_set(range(first, first + width)) for first in range(0, hvd.size(), width)]


def _own(sets: list[hvd.ProcessSet]) -> hvd.ProcessSet:
    return next(one for one in sets if one.included())


def _forget(*sets: hvd.ProcessSet) -> None:
    hvd.barrier()
    for one in sets:
        hvd.remove_process_set(one)


def _steps(model, optimizer, batches) -> list[torch.Tensor]:
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def _clipped_steps(model, optimizer, batches, clip, loss_of=lambda model, batch: model(batch)) -> list[torch.Tensor]:
    """Do as `_steps`, but clip the gradients by `clip`, and return the norms before."""
    norms = []
    for batch in batches:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        with contextlib.ExitStack() as stack:
            if hasattr(optimizer, "synchronize"):
                optimizer.synchronize()
                stack.enter_context(optimizer.skip_synchronize())
            norms.append(clip(model))
            optimizer.step()
    return norms


def _sgd(model) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _assert_equal_everywhere(model, plain) -> None:
    state = hvd.nn.full_state_dict(model)
    hvd.check_consistency(state)
    for name, value in plain.state_dict().items():
        assert_close(state[name], value)


def _small(split: bool) -> torch.nn.Module:
    torch.manual_seed(4)
    if split:
        up = hvd.nn.ColumnParallelLinear(6, 12, gather_output=False)
        down = hvd.nn.RowParallelLinear(12, 6, input_is_parallel=True)
    else:
        up, down = torch.nn.Linear(6, 12), torch.nn.Linear(12, 6)
    return torch.nn.Sequential(up, torch.nn.Tanh(), down, torch.nn.LayerNorm(6)).double()


def _clipped() -> None:
    batches = torch.randn(3, 8, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for max_norm, norm_type in ((0.2, 2.0), (0.2, 1), (0.2, 3.0), (0.05, "inf"), (1e9, 2.0)):
        model, plain = _small(split=True), _small(split=False)
        norms, expected = (
            _clipped_steps(
                each,
                _sgd(each),
                batches,
                clip,
                lambda each, batch: functional.mse_loss(each(batch), batch.roll(1, 1)),
            )
            for each, clip in (
                (model, lambda each: hvd.nn.clip_grad_norm_(each, max_norm, norm_type)),  # noqa: B023
                (plain, lambda each: torch.nn.utils.clip_grad_norm_(each.parameters(), max_norm, norm_type)),  # noqa: B023
            )
        )
        assert_close(torch.stack(norms), torch.stack(expected))
        _assert_equal_everywhere(model, plain)
    assert hvd.nn.clip_grad_norm_(_small(split=True), 1.0).item() == 0.0  # there are no gradients
    with pytest.raises(ValueError, match="norm_type must be above 0, got -inf"):
        hvd.nn.clip_grad_norm_(model, 1.0, "-inf")
    if hvd.rank() == 0:
        model[0].weight.grad[0] = float("nan")
    with pytest.raises(RuntimeError, match="the norm of the gradients is nan"):
        hvd.nn.clip_grad_norm_(model, 1.0, error_if_nonfinite=True)


def _optimizers_of_whole_parameters() -> None:
    model = _small(split=True)
    kinds = [kind for kind in ("Adafactor", "LBFGS", "Muon") if hasattr(torch.optim, kind)]
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        parts, wholes = [each[0].weight, each[2].weight], [torch.nn.Parameter(torch.ones(2, 2))]
        for parameter in (*parts, *wholes):
            parameter.grad = torch.ones_like(parameter)
        for kind in kinds:
            for wrap in (lambda optimizer: optimizer, hvd.DistributedOptimizer):
                for parameters in (parts, wholes):
                    optimizer = wrap(getattr(torch.optim, kind)(parameters))
                    before = parameters[0].clone()
                    if parameters is parts and hvd.size() > 1:
                        with pytest.raises(ValueError, match=rf"{kind} looks at whole .* of the weight of a ColumnPar"):
                            optimizer.step(lambda: 0.0)
                        assert torch.equal(parameters[0], before)
                    else:
                        optimizer.step(lambda: 0.0)


def _two_by_two() -> None:
    """Tensor parallelism on [0, 1] and [2, 3], data parallelism on [0, 2] and [1, 3]: as the unsplit model."""
    tensor_sets = _sets(2)
    data_sets = [hvd.add_process_set([first, first + 2]) for first in range(2)]
    tensor, data = _own(tensor_sets), _own(data_sets)
    model, plain = _seeded(tensor), _seeded()
    assert_same_parameters(model, plain)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), 0.01), model.named_parameters(), process_set=data
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=data.ranks[0], process_set=data)
    batches = tokens(4 * STEPS).split(4)
    losses = _steps(model, optimizer, [batch.chunk(2)[data.rank()] for batch in batches])
    expected = _steps(plain, torch.optim.Adam(plain.parameters(), 0.01), batches)
    mean = hvd.allreduce(torch.stack(losses), process_set=data)
    torch.testing.assert_close(mean, torch.stack(expected), rtol=1e-10, atol=1e-10)
    for name, value in hvd.nn.full_state_dict(model).items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-9, atol=1e-9)
    hvd.check_consistency(model, process_set=data)
    _forget(*tensor_sets, *data_sets)


def _two_by_two_clipped() -> None:
    tensor_sets = _sets(2)
    data_sets = [hvd.add_process_set([first, first + 2]) for first in range(2)]
    tensor, data = _own(tensor_sets), _own(data_sets)
    model, plain = _seeded(tensor), _seeded()
    optimizer = hvd.DistributedOptimizer(_sgd(model), model.named_parameters(), process_set=data)
    batches = tokens(4 * STEPS).split(4)
    parts = [batch.chunk(2)[data.rank()] for batch in batches]
    norms = _clipped_steps(model, optimizer, parts, lambda each: hvd.nn.clip_grad_norm_(each, 0.5))
    expected = _clipped_steps(
        plain, _sgd(plain), batches, lambda each: torch.nn.utils.clip_grad_norm_(each.parameters(), 0.5)
    )
    assert min(expected) > 0.5
    assert_close(torch.stack(norms), torch.stack(expected))
    _assert_equal_everywhere(model, plain)
    with torch.no_grad():
        model.norm.bias += tensor.rank()  # as after clipping by each rank's own norm
    hvd.check_consistency(model, process_set=data)
    with pytest.raises(MismatchError, match=r"norm\.bias: values: ranks 1, 3 differ from ranks 0, 2 \(1 of"):
        hvd.check_consistency(hvd.nn.full_state_dict(model))
    _forget(*tensor_sets, *data_sets)


def _saved_and_loaded_with_another_split() -> None:
    """Trained on all ranks, then in pairs, then alone, then unsplit: as if it had been unsplit from the beginning."""
    plain, batches = _seeded(), tokens(4 * STEPS).split(4)
    expected = _steps(plain, torch.optim.Adam(plain.parameters(), 0.01), batches)
    state = of_optimizer = None
    pairs, alone = _sets(2), _sets(1)
    for batch, loss, chosen in zip(batches, expected, (_own(_sets(4)), _own(pairs), _own(alone), None), strict=True):
        model = Gpt(chosen)
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        if state is None:
            model = _seeded(chosen)
            optimizer = torch.optim.Adam(model.parameters(), 0.01)
        else:
            assert hvd.nn.load_full_state_dict(model, state) == ([], [])
            hvd.nn.load_full_optimizer_state_dict(optimizer, model, of_optimizer)
            again = hvd.nn.full_state_dict(model)
            assert again.keys() == state.keys() and all(torch.equal(again[key], state[key]) for key in state)
        assert_close(_steps(model, optimizer, [batch])[0], loss)
        state = copy.deepcopy(hvd.nn.full_state_dict(model))
        of_optimizer = copy.deepcopy(hvd.nn.full_optimizer_state_dict(optimizer, model))
    assert state.keys() == plain.state_dict().keys()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-9)
    _forget(*pairs, *alone)


def _wrong_states() -> None:
    model = hvd.nn.ColumnParallelLinear(3, 4)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"weight has the shape \(2, 3\).*is \(4, 3\)"):
        hvd.nn.load_full_state_dict(model, {"weight": torch.zeros(2, 3), "bias": torch.zeros(4)})
    with pytest.raises(RuntimeError, match="bias"):
        hvd.nn.load_full_state_dict(model, {"weight": torch.zeros(4, 3)})
    model.load_state_dict(before)
    missing, unexpected = hvd.nn.load_full_state_dict(model, {"weight": torch.ones(4, 3), "more": 1}, strict=False)
    assert (missing, unexpected) == (["bias"], ["more"]) and model.weight.eq(1).all()


def _checkpointed() -> None:
    """Recomputation runs the collectives again, and with dropout it gets the same random numbers."""
    whole = hvd.global_process_set
    batch = tokens(4)
    for dropout in (0.0, 0.4):
        model = _seeded(whole, dropout=dropout)
        for reentrant in (None, False, True):
            torch.manual_seed(5)
            model.zero_grad(set_to_none=True)
            x = model.embedding(batch[:, :-1]) + model.position
            out = model.block(x) if reentrant is None else checkpoint(model.block, x, use_reentrant=reentrant)
            loss = model.loss(out, batch[:, 1:])
            loss.backward()
            gradients = [parameter.grad.clone() for parameter in model.parameters()]
            if reentrant is None:
                expected = [loss.detach(), *gradients]
            assert all(map(torch.equal, [loss.detach(), *gradients], expected))


def _random_streams() -> None:
    region = Region.of("Test", hvd.global_process_set)
    torch.manual_seed(8)
    torch.randint(2**48, ())
    after = torch.rand(3)
    torch.manual_seed(8)
    with own_random_stream(region, torch.device("cpu")):
        first = torch.rand(100)
    assert torch.equal(torch.rand(3), after), "the layer draws one number"
    with own_random_stream(region, torch.device("cpu")):
        second = torch.rand(100)
    streams = hvd.allgather(torch.stack([first, second]))
    assert torch.unique(streams, dim=0).shape[0] == 2 * hvd.size()
    layer = hvd.nn.ParallelSelfAttention(12, 12, dropout=0.5)
    x = torch.ones(1, 40, 12)
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outputs.append(layer(x))
    assert torch.equal(outputs[0], outputs[1]) and not torch.equal(outputs[0], outputs[2])
    hvd.check_consistency({"output": outputs[0].detach()})
    layer.eval()
    before = torch.get_rng_state()
    layer(x)
    assert torch.equal(before, torch.get_rng_state())


def _without_gradients() -> None:
    model, plain = _seeded(hvd.global_process_set), _seeded()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert_close(model(tokens(2)), plain(tokens(2)))
    model.requires_grad_(False)
    loss = model(tokens(2))
    assert not loss.requires_grad
    model.mlp.down.weight.requires_grad_()  # a frozen layer's output, in place, under one that is trained
    model(tokens(2)).backward()
    plain(tokens(2)).backward()
    assert_close(model.mlp.down.weight.grad, parts_of(model, "mlp.down.weight", plain.mlp["down"].weight.grad))


def _names_differ() -> None:
    """Each layer, and each copy of one, has names of its own; a layer is used twice in one pass."""
    layer = hvd.nn.RowParallelLinear(12, 12, process_set=hvd.global_process_set)
    layers = [layer, copy.deepcopy(layer), hvd.nn.RowParallelLinear(12, 12), hvd.nn.ColumnParallelLinear(12, 12)]
    assert len({each._region.name for each in layers}) == len(layers)
    assert layers[1].process_set is hvd.global_process_set
    x = torch.ones(2, 12, requires_grad=True)
    y = x
    for each in (layer, *layers, layer):
        y = each(y)
    y.sum().backward()
    names = [record["name"] for record in hvd.flight_recorder()]
    for each in layers[:3]:
        assert any(f"{each._region.name}.sum" in name for name in names)


def _ranks_that_disagree() -> None:
    """Another batch on one rank is an error on all of them, after which the job continues."""
    model, batch = _seeded(hvd.global_process_set), tokens(3)
    with pytest.raises(hvd.HorovodInternalError, match="shape"):
        model(batch[: 2 + (hvd.rank() == 1)])
    model(batch).backward()


CASES = (_wrong_states, _without_gradients, _names_differ, _ranks_that_disagree, _checkpointed)
ON_FOUR = (_two_by_two, _two_by_two_clipped, _saved_and_loaded_with_another_split)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("case", (_clipped, _optimizers_of_whole_parameters), ids=lambda case: case.__name__.strip("_"))
def test_whole_parameters(ranks, case, size):
    ranks(size).run(case)


@pytest.mark.slow
@pytest.mark.parametrize("overlap", ("always", "never"))
def test_clipping_with_data_parallelism(fresh_ranks, overlap):
    fresh_ranks(4, {"HOROVODLIKE_OVERLAP": overlap}).run(_two_by_two_clipped)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.strip("_"))
def test_training(ranks, case, size):
    ranks(size).run(case)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_random_streams(ranks, size):
    ranks(size).run(_random_streams)


@pytest.mark.parametrize("size", [4])
@pytest.mark.parametrize("case", ON_FOUR, ids=lambda case: case.__name__.strip("_"))
def test_on_four_ranks(ranks, case, size):
    ranks(size).run(case)


def _compiled(backend: str) -> None:
    """One graph for the whole model; and with dropout, where it breaks, the same numbers as without the compiler."""
    with compiler():
        for dropout in (0.0, 0.4):
            model = _seeded(hvd.global_process_set, dropout=dropout)
            compiled = torch.compile(model, backend=backend, fullgraph=dropout == 0.0)
            results = []
            for run in (model, compiled, compiled):
                torch.manual_seed(2)
                model.zero_grad(set_to_none=True)
                loss = run(tokens(2))
                loss.backward()
                results.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
            for result in results[1:]:
                for value, expected in zip(result, results[0], strict=True):
                    assert_close(value, expected)
        layers = torch.nn.Sequential(hvd.nn.ColumnParallelLinear(4, 6), hvd.nn.RowParallelLinear(6, 4)).double()
        x = torch.linspace(-1, 1, 8, dtype=torch.float64).reshape(2, 4)
        gradients = []
        for run in (layers, torch.compile(layers, backend=backend, fullgraph=True)):
            own = x.clone().requires_grad_()
            functional.mse_loss(run(own), x).backward()
            gradients.append(own.grad)
        assert_close(*gradients)


@pytest.mark.slow
@pytest.mark.skipif(not custom_ops.IS_AVAILABLE, reason="torch is too old for operators with effects")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.thorough)])
def test_compiled(ranks, backend):
    ranks(2).run(_compiled, backend, timeout=280)
