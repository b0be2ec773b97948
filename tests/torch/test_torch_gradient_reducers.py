"""PowerSGD, top-k and reducers of one's own in an optimizer: what they remember and refuse, and strange gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from support.reducers import (
    COLUMNS,
    METHODS,
    backward_with,
    gradients_of,
    make_optimizer,
    make_parameters,
    same_everywhere,
)
from torch.utils._python_dispatch import TorchDispatchMode

import horovodlike.torch as hvd
from horovodlike.torch.compression import Collectives


def _missing_gradients() -> None:
    """A gradient that one rank lacks counts as zero, but what it has kept is sent; one that all lack stays None."""
    for make in METHODS.values():
        reducer, parameters = make(), make_parameters()
        optimizer = make_optimizer(parameters, reducer)
        for step in range(4):
            optimizer.zero_grad()
            gradients = gradients_of(step, hvd.rank(), parameters)
            del gradients["scalar"]
            if hvd.rank() == 0:
                del gradients["matrix"]
            if step % 2 == hvd.size() > 1:
                del gradients["kernel"]
            backward_with(parameters, gradients)
            optimizer.step()
            assert parameters["scalar"].grad is None
            assert (parameters["kernel"].grad is None) == ("kernel" not in gradients)
            assert (parameters["matrix"].grad is None) == (hvd.size() == 1)
            assert same_everywhere([p.grad for p in parameters.values() if p.grad is not None])
            if hvd.size() > 1 and step == 0:
                kept = hvd.allreduce(reducer.state_dict()["residuals"]["matrix"], name="kept")
                each = [gradients_of(0, rank, parameters)["matrix"] for rank in range(1, hvd.size())]
                assert torch.allclose(parameters["matrix"].grad + kept, sum(each) / hvd.size(), atol=1e-5)
        optimizer.zero_grad()
        optimizer.step()  # no gradient at all
        assert all(p.grad is None for p in parameters.values())


def _passes_and_clipping() -> None:
    for make in METHODS.values():
        once, twice = make_parameters(), make_parameters()
        optimizers = [make_optimizer(once, make()), make_optimizer(twice, make(), backward_passes_per_step=2)]
        for step in range(3):
            gradients = gradients_of(step, hvd.rank(), once)
            for optimizer, parameters, parts in zip(optimizers, (once, twice), (1, 2), strict=True):
                optimizer.zero_grad()
                for _ in range(parts):
                    backward_with(parameters, {name: gradient / parts for name, gradient in gradients.items()})
                with pytest.raises(AssertionError, match="being reduced"):
                    optimizer.zero_grad()
                optimizer.synchronize()
                norm = torch.nn.utils.clip_grad_norm_(parameters.values(), 0.5)
                assert norm > 0.5
                with optimizer.skip_synchronize():
                    optimizer.step()
            for name in once:
                assert torch.allclose(once[name], twice[name], atol=1e-6)
                assert torch.equal(once[name].grad, twice[name].grad)
        with pytest.raises(AssertionError, match="backward_passes_per_step=1"):
            for _ in range(2):
                backward_with(once, gradients)
            optimizers[0].step()


def _state() -> None:
    """A reducer that was loaded goes on as the one that was saved."""
    for make in METHODS.values():
        trained, parameters = make(start_step=1), make_parameters()
        optimizer = make_optimizer(parameters, trained)
        for step in range(3):
            optimizer.zero_grad()
            backward_with(parameters, gradients_of(step, hvd.rank(), parameters))
            optimizer.step()
        saved = copy.deepcopy(trained.state_dict())
        loaded, others = make(start_step=1), {n: torch.nn.Parameter(p.detach().clone()) for n, p in parameters.items()}
        loaded.load_state_dict(saved)
        other_optimizer = make_optimizer(others, loaded)
        for step in range(3, 5):
            for opt, params in ((optimizer, parameters), (other_optimizer, others)):
                opt.zero_grad()
                backward_with(params, gradients_of(step, hvd.rank(), params))
                opt.step()
            assert all(torch.equal(parameters[name], others[name]) for name in parameters)
        assert trained.state_dict()["steps"] == loaded.state_dict()["steps"] == (5 if hvd.size() > 1 else 0)
        saved["residuals"] = {}
        make().load_state_dict(saved)
        for wrong in ({}, {"steps": 1}, {**saved, "more": {}}):
            with pytest.raises(ValueError, match="residuals"):
                make().load_state_dict(wrong)


def _not_finite() -> None:
    """An overflow on one rank is seen by all, and leaves nothing behind."""
    for make in METHODS.values():
        for value in (float("inf"), float("nan")):
            for where in ("matrix", "bias"):
                reducer, parameters = make(), make_parameters()
                optimizer = make_optimizer(parameters, reducer)
                for step in range(3):
                    optimizer.zero_grad()
                    gradients = gradients_of(step, hvd.rank(), parameters)
                    if step == 1 and hvd.rank() == hvd.size() - 1:
                        gradients[where].view(-1)[3] = value
                    before = copy.deepcopy(reducer.state_dict())
                    backward_with(parameters, gradients)
                    optimizer.synchronize()
                    assert bool(parameters[where].grad.isfinite().all()) == (step != 1)
                    if step == 1:
                        after = reducer.state_dict()
                        for kind in set(after) - {"steps"}:
                            assert before[kind].keys() == after[kind].keys()
                            assert all(torch.equal(before[kind][name], after[kind][name]) for name in after[kind])


class _Reads(TorchDispatchMode):
    """Counts how often the host looks at a value, for which it would wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function.name() == "aten::_local_scalar_dense"
        return function(*args, **kwargs or {})


def _the_host_looks_once() -> None:
    for make in METHODS.values():
        parameters = make_parameters()
        optimizer = make_optimizer(parameters, make())
        backward_with(parameters, gradients_of(0, hvd.rank(), parameters))
        with _Reads() as reads:
            optimizer.step()
        assert reads.count == (hvd.size() > 1)


def _strange_gradients() -> None:
    for make in METHODS.values():
        torch.manual_seed(0)
        conv = torch.nn.Conv2d(8, 12, 3).to(memory_format=torch.channels_last)
        double = torch.nn.Parameter(torch.zeros(30, 30, dtype=torch.float64))
        empty = torch.nn.Parameter(torch.zeros(0, 4))
        embedding = torch.nn.Embedding(50, 8, sparse=True)
        parameters = {**dict(conv.named_parameters()), "double": double, "empty": empty, "rows": embedding.weight}
        reducer = make()
        optimizer = make_optimizer(parameters, reducer, sparse_as_dense=True)
        for _ in range(2):
            optimizer.zero_grad()
            image = torch.full((2, 8, 5, 5), hvd.rank() + 1.0).to(memory_format=torch.channels_last)
            noise = torch.randn(30, 30, generator=torch.Generator().manual_seed(hvd.rank()), dtype=torch.float64)
            rows = embedding(torch.tensor([0, hvd.rank()]))
            (conv(image).sum() + (double * noise).sum() + empty.sum() + rows.sum()).backward()
            optimizer.step()
            assert embedding.weight.grad.is_sparse
            assert same_everywhere([p.grad.to_dense() for p in parameters.values()])
        if hvd.size() > 1:
            assert reducer.state_dict()["residuals"]["double"].dtype is torch.float64


def _sparse_gradients_are_refused() -> None:
    for make in METHODS.values():
        embedding = torch.nn.Embedding(50, 8, sparse=True)
        optimizer = make_optimizer({"rows": embedding.weight}, make())
        embedding(torch.tensor([0])).sum().backward()
        if hvd.size() > 1:
            with pytest.raises(ValueError, match="sparse_as_dense"):
                optimizer.step()


class Signs(hvd.GradientReducer):
    """The majority of signs; each rank sends one byte for each element."""

    def reduce(self, gradients: list[tuple[str, torch.Tensor]], ranks: Collectives) -> None:
        signs = [gradient.sign().to(torch.int8) for _, gradient in gradients]
        for (_, gradient), votes in zip(gradients, ranks.gather(signs, "signs"), strict=True):
            gradient.copy_(votes.sum(dim=0).sign())


def _own_reducer() -> None:
    reducer, parameters = Signs(), make_parameters()
    optimizer = make_optimizer(parameters, reducer)
    backward_with(parameters, gradients_of(0, hvd.rank(), parameters))
    optimizer.step()
    if hvd.size() > 1:
        votes = sum(gradients_of(0, rank, parameters)["matrix"].sign() for rank in range(hvd.size()))
        assert torch.equal(parameters["matrix"], -votes.sign())
        assert reducer.bytes_sent * 4 == reducer.bytes_uncompressed
        assert Signs.bytes_sent == 0
    reducer.load_state_dict(reducer.state_dict())
    with pytest.raises(ValueError, match="no state"):
        reducer.load_state_dict({"steps": 1})


def _arguments() -> None:
    parameters = make_parameters()
    for wrong, options in (
        ("parentheses", {"reducer": hvd.PowerSGD}),
        ("parentheses", {"reducer": hvd.Compression.topk}),
        ("groups", {"reducer": hvd.TopK(), "groups": 2}),
        ("groups", {"reducer": hvd.TopK(), "groups": [[parameters["matrix"]]]}),
        ("Average and op=Sum", {"reducer": hvd.TopK(), "op": hvd.Max}),
        ("predivide", {"reducer": hvd.PowerSGD(), "gradient_predivide_factor": 2.0}),
    ):
        with pytest.raises(ValueError, match=wrong):
            make_optimizer(parameters, **options)
    one, other = {"p": torch.nn.Parameter(torch.zeros(64, 64))}, {"p": torch.nn.Parameter(torch.zeros(1, 64 * 64))}
    for shared in (hvd.TopK(), hvd.PowerSGD(rank=1, min_compression=0.0)):
        for index, parameters in enumerate((one, other)):
            optimizer = make_optimizer(parameters, shared)
            parameters["p"].sum().backward()
            if index and hvd.size() > 1:
                with pytest.raises(ValueError, match="p: .* an object of its own"):
                    optimizer.step()
            else:
                optimizer.step()
            optimizer.zero_grad()


def _disagreement() -> None:
    """Gradients that differ in shape are an error on all ranks, after which the optimizer works."""
    for make in METHODS.values():
        for name, shape in (("bias", (7 + hvd.rank(),)), ("matrix", (20 + hvd.rank(), COLUMNS))):
            reducer, parameters = make(), make_parameters()
            right = parameters[name].data
            optimizer = make_optimizer(parameters, reducer)
            parameters[name].data = torch.zeros(shape)
            backward_with(parameters, {n: torch.ones_like(p) for n, p in parameters.items()})
            if hvd.size() > 1:
                with pytest.raises(hvd.HorovodInternalError, match=rf"bias\.\.scalar|{name}: "):
                    optimizer.step()
            else:
                optimizer.step()
            parameters[name].data = right
            optimizer.zero_grad()
            for p in parameters.values():
                p.grad = None
            backward_with(parameters, gradients_of(0, hvd.rank(), parameters))
            optimizer.step()
            assert same_everywhere([p.grad for p in parameters.values()])


CASES = (
    _disagreement,
    _missing_gradients,
    _passes_and_clipping,
    _state,
    _not_finite,
    _the_host_looks_once,
    _strange_gradients,
    _sparse_gradients_are_refused,
    _own_reducer,
    _arguments,
)


@pytest.mark.parametrize("size", (1, 2, 3))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.strip("_"))
def test_reducer(ranks, case, size):
    ranks(size).run(case)


def test_options_are_checked():
    for make, wrong, message in (
        (hvd.PowerSGD, {"rank": 0}, "rank"),
        (hvd.PowerSGD, {"min_compression": -1.0}, "min_compression"),
        (hvd.PowerSGD, {"start_step": -1}, "start_step"),
        (hvd.TopK, {"ratio": 0.0}, "ratio"),
        (hvd.TopK, {"ratio": 1.5}, "ratio"),
        (hvd.TopK, {"ratio": float("nan")}, "ratio"),
        (hvd.TopK, {"start_step": -1}, "start_step"),
    ):
        with pytest.raises(ValueError, match=message):
            make(**wrong)
