"""`DataParallel` and a module that changes between steps: parameters, attributes, hooks, modes, modules within it."""

from __future__ import annotations

import threading
import types

import pytest
import torch
from support.split_batches import DEVICES, gradients, make_mlp
from torch.func import functional_call
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import horovodlike.torch as hvd

X = torch.randn(9, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

pytestmark = pytest.mark.parametrize("devices", DEVICES, ids=str)


def assert_as_the_module(parallel, x=X, **options):
    """Compare outputs and gradients."""
    module, results = parallel.module, []
    for forward in (parallel, module):
        module.zero_grad()
        output = forward(x)
        if output.requires_grad:
            output.square().sum().backward()
        results.append([output.detach(), *gradients(module)])
    torch.testing.assert_close(*results, **options)
    module.zero_grad()


def test_parameters_that_are_written_to_frozen_or_replaced(devices):
    module = make_mlp()
    parallel = hvd.DataParallel(module, devices)
    assert_as_the_module(parallel)
    with torch.no_grad():
        module[0].weight.mul_(2)
    assert_as_the_module(parallel)
    module[0].weight.data.mul_(0.5)
    torch.autograd.graph.increment_version(module[0].weight)
    assert_as_the_module(parallel)
    module[2].weight.data = torch.randn(9, 9, dtype=torch.float64)
    assert_as_the_module(parallel)
    module[2].requires_grad_(False)
    assert_as_the_module(parallel)
    module[2].requires_grad_(True)
    module[4].weight = torch.nn.Parameter(torch.randn(3, 9, dtype=torch.float64))
    module[4].bias = None
    assert_as_the_module(parallel)
    module[1] = torch.nn.Linear(9, 9).double()
    assert_as_the_module(parallel)
    module.append(torch.nn.Softmax(1))
    assert_as_the_module(parallel)
    module.float()
    assert_as_the_module(parallel, X.float())
    module.requires_grad_(False)
    assert_as_the_module(parallel, X.float())


def test_parameters_that_are_tied_or_unused(devices):
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(5, 5), torch.nn.Linear(5, 5)
            self.second.weight = self.first.weight
            self.unused = torch.nn.Linear(5, 5)
            self.sometimes = torch.nn.Parameter(torch.ones(()))

        def forward(self, x):
            assert len(list(self.parameters())) == 6  # also in replicas
            y = self.second(self.first(x))
            return y * self.sometimes if bool((x == 0).any()) else y

    parallel = hvd.DataParallel(Tied().double(), devices)
    assert_as_the_module(parallel)
    parallel(X).sum().backward()
    assert parallel.module.unused.weight.grad is None and parallel.module.sometimes.grad is None
    some = X.clone()
    some[-1, 0] = 0.0  # so that only the last replica uses it
    parallel(some).sum().backward()
    assert parallel.module.sometimes.grad is not None and parallel.module.unused.bias.grad is None


def test_what_is_kept_between_steps(devices):
    class Seen(torch.nn.Linear):
        def forward(self, x):
            seen.append((int(x[0, 0]), id(self), self.weight.data_ptr(), self.weight._version))
            return super().forward(x)

    def seen_by_replicas():
        seen.clear()
        parallel(torch.arange(float(len(devices))).view(-1, 1))
        return [found[1:] for found in sorted(seen)]

    seen, module = [], Seen(1, 1)
    parallel = hvd.DataParallel(module, devices)
    first = seen_by_replicas()
    assert seen_by_replicas() == first  # nothing was copied
    for device, found in zip(devices, first, strict=True):
        assert (found[1] == module.weight.data_ptr()) == (device == devices[0])
    with torch.no_grad():
        module.weight.add_(1)
    second = seen_by_replicas()
    assert [found[:2] for found in second] == [found[:2] for found in first]  # the same modules and memory
    assert all(after[2] > before[2] for before, after in zip(first, second, strict=True))


def test_gradients_are_added_in_a_tree(devices):
    class Scale(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = torch.nn.Parameter(torch.ones(1))

        def forward(self, x):
            return x * self.factor

    rows = torch.tensor([1e8, 3.0, -1e8, 5.0, 7.0][: len(devices)])
    terms = [*rows]
    others = terms[1:]
    while len(others) > 1:
        others = [sum(others[i : i + 2][1:], others[i]) for i in range(0, len(others), 2)]
    parallel = hvd.DataParallel(Scale(), devices)
    parallel(rows).sum().backward()
    assert parallel.module.factor.grad.item() == (terms[0] + others[0]).item()


def test_sparse_gradients(devices):
    module = torch.nn.Embedding(10, 3, sparse=True)
    x = torch.arange(9) % 4
    results = []
    for forward in (hvd.DataParallel(module, devices), module):
        module.zero_grad()
        forward(x).square().sum().backward()
        assert module.weight.grad.is_sparse
        results.append(module.weight.grad.to_dense())
    torch.testing.assert_close(*results)


def test_modes(devices):
    class Modes(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(5, 5)
            self.seen = set()

        def forward(self, x):
            y = self.linear(x)
            modes = self.training, torch.is_grad_enabled(), torch.is_inference_mode_enabled(), y.dtype
            self.seen.add(modes)  # an object that the replicas share
            return y

    module = Modes()
    parallel, x = hvd.DataParallel(module, devices), X.float()

    def seen():
        module.seen.clear()
        output = parallel(x)
        (only,) = module.seen
        return *only, output.requires_grad

    assert seen() == (True, True, False, torch.float32, True)
    with torch.no_grad():
        assert seen() == (True, False, False, torch.float32, False)
    parallel.eval()
    with torch.inference_mode():
        assert seen() == (False, False, True, torch.float32, False)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            assert seen() == (False, True, False, dtype, True)
    assert_as_the_module(parallel.train(), x)


def test_a_module_made_for_inference(devices):
    with torch.inference_mode():
        parallel = hvd.DataParallel(make_mlp(), devices)
        torch.testing.assert_close(parallel(X), parallel.module(X))
        parallel.module[0].weight.mul_(2)
        torch.testing.assert_close(parallel(X), parallel.module(X))


def test_attributes(devices):
    class Counter(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.calls = 1.0, 0
            self.register_buffer("last", torch.zeros(()))

        def forward(self, x):
            assert not hasattr(self, "cache")
            if getattr(self, "_is_replica", False):
                self.cache = x  # gone in the next pass
            self.calls += 1
            self.last = self.last + 1
            return x * self.scale + self.last

    module = Counter()
    parallel = hvd.DataParallel(module, devices)
    for number in range(1, 4):
        module.scale = float(number)
        torch.testing.assert_close(parallel(X), X * number + number)
        assert module.calls == number and module.last == number  # of the first device


def test_hooks(devices):
    module = make_mlp()
    parallel = hvd.DataParallel(module, devices)
    parts = len(X.chunk(len(devices)))
    parallel(X)
    forwards, backwards, gradient_hooks, outer = [], [], [], []
    module[0].register_forward_hook(lambda module, args, output: forwards.append(args[0].shape[0]))
    module[2].register_full_backward_hook(lambda module, grads, outputs: backwards.append(outputs[0].shape[0]))
    module[0].weight.register_hook(gradient_hooks.append)
    parallel.register_forward_hook(lambda module, args, output: outer.append(output.shape[0]))
    parallel(X).square().sum().backward()
    assert sum(forwards) == sum(backwards) == 9 and len(forwards) == len(backwards) == parts
    assert outer == [9] and len(gradient_hooks) == 1  # with the sum of all replicas
    torch.testing.assert_close(gradient_hooks[0], module[0].weight.grad)


def test_modules_with_state_of_their_own(devices):
    torch.manual_seed(0)
    parametrized = parametrizations.weight_norm(torch.nn.Linear(5, 4)).double()
    for module in (
        parametrized,
        torch.nn.Sequential(
            torch.nn.Linear(5, 4).double(), torch.nn.GELU(), parametrizations.orthogonal(torch.nn.Linear(4, 4).double())
        ),
        torch.nn.GRU(5, 3, bidirectional=True, batch_first=True).double(),
    ):
        assert parametrize.is_parametrized(module) == (module is parametrized)

        def first_of(module, args, output):
            return output[0] if isinstance(output, tuple) else output

        module.register_forward_hook(first_of)
        parallel = hvd.DataParallel(module, devices)
        x = X.unsqueeze(1) if isinstance(module, torch.nn.GRU) else X
        assert_as_the_module(parallel, x)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(1.25)
        assert_as_the_module(parallel, x)


def test_a_forward_that_was_put_over_that_of_the_class(devices):
    def forward(self, x):
        self.calls += 1
        return torch.nn.Linear.forward(self, x) * 2

    module = torch.nn.Linear(5, 2).double()
    module.register_buffer("calls", torch.zeros(()))
    module.forward = types.MethodType(forward, module)
    parallel = hvd.DataParallel(module, devices)
    parallel(X)
    assert module.calls == 1
    assert_as_the_module(parallel)


def test_functional_calls(devices):
    module, other = make_mlp(), make_mlp()
    parallel = hvd.DataParallel(module, devices)
    parameters = {f"module.{name}": parameter * 2 for name, parameter in other.named_parameters()}
    functional_call(parallel, parameters, (X,)).square().sum().backward()
    mine = gradients(other)
    other.zero_grad()
    doubled = {name: parameter * 2 for name, parameter in other.named_parameters()}
    functional_call(other, doubled, (X,)).square().sum().backward()
    torch.testing.assert_close(mine, gradients(other))
    assert gradients(module) == [None] * 6
    assert_as_the_module(parallel)


def test_within_another_one(devices):
    module = make_mlp()
    inner = torch.nn.Sequential(module[0], hvd.DataParallel(module[1:], devices))
    assert_as_the_module(hvd.DataParallel(inner, ["cpu", "cpu"]))
    outer = hvd.DataParallel(inner, devices)
    expected, actual = module(X), outer(X)
    torch.testing.assert_close(actual, expected)


def test_checkpoints(devices):
    class Checkpointed(torch.nn.Module):
        def __init__(self, reentrant) -> None:
            super().__init__()
            self.body, self.reentrant = make_mlp(), reentrant

        def forward(self, x):
            return checkpoint(self.body, x, use_reentrant=self.reentrant)

    assert_as_the_module(hvd.DataParallel(Checkpointed(False), devices))
    assert_as_the_module(hvd.DataParallel(Checkpointed(True), devices), X.clone().requires_grad_())


def test_two_passes_before_a_backward_pass(devices):
    module = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4)).double()
    parallel = hvd.DataParallel(module, devices)
    module.eval()
    expected = gradients_after(module, lambda: module(X).square().sum() + module(2 * X).square().sum())
    actual = gradients_after(module, lambda: parallel(X).square().sum() + parallel(2 * X).square().sum())
    torch.testing.assert_close(actual, expected)
    module.train()
    x = torch.cat([X, X])
    (parallel(x).square().sum() + parallel(2 * x).square().sum()).backward()


def gradients_after(module, loss):
    module.zero_grad()
    loss().backward()
    return gradients(module)


def test_a_step_between_forward_and_backward_is_an_error(devices):
    module = make_mlp()
    parallel = hvd.DataParallel(module, devices)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    parallel(X).sum().backward()
    late = parallel(X).square().sum()
    optimizer.step()
    parallel(X)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        late.backward()


def test_the_part_of_a_batch_may_be_overwritten(devices):
    module = torch.nn.Sequential(torch.nn.ReLU(inplace=True), torch.nn.Linear(5, 2).double())
    results = []
    for forward in (hvd.DataParallel(module, devices), module):
        x = X.clone()
        results.append(gradients_after(module, lambda forward=forward, x=x: forward(x).square().sum()))
        assert torch.equal(x, X.relu())
    torch.testing.assert_close(*results)


def test_calls_by_several_threads(devices):
    module = make_mlp()
    parallel, expected, differences = hvd.DataParallel(module, devices), module(X), []

    def work():
        for _ in range(20):
            differences.append((parallel(X) - expected).abs().max().item())

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(differences) == 60 and max(differences) < 1e-12
