"""Collectives whose data MPI moves: the same results as over our own transports, and the same bits on all ranks."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from support.collectives import DTYPES, described, gathered

from horovodlike import basics
from horovodlike._engine import ops
from horovodlike._engine.ops import DType, Kind, ReduceOp
from horovodlike.process_set import ProcessSet, add_process_set, remove_process_set

ARITHMETIC = (ReduceOp.SUM, ReduceOp.AVERAGE, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT)
SHAPES = ((3, 5), (0,), (1,), (1009,), (7, 11, 2), (70001,))


def _values(dtype: str, shape: tuple[int, ...], rank: int) -> np.ndarray:
    """Numbers that any order adds up to the same."""
    numbers = (np.arange(np.prod(shape, dtype=int)) * 31 + rank * 7) % 23 - 5
    return (numbers % 2 if dtype == "bool" else numbers).astype(dtype).reshape(shape)


def _run(kind: Kind, arrays: list[np.ndarray], name: str, **options: object) -> list[bytes]:
    """The results of one operation, whose inputs stay as they are."""
    request = ops.Request(kind, name, [described(array) for array in arrays], **options)
    inputs = [array.ctypes.data for array in arrays]
    if kind in (Kind.ALLGATHER, Kind.ALLTOALL, Kind.GATHER):
        return [bytes(output.memory) for output in ops.wait(request.enqueue(inputs, []))]
    results = [np.zeros_like(array) for array in arrays]
    ops.wait(request.enqueue(inputs, [result.ctypes.data for result in results]))
    return [result.tobytes() for result in results]


def _scatter(arrays: list[np.ndarray], **options: object) -> list[bytes]:
    """This rank's parts of the arrays of the root, which has one for each rank."""
    results = [np.zeros_like(array[0]) for array in arrays]
    request = ops.Request(Kind.SCATTER, "scatter", [described(result) for result in results], **options)
    inputs = [array.ctypes.data for array in arrays]
    ops.wait(request.enqueue(inputs, [result.ctypes.data for result in results]))
    return [result.tobytes() for result in results]


def _reductions(process_set: int, members: list[int]) -> list[bytes]:
    rank, results = basics.rank(), []
    for dtype in DTYPES:
        for op in ARITHMETIC:
            if dtype == "bool" and op == ReduceOp.AVERAGE:
                continue
            arrays = [_values(dtype, shape, rank) for shape in SHAPES]
            rows = [array for array in arrays if array.shape != (1,)]
            for kind, given in ((Kind.ALLREDUCE, arrays), (Kind.REDUCESCATTER, rows)):
                name = f"{kind}.{dtype}.{op}"
                results += _run(kind, given, name, op=op, process_set=process_set)
                scales = {"prescale": 0.5, "postscale": 3.0}
                results += _run(kind, given, f"{name}.scaled", op=op, process_set=process_set, **scales)
            to_root = {"op": op, "process_set": process_set, "root_rank": members[op % len(members)]}
            results += _run(Kind.REDUCE, arrays, f"to.{dtype}.{op}", **to_root)
    return results


def _bfloat16() -> list[bytes]:
    """NumPy has no bfloat16: the upper halves of float32."""
    values = [
        (_values("float32", (count,), basics.rank()).view(np.uint32) >> 16).astype(np.uint16) for count in (9, 5003)
    ]
    described = [(DType["bfloat16"], each.shape) for each in values]
    request = ops.Request(Kind.ALLREDUCE, "bf", described, op=ReduceOp.AVERAGE)
    results = [np.zeros_like(each) for each in values]
    ops.wait(request.enqueue([each.ctypes.data for each in values], [each.ctypes.data for each in results]))
    return [result.tobytes() for result in results]


def _movements(process_set: int, members: list[int]) -> list[bytes]:
    rank, results, place = basics.rank(), [], members.index(basics.rank())
    for dtype in DTYPES:
        for root in members:
            arrays = [_values(dtype, shape, rank) for shape in SHAPES]
            options = {"root_rank": root, "process_set": process_set}
            results += _run(Kind.BROADCAST, arrays, f"b.{dtype}.{root}", **options)
            results += _run(Kind.GATHER, arrays, f"to.{dtype}.{root}", **options)
            results += _scatter([_values(dtype, (len(members), *shape), rank) for shape in SHAPES], **options)
        uneven = [_values(dtype, ((place * 3 + index) % 5 * 100, 3), rank) for index in range(3)]
        results += _run(Kind.ALLGATHER, uneven, f"g.{dtype}", process_set=process_set)
        rows = [[(place + to + index) % 3 * 50 for to in range(len(members))] for index in range(2)]
        sent = [_values(dtype, (sum(each), 2), rank) for each in rows]
        splits = [number for each in rows for number in each]
        results += _run(Kind.ALLTOALL, sent, f"a.{dtype}", process_set=process_set, arguments=splits)
    return results


def _everything(size: int) -> list[bytes]:
    everyone = list(range(size))
    results = [*_reductions(0, everyone), *_bfloat16(), *_movements(0, everyone)]
    results += _run(Kind.ALLREDUCE, [_values("float32", (5003,), basics.rank())], "adasum", op=ReduceOp.ADASUM)
    ops.wait(ops.Request(Kind.BARRIER, "barrier", []).enqueue([], []))
    return results


def _digests(results: list[bytes]) -> list[str]:
    return [hashlib.sha256(result).hexdigest() for result in results]


def _job_with_everything(size: int) -> list[str]:
    basics.init()
    return _digests(_everything(size))


@pytest.mark.parametrize("size", [2, 3])
def test_every_operation_gives_what_our_own_transports_give(mpi, fresh_ranks, size):
    assert mpi.run(size, _job_with_everything, size) == fresh_ranks(size).run(_job_with_everything, size)


def _sets_and_joins() -> list[str]:
    basics.init()
    rank, results = basics.rank(), []
    pairs = [add_process_set(ProcessSet(ranks)) for ranks in ([0, 2], [1], [1, 2])]
    for pair in pairs:
        if rank in pair.ranks:
            results += [*_reductions(pair.process_set_id, pair.ranks), *_movements(pair.process_set_id, pair.ranks)]
    for pair in pairs:
        remove_process_set(pair)
    for _ in range(2):
        for step in range(rank + 1):  # rank 0 joins first, then 1, then 2
            array = _values("float32", (1009,), rank) + step
            for op in (ReduceOp.AVERAGE, ReduceOp.MAX):
                results += _run(Kind.ALLREDUCE, [array], f"j.{op}", op=op)
            results += _run(Kind.ALLGATHER, [array], "jg")
            results += _run(Kind.REDUCESCATTER, [array], "js")
            results += _run(Kind.ALLTOALL, [array[:9]], "ja", arguments=[2, 3, 4])
            results += _run(Kind.REDUCE, [array], "jr", root_rank=2)
            results += _run(Kind.GATHER, [array], "jo", root_rank=2)
        (last,) = gathered(ops.Request(Kind.JOIN, "join", []).enqueue([], []), np.int64)
        results.append(last.tobytes())
    return _digests(results)


@pytest.mark.slow
def test_process_sets_and_ranks_that_join(mpi, fresh_ranks):
    assert mpi.run(3, _sets_and_joins) == fresh_ranks(3).run(_sets_and_joins)


def _sums_that_round() -> tuple[list[str], float]:
    basics.init()
    size, worst, digests = basics.size(), 0.0, []
    for count in (1, 5, 1009, 300007):
        for dtype in ("float32", "float64"):
            everyone = [np.random.default_rng(rank).standard_normal(count).astype(dtype) for rank in range(size)]
            (result,) = _run(Kind.ALLREDUCE, [everyone[basics.rank()]], f"r.{dtype}.{count}", op=ReduceOp.AVERAGE)
            difference = np.abs(np.frombuffer(result, dtype) - np.mean(everyone, axis=0, dtype=np.float64))
            worst = max(worst, float(difference.max() / np.finfo(dtype).eps))
            digests.append(result)
    nan = np.float32("nan")
    values = np.array([-nan if basics.rank() == 1 else nan, np.inf if basics.rank() == 1 else -np.inf], np.float32)
    digests += _run(Kind.ALLREDUCE, [values], "nan")
    return _digests(digests), worst


@pytest.mark.parametrize("size", [2, 3, 5])
def test_all_ranks_have_the_same_bits(mpi, size):
    results = mpi.run(size, _sums_that_round)
    assert all(digests == results[0][0] for digests, _ in results)
    assert max(worst for _, worst in results) < 4


def _beside_the_script() -> list[float]:
    from mpi4py import MPI

    basics.init(comm=MPI.COMM_WORLD)
    assert basics.mpi_enabled() and basics.mpi_built() and not basics.gloo_enabled()
    assert basics.mpi_threads_supported() == (MPI.Query_thread() == MPI.THREAD_MULTIPLE)
    world, rank, size = MPI.COMM_WORLD, basics.rank(), basics.size()
    for step in range(20):
        arrays = [np.full(50_000, float(rank + step), np.float32) for _ in range(3)]
        requests = [ops.Request(Kind.ALLREDUCE, f"x{index}", [described(array)]) for index, array in enumerate(arrays)]
        handles = [request.enqueue_inplace(array.ctypes.data) for request, array in zip(requests, arrays, strict=True)]
        # The script's own messages, by MPI's lowest means: the same tags, and the library's thread beside ours.
        mine, theirs = np.full(1000, rank), np.zeros(1000, int)
        world.Sendrecv(mine, (rank + 1) % size, 0, theirs, (rank - 1) % size, 0)
        assert (theirs == (rank - 1) % size).all()
        assert world.allreduce(rank) == size * (size - 1) // 2
        assert world.bcast(step if rank == 0 else None) == step
        ops.wait_all(handles)
        expected = size * step + size * (size - 1) / 2
        assert all((array == expected).all() for array in arrays)
    return [float(world.allgather(rank)[-1])]


def test_the_script_uses_mpi_as_well(mpi):
    assert mpi.run(3, _beside_the_script) == [[2.0]] * 3


def _job_after_job() -> list[float]:
    results = []
    for job in range(3):
        basics.init()
        pair = add_process_set(ProcessSet([0, 1]))
        array = np.full(10, float(basics.rank() + job))
        for process_set in (pair.process_set_id, 0) if basics.rank() in pair.ranks else (0,):
            (result,) = _run(Kind.ALLREDUCE, [array], "x", process_set=process_set)
            results.append(float(np.frombuffer(result)[0]))
        basics.shutdown()
        assert not basics.mpi_enabled()
    return results


def test_one_job_after_the_other(mpi):
    both = [1.0, 3.0, 3.0, 6.0, 5.0, 9.0]
    assert mpi.run(3, _job_after_job) == [both, both, [3.0, 6.0, 9.0]]


def _alone() -> list[object]:
    basics.init()
    (result,) = _run(Kind.ALLREDUCE, [np.arange(5.0)], "x", postscale=2.0)
    return [basics.mpi_enabled(), np.frombuffer(result).tolist()]


def test_one_rank(mpi):
    assert mpi.run(1, _alone) == [[True, [0.0, 2.0, 4.0, 6.0, 8.0]]]


def _not_through_mpi() -> list[object]:
    basics.init()
    with pytest.raises(ValueError, match="MPI is not enabled.*HOROVODLIKE_CPU_OPERATIONS=mpi"):
        basics.mpi_threads_supported()
    (result,) = _run(Kind.ALLREDUCE, [np.arange(3.0)], "x")
    return [basics.mpi_enabled(), basics.gloo_enabled(), np.frombuffer(result).tolist()]


@pytest.mark.parametrize("value", ["", "auto", "Gloo", "ccl"])
def test_mpirun_alone_changes_nothing(mpi, value):
    expected = [False, True, [0.0, 2.0, 4.0]]
    assert mpi.run(2, _not_through_mpi, settings={"HOROVODLIKE_CPU_OPERATIONS": value}) == [expected] * 2
