"""Messages in jobs whose collectives MPI moves: they take the engine's own way, beside MPI."""

from __future__ import annotations

import numpy as np
from support.collectives import allreduce

from horovodlike import basics
from horovodlike._engine import messages, ops
from horovodlike._engine.types import DType


def _talk() -> float:
    basics.init()
    assert basics.mpi_enabled()
    rank, size = basics.rank(), basics.size()
    for count in (1, 5000, 1_000_000):
        sent, received = np.full(count, float(rank)), np.zeros(count)
        source = messages.ANY_SOURCE if count == 1 else (rank - 1) % size
        handle = messages.receive(received.ctypes.data, received.nbytes, DType.float64, peer=source, tag=count)
        send = messages.send(sent.ctypes.data, sent.nbytes, DType.float64, peer=(rank + 1) % size, tag=count)
        total = allreduce("beside", np.full(100_000, 1.0))
        assert messages.wait_message(handle) == ((rank - 1) % size, received.nbytes)
        ops.wait(send)
        assert (received == (rank - 1) % size).all()
    allreduce("end", np.zeros(1))  # a rank that leaves would end the messages of the others
    return float(total.max())


def test_messages_beside_mpi(mpi):
    assert mpi.run(3, _talk) == [3.0] * 3
