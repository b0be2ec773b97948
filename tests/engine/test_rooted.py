"""Gather, scatter and reduce to a root, through the package's own requests, against NumPy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from support.collectives import DTYPES, allreduce, described, enqueue, gathered

from horovodlike import basics
from horovodlike._engine import ops
from horovodlike._engine.ops import DType, Kind, ReduceOp
from horovodlike.errors import MismatchError
from horovodlike.process_set import ProcessSet, add_process_set, remove_process_set

ROOTED = (Kind.GATHER, Kind.SCATTER, Kind.REDUCE)
REDUCTIONS = {
    ReduceOp.SUM: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PRODUCT: np.multiply,
}
SHAPES = ((), (0,), (1,), (3, 5), (1009,), (70_001,))  # the last is of more than one slot


def _values(dtype: str, shape: tuple[int, ...], rank: int) -> np.ndarray:
    """Small numbers, so that sums and products are exact in every dtype."""
    numbers = (np.arange(np.prod(shape, dtype=int)) + rank) % 3
    return (numbers % 2 if dtype == "bool" else numbers).astype(dtype).reshape(shape)


def _scatter(name: str, parts: np.ndarray | None, part: np.ndarray, **options: object) -> np.ndarray:
    """Scatter the parts of the root, which the others do not have; `part` is where this rank's goes."""
    request = ops.Request(Kind.SCATTER, name, [described(part)], **options)
    ops.wait(request.enqueue([0 if parts is None else parts.ctypes.data], [part.ctypes.data]))
    return part


def _reduce(name: str, array: np.ndarray, root: int, **options: object) -> np.ndarray | None:
    """Reduce to the root, whose result is returned; the others have no memory for one."""
    request = ops.Request(Kind.REDUCE, name, [described(array)], root_rank=root, **options)
    result = np.empty_like(array) if basics.rank() == root else None
    ops.wait(request.enqueue([array.ctypes.data], [0 if result is None else result.ctypes.data]))
    return result


def _gathers(process_set: int, members: list[int]) -> None:
    place = members.index(basics.rank())
    rows = [(other * 3 + 1) % 4 * 700 for other in range(len(members))]  # of some ranks none
    for dtype in DTYPES:
        for root in members:
            arrays = [_values(dtype, (count, 2), other) for other, count in enumerate(rows)]
            options = {"root_rank": root, "process_set": process_set}
            handle = enqueue(Kind.GATHER, f"g.{dtype}", [arrays[place], arrays[place][:1]], **options)
            result, first = gathered(handle, dtype)
            if basics.rank() != root:
                assert result.shape == first.shape == (0, 2)
                continue
            np.testing.assert_array_equal(result, np.concatenate(arrays))
            np.testing.assert_array_equal(first, np.concatenate([array[:1] for array in arrays]))


def _scatters(process_set: int, members: list[int]) -> None:
    place = members.index(basics.rank())
    for dtype in DTYPES:
        for shape in SHAPES:
            for root in members:
                parts = _values(dtype, (len(members), *shape), root)
                part = np.empty(shape, dtype)
                given = parts if basics.rank() == root else None
                _scatter(f"s.{dtype}.{shape}", given, part, root_rank=root, process_set=process_set)
                np.testing.assert_array_equal(part, parts[place])


def _reduces(process_set: int, members: list[int]) -> None:
    rank = basics.rank()
    for dtype in DTYPES:
        for shape in SHAPES:
            arrays = {other: _values(dtype, shape, other) for other in members}
            for op, function in REDUCTIONS.items():
                root = members[(op + len(shape)) % len(members)]
                name = f"r.{dtype}.{shape}.{op}"
                result = _reduce(name, arrays[rank], root, op=op, process_set=process_set)
                np.testing.assert_array_equal(arrays[rank], _values(dtype, shape, rank))
                if result is not None:
                    expected = function.reduce(list(arrays.values()), dtype=dtype)
                    np.testing.assert_array_equal(result, expected, strict=True)


def _averages_and_factors() -> None:
    size, rank = basics.size(), basics.rank()
    for root in range(size):
        for dtype in ("float32", "float16", "int32"):
            mine = np.full(5003, 6 * size * (rank + 1), dtype)
            result = _reduce(f"mean.{dtype}", mine, root, op=ReduceOp.AVERAGE, prescale=0.5, postscale=3.0)
            if result is not None:
                assert (result == 9 * size * (size + 1) // 2).all()


def _in_place() -> None:
    size, rank = basics.size(), basics.rank()
    for count in (1, 1009, 300_007):
        for root in range(size):
            array = np.full(count, float(rank + 1))
            request = ops.Request(Kind.REDUCE, f"inplace.{count}", [described(array)], root_rank=root)
            ops.wait(request.enqueue_inplace(array.ctypes.data))
            assert (array == (size * (size + 1) / 2 if rank == root else rank + 1)).all()


def _the_bits_of_an_allreduce() -> None:
    for count in (5, 70_001, 1_500_007):
        array = np.random.default_rng(basics.rank()).standard_normal(count).astype(np.float32)
        result = _reduce(f"bits.{count}", array, basics.size() - 1, op=ReduceOp.AVERAGE)
        whole = allreduce(f"bits.all.{count}", array.copy(), ReduceOp.AVERAGE)
        assert result is None or result.tobytes() == whole.tobytes()


def _types_without_numpy() -> None:
    """NumPy has no bfloat16 and no float8, but their bytes can be moved."""
    rank, size = basics.rank(), basics.size()
    for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        width = 2 if name == "bfloat16" else 1
        parts = (np.arange(size * 6 * width) % 251).astype(np.uint8)
        part = np.empty(6 * width, np.uint8)
        tensors = [(DType[name], (6,))]
        scatter = ops.Request(Kind.SCATTER, f"s.{name}", tensors, root_rank=0)
        ops.wait(scatter.enqueue([parts.ctypes.data if rank == 0 else 0], [part.ctypes.data]))
        assert part.tobytes() == parts.reshape(size, -1)[rank].tobytes()
        gather = ops.Request(Kind.GATHER, f"g.{name}", tensors, root_rank=0)
        (result,) = ops.wait(gather.enqueue([part.ctypes.data], []))
        assert bytes(result.memory) == (parts.tobytes() if rank == 0 else b"")


def _everything() -> None:
    members = list(range(basics.size()))
    _gathers(0, members)
    _scatters(0, members)
    _reduces(0, members)
    _averages_and_factors()
    _in_place()
    _the_bits_of_an_allreduce()
    _types_without_numpy()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_results_are_those_of_numpy(ranks, size):
    ranks(size).run(_everything)


def _on_sets() -> None:
    sets = [add_process_set(ProcessSet(members)) for members in ([1, 2], [0, 2])]
    for chosen in sets:
        if basics.rank() in chosen.ranks:
            _gathers(chosen.process_set_id, chosen.ranks)
            _scatters(chosen.process_set_id, chosen.ranks)
            _reduces(chosen.process_set_id, chosen.ranks)
            for kind in ROOTED:
                (outside,) = {0, 1, 2} - set(chosen.ranks)
                with pytest.raises(ValueError, match=f"Root rank {outside} of .* is not one of its ranks"):
                    ops.wait(_of(kind, "outside", np.ones(2), outside, process_set=chosen.process_set_id))
    for chosen in sets:
        remove_process_set(chosen)


def test_process_sets(ranks):
    ranks(3).run(_on_sets)


def _of(kind: Kind, name: str, array: np.ndarray, root: int, **options: object) -> int:
    """Enqueue one of the three with as much memory as any of them needs."""
    given = np.concatenate([array] * basics.size()) if kind == Kind.SCATTER else array
    request = ops.Request(kind, name, [described(array)], root_rank=root, **options)
    outputs = [] if kind == Kind.GATHER else [array.ctypes.data]
    handle = request.enqueue([given.ctypes.data], outputs)
    _kept[:] = [given, array]
    return handle


_kept: list[np.ndarray] = []  # the memory of the request in flight


def _differences(kind: Kind) -> list[str]:
    rank, name = basics.rank(), kind.name.lower()
    cases: list[Callable[[], int]] = [
        lambda: _of(kind, f"{name}.root", np.ones(3), rank),
        lambda: _of(kind, f"{name}.dtype", np.ones(3, np.float32 if rank else np.float64), 0),
        lambda: _of(kind, f"{name}.shape", np.ones((2, 3 + rank)), 0),
        lambda: _of(Kind.BROADCAST if rank else kind, f"{name}.kind", np.ones(3), 0),
    ]
    errors = []
    for case in cases:
        with pytest.raises(MismatchError) as caught:
            ops.wait(case())
        errors.append(str(caught.value))
    assert allreduce("still.works", np.ones(2))[0] == basics.size()
    return errors


@pytest.mark.parametrize("kind", ROOTED)
def test_ranks_that_differ_are_named(ranks, kind):
    per_rank = ranks(3).run(_differences, kind)
    name = kind.name.lower()
    shapes = "dimensions other than the first" if kind == Kind.GATHER else "shapes"
    expected = (f"root ranks for {name}", f"data types for {name}", f"{shapes} for {name}", "operations for")
    for errors in per_rank:
        assert errors == per_rank[0]
        for error, what, case in zip(errors, expected, ("root", "dtype", "shape", "kind"), strict=True):
            assert error.startswith(f"Mismatched {what} '{name}.{case}': ")
            assert "rank 0 has" in error


def _refused(kind: Kind) -> None:
    name = kind.name.lower()
    for root in (-1, 2):
        with pytest.raises(ValueError, match=f"{name} of 'x' has the root rank {root}, but the ranks of this job are"):
            _of(kind, "x", np.ones(2), root)
    array = np.ones(2)
    request = ops.Request(kind, "memory", [described(array)], root_rank=basics.rank())
    with pytest.raises(ValueError, match="a tensor of 'memory' has no memory for its 16 bytes"):
        request.enqueue([0], [] if kind == Kind.GATHER else [array.ctypes.data])
    if kind != Kind.REDUCE:
        with pytest.raises(ValueError, match="'memory' is not an operation of one tensor that is input and output"):
            request.enqueue_inplace(array.ctypes.data)
    if kind != Kind.GATHER:
        with pytest.raises(ValueError, match="'memory' needs an output"):
            request.enqueue([array.ctypes.data], [])
    if kind == Kind.GATHER:
        with pytest.raises(ValueError, match="is a scalar; gather needs at least one dimension"):
            ops.Request(kind, "scalar", [(DType["float32"], ())], root_rank=0)
    if kind == Kind.SCATTER:
        other = ops.Request(kind, "memory", [described(array)], root_rank=1 - basics.rank())
        with pytest.raises(ValueError, match="a tensor of 'memory' has no memory for its 16 bytes"):
            other.enqueue([0], [0])
    if kind == Kind.REDUCE:
        with pytest.raises(ValueError, match="is not one of Average, Sum, Min, Max, Product, and of an allreduce"):
            ops.Request(kind, "adasum", [described(array)], root_rank=0, op=ReduceOp.ADASUM)
        with pytest.raises(ValueError, match="Average is not defined for bool"):
            ops.Request(kind, "bool", [(DType["bool"], (2,))], root_rank=0, op=ReduceOp.AVERAGE)


@pytest.mark.parametrize("kind", ROOTED)
def test_what_one_rank_can_see_is_refused_at_once(ranks, kind):
    ranks(2).run(_refused, kind)


def _without_ranks_that_have_joined() -> None:
    rank, size = basics.rank(), basics.size()
    for step in range(rank + 1):  # rank 0 joins first, then 1, and the last rank is always there
        present = list(range(step, size))
        root, array = size - 1, np.full(1009, float(rank + 1))
        result = _reduce("j.sum", array, root)
        assert result is None or (result == sum(other + 1 for other in present)).all()
        mean = _reduce("j.mean", array, root, op=ReduceOp.AVERAGE)
        assert mean is None or (mean == np.mean([other + 1 for other in present])).all()
        (rows,) = gathered(enqueue(Kind.GATHER, "j.rows", [array[: rank + 1]], root_rank=root), np.float64)
        expected = [float(other + 1) for other in present for _ in range(other + 1)]
        assert rows.tolist() == (expected if rank == root else [])
        parts = np.repeat(np.arange(size), 1009) if rank == root else None
        part = _scatter("j.parts", parts, np.empty(1009, np.int64), root_rank=root)
        assert (part == rank).all()
        if step > 0:
            for kind in ROOTED:
                with pytest.raises(ValueError, match=rf"{kind.name.lower()} 'j.lost' needs .*0.*joined"):
                    ops.wait(_of(kind, "j.lost", np.ones(2), 0))
    ops.wait(ops.Request(Kind.JOIN, "join", []).enqueue([], []))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_that_have_joined_take_no_part(ranks, size):
    ranks(size).run(_without_ranks_that_have_joined)
