"""PowerSGD, top-k and reducers of one's own: what they compute, what they remember, and that training converges."""

from __future__ import annotations

import copy
import hashlib

import pytest
import torch
from sklearn.datasets import load_digits

import horovodlike.torch as hvd
from horovodlike.torch.compression import Collectives

# Every reducer of the package, so that its gradients of 2-D parameters below are compressed.
METHODS = {
    "powersgd": lambda **options: hvd.PowerSGD(rank=2, min_compression=1.0, **options),
    "topk": lambda **options: hvd.TopK(ratio=0.05, **options),
}
ROWS, COLUMNS = 24, 16


class Alone:
    """The collectives of a rank without others."""

    size = 1

    def average(self, tensors: object, name: str) -> None:
        pass

    def gather(self, tensors: list[torch.Tensor], name: str) -> list[torch.Tensor]:
        return [tensor.unsqueeze(0) for tensor in tensors]


def _parameters(dtype: torch.dtype = torch.float32) -> dict[str, torch.nn.Parameter]:
    shapes = {"matrix": (ROWS, COLUMNS), "kernel": (8, 6, 3, 3), "bias": (ROWS,), "scalar": ()}
    return {name: torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for name, shape in shapes.items()}


def _optimizer(parameters: dict[str, torch.nn.Parameter], reducer: object, **options: object) -> torch.optim.Optimizer:
    sgd = torch.optim.SGD(parameters.values(), lr=1.0)
    return hvd.DistributedOptimizer(sgd, parameters.items(), compression=reducer, **options)


def _gradients(step: int, rank: int, parameters: dict[str, torch.nn.Parameter]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {name: torch.randn(p.shape, generator=generator).to(p.dtype) for name, p in parameters.items()}


def _mean(step: int, parameters: dict[str, torch.nn.Parameter]) -> dict[str, torch.Tensor]:
    each = [_gradients(step, rank, parameters) for rank in range(hvd.size())]
    return {name: sum(gradients[name].double() for gradients in each) / hvd.size() for name in parameters}


def _backward(parameters: dict[str, torch.nn.Parameter], gradients: dict[str, torch.Tensor]) -> None:
    sum((parameters[name] * gradient).sum().float() for name, gradient in gradients.items()).backward()


def _same_everywhere(tensors: list[torch.Tensor]) -> bool:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return len(set(hvd.allgather_object(digest.hexdigest()))) == 1


def _applied_and_kept_is_all(method: str, dtype: torch.dtype = torch.float32) -> None:
    """What was applied so far and the mean of what the ranks have kept add up to the mean of all gradients."""
    reducer, parameters = METHODS[method](), _parameters(dtype)
    optimizer = _optimizer(parameters, reducer)
    applied = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in parameters.items()}
    wanted = copy.deepcopy(applied)
    for step in range(5):
        optimizer.zero_grad()
        _backward(parameters, _gradients(step, hvd.rank(), parameters))
        optimizer.synchronize()
        assert _same_everywhere([p.grad for p in parameters.values()])
        for name, mean in _mean(step, parameters).items():
            applied[name] += parameters[name].grad
            wanted[name] += mean
    residuals = reducer.state_dict()["residuals"]
    compressed = {"powersgd": {"matrix", "kernel"}, "topk": {"matrix", "kernel", "bias"}}[method]
    assert set(residuals) == (compressed if hvd.size() > 1 else set())
    # What is rounded is what is applied: at most half of the last bit, of each of five gradients of magnitude 4.
    tolerance = 1e-5 if dtype is torch.float32 else 5 * 4 * torch.finfo(dtype).eps
    for name in parameters:
        kept = residuals.get(name, torch.zeros(()))
        if name in residuals:
            assert kept.dtype is torch.float32
            assert kept.abs().max() > 0.1  # the compression was one
            kept = hvd.allreduce(kept.double(), name="kept")
        assert torch.allclose(applied[name] + kept, wanted[name], rtol=0, atol=tolerance), name


@pytest.mark.parametrize("size", (1, 2, 3))
@pytest.mark.parametrize("method", METHODS)
def test_what_is_applied_and_what_is_kept_add_up(ranks, method, size):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        ranks(size).run(_applied_and_kept_is_all, method, dtype)


def _exact() -> None:
    parameters = _parameters()
    exact = {
        "full rank": hvd.PowerSGD(rank=100, min_compression=0.0),
        "all elements": hvd.TopK(ratio=1.0),
        "not yet": hvd.PowerSGD(rank=1, start_step=1),
    }
    for name, reducer in exact.items():
        for op in (hvd.Average, hvd.Sum):
            optimizer = _optimizer(parameters, copy.deepcopy(reducer), op=op)
            optimizer.zero_grad()
            _backward(parameters, _gradients(0, hvd.rank(), parameters))
            optimizer.synchronize()
            for key, mean in _mean(0, parameters).items():
                expected = mean * (hvd.size() if op == hvd.Sum else 1)
                assert torch.allclose(parameters[key].grad.double(), expected, rtol=1e-4, atol=1e-5), (name, op, key)


@pytest.mark.parametrize("size", (1, 2, 3))
def test_exact_where_nothing_is_left_out(ranks, size):
    ranks(size).run(_exact)


def _sparse_sum_is_exact() -> None:
    """Gradients with no more elements than are sent arrive whole; indices of the ranks overlap."""
    parameter = torch.nn.Parameter(torch.zeros(10, 20))
    reducer = hvd.TopK(ratio=0.02)  # 4 of 200
    optimizer = _optimizer({"p": parameter}, reducer, op=hvd.Sum)
    gradient = torch.zeros(200)
    gradient[[0, 7, 50 + hvd.rank(), 199]] = torch.tensor([1.0, -2.0, 3.0, 0.5]) * (hvd.rank() + 1)
    (parameter * gradient.view(10, 20)).sum().backward()
    optimizer.synchronize()
    ones = sum(range(1, hvd.size() + 1))
    expected = torch.zeros(200)
    expected[[0, 7, 199]] = torch.tensor([1.0, -2.0, 0.5]) * ones
    for rank in range(hvd.size()):
        expected[50 + rank] = 3.0 * (rank + 1)
    assert torch.allclose(parameter.grad.flatten(), expected)
    if hvd.size() > 1:
        assert reducer.bytes_sent == 4 * (4 + 4) + 8  # and the gradient's size
        assert reducer.bytes_uncompressed == 200 * 4
        assert not reducer.state_dict()["residuals"]["p"].any()


def _counts_bytes() -> None:
    parameters = _parameters()
    reducer = hvd.PowerSGD(rank=2, min_compression=1.0)
    optimizer = _optimizer(parameters, reducer)
    for _ in range(3):
        optimizer.zero_grad()
        _backward(parameters, _gradients(0, hvd.rank(), parameters))
        optimizer.step()
    plain = ROWS + 1
    if hvd.size() > 1:
        assert reducer.bytes_sent == 3 * 4 * (2 * (ROWS + COLUMNS) + 2 * (8 + 54) + plain)
        assert reducer.bytes_uncompressed == 3 * 4 * (ROWS * COLUMNS + 8 * 54 + plain)
    else:
        assert reducer.bytes_sent == reducer.bytes_uncompressed == 0


def _missing_gradients() -> None:
    """What one rank lacks counts as zero, what it has kept is sent all the same; what all lack stays None."""
    for make in METHODS.values():
        reducer, parameters = make(), _parameters()
        optimizer = _optimizer(parameters, reducer)
        for step in range(4):
            optimizer.zero_grad()
            gradients = _gradients(step, hvd.rank(), parameters)
            del gradients["scalar"]
            if hvd.rank() == 0:
                del gradients["matrix"]
            if step % 2 == hvd.size() > 1:
                del gradients["kernel"]
            _backward(parameters, gradients)
            optimizer.step()
            assert parameters["scalar"].grad is None
            assert (parameters["kernel"].grad is None) == ("kernel" not in gradients)
            assert (parameters["matrix"].grad is None) == (hvd.size() == 1)
            assert _same_everywhere([p.grad for p in parameters.values() if p.grad is not None])
            if hvd.size() > 1 and step == 0:
                kept = hvd.allreduce(reducer.state_dict()["residuals"]["matrix"], name="kept")
                each = [_gradients(0, rank, parameters)["matrix"] for rank in range(1, hvd.size())]
                assert torch.allclose(parameters["matrix"].grad + kept, sum(each) / hvd.size(), atol=1e-5)
        optimizer.zero_grad()
        optimizer.step()  # no gradient at all
        assert all(p.grad is None for p in parameters.values())


def _passes_and_clipping() -> None:
    for make in METHODS.values():
        once, twice = _parameters(), _parameters()
        optimizers = [_optimizer(once, make()), _optimizer(twice, make(), backward_passes_per_step=2)]
        for step in range(3):
            gradients = _gradients(step, hvd.rank(), once)
            for optimizer, parameters, parts in zip(optimizers, (once, twice), (1, 2), strict=True):
                optimizer.zero_grad()
                for _ in range(parts):
                    _backward(parameters, {name: gradient / parts for name, gradient in gradients.items()})
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
                _backward(once, gradients)
            optimizers[0].step()


def _state() -> None:
    """A reducer that was loaded goes on as the one that was saved."""
    for make in METHODS.values():
        trained, parameters = make(start_step=1), _parameters()
        optimizer = _optimizer(parameters, trained)
        for step in range(3):
            optimizer.zero_grad()
            _backward(parameters, _gradients(step, hvd.rank(), parameters))
            optimizer.step()
        saved = copy.deepcopy(trained.state_dict())
        loaded, others = make(start_step=1), {n: torch.nn.Parameter(p.detach().clone()) for n, p in parameters.items()}
        loaded.load_state_dict(saved)
        other_optimizer = _optimizer(others, loaded)
        for step in range(3, 5):
            for opt, params in ((optimizer, parameters), (other_optimizer, others)):
                opt.zero_grad()
                _backward(params, _gradients(step, hvd.rank(), params))
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
                reducer, parameters = make(), _parameters()
                optimizer = _optimizer(parameters, reducer)
                for step in range(3):
                    optimizer.zero_grad()
                    gradients = _gradients(step, hvd.rank(), parameters)
                    if step == 1 and hvd.rank() == hvd.size() - 1:
                        gradients[where].view(-1)[3] = value
                    before = copy.deepcopy(reducer.state_dict())
                    _backward(parameters, gradients)
                    optimizer.synchronize()
                    assert bool(parameters[where].grad.isfinite().all()) == (step != 1)
                    if step == 1:
                        after = reducer.state_dict()
                        for kind in set(after) - {"steps"}:
                            assert before[kind].keys() == after[kind].keys()
                            assert all(torch.equal(before[kind][name], after[kind][name]) for name in after[kind])


def _zero_gradients() -> None:
    """PowerSGD's factors recover from gradients of zeros."""
    reducer, parameters = METHODS["powersgd"](), _parameters()
    optimizer = _optimizer(parameters, reducer)
    for scale in (0.0, 0.0, 1.0):
        optimizer.zero_grad()
        _backward(parameters, {n: g * scale for n, g in _gradients(0, hvd.rank(), parameters).items()})
        optimizer.synchronize()
    assert parameters["matrix"].grad.norm() > 1


def _strange_gradients() -> None:
    for make in METHODS.values():
        conv = torch.nn.Conv2d(8, 12, 3).to(memory_format=torch.channels_last)
        double = torch.nn.Parameter(torch.zeros(30, 30, dtype=torch.float64))
        empty = torch.nn.Parameter(torch.zeros(0, 4))
        embedding = torch.nn.Embedding(50, 8, sparse=True)
        parameters = {**dict(conv.named_parameters()), "double": double, "empty": empty, "rows": embedding.weight}
        reducer = make()
        optimizer = _optimizer(parameters, reducer, sparse_as_dense=True)
        for _ in range(2):
            optimizer.zero_grad()
            image = torch.full((2, 8, 5, 5), hvd.rank() + 1.0).to(memory_format=torch.channels_last)
            noise = torch.randn(30, 30, generator=torch.Generator().manual_seed(hvd.rank()), dtype=torch.float64)
            rows = embedding(torch.tensor([0, hvd.rank()]))
            (conv(image).sum() + (double * noise).sum() + empty.sum() + rows.sum()).backward()
            optimizer.step()
            assert embedding.weight.grad.is_sparse
            assert _same_everywhere([p.grad.to_dense() for p in parameters.values()])
        if hvd.size() > 1:
            assert reducer.state_dict()["residuals"]["double"].dtype is torch.float64


def _sparse_gradients_are_refused() -> None:
    for make in METHODS.values():
        embedding = torch.nn.Embedding(50, 8, sparse=True)
        optimizer = _optimizer({"rows": embedding.weight}, make())
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
    reducer, parameters = Signs(), _parameters()
    optimizer = _optimizer(parameters, reducer)
    _backward(parameters, _gradients(0, hvd.rank(), parameters))
    optimizer.step()
    if hvd.size() > 1:
        votes = sum(_gradients(0, rank, parameters)["matrix"].sign() for rank in range(hvd.size()))
        assert torch.equal(parameters["matrix"], -votes.sign())
        assert reducer.bytes_sent * 4 == reducer.bytes_uncompressed
        assert Signs.bytes_sent == 0
    reducer.load_state_dict(reducer.state_dict())
    with pytest.raises(ValueError, match="no state"):
        reducer.load_state_dict({"steps": 1})


def _arguments() -> None:
    parameters = _parameters()
    for wrong, options in (
        ("parentheses", {"reducer": hvd.PowerSGD}),
        ("parentheses", {"reducer": hvd.Compression.topk}),
        ("groups", {"reducer": hvd.TopK(), "groups": 2}),
        ("groups", {"reducer": hvd.TopK(), "groups": [[parameters["matrix"]]]}),
        ("Average and op=Sum", {"reducer": hvd.TopK(), "op": hvd.Max}),
        ("predivide", {"reducer": hvd.PowerSGD(), "gradient_predivide_factor": 2.0}),
    ):
        with pytest.raises(ValueError, match=wrong):
            _optimizer(parameters, **options)
    one, other = {"p": torch.nn.Parameter(torch.zeros(64, 64))}, {"p": torch.nn.Parameter(torch.zeros(1, 64 * 64))}
    for shared in (hvd.TopK(), hvd.PowerSGD(rank=1, min_compression=0.0)):
        for index, parameters in enumerate((one, other)):
            optimizer = _optimizer(parameters, shared)
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
            reducer, parameters = make(), _parameters()
            right = parameters[name].data
            optimizer = _optimizer(parameters, reducer)
            parameters[name].data = torch.zeros(shape)
            _backward(parameters, {n: torch.ones_like(p) for n, p in parameters.items()})
            if hvd.size() > 1:
                with pytest.raises(hvd.HorovodInternalError, match=rf"bias\.\.scalar|{name}: "):
                    optimizer.step()
            else:
                optimizer.step()
            parameters[name].data = right
            optimizer.zero_grad()
            for p in parameters.values():
                p.grad = None
            _backward(parameters, _gradients(0, hvd.rank(), parameters))
            optimizer.step()
            assert _same_everywhere([p.grad for p in parameters.values()])


CASES = (
    _disagreement,
    _sparse_sum_is_exact,
    _counts_bytes,
    _missing_gradients,
    _passes_and_clipping,
    _state,
    _not_finite,
    _zero_gradients,
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


def test_power_iteration_finds_the_best_approximation():
    """The same gradient again and again, without error feedback: the warm start converges to the largest factors."""
    matrix = torch.randn(30, 40, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    s = s * 0.5 ** torch.arange(len(s))
    matrix = u @ torch.diag(s) @ v
    reducer = hvd.PowerSGD(rank=3, min_compression=1.0)
    for _ in range(20):
        gradient = matrix.clone()
        reducer.reduce([("p", gradient)], Alone())
        state = reducer.state_dict()
        state["residuals"] = {}
        reducer.load_state_dict(state)
    best = u[:, :3] @ torch.diag(s[:3]) @ v[:3]
    assert torch.allclose(gradient, best, atol=1e-6)


def _train(method: str, images: torch.Tensor, labels: torch.Tensor) -> tuple[float, float, bool]:
    """Train an MLP on this rank's half; return the loss on everything, the accuracy, and whether the ranks agree."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    compression = {
        "none": hvd.Compression.none,
        "powersgd": hvd.Compression.powersgd(rank=2),
        "topk": hvd.Compression.topk(ratio=0.05),
    }[method]
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), compression=compression)
    generator = torch.Generator().manual_seed(2)
    for _ in range(15):
        order = torch.randperm(len(images), generator=generator)
        for batch in order.split(64):
            mine = batch[hvd.rank() :: hvd.size()]
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images[mine]), labels[mine]).backward()
            optimizer.step()
    with torch.no_grad():
        logits = model(images)
    loss = torch.nn.functional.cross_entropy(logits, labels).item()
    return loss, (logits.argmax(1) == labels).float().mean().item(), _same_everywhere(list(model.parameters()))


def test_training_converges_to_the_loss_without_compression(ranks):
    """Margin: 0.01 of cross entropy, where training begins at 2.3 and ends below 0.05."""
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    trained = {method: ranks(2).run(_train, method, images, labels) for method in ("none", "powersgd", "topk")}
    exact = trained["none"][0][0]
    assert exact < 0.05
    for method, outcomes in trained.items():
        assert outcomes[0] == outcomes[1], method
        loss, accuracy, same = outcomes[0]
        assert same, method
        assert abs(loss - exact) < 0.01, method
        assert accuracy > 0.98, method
