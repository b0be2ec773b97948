"""Random mixed collectives for as long as wanted, checked against NumPy: `hvdrun -np 4 python tests/soak.py`.

Everything follows from the seed. In each round all ranks enqueue the same operations, on overlapping process sets and
each rank in an order of its own, and then wait for some of those that are pending, in any order. Now and then process
sets come and go, and ranks with uneven amounts of data join. At the end memory, threads and file descriptors must be as
they were after the first part.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import psutil
import torch

import horovodlike.torch as hvd

DTYPES = (np.float32, np.float64, np.float16, np.int32, np.int64, np.uint8, np.int8)
REDUCTIONS = {hvd.Sum: np.sum, hvd.Min: np.min, hvd.Max: np.max, hvd.Product: np.prod}
LENGTHS = (0, 1, 2, 3, 7, 61, 1009, 20_011)
LARGE = 400_009  # more than all slots hold
OPERATIONS = 12  # of a round
ROUNDS_PENDING = 5
REPORT_SECONDS = 10
GROWTH_ALLOWED = 24 << 20  # bytes
KINDS = ("allreduce", "grouped_allreduce", "allgather", "broadcast", "reducescatter", "alltoall", "barrier")


@dataclass
class Pending:
    """An operation in flight: its handle, and what checks the result."""

    round_number: int
    what: str
    handle: int
    check: Callable[[object], None]


def _data(seed: tuple[int, ...], rank: int, shape: tuple[int, ...], dtype: type) -> np.ndarray:
    """Small integers, whose sums and products are exact in every dtype."""
    generator = np.random.default_rng([*seed, rank])
    return generator.integers(0, 3, shape).astype(dtype)


def _equal(what: str, expected: np.ndarray) -> Callable[[object], None]:
    def check(result: object) -> None:
        assert isinstance(result, torch.Tensor), what
        actual = result.numpy()
        assert actual.dtype == expected.dtype and np.array_equal(actual, expected), f"{what}: wrong result"

    return check


def _shares(rows: int, parts: int) -> list[int]:
    return [len(range(part, rows, parts)) for part in range(parts)]


def _start(common: random.Random, seed: tuple[int, int], name: str, chosen: hvd.ProcessSet) -> tuple[str, int, object]:
    """Enqueue one operation that `common` chooses; what it is, its handle, and what checks it."""
    ranks, rank = chosen.ranks or [], hvd.rank()
    kind, dtype = common.choice(KINDS), common.choice(DTYPES)
    length = LARGE if common.random() < 0.02 else common.choice(LENGTHS)
    op, root = common.choice(list(REDUCTIONS)), common.choice(ranks)
    what = f"round {seed[0]}, {kind} {name} of {length} {dtype.__name__} on {ranks}"
    inputs = {r: _data(seed, r, (length,), dtype) for r in ranks}
    mine = torch.from_numpy(inputs[rank].copy())
    options = {"name": name, "process_set": chosen}
    if kind in ("allreduce", "reducescatter", "grouped_allreduce"):
        reduced = REDUCTIONS[op](np.stack(list(inputs.values())), axis=0).astype(dtype)
        if kind == "allreduce":
            return what, hvd.allreduce_async_(mine, op=op, **options), _equal(what, reduced)
        if kind == "reducescatter":
            place = ranks.index(rank)
            counts = _shares(length, len(ranks))
            begin = sum(counts[:place])
            return (
                what,
                hvd.reducescatter_async(mine, op=op, **options),
                _equal(what, reduced[begin : begin + counts[place]]),
            )
        parts = [_equal(what, reduced), _equal(what, reduced[::-1].copy())]
        handle = hvd.grouped_allreduce_async([mine, mine.flip(0)], op=op, **options)
        return what, handle, lambda results: [check(one) for check, one in zip(parts, results, strict=True)]
    if kind == "allgather":
        rows = {r: inputs[r][: length * (r + 1) // (max(ranks) + 1)] for r in ranks}
        handle = hvd.allgather_async(torch.from_numpy(rows[rank].copy()), **options)
        return what, handle, _equal(what, np.concatenate(list(rows.values())))
    if kind == "broadcast":
        return what, hvd.broadcast_async_(mine, root, **options), _equal(what, inputs[root])
    if kind == "alltoall":
        place = ranks.index(rank)
        splits = {r: _shares(length * (index + 1) // len(ranks), len(ranks)) for index, r in enumerate(ranks)}
        blocks = [inputs[r][sum(splits[r][:place]) :][: splits[r][place]] for r in ranks]
        handle = hvd.alltoall_async(mine, splits[rank], **options)
        check = _equal(what, np.concatenate(blocks))
        return what, handle, lambda results: check(results[0])
    handle = hvd.allreduce_async(torch.ones(1), op=hvd.Sum, **options)  # in place of a barrier, which has no handle
    return what, handle, _equal(what, np.full(1, len(ranks), np.float32))


def _enqueue_round(seed: int, number: int, sets: list[hvd.ProcessSet], own: random.Random) -> list[Pending]:
    todo = list(range(OPERATIONS))
    own.shuffle(todo)
    pending = []
    for index in todo:
        common = random.Random(f"{seed}.{number}.{index}")
        chosen = common.choice(sets)
        if chosen.included():
            name = f"{number % (ROUNDS_PENDING + 2)}.{index}"
            what, handle, check = _start(common, (number, index), name, chosen)
            pending.append(Pending(number, what, handle, check))
        if pending and own.random() < 0.1:
            hvd.poll(own.choice(pending).handle)
    return pending


def _wait(pending: list[Pending], own: random.Random, oldest_kept: int) -> list[Pending]:
    own.shuffle(pending)
    kept = []
    for operation in pending:
        if operation.round_number >= oldest_kept and own.random() < 0.5:
            kept.append(operation)
        else:
            operation.check(hvd.synchronize(operation.handle))
    return kept


def _change_sets(common: random.Random, sets: list[hvd.ProcessSet]) -> None:
    """Remove a set and add another; nothing is pending."""
    assert hvd.remove_process_set(sets.pop(common.randrange(1, len(sets))))
    known = [chosen.ranks for chosen in sets]
    while True:
        ranks = sorted(common.sample(range(hvd.size()), common.randint(1, hvd.size())))
        if ranks not in known:
            sets.append(hvd.add_process_set(ranks))
            return


def _uneven(common: random.Random, number: int) -> None:
    """Each rank has another number of batches, and joins."""
    batches = [common.randrange(4) for _ in range(hvd.size())]
    for batch in range(batches[hvd.rank()]):
        present = [rank for rank in range(hvd.size()) if batches[rank] > batch]
        inputs = [_data((number, batch), rank, (1009,), np.float64) for rank in present]
        mine = torch.from_numpy(inputs[present.index(hvd.rank())].copy())
        assert np.array_equal(hvd.allreduce(mine, op=hvd.Sum, name="uneven").numpy(), np.sum(inputs, axis=0))
        assert np.array_equal(hvd.allgather(mine, name="rows").numpy(), np.concatenate(inputs))
    last = hvd.join()
    assert 0 <= last < hvd.size()


def _resources() -> tuple[int, int, int]:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what the allocator only keeps is no growth
    process = psutil.Process()
    return process.memory_info().rss, process.num_threads(), process.num_fds()


def _agree(value: float, op: int) -> float:
    return hvd.allreduce(torch.tensor([value], dtype=torch.float64), op=op, name="agree").item()


def soak(seconds: float, seed: int) -> str:
    """Run for this number of seconds; return a line with a summary.

    Raises:
        AssertionError: A result was wrong, or memory, threads or file descriptors grew.
    """
    own = random.Random(f"{seed} of rank {hvd.rank()}")
    size = hvd.size()
    sets = [hvd.global_process_set]
    for ranks in ([0], list(range(1, size)), list(range(0, size, 2))):
        if ranks and ranks not in [chosen.ranks for chosen in sets]:
            sets.append(hvd.add_process_set(ranks))
    begin, number, pending = time.monotonic(), 0, []
    before = None
    operations = 0
    next_report = begin + REPORT_SECONDS
    while _agree(time.monotonic() - begin, hvd.Max) < seconds:
        common = random.Random(f"{seed}.{number}")
        for _ in range(10):
            started = _enqueue_round(seed, number, sets, own)
            operations += len(started)
            pending = _wait(pending + started, own, number - ROUNDS_PENDING + 1)
            number += 1
        if common.random() < 0.2:
            pending = _wait(pending, own, number + 1)
            _uneven(common, number)
            if len(sets) > 1:
                _change_sets(common, sets)
        if before is None and time.monotonic() - begin > seconds / 4:
            before = _resources()
        if hvd.rank() == 0 and time.monotonic() > next_report:
            next_report += REPORT_SECONDS
            print(f"{number} rounds, {operations} operations, {_resources()[0] / 2**20:.1f} MiB", flush=True)
    _wait(pending, own, number + 1)
    for chosen in sets[1:]:
        assert hvd.remove_process_set(chosen)
    after = _resources()
    hvd.barrier()  # who is done shuts the job down for all
    assert before is not None
    grown = after[0] - before[0]
    assert grown < GROWTH_ALLOWED, f"memory has grown by {grown} bytes"
    assert after[1:] == before[1:], f"threads and file descriptors: {before[1:]} before, {after[1:]} after"
    return f"rank {hvd.rank()}: {number} rounds, {operations} operations, memory {grown / 2**20:+.1f} MiB, no error"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    hvd.init()
    print(soak(arguments.seconds, arguments.seed), flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
