"""All collectives on all ranks of a job, checked against NumPy: `hvdrun -np 4 python tests/cluster/grid.py`.

Every operation over dtypes and sizes from nothing to 1.25 MiB, more than all slots of shared memory hold; results that
all ranks get must have the same bits on all of them. Then what the tests of the binding check on one host, since those
tests start no ranks on others. `--brief` leaves this out, and most of the dtypes.
`--layout 2,1` checks that there are two hosts with these numbers of ranks. Each rank ends with the line `no error`.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import random
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import torch

import horovodlike.torch as hvd

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "torch")]

import soak  # noqa: E402

BRIEF = "--brief" in sys.argv[1:]  # needed before main() parses the arguments
FLOATS = (torch.bfloat16, torch.float32) if BRIEF else (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.int32,) if BRIEF else (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
DTYPES = (*FLOATS, *INTEGERS, torch.bool)
REDUCTIONS = {
    hvd.Sum: np.add,
    hvd.Average: np.add,
    hvd.Min: np.minimum,
    hvd.Max: np.maximum,
    hvd.Product: np.multiply,
}
LOGICAL = {hvd.Sum: np.logical_or, hvd.Max: np.logical_or, hvd.Min: np.logical_and, hvd.Product: np.logical_and}
BYTES = (64 << 10, 5 << 18)
ROWS = 61
PERIOD = 65_521
"""The inputs repeat after this number of elements: a prime number, so that no part of a tensor is like another one."""


def _counts(dtype: torch.dtype) -> tuple[int, ...]:
    """Numbers of elements: none, one, odd, and of 64 KiB and 1.25 MiB."""
    return (0, 1, 1009, *(size // dtype.itemsize for size in BYTES))


def _ops(dtype: torch.dtype) -> Iterable[int]:
    return LOGICAL if dtype is torch.bool else REDUCTIONS


def _values(rank: int, dtype: torch.dtype, count: int) -> torch.Tensor:
    """A rank's input: floats from 0.5 to 1.5; integers so small that sums and products fit into every dtype."""
    return torch.empty(count, dtype=dtype).copy_(_prepared(rank, dtype, count))


@functools.cache
def _period(rank: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7919 * rank)
    if dtype.is_floating_point:
        return torch.rand(PERIOD, generator=generator, dtype=torch.float64).add(0.5).to(dtype)
    return torch.randint(0, 2, (PERIOD,), generator=generator).to(dtype)


@functools.lru_cache(maxsize=64)
def _prepared(rank: int, dtype: torch.dtype, count: int) -> torch.Tensor:
    return _period(rank, dtype).repeat(count // PERIOD + 1)[:count].contiguous()


@functools.lru_cache(maxsize=64)
def _exact(rank: int, dtype: torch.dtype, count: int) -> np.ndarray:
    """The same for NumPy, in a dtype in which rounding does not matter."""
    return _prepared(rank, dtype, count).to(torch.float32 if dtype.itemsize <= 2 else torch.float64).numpy()


def _reduced(dtype: torch.dtype, count: int, op: int, ranks: Sequence[int]) -> np.ndarray:
    combine = LOGICAL[op] if dtype is torch.bool else REDUCTIONS[op]
    reduced = functools.reduce(combine, (_exact(rank, dtype, count) for rank in ranks))
    if op == hvd.Average:
        reduced = reduced / len(ranks)
    return reduced if dtype.is_floating_point else np.trunc(reduced)


def _check(actual: torch.Tensor, expected: np.ndarray, what: object, roundings: int = 0) -> None:
    """Return whether they are as equal as the number of roundings allows."""
    assert actual.shape == expected.shape, (what, actual.shape, expected.shape)
    tolerance = torch.finfo(actual.dtype).eps * roundings if actual.dtype.is_floating_point else 0
    wide = actual.to(torch.float32 if actual.dtype.itemsize <= 2 else torch.float64).numpy()
    assert (np.abs(wide - expected) <= tolerance * np.abs(expected)).all(), (what, actual, expected)


class Bits:
    """A digest of this rank's results, to be compared with those of the others."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def add(self, tensor: torch.Tensor) -> None:
        self._digest.update(tensor.contiguous().view(torch.uint8).numpy() if tensor.numel() else b"none")

    def compare(self, what: object, process_set: hvd.ProcessSet = hvd.global_process_set) -> None:
        """Check that all ranks of a set have the same."""
        digests = hvd.allgather_object(self._digest.hexdigest(), process_set=process_set)
        assert len(set(digests)) == 1, f"{what}: the ranks differ: {digests}"


def allreduce() -> None:
    for dtype in DTYPES:
        for op in _ops(dtype):
            bits = Bits()
            mine = {count: _values(hvd.rank(), dtype, count) for count in _counts(dtype)}
            handles = {count: hvd.allreduce_async(tensor, op=op) for count, tensor in mine.items()}
            grouped = hvd.grouped_allreduce(list(mine.values()), op=op)
            for turn, ((count, handle), together) in enumerate(zip(handles.items(), grouped, strict=True)):
                result = hvd.synchronize(handle)
                if turn % hvd.size() == hvd.rank():  # the others have the same bits
                    _check(result, _reduced(dtype, count, op, range(hvd.size())), (dtype, op, count), hvd.size())
                assert torch.equal(result, together), (dtype, op, count, "grouped")
                bits.add(result)
            bits.compare((dtype, op))


def allgather() -> None:
    """Rank r has r/(size - 1) of the rows: the first one has none."""
    last = max(1, hvd.size() - 1)
    for dtype in DTYPES:
        bits = Bits()
        for count in _counts(dtype):
            result = hvd.allgather(_values(hvd.rank(), dtype, count)[: count * hvd.rank() // last])
            parts = [_exact(rank, dtype, count)[: count * rank // last] for rank in range(hvd.size())]
            _check(result, np.concatenate(parts), (dtype, count))
            bits.add(result)
        bits.compare(dtype)


def broadcast() -> None:
    for root in range(hvd.size()):
        for dtype in DTYPES:
            mine = {count: _values(hvd.rank(), dtype, count) for count in _counts(dtype)}
            handles = {count: hvd.broadcast_async_(tensor, root) for count, tensor in mine.items()}
            for count, handle in handles.items():
                assert torch.equal(hvd.synchronize(handle), _prepared(root, dtype, count)), (root, dtype, count)


def reducescatter() -> None:
    """Rows that the number of ranks does not divide; what comes are the bits of an allreduce."""
    for dtype in DTYPES:
        for op in _ops(dtype):
            handles = {}
            for count in _counts(dtype):
                rows = _values(hvd.rank(), dtype, count)[: count // ROWS * ROWS].reshape(-1, max(1, count // ROWS))
                handles[count] = rows, hvd.reducescatter_async(rows, op=op), hvd.allreduce_async(rows, op=op)
            for count, (rows, *both) in handles.items():
                share, whole = map(hvd.synchronize, both)
                shares = np.array_split(np.arange(rows.shape[0]), hvd.size())
                expected = _reduced(dtype, count, op, range(hvd.size()))[: rows.numel()].reshape(rows.shape)
                _check(share, expected[shares[hvd.rank()]], (dtype, op, count), hvd.size())
                assert torch.equal(share, whole[shares[hvd.rank()]]), (dtype, op, count)


def alltoall() -> None:
    """Rank r sends to rank q a share of (r + 2 q) % 3: to some of them nothing."""
    size, rank = hvd.size(), hvd.rank()
    weights = np.array([[(r + 2 * q) % 3 for q in range(size)] for r in range(size)])
    for dtype in DTYPES:
        for count in _counts(dtype):
            splits = weights * (count // max(1, int(weights.sum(axis=1).max())))
            begins = np.cumsum(splits, axis=1) - splits
            mine = _values(rank, dtype, count)[: splits[rank].sum()]
            received, counts = hvd.alltoall(mine, splits[rank].tolist())
            blocks = [_exact(r, dtype, count)[begins[r, rank] :][: splits[r, rank]] for r in range(size)]
            _check(received, np.concatenate(blocks), (dtype, count))
            assert counts.tolist() == splits[:, rank].tolist(), (dtype, count)


def barrier() -> None:
    """No rank leaves before all have come. All hosts have the same clock, as they are one machine."""
    for _ in range(20):
        came = time.monotonic()
        hvd.barrier()
        left = time.monotonic()
        times = hvd.allgather(torch.tensor([[came, left]], dtype=torch.float64)).numpy()
        assert times[:, 0].max() <= times[:, 1].min(), times


def adasum() -> None:
    """Of vectors that are orthogonal the sum, of equal ones the vector; the same bits everywhere."""
    for dtype in FLOATS:
        bits = Bits()
        for count in _counts(dtype):
            own = torch.zeros(count * hvd.size(), dtype=dtype)
            own[count * hvd.rank() :][:count] = _values(hvd.rank(), dtype, count)
            result = hvd.allreduce(own, op=hvd.Adasum)
            whole = np.concatenate([_exact(rank, dtype, count) for rank in range(hvd.size())])
            _check(result, whole, (dtype, count), hvd.size())
            bits.add(result)
            same = hvd.allreduce(_values(0, torch.float64, count), op=hvd.Adasum)
            assert np.allclose(same.numpy(), _exact(0, torch.float64, count), rtol=1e-12), count
            bits.add(hvd.allreduce(_values(hvd.rank(), dtype, count), op=hvd.Adasum))
        bits.compare(dtype)


def objects() -> None:
    for root in range(hvd.size()):
        thing = {"from": hvd.rank(), "bytes": bytes([hvd.rank()]) * 100_003}
        received = hvd.broadcast_object(thing, root)
        assert received == {"from": root, "bytes": bytes([root]) * 100_003}
        gathered = hvd.allgather_object("x" * (hvd.rank() * 1009))
        assert [len(text) for text in gathered] == [rank * 1009 for rank in range(hvd.size())]


def process_sets() -> None:
    """Each rank alone, all pairs, all but one: all of them in flight at once, each rank in an order of its own."""
    size, rank = hvd.size(), hvd.rank()
    everybody = list(range(size))
    wanted = [[r] for r in everybody] + [[r, q] for r in everybody for q in everybody[r + 1 :]]
    wanted += [[q for q in everybody if q != r] for r in everybody]
    wanted = [ranks for ranks in dict.fromkeys(map(tuple, wanted)) if 0 < len(ranks) < size]
    sets = [hvd.add_process_set(list(ranks)) for ranks in wanted]
    mine = [chosen for chosen in sets if chosen.included()]
    for dtype in (torch.float32, torch.float64, torch.int64):
        for count in _counts(dtype):
            order = random.Random(count + rank).sample(mine, len(mine))
            handles = {}
            for chosen in order:
                tensor = _values(rank, dtype, count)
                handles[chosen] = [
                    hvd.allreduce_async(tensor, op=hvd.Sum, name="sum", process_set=chosen),
                    hvd.allgather_async(tensor, name="rows", process_set=chosen),
                ]
            for chosen in mine:
                summed, rows = map(hvd.synchronize, handles[chosen])
                what = (dtype, count, chosen.ranks)
                _check(summed, _reduced(dtype, count, hvd.Sum, chosen.ranks), what, hvd.size())
                _check(rows, np.concatenate([_exact(member, dtype, count) for member in chosen.ranks]), what)
                bits = Bits()
                bits.add(summed)
                bits.compare(what, chosen)
    for chosen in sets:
        assert hvd.remove_process_set(chosen)


def join() -> None:
    """Ranks with random numbers of batches join, in all orders that come."""
    for number in range(8):
        soak._uneven(random.Random(number), number)


CASES: dict[str, Callable[[], None]] = {
    case.__name__: case
    for case in (
        allreduce, allgather, broadcast, reducescatter, alltoall, barrier, adasum, objects, process_sets, join,
    )
}  # fmt: skip


def cases_of_the_binding() -> dict[str, Callable[[], None]]:
    """The functions that the binding's tests run on the ranks of one host."""
    import test_torch_adasum
    import test_torch_alltoall
    import test_torch_functions
    import test_torch_ops
    import test_torch_process_sets
    import test_torch_reducescatter
    import test_torch_sparse

    def process_sets() -> None:
        sets = test_torch_process_sets.SETS.get(hvd.size())
        if sets is not None:
            test_torch_process_sets._on_sets(sets)
        if hvd.size() == 4:
            test_torch_process_sets._at_once()

    return {
        **{f"ops{case.__name__}": case for case in test_torch_ops.CASES if case.__name__ != "_place"},
        "alltoall_grid": test_torch_alltoall._grid,
        "alltoall_even": test_torch_alltoall._even,
        "alltoall_grouped": test_torch_alltoall._grouped,
        "alltoall_grouped_of_different_splits": test_torch_alltoall._grouped_of_different_splits,
        "reducescatter_grid": test_torch_reducescatter._grid,
        "reducescatter_large": test_torch_reducescatter._large,
        "reducescatter_grouped": test_torch_reducescatter._grouped_and_strided,
        "process_sets_of_the_binding": process_sets,
        "uneven_data": test_torch_process_sets._uneven_data,
        "adasum_definition": test_torch_adasum._definition,
        "sparse": test_torch_sparse._allreduce,
        "objects_of_the_binding": test_torch_functions._objects,
    }


def check_layout(layout: list[int]) -> None:
    """Check that the job has hosts with these numbers of ranks, numbered host by host."""
    expected = [(host, local, count) for host, count in enumerate(layout) for local in range(count)]
    places = hvd.allgather_object((hvd.cross_rank(), hvd.local_rank(), hvd.local_size()))
    assert places == expected, f"expected (host, local rank, local size) {expected}, found {places}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="one of: " + ", ".join(CASES))
    parser.add_argument("--brief", action="store_true", help="few dtypes, and not what the tests of the binding check")
    parser.add_argument("--layout", type=lambda text: [int(count) for count in text.split(",")])
    parser.add_argument("--mpi", action="store_true", help="check that the data goes through MPI")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    hvd.init()
    assert hvd.mpi_enabled() == arguments.mpi, f"MPI is {'not ' * arguments.mpi}what carries the data"
    if arguments.layout:
        check_layout(arguments.layout)
    cases = CASES if BRIEF else CASES | cases_of_the_binding()
    for name in arguments.cases or cases:
        begin = time.monotonic()
        cases[name]()
        hvd.barrier()
        if hvd.rank() == 0:
            print(f"{name}: {time.monotonic() - begin:.2f} s", flush=True)
    print(f"rank {hvd.rank()} of {hvd.size()}: no error", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
