"""Jobs in which MPI moves the data of some operations, and our own transports that of the others."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import pytest

import horovodlike as hvd
from horovodlike import routes
from horovodlike._engine import mpi_provider

CPU_OPERATIONS = "HOROVODLIKE_CPU_OPERATIONS"


def _operations() -> dict[str, Callable[[], object]]:
    """Every operation, with numbers that any order adds up to the same."""
    rank, size = hvd.rank(), hvd.size()
    rows = np.arange(size * 1000, dtype=np.float32).reshape(size, 1000) + rank
    return {
        "allreduce": lambda: hvd.allreduce(rows, op=hvd.Sum),
        "allgather": lambda: hvd.allgather(rows[: rank + 1]),
        "broadcast": lambda: hvd.broadcast(rows, root_rank=1),
        "reducescatter": lambda: hvd.reducescatter(rows, op=hvd.Sum),
        "alltoall": lambda: hvd.alltoall(rows),
        "gather": lambda: hvd.gather(rows, root_rank=1),
        "scatter": lambda: hvd.scatter(rows if rank == 0 else rows[:1], root_rank=0),
        "reduce": lambda: hvd.reduce(rows, root_rank=1, op=hvd.Sum),
    }


def _count_calls() -> list[int]:
    """A list with the number of collectives that MPI has begun in this process so far."""
    calls, begin = [0], mpi_provider.Library.begin

    def counted(library: mpi_provider.Library, *arguments: object) -> int:
        calls[0] += 1
        return begin(library, *arguments)

    mpi_provider.Library.begin = counted
    return calls


def _each_operation_alone() -> list[object]:
    calls = _count_calls()
    os.environ.pop(CPU_OPERATIONS)
    hvd.init()
    expected = {name: run() for name, run in _operations().items()}
    hvd.shutdown()
    wrong = []
    for chosen in routes.OPERATIONS:
        os.environ[CPU_OPERATIONS] = f"{chosen}=mpi"
        hvd.init()
        assert hvd.mpi_enabled() and not hvd.gloo_enabled()
        table = hvd.collective_availability()
        for name, run in _operations().items():
            before = calls[0]
            result = run()
            used = calls[0] > before
            carried = {name for name, value in hvd.metrics().items() if name.startswith("bytes_by_") and value}
            assert not used or "bytes_by_external" in carried, carried
            said = [table.find(transport, name).state == "available" for transport in ("MPI", "shared memory")]
            if not np.array_equal(result, expected[name]) or said != [used, not used] or used != (name == chosen):
                wrong.append((chosen, name, used, said))
        hvd.barrier()
        hvd.shutdown()
    return wrong


def test_each_operation_alone(mpi):
    assert mpi.run(3, _each_operation_alone) == [[]] * 3


def _by_size() -> list[object]:
    calls = _count_calls()
    hvd.init()
    table = hvd.collective_availability()
    reasons = [table.find(transport, "allreduce").reason for transport in ("MPI", "shared memory")]
    counts = []
    for count in (0, 1, 1023, 1024, 100_000):
        before = calls[0]
        assert (hvd.allreduce(np.full(count, 1.5, np.float32), op=hvd.Sum) == 1.5 * hvd.size()).all()
        counts.append(calls[0] - before)
    # All at once: batches of one transport each.
    arrays = [np.full(512 * (1 + i % 4), float(i), np.float32) for i in range(200)]
    handles = [hvd.allreduce_async_(array, name=f"x{i}", op=hvd.Sum) for i, array in enumerate(arrays)]
    for handle in handles:
        hvd.synchronize(handle)
    assert all((array == i * hvd.size()).all() for i, array in enumerate(arrays))
    return [*reasons, counts]


@pytest.mark.parametrize("size", [2, 3])
def test_small_ones_through_mpi(mpi, size):
    told = ["0 to 4095 bytes", "4096 bytes and more"]
    settings = {CPU_OPERATIONS: "allreduce:<4K=mpi"}
    assert mpi.run(size, _by_size, settings=settings) == [[*told, [0, 1, 1, 0, 0]]] * size


def test_large_ones_through_mpi(mpi):
    told = ["4096 bytes and more", "0 to 4095 bytes"]
    settings = {CPU_OPERATIONS: "MPI, allreduce:<4k = native"}
    assert mpi.run(2, _by_size, settings=settings) == [[*told, [0, 0, 0, 1, 1]]] * 2


def _never_mpi() -> list[object]:
    hvd.init()
    return [hvd.mpi_enabled(), float(hvd.allreduce(np.ones(3), op=hvd.Sum)[0])]


def test_rules_that_leave_nothing_for_mpi(mpi):
    rules = ",".join(["mpi", *(f"{operation}=native" for operation in routes.OPERATIONS)])
    assert mpi.run(2, _never_mpi, settings={CPU_OPERATIONS: rules}) == [[False, 2.0]] * 2


def _rules_differ() -> str:
    from mpi4py import MPI

    os.environ[CPU_OPERATIONS] = f"allreduce:<{4 + MPI.COMM_WORLD.Get_rank()}K=mpi"
    with pytest.raises(hvd.RendezvousError) as raised:
        hvd.init()
    return str(raised.value)


def test_ranks_that_disagree(mpi):
    ended = mpi.start(mpi.command(2), _rules_differ)
    told = f"{CPU_OPERATIONS} differs between the ranks: allreduce:<4k=mpi on rank 0, allreduce:<5k=mpi on rank 1"
    assert any(told in value for value in [*ended.values.values(), *ended.errors.values()]), ended


def _one_is_lost() -> str:
    hvd.init()
    for _ in range(3):
        hvd.allreduce(np.ones(3), op=hvd.Sum)
        hvd.broadcast(np.ones(3), root_rank=0)
    if hvd.rank() == 1:
        os._exit(9)
    with pytest.raises(hvd.HorovodInternalError) as raised:
        while True:
            hvd.broadcast(np.ones(3), root_rank=0)
    return str(raised.value)


def test_a_rank_that_dies(mpi):
    ended = mpi.start(mpi.command(2), _one_is_lost, settings={CPU_OPERATIONS: "broadcast=mpi"})
    assert ended.code != 0 and ended.seconds < 30
    assert all("rank 1" in told for told in ended.values.values())  # unless mpirun was faster
