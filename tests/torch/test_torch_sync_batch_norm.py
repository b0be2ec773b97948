"""SyncBatchNorm over sizes, shares, shapes, dtypes and options: what torch's BatchNorm gives for the joined batch."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings
from collections.abc import Sequence

import pytest
import torch

import horovodlike.torch as hvd
from horovodlike.ops import counters

SIZES = (1, 2, 3, 4)
CHANNELS = 5
PLAIN = {0: torch.nn.BatchNorm1d, 1: torch.nn.BatchNorm1d, 2: torch.nn.BatchNorm2d, 3: torch.nn.BatchNorm3d}
SHAPES = ((), (7,), (3, 2), (2, 3, 2))  # after the batch and the channels
OPTIONS = (
    {},
    {"affine": False},
    {"track_running_stats": False},
    {"momentum": None},
    {"momentum": 0.7, "eps": 0.3},
    {"affine": False, "track_running_stats": False},
)
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}


def _share(whole: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    return whole.split(list(counts))[hvd.rank()].detach().clone()


def _close(actual: torch.Tensor | None, expected: torch.Tensor | None, tolerance: float = 1e-12) -> None:
    if actual is None or expected is None:
        assert actual is expected
        return
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance)


def _alike(layer: torch.nn.Module, plain: torch.nn.Module, tolerance: float = 1e-12) -> None:
    """The layers hold the same, and the gradients over all ranks are those of the joined batch."""
    assert layer.state_dict().keys() == plain.state_dict().keys()
    for name, value in plain.state_dict().items():
        _close(layer.state_dict()[name], value, tolerance)
    _same_gradients(layer, plain, tolerance)


def _same_gradients(layer: torch.nn.Module, plain: torch.nn.Module, tolerance: float) -> None:
    for (_, mine), (_, joined) in zip(layer.named_parameters(), plain.named_parameters(), strict=True):
        _close(hvd.allreduce(mine.grad, op=hvd.Sum), joined.grad, tolerance)


def _pair(trailing: tuple[int, ...], options: dict[str, object]) -> tuple[torch.nn.Module, torch.nn.Module]:
    """The layer and the plain one, with the same parameters."""
    layer, plain = hvd.SyncBatchNorm(CHANNELS, **options).double(), PLAIN[len(trailing)](CHANNELS, **options).double()
    for parameter in plain.parameters():
        torch.nn.init.uniform_(parameter, -2.0, 2.0)
    layer.load_state_dict(plain.state_dict())
    return layer, plain


def _step(
    layer: torch.nn.Module, plain: torch.nn.Module, whole: torch.Tensor, counts: Sequence[int], tolerance: float
) -> torch.Tensor:
    """Forward and backward through both; returns the layer's output."""
    mine, joined = _share(whole, counts).requires_grad_(), whole.clone().double().requires_grad_()
    layer.zero_grad()
    plain.zero_grad()
    actual, expected = layer(mine), plain(joined)
    direction = torch.randn_like(expected)
    assert actual.dtype == mine.dtype
    _close(actual, _share(expected, counts), tolerance)
    (actual.double() * _share(direction, counts)).sum().backward()
    (expected * direction).sum().backward()
    assert mine.grad.dtype == mine.dtype
    _close(mine.grad, _share(joined.grad, counts), tolerance)
    return actual


def _shares_of(size: int) -> list[list[int]]:
    """Equal shares, different ones, an empty one on each rank in turn, and everything on one rank."""
    with_an_empty_one = [[0 if rank == empty else 3 for rank in range(size)] for empty in range(size) if size > 1]
    return [[4] * size, [2 + rank for rank in range(size)], *with_an_empty_one, [0] * (size - 1) + [5]]


def _grid() -> None:
    torch.manual_seed(0)  # the same whole batch on all ranks
    for trailing in SHAPES:
        for options in OPTIONS:
            layer, plain = _pair(trailing, options)
            for counts in _shares_of(hvd.size()):
                whole = torch.randn(sum(counts), CHANNELS, *trailing, dtype=torch.float64) * 3 + 1
                _step(layer, plain, whole, counts, 1e-12)
                _alike(layer, plain)


def _dtypes() -> None:
    torch.manual_seed(1)
    counts = [3 + rank for rank in range(hvd.size())]
    for dtype, tolerance in TOLERANCES.items():
        for parameters in {dtype, torch.float32 if dtype is not torch.float64 else dtype}:
            layer, plain = _pair((4, 4), {})
            layer = layer.to(parameters)
            plain.load_state_dict(layer.state_dict())
            whole = torch.randn(sum(counts), CHANNELS, 4, 4).to(dtype)
            _step(layer, plain, whole, counts, tolerance)
            assert layer.weight.grad.dtype == parameters and layer.running_var.dtype == parameters
            _close(layer.running_mean, plain.running_mean, tolerance)
            _close(layer.running_var, plain.running_var, tolerance)


def _memory_formats() -> None:
    torch.manual_seed(2)
    counts = [2 + rank for rank in range(hvd.size())]
    for trailing, memory_format in (((4, 3), torch.channels_last), ((2, 3, 2), torch.channels_last_3d)):
        layer, plain = _pair(trailing, {})
        whole = torch.randn(sum(counts), CHANNELS, *trailing, dtype=torch.float64).to(memory_format=memory_format)
        assert _step(layer, plain, whole, counts, 1e-12).is_contiguous(memory_format=memory_format)
        _alike(layer, plain)
    layer, plain = _pair((6,), {})
    _step(layer, plain, torch.randn(CHANNELS, sum(counts), 6, dtype=torch.float64).transpose(0, 1), counts, 1e-12)
    mine = _share(torch.randn(sum(counts), CHANNELS, 6, dtype=torch.float64), counts).requires_grad_()
    layer(mine).sum().backward()  # whose gradient is one number, expanded
    _close(mine.grad, torch.zeros_like(mine), 1e-12)


def _a_mean_that_is_large() -> None:
    """Where sums of squares would have lost the variance: its share of them is below float32's resolution."""
    torch.manual_seed(3)
    counts = [64] * hvd.size()
    layer, plain = _pair((8,), {})
    layer = layer.float()
    plain.load_state_dict(layer.state_dict())
    whole = torch.randn(sum(counts), CHANNELS, 8) + 4096.0
    expected = plain(whole.double())
    _close(layer(_share(whole, counts)), _share(expected, counts), 5e-3)
    _close(layer.running_var, plain.running_var, 1e-3)


def _evaluation() -> None:
    torch.manual_seed(4)
    for options in OPTIONS:
        layer, plain = _pair((3,), options)
        counts = [4] * hvd.size()
        _step(layer, plain, torch.randn(4 * hvd.size(), CHANNELS, 3, dtype=torch.float64), counts, 1e-12)
        layer.eval()
        plain.eval()
        mine = torch.randn(4, CHANNELS, 3, dtype=torch.float64, requires_grad=True)
        if hvd.rank() == 0:  # would wait for the others if it sent anything
            _close(layer(mine), plain(mine), 1e-12)
            layer(mine).square().sum().backward()
    hvd.barrier()


def _nobody_has_anything() -> None:
    layer, plain = _pair((3,), {})
    mine = torch.empty(0, CHANNELS, 3, dtype=torch.float64, requires_grad=True)
    assert layer(mine).shape == plain(mine).shape
    layer(mine).sum().backward()
    assert mine.grad.shape == mine.shape
    assert layer.running_var.tolist() == [1.0] * CHANNELS and layer.num_batches_tracked.item() == 2


CASES = (_grid, _dtypes, _memory_formats, _a_mean_that_is_large, _evaluation, _nobody_has_anything)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.strip("_"))
def test_as_the_plain_layer_on_the_joined_batch(ranks, case, size):
    ranks(size).run(case)


class _Net(torch.nn.Module):
    """Several layers, of which one is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU())
        self.second = torch.nn.Sequential(torch.nn.Conv2d(4, 4, 1), torch.nn.BatchNorm2d(4, momentum=None))
        self.shared = self.second[1]
        self.last = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2, affine=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.shared(torch.tanh(self.second(self.first(x)))).mean((2, 3)))


def _nets() -> tuple[_Net, _Net]:
    torch.manual_seed(5)
    plain = _Net().double()
    return hvd.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain)), plain


def _models() -> None:
    net, plain = _nets()
    counts = [3 + rank for rank in range(hvd.size())]
    for _ in range(3):
        whole = torch.randn(sum(counts), 3, 5, 5, dtype=torch.float64)
        _step(net, plain, whole, counts, 1e-9)
        _alike(net, plain, 1e-9)
    # Two forward passes before a backward pass, and the backward passes in the order of the forward passes.
    wholes = [torch.randn(sum(counts), 3, 5, 5, dtype=torch.float64) for _ in range(2)]
    net.zero_grad()
    plain.zero_grad()
    losses = [net(_share(whole, counts)).exp().sum() for whole in wholes]
    for loss, expected in zip(losses, [plain(whole).exp().sum() for whole in wholes], strict=True):
        loss.backward()
        expected.backward()
    _alike(net, plain, 1e-9)
    # Activations that are computed again (and so are running statistics, of some layers).
    net.zero_grad()
    plain.zero_grad()
    checkpoint = torch.utils.checkpoint.checkpoint
    checkpoint(net, _share(wholes[0], counts).requires_grad_(), use_reentrant=False).exp().sum().backward()
    checkpoint(plain, wholes[0].requires_grad_(), use_reentrant=False).exp().sum().backward()
    _same_gradients(net, plain, 1e-9)


def _training() -> None:
    net, plain = _nets()
    counts = [4] * hvd.size()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    reference = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for _ in range(4):
        whole = torch.randn(sum(counts), 3, 5, 5, dtype=torch.float64)
        for model, stepper, batch in ((net, optimizer, _share(whole, counts)), (plain, reference, whole)):
            stepper.zero_grad()
            model(batch).exp().mean().backward()
            stepper.step()
    for name, value in plain.state_dict().items():
        _close(net.state_dict()[name], value, 1e-8)


def _backward_passes_in_threads() -> None:
    """In an order that differs between ranks. Each waits for its own passes of the other ranks."""
    torch.manual_seed(6)
    counts = [3] * hvd.size()
    layer, plain = _pair((), {"affine": False})
    wholes = [torch.randn(sum(counts), CHANNELS, dtype=torch.float64, requires_grad=True) for _ in range(4)]
    mine = [_share(whole, counts).requires_grad_() for whole in wholes]
    losses = [layer(share).exp().sum() for share in mine]
    threads = [threading.Thread(target=loss.backward) for loss in losses]
    for thread in threads if hvd.rank() % 2 else reversed(threads):
        thread.start()
    for thread in threads:
        thread.join(30)
    for share, whole in zip(mine, wholes, strict=True):
        plain(whole).exp().sum().backward()
        _close(share.grad, _share(whole.grad, counts), 1e-12)


def _layers_that_only_one_rank_has() -> None:
    torch.manual_seed(7)
    counts = [3] * hvd.size()
    layers = [hvd.SyncBatchNorm(CHANNELS) for _ in range(1 + hvd.rank())]
    copies = [copy.deepcopy(layers[-1]) for _ in range(2 + hvd.rank())]
    sent = [pickle.loads(pickle.dumps(copies[-1]))]
    for layer in (layers[-1].double(), copies[-1].double(), sent[-1].double(), layers[-1]):
        assert layer.process_set is hvd.global_process_set
        whole = torch.randn(sum(counts), CHANNELS, dtype=torch.float64)
        _step(layer, torch.nn.BatchNorm1d(CHANNELS).double(), whole, counts, 1e-12)


def _input_without_gradient() -> None:
    torch.manual_seed(8)
    counts = [3] * hvd.size()
    layer, plain = _pair((), {})
    whole = torch.randn(sum(counts), CHANNELS, dtype=torch.float64)
    actual, expected = layer(_share(whole, counts)), plain(whole)
    expected.exp().sum().backward()
    for rank in range(hvd.size()):  # one rank after the other: nothing is sent
        if rank == hvd.rank():
            actual.exp().sum().backward()
        hvd.barrier()
    _alike(layer, plain)
    with torch.no_grad():
        _close(layer(_share(whole, counts)), _share(plain(whole), counts))


def _known_operations() -> None:
    """Steps that are alike have operations of the same names, which the ranks need not agree on again."""
    net, _ = _nets()
    before = []
    for _ in range(5):
        before.append(counters()["negotiated_in_full"])
        net(torch.randn(2, 3, 5, 5, dtype=torch.float64)).exp().sum().backward()
    assert before[1] > before[0] and before[2:] == [before[2]] * 3, before


def _half_precision_by_autocast() -> None:
    torch.manual_seed(9)
    net = torch.nn.Sequential(torch.nn.Linear(4, CHANNELS), hvd.SyncBatchNorm(CHANNELS))
    with torch.autocast("cpu", torch.bfloat16):
        y = net(torch.randn(6, 4))
    assert y.dtype is torch.bfloat16 and net[1].running_mean.dtype is torch.float32
    y.float().square().sum().backward()
    assert net[0].weight.grad.dtype is torch.float32


USES = (
    _models,
    _training,
    _backward_passes_in_threads,
    _layers_that_only_one_rank_has,
    _input_without_gradient,
    _known_operations,
    _half_precision_by_autocast,
)


@pytest.mark.parametrize("size", (2, 3))
@pytest.mark.parametrize("case", USES, ids=lambda case: case.__name__.strip("_"))
def test_use_in_a_model(ranks, case, size):
    ranks(size).run(case)


def _compiled() -> None:
    torch.manual_seed(10)
    counts = [3] * hvd.size()
    layer, plain = _pair((), {})
    compiled = torch.compile(layer, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler causes some itself, which it does not show
        whole = torch.randn(sum(counts), CHANNELS, dtype=torch.float64)
        _step(compiled, plain, whole, counts, 1e-12)
        _alike(layer, plain)
        _close(compiled.eval()(whole), plain.eval()(whole), 1e-12)


def test_in_a_compiled_model(ranks):
    ranks(2).run(_compiled)


def _bad_inputs() -> None:
    layer = hvd.SyncBatchNorm(CHANNELS)
    for training in (True, False):
        with pytest.raises(ValueError, match=r"at least 2D input \(got 1D input\)"):
            layer.train(training)(torch.randn(CHANNELS))
    layer.train()
    with pytest.raises(ValueError, match=r"5 channels, got size \[2, 4\]"):
        layer(torch.randn(2, 4))
    # One value on all ranks together: an error on all of them, and the layer still works.
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        layer(torch.randn(1 if hvd.rank() == 1 else 0, CHANNELS))
    assert layer.num_batches_tracked.item() == 0
    with pytest.raises(hvd.HorovodInternalError, match="sync_batch_norm"):
        layer(torch.randn(3, CHANNELS, dtype=torch.float64 if hvd.rank() == 0 else torch.float32))
    assert layer(torch.randn(1, CHANNELS)).shape == (1, CHANNELS)
    x = torch.randn(2, CHANNELS, requires_grad=True)
    (gradient,) = torch.autograd.grad(layer(x).exp().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_bad_inputs(ranks):
    ranks(2).run(_bad_inputs)


def _known_by_only_one_rank() -> None:
    layers = [hvd.SyncBatchNorm(CHANNELS) for _ in range(3)]
    for layer in layers:
        layer(torch.randn(4, CHANNELS))
    hvd.shutdown()
    hvd.init()
    again = layers[2] if hvd.rank() == 0 else hvd.SyncBatchNorm(CHANNELS)
    again(torch.randn(4, CHANNELS))


def test_layers_are_numbered_anew_in_a_new_job(fresh_ranks):
    fresh_ranks(2).run(_known_by_only_one_rank)


def test_conversion_keeps_what_the_layers_hold():
    plain = torch.nn.Sequential(
        torch.nn.BatchNorm1d(3, eps=0.5, momentum=None),
        torch.nn.ModuleDict({"a": torch.nn.BatchNorm2d(4, affine=False).eval(), "b": torch.nn.Linear(1, 1)}),
        torch.nn.BatchNorm3d(5, track_running_stats=False).half(),
        torch.nn.InstanceNorm1d(3),
    )
    plain.append(plain[0])
    plain[0].weight.requires_grad_(False)
    held = {name: id(value) for name, value in plain.state_dict(keep_vars=True).items()}
    options = [(m.eps, m.momentum, m.affine, m.track_running_stats, m.training) for m in _normalizing(plain)]
    converted = hvd.SyncBatchNorm.convert_sync_batchnorm(plain)
    assert converted is plain
    assert {name: id(value) for name, value in converted.state_dict(keep_vars=True).items()} == held
    layers = _normalizing(converted)
    assert [(m.eps, m.momentum, m.affine, m.track_running_stats, m.training) for m in layers] == options
    assert [type(m) for m in layers] == [hvd.SyncBatchNorm] * 3
    assert converted[4] is converted[0] and type(converted[3]) is torch.nn.InstanceNorm1d
    assert not converted[0].weight.requires_grad
    alone = torch.nn.BatchNorm1d(2).eval()
    replacement = hvd.SyncBatchNorm.convert_sync_batchnorm(alone)
    assert type(replacement) is hvd.SyncBatchNorm and replacement.weight is alone.weight and not replacement.training
    with pytest.raises(ValueError, match="LazyBatchNorm1d has to see an input"):
        hvd.SyncBatchNorm.convert_sync_batchnorm(torch.nn.LazyBatchNorm1d())


def _normalizing(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [module for module in model.modules() if isinstance(module, torch.nn.modules.batchnorm._BatchNorm)]
