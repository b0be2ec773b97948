"""Calls that are wrong, and jobs that break: a clear error on every rank, eagerly and in functions."""

from __future__ import annotations

import os
import queue
import re
import signal
import threading

import pytest
import tensorflow as tf

import horovodlike.tensorflow as hvd
from horovodlike.tensorflow.data import shard


def _works():
    assert hvd.allreduce(tf.ones([3]), op=hvd.Sum, name="again").numpy().tolist() == [hvd.size()] * 3


def _error(call):
    """Return what a mismatch says; it says the same in a function, and afterwards the same name works again."""
    with pytest.raises(tf.errors.FailedPreconditionError) as eagerly:
        call()
    with pytest.raises(tf.errors.FailedPreconditionError) as in_function:
        tf.function(call, autograph=False)()
    _works()
    message = _own_words(eagerly.value)
    assert _own_words(in_function.value) == message
    return message


def _own_words(error):
    """Return the message of the engine, without what TensorFlow puts around it: function_node and op."""
    return re.sub(r"^(\{\{.*?\}\} )*|\s*\[(\[\{\{node|Op:).*", "", error.message, flags=re.DOTALL)


def _mismatches():
    first = hvd.rank() == 0
    ones = tf.ones
    return {
        "shape": _error(lambda: hvd.allreduce(ones([17, 17 if first else 16]), name="again")),
        "dimensions": _error(lambda: hvd.allreduce(ones([6] if first else [2, 3]), name="again")),
        "dtype": _error(lambda: hvd.allreduce(ones([3], tf.int32 if first else tf.float32), name="again")),
        "op": _error(lambda: hvd.allreduce(ones([3]), op=hvd.Sum if first else hvd.Max, name="again")),
        "prescale": _error(lambda: hvd.allreduce(ones([3]), prescale_factor=1.0 if first else 2.5, name="again")),
        "root": _error(lambda: hvd.broadcast(ones([3]), 0 if first else 1, name="again")),
        "broadcast shape": _error(lambda: hvd.broadcast(ones([3 if first else 4]), 0, name="again")),
        "allgather rank": _error(lambda: hvd.allgather(ones([2, 3] if first else [2, 3, 1]), name="again")),
        "allgather dimension": _error(lambda: hvd.allgather(ones([2, 5 if first else 6]), name="again")),
        "reducescatter shape": _error(lambda: hvd.reducescatter(ones([2, 5 if first else 6]), name="again")),
        "alltoall dimension": _error(lambda: hvd.alltoall(ones([6, 5 if first else 7]), name="again")),
        "group": _error(lambda: hvd.grouped_allreduce([ones([3])] * (2 if first else 3), name="again")),
        "operations": _error(lambda: (hvd.allreduce if first else hvd.allgather)(ones([3]), name="again")),
        "operations of lists": _error(
            lambda: hvd.grouped_allreduce([ones([3])], name="again") if first else hvd.broadcast(ones([3]), 0, "again")
        ),
    }


@pytest.mark.slow
@pytest.mark.parametrize("size", (2, 3))
def test_mismatches_name_the_tensor_the_ranks_and_both_values(ranks, size):
    on_ranks = ranks(size).run(_mismatches, timeout=120)
    expected = {
        "shape": ("[17, 17]", "[17, 16]"),
        "dimensions": ("[6]", "[2, 3]"),
        "dtype": ("int32", "float32"),
        "op": ("Sum", "Max"),
        "prescale": ("1", "2.5"),
        "root": ("0", "1"),
        "broadcast shape": ("[3]", "[4]"),
        "allgather rank": ("2", "3"),
        "allgather dimension": ("5", "6"),
        "reducescatter shape": ("[2, 5]", "[2, 6]"),
        "alltoall dimension": ("5", "7"),
        "group": ("2", "3"),
        "operations": ("Mismatched operations", "allreduce", "allgather"),
        "operations of lists": ("Mismatched operations", "allreduce", "broadcast"),
    }
    for messages in on_ranks:
        assert messages == on_ranks[0]  # the same text everywhere
    for case, message in on_ranks[0].items():
        assert "rank" in message and "again" in message, (case, message)
        for value in expected[case]:
            assert value in message, (case, message)


def _refused():
    for call in (hvd.allreduce, hvd.allgather, hvd.reducescatter, lambda tensor: hvd.broadcast(tensor, 0)):
        for dtype in (tf.complex64, tf.string):
            with pytest.raises(ValueError, match=f"{dtype.name} are not supported; supported are bfloat16, bool"):
                call(tf.zeros([3], dtype))
    with pytest.raises(ValueError, match="op must be one of"):
        hvd.allreduce(tf.ones([3]), op=17)
    with pytest.raises(ValueError, match="Min, Max and Product"):
        hvd.reducescatter(tf.ones([3]), op=hvd.Adasum)
    with pytest.raises(ValueError, match="root rank 9 is not one of the ranks"):
        hvd.broadcast(tf.ones([3]), 9)
    with pytest.raises(tf.errors.InvalidArgumentError, match="bool"):
        hvd.allreduce(tf.constant([True]), op=hvd.Average, name="wrong")
    with pytest.raises(tf.errors.InvalidArgumentError, match="Adasum is for floating-point"):
        hvd.allreduce(tf.ones([3], tf.int32), op=hvd.Adasum)
    for call in (hvd.allgather, hvd.reducescatter, hvd.alltoall):
        with pytest.raises(tf.errors.InvalidArgumentError, match="scalar"):
            call(tf.constant(1.0), name="pebble")
    size = hvd.size()
    splits = {
        "must be a multiple of the number of ranks": (tf.ones([size + 1]), None),
        f"has {size + 1} splits for {size} ranks": (tf.ones([size]), [0] * (size + 1)),
        "more than its 1 rows": (tf.ones([1]), [1] * size),
        "must not be negative": (tf.ones([1]), [-1] * size),
        "must have one dimension": (tf.ones([1]), [[1] * size]),
    }
    for match, (tensor, given) in splits.items():
        with pytest.raises(tf.errors.InvalidArgumentError, match=match):
            hvd.alltoall(tensor, given, name="wrong")
    with pytest.raises(ValueError, match="int32 or int64, not float32"):
        hvd.alltoall(tf.ones([1]), tf.ones([size]))
    with pytest.raises(ValueError, match=r"splits must be integers, got 1\.0"):
        hvd.alltoall(tf.ones([1]), [1.0] * size)
    some = hvd.ProcessSet([0])
    for call in (hvd.allreduce, hvd.allgather, hvd.alltoall):
        with pytest.raises(ValueError, match=r"ranks=\[0\]\) is not registered"):
            call(tf.ones([1]), process_set=some)
    with pytest.raises(ValueError, match="not registered"):
        hvd.barrier(process_set=some)
    with pytest.raises(NotImplementedError, match="Only Sum and Average"):
        hvd.allreduce(tf.IndexedSlices(tf.ones([1, 2]), [0]), op=hvd.Max)
    with pytest.raises(NotImplementedError, match="sparse_as_dense"):
        hvd.allreduce(tf.IndexedSlices(tf.ones([1, 2]), [0]), op=hvd.Adasum)
    with pytest.raises(NotImplementedError, match="prescale_factor"):
        hvd.allreduce(tf.IndexedSlices(tf.ones([1, 2]), [0]), prescale_factor=2.0)
    with pytest.raises(RuntimeError, match="broadcast_variables"):
        hvd.broadcast_global_variables(0)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = hvd.nonsense
    _works()


def test_what_is_refused_before_anybody_waits(ranks):
    ranks(2).run(_refused)


def _compiled_by_xla():
    def total(tensor):
        return hvd.allreduce(tensor, op=hvd.Sum)

    compiled = tf.function(total, jit_compile=True)
    with pytest.raises(tf.errors.InvalidArgumentError, match="set jit_compile=False"):
        compiled(tf.ones([2]))
    outer = tf.function(lambda tensor: tf.function(total)(tensor), jit_compile=True)
    with pytest.raises(tf.errors.InvalidArgumentError, match="set jit_compile=False"):
        outer(tf.ones([2]))
    # Traced before, and compiled then: TensorFlow's own error.
    inner = tf.function(total)
    assert inner(tf.ones([2])).numpy().tolist() == [hvd.size()] * 2
    outer = tf.function(lambda tensor: inner(tensor), jit_compile=True)
    with pytest.raises(tf.errors.InvalidArgumentError, match="unsupported operations.*Horovodlike"):
        outer(tf.ones([2]))
    _works()


def test_xla_is_refused(ranks):
    ranks(2).run(_compiled_by_xla)


def _same_name_twice():
    @tf.function
    def twice(tensor):
        return hvd.allreduce(tensor, name="twice"), hvd.allreduce(tensor + 1.0, name="twice"), hvd.rank_op()

    # Whether the first one is through before the second begins is a matter of luck; a wrong result is not. On
    # several ranks it may be: the first one here and the second one there may be taken for the same.
    try:
        first, second, _ = twice(tf.ones([2]))
        assert first.numpy().tolist() == [1.0, 1.0] and second.numpy().tolist() == [2.0, 2.0]
    except tf.errors.InvalidArgumentError as error:
        assert "twice" in error.message  # noqa: PT017  # of several exceptions


def test_a_name_twice_in_a_function_on_one_rank(ranks):
    ranks(1).run(_same_name_twice)


def _side_by_side():
    one = tf.function(lambda tensor: hvd.allreduce(tensor, op=hvd.Sum, name="side")).get_concrete_function(tf.ones([2]))
    if hvd.rank() != 0:
        hvd.barrier()
        one(tf.ones([2]))
        return
    outcomes: queue.Queue[object] = queue.Queue()

    def run():
        try:
            outcomes.put(one(tf.ones([2])).numpy().tolist())
        except tf.errors.InvalidArgumentError as error:
            outcomes.put(error.message)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    refused = outcomes.get(timeout=60)  # the other waits for rank 1
    hvd.barrier()
    assert "'tensorflow.side' is already in flight" in refused
    assert "tf.control_dependencies" in refused and "set_loop_options(parallel_iterations=1)" in refused
    assert outcomes.get(timeout=60) == [hvd.size()] * 2
    for thread in threads:
        thread.join()


def test_a_name_that_is_in_flight_in_a_graph(ranks):
    ranks(2).run(_side_by_side, timeout=120)


def _before_init():
    hvd.shutdown()

    @tf.function
    def total(tensor):
        return hvd.allreduce(tensor, op=hvd.Sum)

    weight, legacy = tf.Variable(1.0), tf.compat.v1.train.GradientDescentOptimizer(0.5)

    def gradient_of(kind):
        with kind(tf.GradientTape()) as tape:
            loss = weight * weight
        return tape.gradient(loss, weight)

    calls = (
        lambda: hvd.allreduce(tf.ones([3])),
        lambda: hvd.allgather(tf.ones([3]), name="early"),
        hvd.barrier,
        hvd.rank_op,
        lambda: total(tf.ones([3])),
    )
    for call in calls:
        with pytest.raises(tf.errors.FailedPreconditionError, match=r"not been initialized; use hvd\.init"):
            call()
    for call in (
        hvd.rank,
        lambda: hvd.broadcast_object(1),
        lambda: shard(tf.data.Dataset.range(2)),
        lambda: gradient_of(hvd.DistributedGradientTape),
        lambda: gradient_of(hvd.PartialDistributedGradientTape),
        lambda: hvd.DistributedOptimizer(legacy).compute_gradients(lambda: weight * weight, [weight]),
    ):
        with pytest.raises(ValueError, match=r"not been initialized; use hvd\.init"):
            call()
    hvd.init()
    assert total(tf.ones([3])).numpy().tolist() == [1.0] * 3
    assert int(hvd.size_op()) == 1
    with pytest.raises(ValueError, match="is not registered"):
        gradient_of(lambda tape: hvd.DistributedGradientTape(tape, process_set=hvd.ProcessSet([0])))
    _works()


def test_use_before_init_and_initialisation_again(fresh_ranks):
    fresh_ranks(1).run(_before_init, timeout=120)


def _peer_dies():
    @tf.function
    def step(tensor):
        return hvd.allreduce(tensor, op=hvd.Sum, name="first"), hvd.allgather(tensor, name="second")

    step(tf.ones([3]))
    hvd.barrier()
    if hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    messages = []
    for call in (lambda: step(tf.ones([3])), lambda: hvd.allreduce(tf.ones([3])), hvd.barrier):
        with pytest.raises(tf.errors.UnknownError) as caught:
            call()
        messages.append(caught.value.message)
    return messages


def test_a_lost_peer_ends_what_waits_for_it(fresh_ranks):
    pool = fresh_ranks(3)
    pool.start(_peer_dies)
    outcomes = pool.collect(timeout=120)
    for rank in (0, 2):
        assert outcomes[rank].ok, outcomes[rank].error
        assert all("rank 1" in message for message in outcomes[rank].value)
        assert outcomes[rank].seconds - outcomes[1].seconds < 10
