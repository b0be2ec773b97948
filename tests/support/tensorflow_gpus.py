"""TensorFlow with GPUs on machines that have none: a pluggable device made of the fake of the CUDA driver.

The test's process builds the device. Ranks have it preloaded, and `load()` it before TensorFlow looks for devices.
"""

from __future__ import annotations

import contextlib
import ctypes
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DOUBLE = ROOT / "tests" / "native" / "fake_gpu"
SOURCES = ROOT / "tests" / "tensorflow" / "gpu"

_library: Any = None
_kernels: Any = None


def build(folder: Path) -> tuple[str, str]:
    """Compile the device, and a kernel that adds one to its input."""
    import tensorflow as tf

    device, kernels = folder / "libgpu.so", folder / "kernels.so"
    command = ["g++", "-O0", "-fPIC", "-shared", "-fvisibility=hidden", "-w", f"-I{DOUBLE}"]
    command += [f"-I{ROOT / part}" for part in ("horovodlike/native", "bindings/tensorflow")]
    command += [*tf.sysconfig.get_compile_flags(), "-isystem", tf.sysconfig.get_include()]
    _run([*command, SOURCES / "device.cc", *DOUBLE.glob("*.cc"), "-o", device, "-lpthread"])
    _run([*command, SOURCES / "kernels.cc", device, "-o", kernels, *tf.sysconfig.get_link_flags()])
    return str(device), str(kernels)


def _run(command: list[Any]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stderr}"


def load(device: str, kernels: str) -> None:
    """Have TensorFlow use the files that `build()` has returned."""
    global _library, _kernels
    import tensorflow as tf
    from tensorflow.python.framework.load_library import load_pluggable_device_library

    load_pluggable_device_library(device)
    _library = ctypes.CDLL(device)
    _library.violations.restype = ctypes.c_char_p
    _library.count_calls.restype = ctypes.c_size_t
    _kernels = tf.load_op_library(kernels)


def add_one(tensor: Any) -> Any:
    """Return a float32 tensor plus one, computed on a GPU, which may not have begun when this returns."""
    return _kernels.add_one_on_gpu(tensor)


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Return a context in which the first GPU runs no kernels; waiting for a kernel inside it blocks forever."""
    _library.hold_kernels(0)
    try:
        yield
    finally:
        _library.release_kernels(0)


@contextlib.contextmanager
def without_handles() -> Iterator[None]:
    """Return a context in which streams give no handle, like streams of devices other than CUDA's."""
    _library.set_has_handles(False)
    try:
        yield
    finally:
        _library.set_has_handles(True)


def fail_nccl() -> None:
    """Have NCCL report from now on that a collective of the first GPU has failed."""
    _library.fail_nccl(0)


def count(call: str, gpu: int = 0) -> int:
    """Return how many calls of the driver for a GPU begin with `call`."""
    return int(_library.count_calls(gpu, call.encode()))


def check() -> None:
    """Check that nothing was done that a GPU does not allow."""
    assert _library.violations() == b""
