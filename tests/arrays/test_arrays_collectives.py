"""The collectives on NumPy arrays over sizes, shapes, dtypes, orders and forms, against NumPy's own results."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest

import horovodlike as hvd
from horovodlike._engine.ops import DType

SIZES = (1, 2, 3, 4)
DTYPES = [np.dtype(getattr(ml_dtypes, name, name)) for name in DType.__members__]
OPS = (hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product)
SHAPES = ((0,), (1,), (), (17,), (3, 0, 2), (3, 5, 2), (1, 2, 1, 2, 1, 2, 1, 2, 3))
LARGER_THAN_A_SLOT = 1_000_003


def _unaligned(array):
    memory = np.empty(array.nbytes + 1, np.uint8)[1:]
    moved = memory.view(array.dtype).reshape(array.shape)
    moved[...] = array
    return moved


LAYOUTS = {
    "row-major": lambda array: array,
    "column-major": np.asfortranarray,
    "every second row": lambda array: np.repeat(array, 2, axis=0)[::2] if array.ndim else array,
    "backwards": lambda array: np.ascontiguousarray(array[..., ::-1])[..., ::-1] if array.ndim else array,
    "unaligned": _unaligned,
}


def _input(rank, dtype, shape):
    """Small integers, so that sums and products are exact in every dtype; different on each rank."""
    low = 0 if dtype.kind in "ub" else -2
    return np.random.default_rng(1000 * rank + len(shape)).integers(low, 3, shape).astype(dtype)


def _inputs(dtype, shape):
    return [_input(rank, dtype, shape) for rank in range(hvd.size())]


def _is_integer(dtype):
    return dtype.kind in "iu"


def _reduced(arrays, op):
    dtype = arrays[0].dtype
    if dtype.kind == "b":
        return np.any(arrays, axis=0) if op in (hvd.Sum, hvd.Max) else np.all(arrays, axis=0)
    wide = np.stack([array.astype(np.float64) for array in arrays])
    function = {hvd.Average: np.mean, hvd.Sum: np.sum, hvd.Min: np.min, hvd.Max: np.max, hvd.Product: np.prod}[op]
    result = function(wide, axis=0)
    return (np.trunc(result) if _is_integer(dtype) else result).astype(dtype)


def _check(actual, expected, what):
    assert type(actual) is np.ndarray, what
    assert actual.dtype == expected.dtype and actual.shape == expected.shape, what
    assert actual.flags.writeable and actual.flags.aligned, what
    if expected.dtype.kind in "iub":
        assert np.array_equal(actual, expected), (what, actual, expected)
    else:  # everything here but an average is exact
        tolerance = float(ml_dtypes.finfo(expected.dtype).eps)
        actual, expected = actual.astype(np.float64), expected.astype(np.float64)
        np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=0, err_msg=str(what))


def _pairs():
    return [pair for pair in itertools.product(DTYPES, OPS) if pair != (np.dtype(bool), hvd.Average)]


def _allreduce_at_once(dtype, op):
    """All shapes in flight at the same time."""
    inputs = {shape: _inputs(dtype, shape) for shape in SHAPES}
    targets = {shape: arrays[hvd.rank()].copy() for shape, arrays in inputs.items()}
    handles = {
        shape: (
            hvd.allreduce_async(arrays[hvd.rank()], op=op),
            hvd.allreduce_async_(targets[shape], op=op, name=f"{shape}"),
        )
        for shape, arrays in inputs.items()
    }
    for shape, (new, in_place) in handles.items():
        expected = _reduced(inputs[shape], op)
        _check(hvd.synchronize(new), expected, (dtype, op, shape))
        assert hvd.synchronize(in_place) is targets[shape]
        _check(targets[shape], expected, (dtype, op, shape, "in place"))


def _allreduce_forms(dtype, op, shape, name):
    what = (dtype, op, shape)
    inputs = _inputs(dtype, shape)
    mine, expected = inputs[hvd.rank()], _reduced(inputs, op)
    before = mine.copy()
    for _ in range(2):  # the second time as a known request
        _check(hvd.allreduce(mine, op=op, name=name), expected, what)
        target = mine.copy()
        assert hvd.allreduce_(target, op=op, name=name) is target
        _check(target, expected, what)
    _check(hvd.allreduce(mine, op=op), expected, what)
    _check(hvd.synchronize(hvd.allreduce_async(mine, op=op, name=name)), expected, what)
    assert mine.tobytes() == before.tobytes(), what


def _allreduce_grid():
    shapes = itertools.cycle(SHAPES)
    for dtype, op in _pairs():
        _allreduce_at_once(dtype, op)
        _allreduce_forms(dtype, op, next(shapes), "grid")
    _allreduce_forms(np.dtype(np.float32), hvd.Average, (LARGER_THAN_A_SLOT,), "large")


def _layouts():
    """Arrays in any order of memory, in each collective; in place the caller's own array has the result."""
    for (name, lay), dtype in itertools.product(LAYOUTS.items(), map(np.dtype, ("float32", "int16", "bool"))):
        for shape in SHAPES:
            inputs = [lay(array) for array in _inputs(dtype, shape)]
            mine, what = inputs[hvd.rank()], (name, dtype, shape)
            _check(hvd.allreduce(mine, op=hvd.Max), _reduced(inputs, hvd.Max), what)
            _check(hvd.broadcast(mine, hvd.size() - 1), inputs[-1], what)
            for do, expected in (
                (lambda target: hvd.allreduce_(target, op=hvd.Max, name="layout"), _reduced(inputs, hvd.Max)),
                (lambda target: hvd.broadcast_(target, hvd.size() - 1), inputs[-1]),
            ):
                target = lay(mine.copy())
                assert do(target) is target
                assert np.array_equal(target, expected), what
            if shape:
                _check(hvd.allgather(mine), np.concatenate(inputs), what)


def _factors_and_adasum():
    inputs = _inputs(np.dtype(np.float64), (11, 3))
    result = hvd.allreduce(inputs[hvd.rank()], op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
    _check(result, 2 * _reduced(inputs, hvd.Sum), "factors")
    parallel = np.arange(5.0)
    np.testing.assert_allclose(hvd.allreduce(parallel, op=hvd.Adasum), parallel)
    in_columns = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    np.testing.assert_allclose(hvd.allreduce(in_columns, op=hvd.Adasum), in_columns)


def _grouped():
    dtypes = [dtype for dtype in DTYPES if dtype.kind != "b"]
    inputs = [_inputs(dtype, shape) for dtype, shape in zip(dtypes, SHAPES * 2, strict=False)]
    mine = [arrays[hvd.rank()] for arrays in inputs]
    expected = [_reduced(arrays, hvd.Average) for arrays in inputs]
    targets = [array.copy() for array in mine]
    averaged = {"op": hvd.Average}
    returned = hvd.grouped_allreduce_(targets, name="group", **averaged)
    assert all(map(lambda a, b: a is b, returned, targets))
    for results in (
        hvd.grouped_allreduce(mine, **averaged),
        targets,
        hvd.synchronize(hvd.grouped_allreduce_async(iter(mine), **averaged)),
    ):
        for result, array in zip(results, expected, strict=True):
            _check(result, array, array.dtype)
    results = hvd.synchronize(hvd.grouped_broadcast_async(mine, 0))
    targets = [array.copy() for array in mine]
    in_place = hvd.synchronize(hvd.grouped_broadcast_async_(targets, 0))
    for arrays, result, target, same in zip(inputs, results, targets, in_place, strict=True):
        _check(result, arrays[0], "broadcast")
        _check(target, arrays[0], "broadcast in place")
        assert same is target
    whole = [(arrays, array) for arrays, array in zip(inputs, mine, strict=True) if array.ndim]
    for result, (arrays, _) in zip(hvd.grouped_allgather([array for _, array in whole]), whole, strict=True):
        _check(result, np.concatenate(arrays), "allgather")
    for result, (arrays, _) in zip(
        hvd.grouped_reducescatter([array for _, array in whole], op=hvd.Sum), whole, strict=True
    ):
        _check(result, _share(_reduced(arrays, hvd.Sum)), "reducescatter")


def _share(array):
    """This rank's rows: NumPy divides them in the same way."""
    return np.array_split(array, hvd.size())[hvd.rank()]


def _movements():
    rank, size = hvd.rank(), hvd.size()
    for dtype in DTYPES:
        parts = [_input(of, dtype, (of + 1, 3, 1, 1, 1, 1, 1, 1, 2)) for of in range(size)]
        _check(hvd.allgather(parts[rank]), np.concatenate(parts), dtype)
        none_here = [part[: of % 2] for of, part in enumerate(parts)]
        _check(hvd.allgather(none_here[rank], name="rows"), np.concatenate(none_here), dtype)
        for root in range(size):
            _check(hvd.broadcast(_input(rank, dtype, (5, 2)), root), _input(root, dtype, (5, 2)), dtype)
        for rows in (0, 1, 2 * size, 2 * size + 1):
            inputs = _inputs(dtype, (rows, 4))
            for op in (hvd.Sum, hvd.Max):
                _check(hvd.reducescatter(inputs[rank], op=op), _share(_reduced(inputs, op)), (dtype, rows))
        even = [_input(of, dtype, (2 * size, 3)) for of in range(size)]
        received = np.concatenate([array[2 * rank : 2 * rank + 2] for array in even])
        _check(hvd.alltoall(even[rank]), received, dtype)
        _check_splits(dtype)


def _check_splits(dtype):
    rank, size = hvd.rank(), hvd.size()
    splits = [[(source + target) % 3 for target in range(size)] for source in range(size)]
    sent = [_input(source, dtype, (sum(splits[source]), 5)) for source in range(size)]
    starts = [sum(splits[source][:rank]) for source in range(size)]
    parts = [sent[source][starts[source] :][: splits[source][rank]] for source in range(size)]
    counts = [splits[source][rank] for source in range(size)]
    for given in (splits[rank], np.array(splits[rank])):
        received, came = hvd.alltoall(sent[rank], given)
        _check(received, np.concatenate(parts), dtype)
        assert came.tolist() == counts
    pair, rows = hvd.grouped_alltoall([sent[rank], np.zeros(size, dtype)], [splits[rank], None])
    _check(pair[0], np.concatenate(parts), dtype)
    assert pair[1].tolist() == counts and rows.shape == (size,)


def _others():
    rank, size = hvd.rank(), hvd.size()
    hvd.barrier()
    with ThreadPoolExecutor(2) as threads:  # in another order on rank 0
        names = ["one", "two"] if rank == 0 else ["two", "one"]
        assert list(threads.map(lambda name: hvd.barrier(name=name), names)) == [None, None]
    assert hvd.broadcast_object({"rank": rank}, size - 1) == {"rank": size - 1}
    assert hvd.allgather_object(rank, name="who") == list(range(size))
    handle = hvd.allreduce_async(np.ones(3), op=hvd.Sum)
    while not hvd.poll(handle):
        pass
    assert hvd.synchronize(handle).tolist() == [size] * 3
    for _ in range(rank):  # the ranks make different numbers of unnamed calls, and then as many again
        hvd.allreduce(np.ones(2))
        hvd.allgather_object(None)
    last = hvd.join()
    assert last in range(size)
    assert hvd.allreduce(np.array([rank]), op=hvd.Max).tolist() == [size - 1]
    assert hvd.broadcast_object(rank, 0) == 0


def _process_sets():
    rank, size = hvd.rank(), hvd.size()
    some = hvd.add_process_set(range(0, size, 2))
    try:
        if some.included():
            members = some.ranks
            total = hvd.allreduce(np.full(3, rank), op=hvd.Sum, process_set=some, name="set")
            assert total.tolist() == [sum(members)] * 3
            assert hvd.allgather(np.array([rank]), process_set=some).tolist() == members
            assert hvd.broadcast(np.array(rank), members[-1], process_set=some) == members[-1]
            rows = hvd.reducescatter(np.arange(len(members)), op=hvd.Sum, process_set=some)
            assert rows.tolist() == [some.rank() * len(members)]
            hvd.barrier(some)
            assert hvd.broadcast_object(rank, members[0], process_set=some) == members[0]
        else:
            with pytest.raises(ValueError, match="not a member"):
                hvd.allreduce(np.ones(1), process_set=some)
        assert hvd.allreduce(np.full(3, rank), op=hvd.Max, name="set").tolist() == [size - 1] * 3
    finally:
        hvd.remove_process_set(some)


def _threads():
    """Any thread may call the collectives, under names of its own."""

    def work(name):
        for number in range(30):
            array = np.full(3, hvd.rank() + number)
            handle = hvd.allreduce_async(array, op=hvd.Min, name=f"{name}.async")
            assert hvd.allreduce(array, op=hvd.Max, name=name).tolist() == [hvd.size() - 1 + number] * 3
            assert hvd.synchronize(handle).tolist() == [number] * 3

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, ["one", "two", "three", "four"]))


CASES = [_allreduce_grid, _layouts, _factors_and_adasum, _grouped, _movements, _process_sets, _others, _threads]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", CASES)
def test_as_numpy_computes_it(ranks, case, size):
    if case is _process_sets and size == 1:
        case = _grouped  # a set of all ranks is the global one
    ranks(size).run(case)
