"""`DistributedOptimizer` with gradients on a GPU, of a double of CUDA."""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch
from support.gpus import pretend
from support.reducers import METHODS, backward_with, gradients_of, make_optimizer, make_parameters

import horovodlike.torch as hvd
from horovodlike._engine.ops import Request, RequestList
from horovodlike.torch._ops import gpu as gpu_module
from horovodlike.torch.compression import Compressor

SIZES = [1, 2, 3]
STEPS = 4


class Mixed(torch.nn.Module):
    """A model of float32 and float64, either of which can be said to be on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = torch.nn.Linear(5, 7), torch.nn.Linear(7, 2).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)).double())


def _optimizer(model: torch.nn.Module, **options: object) -> torch.optim.Optimizer:
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return hvd.DistributedOptimizer(sgd, model.named_parameters(), **options)


def _batch(step: int) -> torch.Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + hvd.rank()))


def _trained(**options: object) -> list[torch.Tensor]:
    model = Mixed()
    optimizer = _optimizer(model, **options)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(_batch(step)).square().mean().backward()
        optimizer.step()
    return [param.detach().clone() for param in model.parameters()]


def _equals_that_on_the_cpu(on_cpu: tuple[torch.dtype, ...]) -> None:
    for options in (
        {},
        {"groups": 1},
        {"groups": 3},
        {"compression": hvd.Compression.fp16},
        {"compression": hvd.Compression.bf16, "groups": 1},
        {"gradient_predivide_factor": 2.0},
        {"op": hvd.Sum},
    ):
        expected = _trained(**options)
        with pretend(on_cpu=on_cpu):
            actual = _trained(**options)
        for one, other in zip(actual, expected, strict=True):
            assert torch.allclose(one, other, rtol=1e-2 if "compression" in options else 1e-5, atol=1e-6), options


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("on_cpu", [(), (torch.float64,), (torch.float32,)], ids=["none", "last", "first"])
def test_equals_that_on_the_cpu(gpu_ranks, on_cpu, size):
    gpu_ranks(size).run(_equals_that_on_the_cpu, on_cpu)


@contextlib.contextmanager
def _enqueued():
    """A list of what is enqueued on which stream: names, as many as are handed over at once, and addresses."""
    seen: list[tuple[int, list[str], list[int]]] = []

    def one(self, inputs, outputs, stream, allocation=None):
        seen.append((stream.pointer, [self.name], list(inputs)))
        return single(self, inputs, outputs, stream, allocation)

    def many(self, addresses, handles, stream):
        seen.append((stream.pointer, [request.name for request in self._requests], list(addresses)))
        return together(self, addresses, handles, stream)

    single, together = Request.enqueue_on_stream, RequestList.enqueue_inplace_on_stream
    with (
        mock.patch.object(Request, "enqueue_on_stream", one),
        mock.patch.object(RequestList, "enqueue_inplace_on_stream", many),
    ):
        yield seen


def _one_call_for_a_batch() -> None:
    with pretend() as gpu:
        model = Mixed()
        optimizer = _optimizer(model)
        for step in range(2):
            optimizer.zero_grad()
            before = len(gpu.double.calls())
            with _enqueued() as seen:
                model(_batch(step)).square().mean().backward()
                optimizer.step()
        if hvd.size() > 1:
            assert [len(names) for _, names, _ in seen] == [4]
            calls = gpu.double.calls()[before:]
            assert calls.count("cuEventRecord test") == 1
            assert 1 <= calls.count("cuStreamWaitEvent test") <= 4
        else:
            assert not seen  # there is no other rank
        assert not gpu.kept


class _Streams:
    """Has autograd make each parameter's gradient on a stream of its own, as it does after such a forward pass."""

    def __init__(self, gpu, model: torch.nn.Module, streams: dict[str, int]) -> None:
        for name, param in model.named_parameters():
            param.register_post_accumulate_grad_hook(lambda _, name=name: setattr(gpu, "stream", streams[name]))


def _gradients_of_several_streams(options: dict[str, object]) -> None:
    expected = _trained(**options)
    with pretend() as gpu:
        main, other = gpu.stream, gpu.double.make_stream()
        model = Mixed()
        streams = {name: other if name.startswith("second") else main for name, _ in model.named_parameters()}
        _Streams(gpu, model, streams)
        optimizer = _optimizer(model, **options)
        for step in range(STEPS):
            optimizer.zero_grad()
            gpu.kept.clear()
            with _enqueued() as seen:
                model(_batch(step)).square().mean().backward()
                gpu.stream = main
                optimizer.step()
            if hvd.size() == 1:
                continue
            if "groups" in options:
                assert (main, other) in gpu.held_up or (other, main) in gpu.held_up
            else:
                for stream, names, _ in seen:
                    assert {streams[name.removeprefix("allreduce.")] for name in names} == {stream}
                assert {name for _, names, _ in seen for name in names} == {f"allreduce.{name}" for name in streams}
            # The stream that has waited is not the one for which some of the memory is given out again.
            addresses = {address for _, _, each in seen for address in each}
            assert addresses <= {address for stream, address in gpu.kept if stream == main}
            assert len(addresses) == len(streams)
        for param, one in zip(model.parameters(), expected, strict=True):
            assert torch.allclose(param, one, rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("compression", [{}, {"compression": hvd.Compression.fp16}], ids=["plain", "fp16"])
@pytest.mark.parametrize("groups", [{}, {"groups": 1}], ids=["alone", "grouped"])
def test_gradients_of_several_streams(gpu_ranks, groups, compression, size):
    gpu_ranks(size).run(_gradients_of_several_streams, groups | compression)


def _moved_after_it_was_wrapped(options: dict[str, object]) -> None:
    expected = _trained(**options)
    model = Mixed()
    optimizer = _optimizer(model, **options)

    def backward(step: int) -> None:
        optimizer.zero_grad()
        model(_batch(step)).square().mean().backward()

    with pretend() as gpu:
        main, other = gpu.stream, gpu.double.make_stream()
        streams = {name: other if name.startswith("second") else main for name, _ in model.named_parameters()}
        _Streams(gpu, model, streams)
        for step in range(2):
            with _enqueued() as seen:
                backward(step)
                # The streams on which the first gradients are made are not known; the caller's has waited for them.
                assert bool(seen) == (step > 0 and hvd.size() > 1)
                gpu.stream = main
                optimizer.step()
            assert len(seen) <= len(streams)
            for stream, names, _ in seen if "groups" not in options else ():
                ways = {streams[name.removeprefix("allreduce.")] for name in names} if step > 0 else {main}
                assert ways == {stream}
    for step in range(2, STEPS):  # and back
        backward(step)
        optimizer.step()
    for param, one in zip(model.parameters(), expected, strict=True):
        assert torch.allclose(param, one, rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("options", [{}, {"groups": 1}, {"compression": hvd.Compression.fp16}], ids=str)
def test_a_model_that_is_moved_after_it_was_wrapped(gpu_ranks, options, size):
    gpu_ranks(size).run(_moved_after_it_was_wrapped, options)


def _a_captured_step_is_refused() -> None:
    with pretend() as gpu:
        model = Mixed()
        optimizer = _optimizer(model)
        model(_batch(0)).square().mean().backward()
        optimizer.step()
        gpu.double.capture(gpu.stream, True)
        if hvd.size() > 1:
            with pytest.raises(ValueError, match=r"allreduce\.(first|second).* into a CUDA graph"):
                model(_batch(1)).square().mean().backward()
        gpu.double.capture(gpu.stream, False)
        optimizer.zero_grad()
        model(_batch(2)).square().mean().backward()
        optimizer.step()


class _Spying(Compressor):
    """Remembers where tensors are compressed."""

    streams: list[int] = []
    current = None

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, object]:
        _Spying.streams.append(_Spying.current())
        return tensor.clone(), None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: object) -> torch.Tensor:
        return tensor


def _gradients_are_compressed_on_their_stream() -> None:
    with pretend() as gpu:
        _Spying.streams, _Spying.current = [], lambda: gpu.stream
        main, other = gpu.stream, gpu.double.make_stream()
        model = Mixed()
        _Streams(gpu, model, {name: other if "weight" in name else main for name, _ in model.named_parameters()})
        optimizer = _optimizer(model, compression=_Spying)
        model(_batch(0)).square().mean().backward()
        gpu.stream = main
        optimizer.step()
        assert sorted(_Spying.streams) == sorted([main, main, other, other] if hvd.size() > 1 else [])


def _the_host_reads_nothing_that_was_gathered() -> None:
    """Sizes, of int64, are compared by the host: it would wait for the GPU if they came from there."""
    gathered, read = [], []

    def allocator(like):
        def allocate(shape, dtype):
            gathered.append(torch.empty(shape, dtype=dtype))
            return gathered[-1]

        return allocate

    def tolist(tensor):
        read.append(tensor)
        return original(tensor)

    original = torch.Tensor.tolist
    with (
        pretend(on_cpu=(torch.int64,)),
        mock.patch.object(gpu_module, "allocator", allocator),
        mock.patch.object(torch.Tensor, "tolist", tolist),
    ):
        parameters = make_parameters()
        optimizer = make_optimizer(parameters, METHODS["topk"]())
        backward_with(parameters, gradients_of(0, hvd.rank(), parameters))
        optimizer.step()
    # None is freed before this, so memory tells them apart.
    memory = {tensor.untyped_storage().data_ptr() for tensor in gathered}
    assert bool(memory) == bool(read) == (hvd.size() > 1)
    assert memory.isdisjoint(tensor.untyped_storage().data_ptr() for tensor in read)


CASES = [
    _one_call_for_a_batch,
    _a_captured_step_is_refused,
    _gradients_are_compressed_on_their_stream,
    _the_host_reads_nothing_that_was_gathered,
]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.strip("_"))
def test_on_a_gpu(gpu_ranks, case, size):
    gpu_ranks(size).run(case)
