"""PowerSGD and top-k: what they compute and send, and that training converges."""

from __future__ import annotations

import copy

import pytest
import torch
from sklearn.datasets import load_digits
from support.reducers import (
    COLUMNS,
    METHODS,
    ROWS,
    backward_with,
    gradients_of,
    make_optimizer,
    make_parameters,
    mean_of_gradients,
    same_everywhere,
)

import horovodlike.torch as hvd


class Alone:
    """The collectives of a rank without others."""

    size = 1

    def average(self, tensors: object, name: str) -> None:
        pass

    def gather(self, tensors: list[torch.Tensor], name: str) -> list[torch.Tensor]:
        return [tensor.unsqueeze(0) for tensor in tensors]


def _applied_and_kept_is_all(method: str, dtype: torch.dtype = torch.float32) -> None:
    """The updates so far and the mean of what the ranks have kept add up to the mean of all gradients."""
    reducer, parameters = METHODS[method](), make_parameters(dtype)
    optimizer = make_optimizer(parameters, reducer)
    applied = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in parameters.items()}
    wanted = copy.deepcopy(applied)
    for step in range(5):
        optimizer.zero_grad()
        backward_with(parameters, gradients_of(step, hvd.rank(), parameters))
        optimizer.synchronize()
        assert same_everywhere([p.grad for p in parameters.values()])
        for name, mean in mean_of_gradients(step, parameters).items():
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
    parameters = make_parameters()
    exact = {
        "full rank": hvd.PowerSGD(rank=100, min_compression=0.0),
        "all elements": hvd.TopK(ratio=1.0),
        "not yet": hvd.PowerSGD(rank=1, start_step=1),
    }
    for name, reducer in exact.items():
        for op in (hvd.Average, hvd.Sum):
            optimizer = make_optimizer(parameters, copy.deepcopy(reducer), op=op)
            optimizer.zero_grad()
            backward_with(parameters, gradients_of(0, hvd.rank(), parameters))
            optimizer.synchronize()
            for key, mean in mean_of_gradients(0, parameters).items():
                expected = mean * (hvd.size() if op == hvd.Sum else 1)
                assert torch.allclose(parameters[key].grad.double(), expected, rtol=1e-4, atol=1e-5), (name, op, key)


@pytest.mark.parametrize("size", (1, 2, 3))
def test_exact_where_nothing_is_left_out(ranks, size):
    ranks(size).run(_exact)


def _sparse_sum_is_exact() -> None:
    """Gradients with no more elements than are sent arrive whole; indices of the ranks overlap."""
    parameter = torch.nn.Parameter(torch.zeros(10, 20))
    reducer = hvd.TopK(ratio=0.02)  # 4 of 200
    optimizer = make_optimizer({"p": parameter}, reducer, op=hvd.Sum)
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
    parameters = make_parameters()
    reducer = hvd.PowerSGD(rank=2, min_compression=1.0)
    optimizer = make_optimizer(parameters, reducer)
    for _ in range(3):
        optimizer.zero_grad()
        backward_with(parameters, gradients_of(0, hvd.rank(), parameters))
        optimizer.step()
    plain = ROWS + 1
    if hvd.size() > 1:
        assert reducer.bytes_sent == 3 * 4 * (2 * (ROWS + COLUMNS) + 2 * (8 + 54) + plain)
        assert reducer.bytes_uncompressed == 3 * 4 * (ROWS * COLUMNS + 8 * 54 + plain)
    else:
        assert reducer.bytes_sent == reducer.bytes_uncompressed == 0


def _zero_gradients() -> None:
    """PowerSGD's factors recover from gradients of zeros."""
    reducer, parameters = METHODS["powersgd"](), make_parameters()
    optimizer = make_optimizer(parameters, reducer)
    for scale in (0.0, 0.0, 1.0):
        optimizer.zero_grad()
        backward_with(parameters, {n: g * scale for n, g in gradients_of(0, hvd.rank(), parameters).items()})
        optimizer.synchronize()
    assert parameters["matrix"].grad.norm() > 1


CASES = (
    _sparse_sum_is_exact,
    _counts_bytes,
    _zero_gradients,
)


@pytest.mark.parametrize("size", (1, 2, 3))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.strip("_"))
def test_reducer(ranks, case, size):
    ranks(size).run(case)


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
    return loss, (logits.argmax(1) == labels).float().mean().item(), same_everywhere(list(model.parameters()))


@pytest.mark.slow
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
