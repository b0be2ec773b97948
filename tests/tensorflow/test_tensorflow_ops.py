"""The collectives over sizes, counts, dtypes, operations and forms, eagerly and in functions, against NumPy."""

from __future__ import annotations

import gc
import itertools
import resource
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import horovodlike.tensorflow as hvd
from horovodlike._engine import ops

SIZES = (1, 2, 3, 4)
EPSILONS = {tf.float16: 2**-10, tf.bfloat16: 2**-7, tf.float32: 2**-23, tf.float64: 2**-52}
FLOATS = tuple(EPSILONS)
INTEGERS = (tf.uint8, tf.int8, tf.uint16, tf.int16, tf.int32, tf.int64)
DTYPES = (*FLOATS, *INTEGERS, tf.bool)
OPS = (hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product)
SHAPES = ((0,), (1,), (), (17,), (3, 0, 2), (3, 5, 2), (1, 2, 1, 2, 1, 2, 1, 2, 3))
LARGER_THAN_A_SLOT = 1_000_003


def _inputs(dtype, shape):
    """Small integers, so that sums and products are exact in every dtype; different on each rank."""
    inputs = []
    for rank in range(hvd.size()):
        generator = np.random.default_rng(1000 * rank + len(shape))
        low = -2 if dtype in FLOATS or dtype in (tf.int8, tf.int16, tf.int32, tf.int64) else 0
        inputs.append(generator.integers(low, 3, shape).astype(dtype.as_numpy_dtype))
    return inputs


def _mine(dtype, shape):
    return tf.constant(_inputs(dtype, shape)[hvd.rank()], dtype)


def _reduced(inputs, op):
    dtype = inputs[0].dtype
    stacked = np.stack(inputs)
    if dtype.kind == "b":
        return stacked.any(0) if op in (hvd.Sum, hvd.Max) else stacked.all(0)
    wide = stacked.astype(np.float64)
    reduce = {hvd.Average: np.mean, hvd.Sum: np.sum, hvd.Min: np.min, hvd.Max: np.max, hvd.Product: np.prod}[op]
    return np.trunc(reduce(wide, axis=0)).astype(dtype) if dtype.kind in "iu" else reduce(wide, axis=0).astype(dtype)


def _check(actual, expected, what):
    array = actual.numpy()
    assert array.dtype == expected.dtype, what
    assert array.shape == expected.shape, what
    # Everything here but an average is exact.
    tolerance = 4 * EPSILONS.get(actual.dtype, 0)
    assert np.allclose(array.astype(np.float64), expected.astype(np.float64), rtol=tolerance, atol=0), (what, array)


def _all_reductions():
    return [
        (dtype, op, shape)
        for dtype, op, shape in itertools.product(DTYPES, OPS, SHAPES)
        if not (dtype is tf.bool and op == hvd.Average)
    ]


def _allreduce_eagerly():
    for dtype, op, shape in _all_reductions():
        _check(hvd.allreduce(_mine(dtype, shape), op=op), _reduced(_inputs(dtype, shape), op), (dtype, op, shape))


def _allreduce_in_one_function():
    every = [(dtype, op, shape) for dtype, op, shape in _all_reductions() if dtype is tf.float32 or shape == (17,)]

    @tf.function
    def reduce(tensors):
        return [
            hvd.allreduce(tensor, op=op, name=f"grid.{i}")
            for i, (tensor, (_, op, _)) in enumerate(zip(tensors, every, strict=True))
        ]

    for _ in range(2):
        results = reduce([_mine(dtype, shape) for dtype, _, shape in every])
        for result, (dtype, op, shape) in zip(results, every, strict=True):
            _check(result, _reduced(_inputs(dtype, shape), op), (dtype, op, shape))


@tf.function
def _total(tensor):
    return hvd.allreduce(tensor, op=hvd.Sum)


def _allreduce_of_much():
    for shape in ((LARGER_THAN_A_SLOT,), (1009, 7)):
        expected = _reduced(_inputs(tf.float32, shape), hvd.Sum)
        for _ in range(2):
            _check(hvd.allreduce(_mine(tf.float32, shape), op=hvd.Sum, name="much"), expected, shape)
            _check(_total(_mine(tf.float32, shape)), expected, shape)


def _allreduce_arguments():
    one = tf.ones([3])
    assert hvd.allreduce(one).numpy().tolist() == [1.0] * 3  # Average
    scaled = hvd.allreduce(one, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.25)
    assert scaled.numpy().tolist() == [hvd.size() / 2] * 3
    third = hvd.allreduce(tf.ones([1], tf.float64), op=hvd.Sum, prescale_factor=1 / 3)
    assert third.numpy()[0] == sum([1 / 3] * hvd.size())  # all the bits of the factor
    with pytest.warns(DeprecationWarning, match="average"):
        assert hvd.allreduce(one, average=False).numpy().tolist() == [hvd.size()] * 3
    with pytest.raises(ValueError, match="only one"):
        hvd.allreduce(one, average=True, op=hvd.Sum)
    assert hvd.allreduce([1.0, 2.0], op=hvd.Max).numpy().tolist() == [1.0, 2.0]  # what can be made a tensor
    assert hvd.allreduce(tf.Variable([4.0])).numpy().tolist() == [4.0]
    for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
        result = hvd.allreduce(one, op=hvd.Sum, compression=compression)
        assert result.dtype is tf.float32 and result.numpy().tolist() == [hvd.size()] * 3
        assert hvd.allreduce(tf.range(3), op=hvd.Sum, compression=compression).dtype is tf.int32
    if hvd.size() > 1:
        orthogonal = tf.one_hot([hvd.rank()], hvd.size())
        assert hvd.allreduce(orthogonal, op=hvd.Adasum).numpy().tolist() == [[1.0] * hvd.size()]


def _inputs_keep_their_values():
    variable = tf.Variable([float(hvd.rank())] * 5)

    @tf.function
    def step(tensor):
        total = hvd.allreduce(variable, op=hvd.Sum) + hvd.allreduce(tensor, op=hvd.Sum)
        return total, tensor * 1.0

    tensor = tf.fill([5], 1.0 + hvd.rank())
    ranks = sum(range(hvd.size()))
    for _ in range(3):
        total, same = step(tensor)
        assert total.numpy().tolist() == [ranks + ranks + hvd.size()] * 5
        assert same.numpy().tolist() == tensor.numpy().tolist() == [1.0 + hvd.rank()] * 5
        assert variable.numpy().tolist() == [float(hvd.rank())] * 5


def _groups():
    shapes = [(tf.float32, (3,)), (tf.int64, (2, 2)), (tf.bfloat16, ()), (tf.float32, (0,)), (tf.float64, (70001,))]
    tensors = [_mine(*described) for described in shapes]

    def both(tensors):
        return hvd.grouped_allreduce(tensors, op=hvd.Sum), hvd.grouped_broadcast(tensors, hvd.size() - 1)

    for run in (both, tf.function(both)):
        reduced, sent = run(tensors)
        for result, other, described in zip(reduced, sent, shapes, strict=True):
            _check(result, _reduced(_inputs(*described), hvd.Sum), described)
            _check(other, _inputs(*described)[-1], described)
    assert hvd.grouped_allreduce([]) == hvd.grouped_allgather([]) == hvd.grouped_reducescatter([]) == []


def _allgather():
    for dtype, rest in itertools.product(DTYPES, ((), (3,), (2, 0), (1, 2, 1, 2, 1, 2, 1, 2))):
        parts = [_inputs(dtype, (4, *rest))[rank][: (rank * 2) % 5] for rank in range(hvd.size())]
        mine = tf.constant(parts[hvd.rank()], dtype)
        _check(hvd.allgather(mine), np.concatenate(parts), (dtype, rest))

    @tf.function(input_signature=[tf.TensorSpec([None, 2])])
    def gather(tensor):
        return hvd.allgather(tensor), hvd.grouped_allgather([tensor, tf.range(hvd.rank_op())])

    for rows in (0, 1, 5):
        whole, (again, numbers) = gather(tf.fill([rows + hvd.rank(), 2], float(hvd.rank())))
        expected = np.concatenate([np.full((rows + rank, 2), float(rank)) for rank in range(hvd.size())])
        assert whole.numpy().tolist() == again.numpy().tolist() == expected.tolist()
        assert numbers.numpy().tolist() == [number for rank in range(hvd.size()) for number in range(rank)]


def _broadcast():
    for dtype, shape, root in itertools.product(DTYPES, SHAPES, {0, hvd.size() - 1}):
        _check(hvd.broadcast(_mine(dtype, shape), root), _inputs(dtype, shape)[root], (dtype, shape, root))
    variables = [tf.Variable(_mine(tf.float32, (7,))), tf.Variable(_mine(tf.int64, (2, 3)))]
    expected = [_inputs(tf.float32, (7,))[0], _inputs(tf.int64, (2, 3))[0]]
    assert len(hvd.broadcast_(variables, 0)) == 2
    for variable, value in zip(variables, expected, strict=True):
        assert variable.numpy().tolist() == value.tolist()

    @tf.function
    def again():
        hvd.broadcast_(variables, 0, name="again")

    for variable in variables:
        variable.assign_add(tf.cast(tf.fill(variable.shape, hvd.rank()), variable.dtype))
    again()
    for variable, value in zip(variables, expected, strict=True):
        assert variable.numpy().tolist() == value.tolist()


def _alltoall():
    size, rank = hvd.size(), hvd.rank()
    for dtype in DTYPES:
        tensor = tf.cast(tf.fill([2 * size, 3], rank), dtype)
        expected = np.repeat(np.arange(size), 2)[:, np.newaxis].repeat(3, axis=1).astype(dtype.as_numpy_dtype)
        _check(hvd.alltoall(tensor), expected, dtype)
    splits = [(rank + other) % 3 for other in range(size)]
    rows = tf.range(sum(splits) + 1) + 100 * rank  # the last row stays

    def exchange(rows, splits):
        return hvd.alltoall(rows, splits)

    for kind in (tf.int32, tf.int64):
        for run in (exchange, tf.function(exchange)):
            result, received = run(rows, tf.constant(splits, kind))
            assert received.dtype is tf.int32
            assert received.numpy().tolist() == [(rank + other) % 3 for other in range(size)]
            expected = []
            for other in range(size):
                begin = sum((other + before) % 3 for before in range(rank))
                expected += [100 * other + begin + i for i in range((other + rank) % 3)]
            assert result.numpy().tolist() == expected


def _reducescatter():
    size, rank = hvd.size(), hvd.rank()
    for dtype, op, rows in itertools.product((*FLOATS, tf.int32, tf.int64), OPS, (0, 1, 7, 2 * size)):
        whole = _reduced(_inputs(dtype, (rows, 3)), op)
        begin = sum((rows + size - 1 - place) // size for place in range(rank))
        mine = whole[begin : begin + (rows + size - 1 - rank) // size]
        _check(hvd.reducescatter(_mine(dtype, (rows, 3)), op=op), mine, (dtype, op, rows))

    @tf.function
    def scatter(tensor):
        return hvd.grouped_reducescatter([tensor, tensor[:1]], op=hvd.Sum, postscale_factor=0.5)

    first, second = scatter(tf.ones([2 * size, 2]))
    assert first.numpy().tolist() == [[size / 2] * 2] * 2
    assert second.numpy().tolist() == ([[size / 2] * 2] if rank == 0 else [])


def _different_order_on_each_rank():
    count = 20
    order = np.random.default_rng(hvd.rank()).permutation(count)

    @tf.function
    def step(tensor):
        results = {}
        with tf.control_dependencies([tensor]):
            previous = tensor
        for i in order:  # each begins when the one before has been computed on, so every rank begins in its own order
            with tf.control_dependencies([previous]):
                previous = tensor * float(i)
            results[int(i)] = hvd.allreduce(previous, op=hvd.Sum, name=f"ordered.{i}")
        return [results[i] for i in range(count)]

    for _ in range(5):
        for i, result in enumerate(step(tf.ones([11]))):
            assert result.numpy().tolist() == [i * hvd.size()] * 11


def _in_threads(call):
    """Compare what `call(thread, i)` returns, a result and the one expected, in several threads at a time."""
    results = {}

    def work(thread):
        results[thread] = [call(thread, i) for i in range(200)]

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(results) == list(range(4))
    assert all(got == expected for pairs in results.values() for got, expected in pairs)


def _eagerly_from_threads():
    def reduce(thread, i):
        return float(hvd.allreduce(tf.constant(float(thread + i)), name=f"thread.{thread}")), float(thread + i)

    _in_threads(reduce)


def _splits_from_threads():
    def exchange(thread, i):
        value, rows = float(1000 * thread + i), [thread + 1] * hvd.size()
        received, splits = hvd.alltoall(tf.constant([value] * sum(rows)), rows, name=f"thread.{thread}")
        return (received.numpy().tolist(), splits.numpy().tolist()), ([value] * sum(rows), rows)

    _in_threads(exchange)


def _recorded_from_threads():
    def differentiate(thread, i):
        value, rows = float(1000 * thread + i), [thread + 1] * hvd.size()
        with tf.device("CPU:0"):
            tensor = tf.constant([value] * sum(rows))
        with tf.GradientTape() as tape:
            tape.watch(tensor)
            mean = hvd.allreduce(tensor, name=f"mean.{thread}")
            received, _ = hvd.alltoall(tensor, rows, name=f"thread.{thread}")
        (gradient,) = tape.gradient([mean, received], [tensor])
        got = mean.numpy().tolist(), received.numpy().tolist(), gradient.numpy().tolist()
        return got, ([value] * sum(rows), [value] * sum(rows), [2.0] * sum(rows))

    _in_threads(differentiate)


def _nothing_is_computed_beforehand():
    @tf.function
    def constant():
        return hvd.allreduce(tf.constant([3.0]), op=hvd.Sum), hvd.broadcast(tf.constant(1), 0)

    constant()
    hvd.barrier()
    before = ops.counters()["executed"]
    for _ in range(5):
        total, _ = constant()
        assert total.numpy().tolist() == [3.0 * hvd.size()]
    assert ops.counters()["executed"] == before + 10


def _unnamed_ones_are_known():
    for i in range(3):
        hvd.allreduce(tf.ones([2 + i]))
    before = ops.counters()["negotiated_in_full"]
    for _ in range(10):
        hvd.allreduce(tf.ones([4]))
    assert ops.counters()["negotiated_in_full"] == before


def _names_in_branches():
    @tf.function
    def step(tensor):
        first = tf.cond(tensor[0] > 0, lambda: hvd.allreduce(tensor, op=hvd.Sum), lambda: tensor)
        second = tf.cond(tensor[0] > 0, lambda: hvd.allreduce(tensor, op=hvd.Sum), lambda: tensor)
        total = tf.zeros_like(tensor)
        for _ in tf.range(3):
            total += hvd.allreduce(tensor + total, op=hvd.Max)
        return first, second, total

    for _ in range(3):
        first, second, total = step(tf.ones([2]))
        assert first.numpy().tolist() == second.numpy().tolist() == [hvd.size()] * 2
        assert total.numpy().tolist() == [7.0, 7.0]
    assert step(-tf.ones([2]))[0].numpy().tolist() == [-1.0, -1.0]


def _loops():
    size, rank = hvd.size(), hvd.rank()
    rows = tf.reshape(tf.range(160.0), [40, 4])

    @tf.function
    def nested():
        total = 0.0
        for i in tf.range(5):
            for j in tf.range(8):
                total += tf.reduce_sum(hvd.allreduce(rows[8 * i + j] + rank, op=hvd.Sum))
        return total

    @tf.function
    def some():
        total = 0.0
        for i in tf.range(40):
            if i % 2 == 0:
                total += tf.reduce_sum(hvd.allreduce(rows[i] + rank, op=hvd.Sum))
                total += tf.reduce_sum(hvd.allgather(rows[i]))
        return total

    @tf.function
    def gradient():
        with tf.GradientTape() as tape:
            tape.watch(rows)
            total = 0.0
            for i in tf.range(40):
                total += tf.reduce_sum(hvd.allreduce(rows[i] ** 2))
        return tf.reduce_sum(tape.gradient(total, rows))

    @tf.function
    def exchanged():
        return tf.reduce_sum(tf.map_fn(lambda row: hvd.alltoall(tf.tile(row, [size]), [4] * size)[0], rows))

    whole, half = float(tf.reduce_sum(rows)), float(tf.reduce_sum(rows[::2]))
    ranks = size * (size - 1) / 2
    for _ in range(3):
        assert float(nested()) == whole * size + 160 * ranks
        assert float(some()) == half * size * 2 + 80 * ranks
        assert float(gradient()) == 2 * whole
        assert float(exchanged()) == whole * size


def _traced_graphs_are_collected():
    function = tf.function(lambda tensor: hvd.allreduce(tensor, op=hvd.Sum))
    tensor = tf.ones([2])
    assert function(tensor).numpy().tolist() == [hvd.size()] * 2
    graph = weakref.ref(function.get_concrete_function(tensor).graph)
    assert graph() is not None
    del function
    gc.collect()
    assert graph() is None


def _resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _other_names_and_factors_in_each_step():
    def steps(begin, end):
        for i in range(begin, end):
            hvd.allreduce(tf.ones([2]), name=f"loss_{i}")
            hvd.allreduce(tf.ones([2]), prescale_factor=1.0 + i)
            hvd.barrier(name=f"barrier_{i}")

    steps(0, 100)
    before = _resident_bytes()
    steps(100, 1100)
    assert _resident_bytes() - before < 30 << 20  # a kernel that TensorFlow keeps for each has about 37 KB


def _place():
    def numbers():
        return hvd.rank_op(), hvd.size_op(), hvd.local_rank_op(), hvd.local_size_op(), hvd.process_set_included_op()

    for run in (numbers, tf.function(numbers)):
        expected = [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), 1]
        assert [int(number) for number in run()] == expected
    with pytest.raises(tf.errors.InvalidArgumentError, match="process set 77 does not exist"):
        hvd.size_op(77)
    hvd.barrier()
    tf.function(hvd.barrier)()
    assert hvd.is_homogeneous()
    assert [hvd.check_num_rank_power_of_2(number) for number in (1, 2, 3, 4, 6, 8)] == [1, 1, 0, 1, 0, 1]


def _graph_of_tensorflow_1():
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        fed = tf.compat.v1.placeholder(tf.float32, [2])
        variable = tf.compat.v1.get_variable("v", initializer=tf.constant([float(hvd.rank())]))
        total = hvd.allreduce(fed, op=hvd.Sum)
        everything = hvd.broadcast_global_variables(0)
        session.run(tf.compat.v1.global_variables_initializer())
        assert session.run(total, {fed: [1.0, 2.0]}).tolist() == [hvd.size(), 2.0 * hvd.size()]
        session.run(everything)
        assert session.run(variable).tolist() == [0.0]


CASES = (
    _allreduce_eagerly,
    _allreduce_in_one_function,
    _allreduce_of_much,
    _allreduce_arguments,
    _inputs_keep_their_values,
    _groups,
    _allgather,
    _broadcast,
    _alltoall,
    _reducescatter,
    _different_order_on_each_rank,
    _eagerly_from_threads,
    _splits_from_threads,
    _recorded_from_threads,
    _nothing_is_computed_beforehand,
    _unnamed_ones_are_known,
    _names_in_branches,
    _loops,
    _traced_graphs_are_collected,
    _other_names_and_factors_in_each_step,
    _place,
    _graph_of_tensorflow_1,
)


SLOW = (_recorded_from_threads, _other_names_and_factors_in_each_step)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.slow) if case in SLOW else case for case in CASES],
    ids=lambda case: case.__name__.strip("_"),
)
def test_collective(ranks, case, size):
    ranks(size).run(case, timeout=180)
