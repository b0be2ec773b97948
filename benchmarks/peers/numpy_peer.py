"""horovodlike without a framework, on NumPy arrays, under hvdrun."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import horovodlike as hvd
from benchmarks.buffers import Buffer
from benchmarks.parameters import PUSHES
from benchmarks.peers import Step
from horovodlike.parameter_server import ParameterServer


class NumpyPeer:
    """Named operations on the buffers themselves, which are NumPy arrays."""

    def __init__(self) -> None:
        hvd.init()
        self.rank = hvd.rank()
        self.size = hvd.size()

    def expected(self, total: int) -> int:
        return total

    def barrier(self) -> None:
        hvd.barrier()

    def allreduce(self, buffer: Buffer, dtype: str) -> Step:
        name = f"{dtype}.{buffer.size}"

        def step() -> None:
            hvd.allreduce_(buffer, name=name, op=hvd.Sum)

        return step

    def round_trip(self, buffer: Buffer) -> Step:
        def there_and_back() -> None:
            hvd.send(buffer, 1)
            hvd.recv(buffer, 1)

        def back() -> None:
            hvd.recv(buffer, 0)
            hvd.send(buffer, 0)

        return back if self.rank else there_and_back

    @contextlib.contextmanager
    def parameters(self, buffer: Buffer) -> Iterator[Callable[[str], Step]]:
        with ParameterServer(buffer * 0) as server:

            def push() -> None:
                handles = [server.send(buffer) for _ in range(PUSHES)]
                for handle in handles:
                    handle.wait()

            steps = {
                "send": lambda: server.send(buffer).wait(),
                "receive": lambda: server.receive(buffer).wait(),
                "push": push,
            }
            yield lambda operation: steps[operation]

    def many(self, buffers: list[Buffer]) -> Step:
        raise NotImplementedError("measured through `allreduce`")

    def training_step(self, model: str) -> Step:
        raise NotImplementedError("there is no framework to train with")

    def close(self) -> None:
        hvd.shutdown()
