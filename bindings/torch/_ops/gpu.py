"""The only module that uses `torch.cuda`: tensors on GPUs, their streams, and the lifetime of their memory.

To its caller, a collective is like any other operation of the current stream: it begins after the work queued on that
stream so far, and work queued after `synchronize` finds the result. In between, the engine works on a stream of its
own. References keep tensors alive while in flight. After `synchronize` there are none: if torch reuses the memory for
the same stream, the new use comes after that stream's wait for the result. Only if the stream that waits is not the
stream of the start must the allocator be told: see `keep_for`.

Other modules call these functions as attributes of this module, where tests replace them.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import torch

from horovodlike._engine.ops import GpuStream

# Made for `map`, with which they take no longer than reading the attributes. The engine supports CUDA only: tensors on
# AMD GPUs, for which torch reports CUDA as well, go through the CPU.
is_on_cpu: Callable[[torch.Tensor], bool] = operator.attrgetter("is_cpu")
is_on_gpu: Callable[[torch.Tensor], bool] = (
    operator.attrgetter("is_cuda") if torch.version.hip is None else lambda _: False
)
device_of: Callable[[torch.Tensor], int] = torch.Tensor.get_device  # the number of a tensor's GPU


def current_stream(device: int) -> GpuStream:
    """Return the current stream of this thread on a GPU."""
    return GpuStream(device, torch._C._cuda_getCurrentRawStream(device))


def _of_torch(stream: GpuStream) -> torch.cuda.Stream:
    if stream.pointer == 0:  # `ExternalStream` would take 0 as no stream given, and make a new one
        return torch.cuda.default_stream(stream.device)
    return torch.cuda.ExternalStream(stream.pointer, device=stream.device)  # type: ignore[no-untyped-call]  # untyped


def as_current(stream: GpuStream) -> contextlib.AbstractContextManager[object]:
    """Return a context in which a stream is the current one of this thread."""
    if stream == current_stream(stream.device):
        return contextlib.nullcontext()
    return torch.cuda.stream(_of_torch(stream))


def on(stream: GpuStream) -> contextlib.AbstractContextManager[object]:
    """Return a context in which a stream is the current one of this thread, and its GPU the current GPU."""
    return torch.cuda.stream(_of_torch(stream))


def hold_up(others: Collection[GpuStream]) -> None:
    """Have the current stream of each GPU wait for the work queued so far on other streams of that GPU."""
    for other in others:
        stream = current_stream(other.device)
        if other != stream:
            _of_torch(stream).wait_stream(_of_torch(other))


def keep_for(stream: GpuStream, tensors: Iterable[torch.Tensor]) -> None:
    """Tell the allocator that a stream uses tensors that may have been allocated on another one.

    The stream has waited for the engine, so memory freed now is reused only when the engine and the stream are done.
    """
    user = _of_torch(stream)
    for tensor in tensors:
        if is_on_gpu(tensor) and tensor.layout is torch.strided:  # operations hold the parts of a sparse one
            tensor.record_stream(user)


def finish(tensors: Iterable[torch.Tensor]) -> bool:
    """Have the host wait for the current streams of the tensors' GPUs; return False if no tensor is on a GPU.

    The tensors may be results of collectives: see `check_results` of the elastic states.
    """
    devices = {device_of(tensor) for tensor in tensors if is_on_gpu(tensor)}
    for device in devices:
        _of_torch(current_stream(device)).synchronize()
    return bool(devices)


def allocator(like: torch.Tensor) -> Callable[[Sequence[int], torch.dtype], torch.Tensor]:
    """Return a function that makes uninitialised tensors on the GPU of `like`, for the stream that is current now.

    Any thread may call the function, with any current device, stream and inference mode.
    """
    device, stream = like.device, torch.cuda.current_stream(like.device)

    def allocate(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        # The device is set first. The engine's thread is on GPU 0: to leave the stream of another GPU would make a
        # context on GPU 0, which may be another rank's, and take memory there.
        with torch.inference_mode(False), torch.cuda.device(device), torch.cuda.stream(stream):
            return torch.empty(shape, dtype=dtype, device=device)

    return allocate


class CopyStream:
    """A stream for copies to a GPU. One thread copies, and another one receives."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # untyped

    @contextlib.contextmanager
    def copying(self) -> Iterator[torch.cuda.Event]:
        """Have the copies of this context go to the stream; yield the event that is their end."""
        end = torch.cuda.Event()  # type: ignore[no-untyped-call]  # untyped
        with torch.cuda.stream(self._stream):
            yield end
            end.record(self._stream)

    def receive(self, end: torch.cuda.Event, tensors: Iterable[torch.Tensor]) -> None:
        """Have the current stream wait for copies, and keep their memory for it."""
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(end)
        for tensor in tensors:
            if is_on_gpu(tensor):
                tensor.record_stream(stream)


def copy_stream(device: torch.device) -> CopyStream | None:
    """Return a stream for copies to the device; None if it is no GPU."""
    return CopyStream(device) if device.type == "cuda" else None
