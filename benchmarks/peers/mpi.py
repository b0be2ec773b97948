"""Raw MPI: mpi4py's in-place Allreduce on buffers, with any MPI library."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import numpy as np
from mpi4py import MPI

from benchmarks.buffers import Buffer
from benchmarks.parameters import PUSHES
from benchmarks.peers import Step


class MpiPeer:
    """float32 only: MPI has no bfloat16."""

    def __init__(self) -> None:
        self._world = MPI.COMM_WORLD
        self.rank = self._world.Get_rank()
        self.size = self._world.Get_size()

    def expected(self, total: int) -> int:
        return total

    def barrier(self) -> None:
        self._world.Barrier()

    def allreduce(self, buffer: Buffer, dtype: str) -> Step:
        if dtype != "float32":
            raise ValueError(f"MPI has no {dtype}")
        described = [buffer, MPI.FLOAT]
        world = self._world

        def step() -> None:
            world.Allreduce(MPI.IN_PLACE, described, MPI.SUM)

        return step

    def round_trip(self, buffer: Buffer) -> Step:
        described, world = [buffer, MPI.FLOAT], self._world

        def there_and_back() -> None:
            world.Send(described, 1)
            world.Recv(described, 1)

        def back() -> None:
            world.Recv(described, 0)
            world.Send(described, 0)

        return back if self.rank else there_and_back

    @contextlib.contextmanager
    def parameters(self, buffer: Buffer) -> Iterator[Callable[[str], Step]]:
        """Split a window among the ranks; see `benchmarks.peers.ParameterPeer`."""
        each = buffer.size // self.size
        slices = [(rank, [buffer[rank * each : (rank + 1) * each], MPI.FLOAT]) for rank in range(self.size)]
        window = self._window(each)
        self._world.Barrier()
        window.Lock_all()

        def add() -> None:
            for rank, part in slices:
                window.Accumulate(part, rank, op=MPI.SUM)

        def send() -> None:
            add()
            window.Flush_all()

        def receive() -> None:
            for rank, part in slices:
                window.Get(part, rank)
            window.Flush_all()

        def push() -> None:
            for _ in range(PUSHES):
                add()
            window.Flush_all()

        steps = {"send": send, "receive": receive, "push": push}
        yield lambda operation: steps[operation]
        window.Unlock_all()
        window.Free()

    def _window(self, count: int) -> MPI.Win:
        """Let MPI choose the memory: it is shared by the ranks of a host, which access it directly."""
        window = MPI.Win.Allocate(4 * count, 4, comm=self._world)
        np.frombuffer(window.tomemory(), np.float32).fill(0)
        return window

    def many(self, buffers: list[Buffer]) -> Step:
        steps = [self.allreduce(buffer, "float32") for buffer in buffers]

        def one_by_one() -> None:
            for step in steps:
                step()

        return one_by_one

    def training_step(self, model: str) -> Step:
        raise NotImplementedError("raw MPI has no training step")

    def close(self) -> None:
        MPI.Finalize()


class MpiArraysPeer(MpiPeer):
    """The same, but a window is an array that the program has, as a model's parameters are."""

    def _window(self, count: int) -> MPI.Win:
        return MPI.Win.Create(np.zeros(count, np.float32), 4, comm=self._world)
