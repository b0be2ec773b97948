"""The fake of the CUDA driver and of NCCL (`tests/native/fake_gpu`) for tests in Python, with and without torch.

A torch that is built for the CPU has no tensors on GPUs. `pretend` has the binding take tensors on the CPU for such
tensors, by replacing the functions of `horovodlike.torch._ops.gpu`. The binding then makes the same requests as on a
GPU, and the engine calls the fake, which uses memory of the host in place of a GPU's.
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
    """Return the file of the fake."""
    return core_builds.released() / "libfake_gpu.so"


def settings(library: Path) -> dict[str, str]:
    """Return the settings with which ranks use the fake."""
    return {"HOROVODLIKE_CUDA_LIBRARY": str(library), "HOROVODLIKE_NCCL_LIBRARY": str(library)}


class Double:
    """The fake CUDA driver of this process, which has one GPU."""

    def __init__(self) -> None:
        self._lib = ctypes.CDLL(os.environ["HOROVODLIKE_CUDA_LIBRARY"])
        self._lib.fake_gpu_make_stream.restype = ctypes.c_void_p
        self._lib.fake_gpu_calls.restype = self._lib.fake_gpu_violations.restype = ctypes.c_size_t
        self._lib.fake_gpu_reset(1)

    def make_stream(self) -> int:
        return int(self._lib.fake_gpu_make_stream(0))

    def hold(self, stream: int) -> None:
        """Stop a stream until it is released."""
        self._lib.fake_gpu_hold(ctypes.c_void_p(stream))

    def release(self, stream: int) -> None:
        self._lib.fake_gpu_release(ctypes.c_void_p(stream))

    def capture(self, stream: int, captures: bool) -> None:
        self._lib.fake_gpu_capture(ctypes.c_void_p(stream), int(captures))

    def synchronize(self, stream: int) -> None:
        """Wait until the stream has done all its work."""
        self._lib.fake_gpu_synchronize(ctypes.c_void_p(stream))

    def fail(self, function: str, result: int) -> None:
        """Have a function of CUDA or NCCL return `result`; with 0 it works again."""
        self._lib.fake_gpu_fail(0, function.encode(), result)

    def compute(self, stream: int, tensor: Any, values: Any) -> None:
        """Queue a computation on the stream that writes these values into a tensor."""
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
    """Return the fake driver of this process: always the same one, because the engine keeps its functions."""
    global _double
    _double = _double or Double()
    return _double


class Pretence:
    """A fake of `torch.cuda`.

    Attributes:
        double: The fake driver.
        stream: The current stream.
        kept: Calls of `keep_for`: pairs of a stream and a tensor's address.
        held_up: Calls of `hold_up`: pairs of streams, of which the first waits for the second.
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
        """Return the functions that replace functions of `horovodlike.torch._ops.gpu`, by name."""
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
        """Return a function that calls `wait` and then waits for the stream: torch computes on the host at once."""

        def wait_and_synchronize(handles: Any, stream: Any = None) -> Any:
            returned = wait(handles, stream) if stream is not None else wait(handles)
            if stream is not None and self._eager:
                self.double.synchronize(stream.pointer)
            return returned

        return wait_and_synchronize


@contextlib.contextmanager
def pretend(eager: bool = True, on_cpu: tuple[Any, ...] = ()) -> Iterator[Pretence]:
    """Have the torch binding take tensors for ones on a GPU; check that it does nothing that CUDA forbids.

    Args:
        eager: Whether waiting for an operation also waits for its result: needed if torch then computes with it.
        on_cpu: The dtypes of tensors that count as tensors on the CPU.
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
    """Return a function for ranks that runs `case` with its tensors taken for ones on a GPU."""

    @functools.wraps(case)
    def run(*arguments: Any) -> Any:
        with pretend():
            return case(*arguments)

    return run
