"""The double of the CUDA driver and of NCCL (`tests/native/fake_gpu`) for tests in Python, and torch with it.

A torch that is built for the CPU has no tensors on GPUs. `pretend` has the binding take its tensors for such, by
replacing the functions of `horovodlike.torch._ops.gpu`: what it then asks the engine for is what it asks for on a GPU,
and the engine calls the double, for which memory of the host stands in for that of GPUs.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from support import core_builds


def build() -> Path:
    """The file of the double."""
    return core_builds.released() / "libfake_gpu.so"


def settings(library: Path) -> dict[str, str]:
    """Have ranks use the double."""
    return {"HOROVODLIKE_CUDA_LIBRARY": str(library), "HOROVODLIKE_NCCL_LIBRARY": str(library)}


class Double:
    """The double of this process, which has one GPU."""

    def __init__(self) -> None:
        self._lib = ctypes.CDLL(os.environ["HOROVODLIKE_CUDA_LIBRARY"])
        self._lib.fake_gpu_make_stream.restype = ctypes.c_void_p
        self._lib.fake_gpu_calls.restype = self._lib.fake_gpu_violations.restype = ctypes.c_size_t
        self._lib.fake_gpu_reset(1)

    def make_stream(self) -> int:
        return int(self._lib.fake_gpu_make_stream(0))

    def hold(self, stream: int) -> None:
        """The stream does not get on until it is released."""
        self._lib.fake_gpu_hold(ctypes.c_void_p(stream))

    def release(self, stream: int) -> None:
        self._lib.fake_gpu_release(ctypes.c_void_p(stream))

    def capture(self, stream: int, captures: bool) -> None:
        self._lib.fake_gpu_capture(ctypes.c_void_p(stream), int(captures))

    def synchronize(self, stream: int) -> None:
        """Wait until the stream has done what it was given."""
        self._lib.fake_gpu_synchronize(ctypes.c_void_p(stream))

    def fail(self, function: str, result: int) -> None:
        """Have a function of CUDA or NCCL fail, or not any more with a result of 0."""
        self._lib.fake_gpu_fail(0, function.encode(), result)

    def compute(self, stream: int, tensor: Any, values: Any) -> None:
        """Give the stream a computation that makes these values of a tensor when it is its turn."""
        num_bytes = ctypes.c_size_t(tensor.numel() * tensor.element_size())
        addresses = (ctypes.c_void_p(each.data_ptr()) for each in (tensor, values))
        self._lib.fake_gpu_compute(ctypes.c_void_p(stream), *addresses, num_bytes)

    def calls(self) -> list[str]:
        """Return the calls that have been made, as `fake_gpu.h` describes them."""
        return self._text(self._lib.fake_gpu_calls, 0).splitlines()

    def violations(self) -> str:
        return self._text(self._lib.fake_gpu_violations)

    def _text(self, function: Any, *arguments: int) -> str:
        room = 1 << 16
        while True:
            buffer = ctypes.create_string_buffer(room)
            length = function(*arguments, buffer, ctypes.c_size_t(room))
            if length < room:
                return buffer.value.decode()
            room = length + 1


_double: Double | None = None


def double() -> Double:
    """The double of this process; the same one each time, since the engine keeps what it has of it."""
    global _double
    _double = _double or Double()
    return _double


class Pretence:
    """A double of `torch.cuda`.

    Attributes:
        double: The double.
        stream: The current one.
        kept: What the allocator has been told: pairs of a stream and a tensor's address.
        held_up: Pairs of streams, of which the first was told to wait for the second.
    """

    def __init__(self, eager: bool, on_cpu: tuple[Any, ...]) -> None:
        self.double = double()
        self.stream = self.double.make_stream()
        self.kept: list[tuple[int, int]] = []
        self.held_up: list[tuple[int, int]] = []
        self._eager = eager
        self._on_cpu = on_cpu

    @contextlib.contextmanager
    def on(self, stream: int) -> Iterator[None]:
        """Make a stream the current one."""
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    def functions(self) -> dict[str, Any]:
        """Those of `_gpu`."""
        import torch

        from horovodlike._engine.ops import GpuStream

        def keep_for(stream: GpuStream, tensors: Any) -> None:
            self.kept += [(stream.pointer, tensor.data_ptr()) for tensor in tensors]

        def hold_up(others: Any) -> None:
            self.held_up += [(self.stream, other.pointer) for other in others if other.pointer != self.stream]

        def finish(tensors: Any) -> bool:
            self.double.synchronize(self.stream)
            return any(tensor.dtype not in self._on_cpu for tensor in tensors)

        return {
            "is_on_cpu": lambda tensor: tensor.dtype in self._on_cpu,
            "is_on_gpu": lambda tensor: tensor.dtype not in self._on_cpu,
            "device_of": lambda tensor: 0,
            "current_stream": lambda device: GpuStream(device, self.stream),
            "as_current": lambda stream: self.on(stream.pointer),
            "hold_up": hold_up,
            "keep_for": keep_for,
            "finish": finish,
            "allocator": lambda like: lambda shape, dtype: torch.empty(shape, dtype=dtype),
        }

    def waiting(self, wait: Any) -> Any:
        """A function that waits as `wait`, and then for the stream, as torch computes on the host at once."""

        def wait_and_synchronize(handles: Any, stream: Any = None) -> Any:
            returned = wait(handles, stream) if stream is not None else wait(handles)
            if stream is not None and self._eager:
                self.double.synchronize(stream.pointer)
            return returned

        return wait_and_synchronize


@contextlib.contextmanager
def pretend(eager: bool = True, on_cpu: tuple[Any, ...] = ()) -> Iterator[Pretence]:
    """Have the torch binding take tensors for ones on a GPU; nothing may be done that CUDA would not allow.

    Args:
        eager: Who waits for an operation waits for its result as well: needed where torch then computes with it.
        on_cpu: The dtypes of tensors that are not on the GPU.
    """
    from horovodlike._engine import ops
    from horovodlike.torch._ops import gpu

    pretence = Pretence(eager, on_cpu)
    with contextlib.ExitStack() as stack:
        for name, function in pretence.functions().items():
            stack.enter_context(mock.patch.object(gpu, name, function))
        for name in ("wait_on_stream", "wait_all"):
            stack.enter_context(mock.patch.object(ops, name, pretence.waiting(getattr(ops, name))))
        yield pretence
        assert pretence.double.violations() == ""


def on_gpu(case: Callable[..., Any]) -> Callable[..., Any]:
    """A function for ranks that does what another one does with tensors on the CPU with ones on a GPU."""

    @functools.wraps(case)
    def run(*arguments: Any) -> Any:
        with pretend():
            return case(*arguments)

    return run
