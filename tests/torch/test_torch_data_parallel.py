"""`DataParallel` on CPU devices: the parameters of one device after training, and batches of any shape."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections import OrderedDict, defaultdict, namedtuple
from functools import partial

import pytest
import torch
from support.split_batches import DEVICES, assert_same, by_parts, gradients, make_mlp

import horovodlike.torch as hvd

OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "AdamW": partial(torch.optim.AdamW, lr=0.01),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.05),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.01),
    "LBFGS": partial(torch.optim.LBFGS, lr=0.1, max_iter=4),
}
Pair = namedtuple("Pair", "first second")


def train(model, forward, make_optimizer, rows, steps=12):
    optimizer = make_optimizer(model.parameters())
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        x = torch.randn(rows, 5, generator=generator, dtype=torch.float64).to(next(model.parameters()).dtype)

        def closure(x=x):
            optimizer.zero_grad()
            loss = (forward(x) - x[:, :2]).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)


@pytest.mark.parametrize("devices", DEVICES, ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_gives_the_parameters_of_one_device(optimizer, devices):
    for rows in (12, 7, 2, 1):
        model, alone = make_mlp(), make_mlp()
        train(model, hvd.DataParallel(model, devices), OPTIMIZERS[optimizer], rows)
        train(alone, alone, OPTIMIZERS[optimizer], rows)
        assert_same(model, alone)


@pytest.mark.parametrize("devices", DEVICES, ids=str)
def test_batch_normalization_keeps_the_buffers_of_the_first_device(devices):
    def make():
        torch.manual_seed(1)
        return torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 2)).double()

    model, alone = make(), make()
    parallel = hvd.DataParallel(model, devices)
    train(model, parallel, OPTIMIZERS["SGD"], 20)
    train(alone, lambda x: by_parts(alone, x, len(devices)), OPTIMIZERS["SGD"], 20)
    assert_same(model, alone)
    assert model[1].num_batches_tracked == 12
    x = torch.randn(9, 5, dtype=torch.float64)
    parallel.eval()  # all replicas have the running statistics of the first
    torch.testing.assert_close(parallel(x), alone.eval()(x))
    assert_same(model, alone)


class Everything(torch.nn.Module):
    """Takes and returns nested values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)

    def forward(self, batch, pair, *, scale, options):
        assert (
            type(batch["rows"]) is list and type(pair) is Pair and options["mode"] == "fast" and options["none"] is None
        )
        total = self.linear(batch["rows"][0]) + batch["rows"][1] * scale + pair.first[0] + options["shift"]
        result = OrderedDict(total=total, parts=[total * 2, (total * 3, None)], pair=Pair(total.sum(1), "name"))
        return {"result": result, "count": 7, "mean": total.mean()}


@pytest.mark.parametrize("devices", DEVICES, ids=str)
def test_nested_values_and_keywords(devices):
    module, x = Everything(), torch.randn(8, 3)
    batch, pair = {"rows": [x, x + 1], "text": "abc"}, Pair((torch.ones(8, 3), 5), object())
    arguments = {"scale": 0.5, "options": defaultdict(int, mode="fast", none=None, shift=torch.arange(8.0).view(8, 1))}
    expected, actual = module(batch, pair, **arguments), hvd.DataParallel(module, devices)(batch, pair, **arguments)
    assert actual["mean"].shape == (min(len(devices), 4),) and actual["count"] == 7
    shares = torch.tensor([float(len(part)) for part in x.chunk(len(devices))]) / len(x)
    torch.testing.assert_close((actual["mean"] * shares).sum(), expected["mean"])
    actual, expected = actual["result"], expected["result"]
    assert type(actual) is OrderedDict and type(actual["parts"]) is list and type(actual["pair"]) is Pair
    torch.testing.assert_close(actual["total"], expected["total"])
    torch.testing.assert_close(actual["parts"][1][0], expected["parts"][1][0])
    torch.testing.assert_close(actual["pair"].first, expected["pair"].first)
    assert actual["parts"][1][1] is None and actual["pair"].second == "name"


def test_another_dimension_and_devices_of_outputs():
    module = torch.nn.LSTM(4, 6, num_layers=2).double()
    x = torch.randn(7, 5, 4, dtype=torch.float64)
    for devices in DEVICES:
        parallel = hvd.DataParallel(module, devices, output_device="cpu", dim=1)
        expected, actual = module(x), parallel(x)
        torch.testing.assert_close(actual, expected)
        actual[0].square().sum().backward()
        mine = gradients(module)
        module.zero_grad()
        expected[0].square().sum().backward()
        torch.testing.assert_close(mine, gradients(module))
        module.zero_grad()
        torch.testing.assert_close(hvd.DataParallel(module, devices, dim=-2)(x), expected)


def test_inputs_without_tensors():
    class Fill(torch.nn.Module):
        def forward(self, rows=1):
            return torch.ones(rows)

    parallel = hvd.DataParallel(Fill(), ["cpu"] * 3)
    assert parallel().tolist() == [1.0]  # by the first device alone
    assert parallel(2).tolist() == parallel(rows=2).tolist() == [1.0] * 6


@pytest.mark.parametrize("devices", DEVICES, ids=str)
def test_gradients_of_inputs_and_of_gradients(devices):
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()
    parallel = hvd.DataParallel(module, devices)
    x = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)

    def penalty(forward):
        module.zero_grad()
        (gradient,) = torch.autograd.grad(forward(x).sum(), x, create_graph=True)
        weights = torch.autograd.grad(forward(x).square().sum(), [*module.parameters()], create_graph=True)
        (gradient.square().sum() + sum(each.square().sum() for each in weights)).backward()
        return [gradient.detach(), *gradients(module)]

    torch.testing.assert_close(penalty(parallel), penalty(module))


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex128])
def test_dtypes(dtype):
    module = make_mlp(dtype)
    x = torch.randn(9, 5).to(dtype)
    tolerance = {torch.bfloat16: 0.05, torch.float16: 0.01}.get(dtype, 1e-5)
    for devices in DEVICES:
        expected, actual = module(x), hvd.DataParallel(module, devices)(x)
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
        results = []
        for output in (actual, expected):
            module.zero_grad()
            output.abs().sum().backward()
            results.append(gradients(module))
        torch.testing.assert_close(*results, rtol=tolerance, atol=tolerance)


def test_state_dict_copies_and_pickles():
    model = make_mlp()
    parallel = hvd.DataParallel(model, ["cpu", "cpu"])
    x = torch.randn(4, 5, dtype=torch.float64)
    expected = parallel(x)
    assert list(parallel.state_dict()) == [f"module.{name}" for name in model.state_dict()]
    for other in (copy.deepcopy(parallel), pickle.loads(pickle.dumps(parallel))):
        assert torch.equal(other(x), expected) and other.device_ids == parallel.device_ids
        other.load_state_dict({name: value + 1 for name, value in parallel.state_dict().items()})
        assert not torch.equal(other(x), expected) and torch.equal(parallel(x), expected)


@pytest.mark.parametrize("devices", DEVICES, ids=str)
def test_the_same_bits_in_each_run(devices):
    results = []
    for _ in range(2):
        model = make_mlp(torch.float32)
        train(model, hvd.DataParallel(model, devices), OPTIMIZERS["SGD"], 40)
        results.append(model.state_dict())
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name]), name


def test_a_forked_process_has_threads_of_its_own():
    script = """
import os, torch, horovodlike.torch as hvd
torch.set_num_threads(1)
parallel, x = hvd.DataParallel(torch.nn.Linear(2, 1), ["cpu", "cpu"]), torch.ones(4, 2)
expected = parallel(x)
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(parallel(x), expected) else 1)
assert os.waitpid(child, 0)[1] == 0 and torch.equal(parallel(x), expected)
"""
    assert subprocess.run([sys.executable, "-P", "-c", script], timeout=60).returncode == 0


def test_one_device_or_none():
    model, x = make_mlp(), torch.randn(3, 5, dtype=torch.float64)
    for devices in (["cpu"], None) if not torch.cuda.is_available() else (["cpu"],):
        parallel = hvd.DataParallel(model, devices)
        assert torch.equal(parallel(x), model(x))
        assert parallel(x).grad_fn is not None and list(parallel.state_dict())[0] == "module.0.weight"


def _on_top_of_distributed_optimizer(devices, find_names):
    model, alone = make_mlp(), make_mlp()
    for parameter in model.parameters():
        parameter.data.add_(hvd.rank())  # which the broadcast undoes
    parallel = hvd.DataParallel(model, devices)
    hvd.broadcast_parameters(parallel.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(parallel.parameters(), lr=0.1, momentum=0.9),
        named_parameters=parallel.named_parameters() if find_names else None,
    )
    plain = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(0)
    for _ in range(8):
        x = torch.randn(6 * hvd.size(), 5, dtype=torch.float64)
        optimizer.zero_grad()
        parallel(x.chunk(hvd.size())[hvd.rank()]).square().mean().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        optimizer.step()
        plain.zero_grad()
        alone(x).square().mean().backward()
        plain.step()
    assert_same(model, alone)
    hvd.check_consistency(model)


@pytest.mark.parametrize("size", (1, 2, 3))
def test_with_distributed_optimizer(ranks, size):
    for devices in DEVICES[1:3]:
        ranks(size).run(_on_top_of_distributed_optimizer, devices, True)
    ranks(size).run(_on_top_of_distributed_optimizer, ["cpu", "cpu"], False)
