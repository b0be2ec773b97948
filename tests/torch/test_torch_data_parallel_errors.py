"""`DataParallel`: arguments, inputs, outputs and modules that cannot be used, and replicas that fail."""

from __future__ import annotations

import contextlib
import gc
import threading

import pytest
import torch
from support.split_batches import make_mlp
from torch.nn.utils.rnn import pack_sequence

import horovodlike.torch as hvd
from horovodlike.torch import HorovodInternalError

TWO = ["cpu", "cpu"]


def parallel_of(function, devices=TWO, **options):
    class Calls(torch.nn.Module):
        def forward(self, *args, **kwargs):
            return function(*args, **kwargs)

    return hvd.DataParallel(Calls(), devices, **options)


def test_devices():
    model = make_mlp()
    gpus = torch.cuda.device_count()
    for devices, words in (
        ([], "device_ids is empty"),
        (["cpu", "meta"], r"device_ids\[1\] is meta: DataParallel knows GPUs and the CPU"),
        ([gpus], rf"device_ids\[0\] is cuda:{gpus}, but torch finds {gpus} GPUs; the CPU is 'cpu'"),
    ):
        with pytest.raises(ValueError, match=words):
            hvd.DataParallel(model, devices)
    with pytest.raises(ValueError, match="output_device is cuda"):
        hvd.DataParallel(model, TWO, output_device=gpus)
    with pytest.raises(ValueError, match=r"Linear\.weight is on meta, .* call module\.to\('cpu'\)"):
        hvd.DataParallel(model.to("meta"), TWO)(torch.ones(2, 5))


@pytest.mark.parametrize(
    ("inputs", "options", "error", "words"),
    [
        ([torch.ones(())], {}, ValueError, r"shape \[\] in the input has no dimension 0"),
        ([torch.ones(3)], {"dim": 1}, ValueError, r"shape \[3\] in the input has no dimension 1"),
        ([torch.ones(4), [torch.ones(1)]], {}, ValueError, r"sizes \[1, 4\] in dimension 0, .* 2 devices get \[1, 2\]"),
        ([pack_sequence([torch.ones(2), torch.ones(1)])], {}, TypeError, "PackedSequence cannot be split"),
    ],
)
def test_inputs(inputs, options, error, words):
    with pytest.raises(error, match=words):
        parallel_of(lambda *args: args[0], **options)(*inputs)


@pytest.mark.parametrize(
    ("function", "error", "words"),
    [
        (lambda x: x.sum().item(), TypeError, "outputs of type float that differ between the replicas"),
        (lambda x: object(), TypeError, "outputs of type object that differ"),
        (lambda x: x if x[0] else [x], TypeError, "different types: list, Tensor"),
        (lambda x: {"b" if x[0] else "a": x}, ValueError, r"different keys: \[\['a'\], \['b'\]\]"),
        (lambda x: [x] * int(1 + x[0]), ValueError, r"lists of different lengths: \[1, 3\]"),
    ],
)
def test_outputs(function, error, words):
    with pytest.raises(error, match=words):
        parallel_of(function)(torch.arange(4.0))
    with pytest.raises(ValueError, match=r"replica 0 returns a tensor of shape \[\], which has no dimension 1"):
        parallel_of(lambda x: x.sum(), dim=1)(torch.ones(2, 2))


def test_modules(monkeypatch):
    x = torch.ones(4, 5)
    with pytest.raises(ValueError, match="LazyLinear has to see an input before"):
        hvd.DataParallel(torch.nn.LazyLinear(2), TWO)(x)
    with pytest.raises(TypeError, match="SyncBatchNorm in DataParallel: .* DistributedOptimizer"):
        hvd.DataParallel(torch.nn.Sequential(hvd.SyncBatchNorm(5)), TWO)(x)
    with pytest.raises(TypeError, match="cannot replicate a compiled module"):
        hvd.DataParallel(torch.compile(torch.nn.Linear(5, 1), backend="eager"), TWO)(x)
    with contextlib.suppress(DeprecationWarning):
        scripted = torch.jit.script(torch.nn.Linear(5, 1))
        with pytest.raises(TypeError, match="cannot replicate a ScriptModule"):
            hvd.DataParallel(scripted, TWO)(x)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # a warning within the compiler
def test_a_compiled_caller_runs_it_uncompiled():
    model = make_mlp()
    parallel, x = hvd.DataParallel(model, TWO), torch.ones(4, 5, dtype=torch.float64)
    compiled = torch.compile(lambda x: parallel(x * 2) + 1, backend="eager")
    torch.testing.assert_close(compiled(x), model(2 * x) + 1)


class OddError(Exception):
    def __init__(self, number, reason):
        super().__init__(number, reason)


@pytest.mark.parametrize("number", (0, 1, 2))
def test_the_error_of_a_replica_names_it(number):
    finished = []

    def fail(x, error):
        if x[0] == number:
            raise error
        finished.append(int(x[0]))
        return x

    parallel, x = parallel_of(fail, ["cpu", "cpu", "cpu:1"]), torch.arange(3.0)
    device = "cpu:1" if number == 2 else "cpu"
    for error in (ValueError("bad"), HorovodInternalError("bad"), KeyError("bad"), torch.OutOfMemoryError("bad")):
        with pytest.raises(type(error), match=f"replica {number} on device {device} failed: .*bad") as caught:
            parallel(x, error)
        assert caught.value.__cause__ is error and type(caught.value) is type(error)
    odd = OddError(3, "odd")
    with pytest.raises(
        RuntimeError, match=f"replica {number} on device {device} failed: OddError: .*3, 'odd'"
    ) as caught:
        parallel(x, odd)
    assert caught.value.__cause__ is odd
    assert len(finished) == 10  # the others come to their ends
    torch.testing.assert_close(parallel(x + 3, odd), x + 3)


def test_the_first_of_several_errors_is_raised():
    def fail(x):
        raise ValueError(f"row {int(x[0])}")

    with pytest.raises(ValueError, match="replica 0 .* row 0"):
        parallel_of(fail, ["cpu"] * 3)(torch.arange(3))


@pytest.mark.parametrize("number", (0, 1))
def test_after_an_interruption_it_can_be_used_again(number):
    is_released = threading.Event()

    def interrupt(x, kind):
        if x[0] == number and kind is not None:
            raise kind
        if kind is not None and number == 0:
            is_released.wait(30)  # still at work when the caller is interrupted
        return x

    parallel, x = parallel_of(interrupt), torch.arange(2.0)
    with pytest.raises(KeyboardInterrupt):
        parallel(x, KeyboardInterrupt)
    assert torch.equal(parallel(x, None), x)
    is_released.set()


def test_its_threads_end_with_it():
    before = set(threading.enumerate())
    parallel = hvd.DataParallel(make_mlp(), ["cpu"] * 3)
    parallel.module[0].register_forward_hook(lambda *_, parallel=parallel: None)  # which the replicas refer to
    parallel(torch.ones(3, 5, dtype=torch.float64)).sum().backward()
    started = set(threading.enumerate()) - before
    assert len(started) == 2
    del parallel
    gc.collect()
    for thread in started:
        thread.join(timeout=30)
        assert not thread.is_alive()
