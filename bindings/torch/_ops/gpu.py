"""All that is known of `torch.cuda`: which tensors are on a GPU, on which streams, and who still uses their memory.

A collective is to its caller as any other operation of the stream that is current: it begins after what that stream has
been given, and what the stream is given after `synchronize` finds the result. The engine does the work on a stream of
its own in between. Tensors in flight are kept by references. After `synchronize` nothing keeps them, because memory
that torch gives out again for the same stream is not used before that stream has waited for the result. Only if another
stream than that of the start has waited must the allocator know: see `keep_for`.

Other modules reach these functions through this one, where tests replace them.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Collection, Iterable, Sequence

import torch

from horovodlike._engine.ops import GpuStream

# Made for `map`, with which they take no longer than the attributes alone. The engine knows CUDA only: tensors on GPUs
# of AMD, which torch says are on CUDA as well, go through the CPU.
is_on_cpu: Callable[[torch.Tensor], bool] = operator.attrgetter("is_cpu")
is_on_gpu: Callable[[torch.Tensor], bool] = (
    operator.attrgetter("is_cuda") if torch.version.hip is None else lambda _: False
)
device_of: Callable[[torch.Tensor], int] = torch.Tensor.get_device  # of a tensor on a GPU: its number


def current_stream(device: int) -> GpuStream:
    """Return the stream that this thread gives work to."""
    return GpuStream(device, torch._C._cuda_getCurrentRawStream(device))


def _of_torch(stream: GpuStream) -> torch.cuda.Stream:
    if stream.pointer == 0:  # which `ExternalStream` would take for none given, and make a new one
        return torch.cuda.default_stream(stream.device)
    return torch.cuda.ExternalStream(stream.pointer, device=stream.device)  # type: ignore[no-untyped-call]  # not annotated


def as_current(stream: GpuStream) -> contextlib.AbstractContextManager[object]:
    """Have this thread give its work to a stream, within the context."""
    if stream == current_stream(stream.device):
        return contextlib.nullcontext()
    return torch.cuda.stream(_of_torch(stream))


def hold_up(others: Collection[GpuStream]) -> None:
    """Have the current stream of their GPU wait for what other streams have been given so far."""
    for other in others:
        stream = current_stream(other.device)
        if other != stream:
            _of_torch(stream).wait_stream(_of_torch(other))


def keep_for(stream: GpuStream, tensors: Iterable[torch.Tensor]) -> None:
    """Tell the allocator that a stream uses tensors that may have been made on another one.

    The stream has waited for the engine, so memory that is freed now is given out again when both are done with it.
    """
    user = _of_torch(stream)
    for tensor in tensors:
        if is_on_gpu(tensor) and tensor.layout is torch.strided:  # operations hold the parts of sparse ones
            tensor.record_stream(user)


def finish(tensors: Iterable[torch.Tensor]) -> bool:
    """Have the host wait until tensors on GPUs have the values that the current streams make; False if there are none.

    For tensors that may be the results of collectives: see `check_results` of the elastic states.
    """
    devices = {device_of(tensor) for tensor in tensors if is_on_gpu(tensor)}
    for device in devices:
        _of_torch(current_stream(device)).synchronize()
    return bool(devices)


def allocator(like: torch.Tensor) -> Callable[[Sequence[int], torch.dtype], torch.Tensor]:
    """Return a function that makes uninitialised tensors on the GPU of `like`, for the stream that is current now.

    Any thread may call it, whatever its streams and modes are.
    """
    device, stream = like.device, torch.cuda.current_stream(like.device)

    def allocate(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        # The device first: the engine's thread is on GPU 0, and to leave a stream of another GPU would make a context
        # there, which takes memory of a GPU that may be another rank's.
        with torch.inference_mode(False), torch.cuda.device(device), torch.cuda.stream(stream):
            return torch.empty(shape, dtype=dtype, device=device)

    return allocate
