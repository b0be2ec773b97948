"""SyncBatchNorm in models: training, backward passes in any order, copies, compiled models, and conversion."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings

import pytest
import torch
from support.batch_norms import (
    CHANNELS,
    assert_alike,
    assert_close,
    assert_same_gradients,
    make_pair,
    share_of,
    step_both,
)

import horovodlike.torch as hvd
from horovodlike._engine.ops import counters


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
        step_both(net, plain, whole, counts, 1e-9)
        assert_alike(net, plain, 1e-9)
    # Two forward passes before a backward pass, and the backward passes in the order of the forward passes.
    wholes = [torch.randn(sum(counts), 3, 5, 5, dtype=torch.float64) for _ in range(2)]
    net.zero_grad()
    plain.zero_grad()
    losses = [net(share_of(whole, counts)).exp().sum() for whole in wholes]
    for loss, expected in zip(losses, [plain(whole).exp().sum() for whole in wholes], strict=True):
        loss.backward()
        expected.backward()
    assert_alike(net, plain, 1e-9)
    # Activations that are computed again (and so are running statistics, of some layers).
    net.zero_grad()
    plain.zero_grad()
    checkpoint = torch.utils.checkpoint.checkpoint
    checkpoint(net, share_of(wholes[0], counts).requires_grad_(), use_reentrant=False).exp().sum().backward()
    checkpoint(plain, wholes[0].requires_grad_(), use_reentrant=False).exp().sum().backward()
    assert_same_gradients(net, plain, 1e-9)


def _training() -> None:
    net, plain = _nets()
    counts = [4] * hvd.size()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    reference = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for _ in range(4):
        whole = torch.randn(sum(counts), 3, 5, 5, dtype=torch.float64)
        for model, stepper, batch in ((net, optimizer, share_of(whole, counts)), (plain, reference, whole)):
            stepper.zero_grad()
            model(batch).exp().mean().backward()
            stepper.step()
    for name, value in plain.state_dict().items():
        assert_close(net.state_dict()[name], value, 1e-8)


def _backward_passes_in_threads() -> None:
    """In an order that differs between ranks. Each waits for its own passes of the other ranks."""
    torch.manual_seed(6)
    counts = [3] * hvd.size()
    layer, plain = make_pair((), {"affine": False})
    wholes = [torch.randn(sum(counts), CHANNELS, dtype=torch.float64, requires_grad=True) for _ in range(4)]
    mine = [share_of(whole, counts).requires_grad_() for whole in wholes]
    losses = [layer(share).exp().sum() for share in mine]
    threads = [threading.Thread(target=loss.backward) for loss in losses]
    for thread in threads if hvd.rank() % 2 else reversed(threads):
        thread.start()
    for thread in threads:
        thread.join(30)
    for share, whole in zip(mine, wholes, strict=True):
        plain(whole).exp().sum().backward()
        assert_close(share.grad, share_of(whole.grad, counts), 1e-12)


def _layers_that_only_one_rank_has() -> None:
    torch.manual_seed(7)
    counts = [3] * hvd.size()
    layers = [hvd.SyncBatchNorm(CHANNELS) for _ in range(1 + hvd.rank())]
    copies = [copy.deepcopy(layers[-1]) for _ in range(2 + hvd.rank())]
    sent = [pickle.loads(pickle.dumps(copies[-1]))]
    for layer in (layers[-1].double(), copies[-1].double(), sent[-1].double(), layers[-1]):
        assert layer.process_set is hvd.global_process_set
        whole = torch.randn(sum(counts), CHANNELS, dtype=torch.float64)
        step_both(layer, torch.nn.BatchNorm1d(CHANNELS).double(), whole, counts, 1e-12)


def _input_without_gradient() -> None:
    torch.manual_seed(8)
    counts = [3] * hvd.size()
    layer, plain = make_pair((), {})
    whole = torch.randn(sum(counts), CHANNELS, dtype=torch.float64)
    actual, expected = layer(share_of(whole, counts)), plain(whole)
    expected.exp().sum().backward()
    for rank in range(hvd.size()):  # one rank after the other: nothing is sent
        if rank == hvd.rank():
            actual.exp().sum().backward()
        hvd.barrier()
    assert_alike(layer, plain)
    with torch.no_grad():
        assert_close(layer(share_of(whole, counts)), share_of(plain(whole), counts))


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
    layer, plain = make_pair((), {})
    compiled = torch.compile(layer, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler causes some itself, which it does not show
        whole = torch.randn(sum(counts), CHANNELS, dtype=torch.float64)
        step_both(compiled, plain, whole, counts, 1e-12)
        assert_alike(layer, plain)
        assert_close(compiled.eval()(whole), plain.eval()(whole), 1e-12)


def test_in_a_compiled_model(ranks):
    ranks(2).run(_compiled)


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
