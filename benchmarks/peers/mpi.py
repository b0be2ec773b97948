"""Raw MPI: mpi4py's in-place Allreduce on buffers, whatever MPI library it runs with."""

from __future__ import annotations

from mpi4py import MPI

from benchmarks.buffers import Buffer
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
