"""The calls of `torch.cuda`, whose functions are replaced: a torch for the CPU has none that work."""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch

from horovodlike._engine.ops import GpuStream
from horovodlike.torch._ops import gpu


class Tensor:
    """As much of a tensor on a GPU as the allocator gets to see."""

    layout = torch.strided

    def __init__(self) -> None:
        self.used_by: list[object] = []

    def record_stream(self, stream: object) -> None:
        self.used_by.append(stream)


@pytest.fixture
def cuda(monkeypatch):
    """A `torch.cuda` that remembers in which order contexts are entered and left, and has stream 0 as current one."""
    events: list[str] = []

    @contextlib.contextmanager
    def context(name: object):
        events.append(f"into {name}")
        yield
        events.append(f"out of {name}")

    cuda = mock.Mock(events=events)
    cuda.default_stream = lambda device: f"default stream of GPU {device}"
    cuda.current_stream = lambda device: f"current stream of {device}"
    cuda.ExternalStream = lambda pointer, device: mock.Mock(pointer=pointer, device=device)
    cuda.stream = cuda.device = context
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    monkeypatch.setattr(gpu, "is_on_gpu", lambda tensor: isinstance(tensor, Tensor))
    monkeypatch.setattr(gpu, "device_of", lambda tensor: tensor.get_device())
    return cuda


def test_tensors_are_kept_for_the_stream(cuda):
    tensors = [Tensor(), Tensor()]
    gpu.keep_for(GpuStream(1, 64), [*tensors, torch.ones(1)])
    first, second = (stream for tensor in tensors for stream in tensor.used_by)
    assert first is second
    assert (first.pointer, first.device) == (64, 1)


def test_the_default_stream_is_no_stream_of_the_pool(cuda):
    tensor = Tensor()
    gpu.keep_for(GpuStream(1, 0), [tensor])
    assert tensor.used_by == ["default stream of GPU 1"]


def test_a_stream_that_is_current_is_left_so(cuda):
    with gpu.as_current(GpuStream(1, 0)):
        assert cuda.events == []


def test_another_stream_becomes_current(cuda):
    with gpu.as_current(GpuStream(1, 64)):
        assert len(cuda.events) == 1
    assert len(cuda.events) == 2


def test_a_stream_waits_for_others_and_not_for_itself(cuda):
    waiting = mock.Mock()
    cuda.default_stream = lambda device: waiting
    gpu.hold_up([GpuStream(0, 64), GpuStream(0, 0), GpuStream(0, 65)])
    assert [call.args[0].pointer for call in waiting.wait_stream.call_args_list] == [64, 65]


def test_the_host_waits_for_the_streams_of_tensors(cuda):
    waited: list[object] = []
    cuda.default_stream = lambda device: mock.Mock(synchronize=lambda: waited.append(device))
    assert not gpu.finish([torch.ones(1)])
    first, second = Tensor(), Tensor()
    first.get_device, second.get_device = lambda: 0, lambda: 1
    assert gpu.finish([torch.ones(1), first, second, first])
    assert waited == [0, 1]


def test_memory_is_of_the_stream_that_was_current(cuda):
    like = torch.ones(2)
    allocate = gpu.allocator(like)
    cuda.current_stream = lambda device: "another stream"
    made = allocate([3, 2], torch.int16)
    assert (made.shape, made.dtype, made.device) == ((3, 2), torch.int16, like.device)
    assert cuda.events == [
        "into cpu",
        "into current stream of cpu",
        "out of current stream of cpu",
        "out of cpu",
    ]


def test_memory_is_no_inference_tensor(cuda):
    with torch.inference_mode():
        assert not gpu.allocator(torch.ones(2))([1], torch.float32).is_inference()
