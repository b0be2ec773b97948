"""The limit of the machine's memory: every process copies from one buffer to another, all at the same time."""

from __future__ import annotations

import ctypes
import os

from benchmarks.buffers import Buffer, allocate
from benchmarks.peers import Step


class MemcpyPeer:
    """Not a collective: nothing is exchanged, and `barrier` does nothing.

    The driver wakes all ranks within some ten microseconds, and a measurement takes much longer than that.
    """

    def __init__(self) -> None:
        self.rank = int(os.environ["BENCHMARK_RANK"])
        self.size = int(os.environ["BENCHMARK_SIZE"])

    def expected(self, total: int) -> int:
        return self.rank + 1

    def barrier(self) -> None:
        pass

    def allreduce(self, buffer: Buffer, dtype: str) -> Step:
        target = allocate(buffer.nbytes, dtype)
        arguments = (target.ctypes.data, buffer.ctypes.data, buffer.nbytes)

        def step() -> None:
            ctypes.memmove(*arguments)
            # Keeps both buffers alive as long as the function.
            _ = (target, buffer)

        return step

    def many(self, buffers: list[Buffer]) -> Step:
        raise NotImplementedError("memcpy is measured with one buffer only")

    def training_step(self, model: str) -> Step:
        raise NotImplementedError("memcpy has no training step")

    def close(self) -> None:
        pass
