"""The ops on GPUs: with the double of the CUDA driver behind a pluggable device of TensorFlow."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import tensorflow as tf
import test_tensorflow_gradients
import test_tensorflow_ops
from support import tensorflow_gpus
from support.ranks import RankPool

import horovodlike.tensorflow as hvd
from horovodlike._engine import ops
from horovodlike.errors import HorovodInternalError

pytestmark = pytest.mark.slow

SIZES = (1, 2)
GPU = "GPU:0"
MODULES = ("tensorflow", "horovodlike.tensorflow")


# Functions that are sent to ranks are copies; the module that they call is not.


def _load(device, kernels):
    tensorflow_gpus.load(device, kernels)


def _check():
    tensorflow_gpus.check()


def _count(call):
    return tensorflow_gpus.count(call)


@pytest.fixture(scope="module")
def gpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return tensorflow_gpus.build(tmp_path_factory.mktemp("gpu"))


@pytest.fixture(scope="module")
def open_pool(gpus: tuple[str, str]) -> Callable[..., RankPool]:
    """Ranks with GPUs. Those of several share one, as far as the engine knows, and so copy what they exchange."""
    device, _ = gpus
    libraries = {"HOROVODLIKE_CUDA_LIBRARY": device, "HOROVODLIKE_NCCL_LIBRARY": device}

    def pool_of(size: int, **settings: str) -> RankPool:
        pool = RankPool(size, {**libraries, **settings}, modules=MODULES, before={"LD_PRELOAD": device})
        pool.run(_load, *gpus)
        return pool

    return pool_of


@pytest.fixture(scope="module")
def _pools(open_pool: Callable[..., RankPool]) -> Iterator[Callable[[int], RankPool]]:
    pools: dict[int, RankPool] = {}

    def pool_of(size: int) -> RankPool:
        if size in pools and pools[size].broken:
            pools.pop(size).close()
        if size not in pools:
            pools[size] = open_pool(size)
        return pools[size]

    yield pool_of
    for pool in pools.values():
        pool.close()


@pytest.fixture
def on_gpus(_pools: Callable[[int], RankPool]) -> Iterator[Callable[[int], RankPool]]:
    """`on_gpus(2)`: as `ranks(2)`; the double has nothing to say about what they do."""
    used: list[RankPool] = []

    def pool_of(size: int) -> RankPool:
        used.append(_pools(size))
        return used[-1]

    yield pool_of
    for pool in used:
        if not pool.broken:
            pool.run(_check)


NEIGHBOURS = [*test_tensorflow_ops.CASES, *test_tensorflow_gradients.CASES]
NEIGHBOURS.remove(test_tensorflow_ops._place)  # which has no tensors


# They trace many functions, the same on GPUs as on the CPU.
TRACING = ("_loops", "_other_names_and_factors_in_each_step", "_recorded_from_threads", "_splits_from_threads")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.thorough if case.__name__ in TRACING else ()) for case in NEIGHBOURS],
    ids=lambda case: f"{case.__module__.rpartition('_')[2]}-{case.__name__}",
)
def test_what_works_on_the_cpu(on_gpus, case, size):
    """TensorFlow puts on a GPU whatever it can."""
    pool = on_gpus(size)
    before = pool.run(_count, "cuStreamWaitEvent engine")
    pool.run(case, timeout=180)
    after = pool.run(_count, "cuStreamWaitEvent engine")
    assert all(np.greater(after, before)), "nothing was done on a GPU"


def _numbers_without_tensors():
    def everything():
        return hvd.rank_op(), hvd.size_op(), hvd.local_rank_op(), hvd.local_size_op(), hvd.process_set_included_op()

    def last():
        hvd.barrier()
        return tf.cast(hvd.join(), tf.int32)

    tf.config.set_soft_device_placement(False)  # what has no kernel for GPUs is an error then
    try:
        with tf.device(GPU):
            for wrapped in (lambda fn: fn, tf.function):
                numbers = wrapped(everything)()
                assert [int(number) for number in numbers] == [hvd.rank(), hvd.size(), hvd.rank(), hvd.size(), 1]
                assert {number.backing_device for number in numbers} == {_on_host()}
                assert int(wrapped(last)()) in range(hvd.size())
    finally:
        tf.config.set_soft_device_placement(True)


def _on_host():
    with tf.device("CPU:0"):
        return tf.identity(1.0).backing_device


@pytest.mark.parametrize("size", SIZES)
def test_what_has_no_tensors_runs_under_a_gpu_as_well(on_gpus, size):
    on_gpus(size).run(_numbers_without_tensors)


def _exchanged():
    size, rank = hvd.size(), hvd.rank()
    with tf.device(GPU):
        rows = tf.identity(tf.fill([size + 1, 2], float(rank)))
        for splits in ([1] * size, tf.ones([size], tf.int64)):
            for run in (hvd.alltoall, tf.function(hvd.alltoall)):
                result, received = run(rows, splits)
                assert result.backing_device.endswith(GPU) and received.backing_device == _on_host()
                assert result.numpy().tolist() == [[float(other)] * 2 for other in range(size)]
                assert received.numpy().tolist() == [1] * size


@pytest.mark.parametrize("size", SIZES)
def test_splits_are_on_the_host(on_gpus, size):
    on_gpus(size).run(_exchanged)


def _objects():
    before = tensorflow_gpus.count("")
    assert hvd.broadcast_object({"rank": hvd.rank()}) == {"rank": 0}
    assert hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))
    assert tensorflow_gpus.count("") == before


def test_objects_do_not_come_near_a_gpu(on_gpus):
    on_gpus(2).run(_objects)


def _variables():
    with tf.device(GPU):
        on_gpu = [tf.Variable([1.0 + hvd.rank(), 2.0]), tf.Variable(3 + hvd.rank(), dtype=tf.int64)]
    with tf.device("CPU:0"):
        on_cpu = tf.Variable([7.0 + hvd.rank()])
    hvd.broadcast_variables([*on_gpu, on_cpu], root_rank=hvd.size() - 1)
    last = hvd.size() - 1
    assert [variable.numpy().tolist() for variable in (*on_gpu, on_cpu)] == [[1.0 + last, 2.0], 3 + last, [7.0 + last]]
    assert on_gpu[0].device.endswith(GPU) and on_cpu.device.endswith("CPU:0")


@pytest.mark.parametrize("size", SIZES)
def test_variables_stay_where_they_are(on_gpus, size):
    on_gpus(size).run(_variables)


def _fit():
    import keras

    import horovodlike.keras

    keras.utils.set_random_seed(hvd.rank())
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    optimizer = horovodlike.keras.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
    data = np.random.default_rng(hvd.rank()).normal(size=(16, 4)).astype(np.float32)
    callbacks = [horovodlike.keras.callbacks.BroadcastGlobalVariablesCallback(0)]

    def fit(**options):
        model.compile(optimizer, "mse", **options)
        model.fit(data, data[:, :1], batch_size=4, epochs=2, verbose=0, callbacks=callbacks)

    with pytest.raises(tf.errors.InvalidArgumentError, match="set jit_compile=False"):
        fit()  # with a GPU Keras asks for XLA by itself
    fit(jit_compile=False)
    weights = [weight.numpy() for weight in model.weights]
    assert len({weight.tobytes() for weight in hvd.allgather_object(np.concatenate([*map(np.ravel, weights)]))}) == 1


def test_keras_trains_on_gpus(on_gpus):
    pool = on_gpus(2)
    before = pool.run(_count, "cuStreamWaitEvent engine")
    pool.run(_fit, timeout=120)
    assert all(np.greater(pool.run(_count, "cuStreamWaitEvent engine"), before))


def _nobody_waits_for_what_keras_reduces():
    import keras

    from horovodlike.keras._backend import Reduction
    from horovodlike.tensorflow import _keras_backend

    reduction = Reduction(hvd.Sum, 1.0, 1.0, hvd.Compression.none, hvd.global_process_set)
    with tf.device(GPU):
        variables = [keras.Variable([0.0, 0.0, 0.0]) for _ in range(3)]
        tensor = tf.identity(tf.constant([1.0, 2.0, 3.0]))

        def reduced(groups, second):
            gradients = [tensorflow_gpus.add_one(tensor), second, tensor]
            return _keras_backend.reduce(reduction, groups, ["first", "second", "third"], gradients, variables)

        for groups in ([], [[0, 1]]):
            assert [result is None for result in reduced(groups, None)] == [False, True, False]
            with tensorflow_gpus.held():
                results = reduced(groups, tensor)
            assert all(result.backing_device.endswith(GPU) for result in results)
            assert [result.numpy().tolist() for result in results] == [
                [2.0, 3.0, 4.0],
                [1.0, 2.0, 3.0],
                [1.0, 2.0, 3.0],
            ]


def test_the_host_does_not_wait_for_gradients_of_keras(on_gpus):
    on_gpus(1).run(_nobody_waits_for_what_keras_reduces)


def _nobody_waits():
    with tf.device(GPU):
        tensor = tf.identity(tf.constant([1.0, 2.0, 3.0]))
        assert tensor.backing_device.endswith(GPU)

        @tf.function
        def step(tensor):
            total = hvd.allreduce(tensorflow_gpus.add_one(tensor), op=hvd.Sum)
            rows = hvd.allgather(tensorflow_gpus.add_one(total))
            exchanged = hvd.alltoall(tensorflow_gpus.add_one(rows))
            scattered = hvd.reducescatter(tensorflow_gpus.add_one(exchanged))
            return tensorflow_gpus.add_one(hvd.broadcast(tensorflow_gpus.add_one(scattered), 0))

        step(tensor)
        with tensorflow_gpus.held():
            results = [step(tensor), step.python_function(tensor)]
            results.append(step(results[0]))
    for result, added in zip(results, (6, 6, 12), strict=True):
        assert result.backing_device.endswith(GPU)
        assert result.numpy().tolist() == [1.0 + added, 2.0 + added, 3.0 + added]


def test_neither_the_host_nor_tensorflow_waits_for_results(on_gpus):
    """Everything is given to a GPU that does nothing yet, and done in order when it does."""
    on_gpus(1).run(_nobody_waits)


def _on_gpu_and_on_cpu():
    def total(tensor):
        return hvd.allreduce(tensor, name="mixed", op=hvd.Sum)

    messages = []
    for run in (total, tf.function(total)):
        with tf.device(GPU if hvd.rank() == 0 else "CPU:0"), pytest.raises(tf.errors.FailedPreconditionError) as caught:
            run(tf.ones([3]))
        messages.append(caught.value.message)
    for place in (GPU, "CPU:0"):
        with tf.device(place):
            assert total(tf.ones([3])).numpy().tolist() == [hvd.size()] * 3
    return messages


def test_a_tensor_on_a_gpu_here_and_on_the_cpu_there(on_gpus):
    for messages in on_gpus(2).run(_on_gpu_and_on_cpu):
        for message in messages:
            assert "mixed" in message and "GPU" in message and "CPU" in message and "rank" in message, message


def _another_gpu():
    with tf.device(GPU):
        assert hvd.allreduce(tf.ones([2])).numpy().tolist() == [1.0, 1.0]
    with tf.device("GPU:1"):
        for run in (hvd.allreduce, tf.function(hvd.allreduce)):
            with pytest.raises(tf.errors.InvalidArgumentError, match="on GPU 1, but this rank has used GPU 0 before"):
                run(tf.ones([2]))


def _not_cuda():
    def total(tensor):
        return hvd.allreduce(tensor, op=hvd.Sum)

    with tensorflow_gpus.without_handles():
        for run in (total, tf.function(total)):
            with tf.device(GPU), pytest.raises(tf.errors.UnimplementedError, match=r"device:GPU:0 .*tf.device\(.CPU:0"):
                run(tf.ones([2]))
        with tf.device("CPU:0"):
            assert total(tf.ones([2])).numpy().tolist() == [1.0, 1.0]


@pytest.mark.parametrize("case", [_another_gpu, _not_cuda], ids=lambda case: case.__name__.strip("_"))
def test_a_gpu_that_cannot_be_used(on_gpus, case):
    on_gpus(1).run(case)


def _without_driver():
    for run in (hvd.allreduce, tf.function(hvd.allreduce)):
        with tf.device(GPU), pytest.raises(tf.errors.ResourceExhaustedError, match=r"nowhere/libcuda\.so\.1"):
            run(tf.ones([2]))
        with tf.device("CPU:0"):
            assert run(tf.ones([2])).numpy().tolist() == [1.0, 1.0]


def test_the_cuda_driver_is_missing(open_pool):
    pool = open_pool(1, HOROVODLIKE_CUDA_LIBRARY="/nowhere/libcuda.so.1")
    try:
        pool.run(_without_driver)
    finally:
        pool.close()


def _one_gpu_each():
    every = tf.config.list_physical_devices("GPU")
    tf.config.set_visible_devices(every[hvd.local_rank()], "GPU")
    assert len(tf.config.list_logical_devices("GPU")) == 1
    with tf.device(GPU):
        assert hvd.allreduce(tf.ones([3]), op=hvd.Sum).numpy().tolist() == [hvd.size()] * 3
    engines = "cuStreamWaitEvent engine"
    assert [tensorflow_gpus.count(engines, gpu) > 0 for gpu in (0, 1)] == [hvd.rank() == 0, hvd.rank() == 1]
    tensorflow_gpus.check()


def test_a_gpu_is_meant_by_the_number_that_the_driver_has_for_it(open_pool):
    # NCCL's double is for threads of one process.
    pool = open_pool(2, HOROVODLIKE_GPU_OPERATIONS="staging")
    try:
        pool.run(_one_gpu_each)
    finally:
        pool.close()


def _breaks_under_way():
    import keras

    with tf.device(GPU):
        model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1, use_bias=False)])
        variable = model.weights[0].value
        variable.assign([[1.0], [2.0]])
        states = [
            hvd.elastic.TensorFlowState([variable], epoch=0),
            hvd.elastic.TensorFlowKerasState(model, epoch=0),
        ]
        for state in states:
            state.commit()
        with tensorflow_gpus.held():
            # Without an error: the GPU has only been given it.
            variable.assign(hvd.allreduce(tensorflow_gpus.add_one(variable), op=hvd.Sum))
            tensorflow_gpus.fail_nccl()
            deadline = time.monotonic() + 10
            while ops.has_ended() is None:  # no thread waits for an operation that would fail
                assert time.monotonic() < deadline
                time.sleep(0.001)
        with pytest.raises(tf.errors.UnknownError, match="GPU 0: a collective of NCCL has failed"):
            hvd.allreduce(variable)
        for state in states:
            state.epoch = 1
            with pytest.raises(HorovodInternalError, match="GPU 0: a collective of NCCL has failed"):
                state.save()
            variable.assign([[0.0], [0.0]])
            state.restore()
            assert variable.numpy().tolist() == [[1.0], [2.0]] and state.epoch == 0


def test_what_a_broken_collective_leaves_is_not_saved(open_pool):
    pool = open_pool(1)
    try:
        pool.run(_breaks_under_way)
    finally:
        pool.close()
