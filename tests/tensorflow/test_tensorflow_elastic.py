"""Elastic training with TensorFlow: the state, errors of a broken job, and functions that outlive it."""

from __future__ import annotations

import os
import signal
from contextlib import nullcontext

import numpy as np
import pytest
import tensorflow as tf
from support.generations import Generation

import horovodlike.tensorflow as hvd
from horovodlike.errors import JobBrokenError, ShutDownError, StateFileError
from horovodlike.tensorflow._ops.calls import translated


def _saves_and_synchronizes():
    variables = [tf.Variable([1.0, np.nan]), tf.Variable(3, dtype=tf.int64), tf.Variable([0.5], dtype=tf.bfloat16)]
    state = hvd.elastic.TensorFlowState(variables, epoch=0, seen=[])
    before = [variable.numpy().tobytes() for variable in variables]

    def change():
        for variable in variables:
            variable.assign(variable * 2 + tf.cast(hvd.rank() + 1, variable.dtype))
        state.epoch += 1
        state.seen.append(hvd.rank())

    change()
    state.restore()
    assert [variable.numpy().tobytes() for variable in variables] == before
    assert state.epoch == 0 and state.seen == [] and state.variables[0] is variables[0]
    for _ in range(hvd.rank() + 1):
        change()
    state._commits = hvd.rank()
    state.sync()
    change()
    state.restore()
    assert state.seen == [1, 1] and state.epoch == 2 and state._commits == 1
    assert variables[1].numpy() == (3 * 2 + 2) * 2 + 2, "those of rank 1"
    saved = state._saved_to_bytes()
    change()
    state.save()
    state._saved_from_bytes(saved)
    state.restore()
    assert state.seen == [1, 1] and variables[1].numpy() == 18
    with pytest.raises(ValueError, match=r"TensorFlowState\(variables=\[\.\.\.\]\)"):
        hvd.elastic.TensorFlowState(epoch=0)


def test_a_state_is_saved_restored_and_synchronized(ranks):
    ranks(2).run(_saves_and_synchronizes)


def _persists(path):
    def make(*values):
        state = hvd.elastic.TensorFlowState([tf.Variable(value) for value in values or ([1.0, 2.0],)], epoch=0)
        state.persist(path)
        return state

    state = make()
    state.variables[0].assign([3.0, 4.0])
    state.epoch = 1
    state.commit()
    resumed = make()
    resumed._resume()
    resumed.sync()
    assert resumed.variables[0].numpy().tolist() == [3.0, 4.0] and resumed.epoch == resumed._commits == 1
    for others in ([[1.0]], [[1.0, 2.0], 3.0]):
        with pytest.raises(StateFileError, match="does not fit this script") if hvd.rank() == 0 else nullcontext():
            make(*others)._resume()


def test_a_state_resumes_from_disk(ranks, tmp_path):
    ranks(2).run(_persists, str(tmp_path / "state"))


def _in_a_session():
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        variable = tf.compat.v1.get_variable("v", initializer=[1.0, 2.0])
        more = tf.compat.v1.assign_add(variable, [1.0, 1.0])
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(more)
        state = hvd.elastic.TensorFlowState(session=session, step=1)
        session.graph.finalize()
        for _ in range(hvd.rank() + 1):
            session.run(more)
        assert state.variables == [variable]
        state.restore()
        assert session.run(variable).tolist() == [2.0, 3.0]
        for _ in range(hvd.rank() + 1):
            session.run(more)
        state._commits = hvd.rank()
        state.sync()
        assert session.run(variable).tolist() == [4.0, 5.0]


def test_a_state_of_a_session(ranks):
    ranks(2).run(_in_a_session)


def _others_pass(state, which):
    if which == "its own":
        raise tf.errors.UnknownError(None, None, "of the script")
    if which == "an argument":
        tf.reshape(tf.ones([3]), [2])
    if which == "a mismatch":
        tf.function(lambda x: hvd.allreduce(x, name="mismatch"))(tf.ones([2 + hvd.rank()]))
    raise ValueError("of the script")


def _fails_on_rank_0(state):
    if hvd.rank() == 0:
        _others_pass(state, "its own")
    hvd.allreduce(tf.ones([1]), name="never")


def _untouched():
    for which, kind in (
        ("its own", tf.errors.UnknownError),
        ("an argument", tf.errors.InvalidArgumentError),
        ("a mismatch", tf.errors.FailedPreconditionError),
        ("no error of TensorFlow", ValueError),
    ):
        with pytest.raises(kind), translated():
            _others_pass(None, which)
    assert hvd.allreduce(tf.ones([1]), op=hvd.Sum).numpy() == [2.0]
    # A rank that fails ends the job for the other.
    with pytest.raises(tf.errors.UnknownError if hvd.rank() == 0 else ShutDownError):
        hvd.elastic.run(_fails_on_rank_0)(hvd.elastic.TensorFlowState([]))
    assert not hvd.is_initialized()


def test_other_errors_pass_untouched(fresh_ranks):
    fresh_ranks(2).run(_untouched, timeout=120)


def _traced_functions(traced: list[str]):
    weight = tf.Variable([1.0, 2.0])

    @tf.function
    def step(x):
        traced.append("step")
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_sum(weight * x)
        (gradient,) = tape.gradient(loss, [weight])
        weight.assign_sub(gradient)
        return gradient

    @tf.function
    def collectives(x):
        traced.append("collectives")
        rows = hvd.allgather(x[tf.newaxis])
        exchanged = hvd.alltoall(tf.repeat(x[tf.newaxis], hvd.size_op(), axis=0))
        part = hvd.reducescatter(tf.repeat(x[tf.newaxis], hvd.size_op(), axis=0), op=hvd.Sum)
        slices = hvd.allreduce(tf.IndexedSlices(x[tf.newaxis], [0], [1, 2]), op=hvd.Average)
        return rows, exchanged, part, tf.reduce_sum(slices.values, 0), hvd.broadcast(x, 0), hvd.rank_op()

    return weight, step, collectives


def _right(step, collectives) -> None:
    """Whether functions traced in another job are right in this one."""
    rank, size = hvd.rank(), hvd.size()
    mean = (size - 1) / 2 + 1
    assert step(tf.fill([2], rank + 1.0)).numpy().tolist() == [mean] * 2
    rows, exchanged, part, summed, roots, own = collectives(tf.fill([2], rank + 1.0))
    assert rows.numpy()[:, 0].tolist() == exchanged.numpy()[:, 0].tolist() == [r + 1.0 for r in range(size)]
    assert part.numpy().tolist() == [[mean * size] * 2]
    assert summed.numpy().tolist() == [mean] * 2
    assert roots.numpy().tolist() == [1.0, 1.0] and own.numpy() == rank


def _lives(victim: int, jobs: list[Generation], ranks_in: list[int | None], in_graph: bool):
    traced: list[str] = []
    weight, step, collectives = _traced_functions(traced)
    state = hvd.elastic.TensorFlowState([weight], steps=0)

    @hvd.elastic.run
    def train(state):
        for _ in range(3):
            _right(step, collectives)
            state.steps += 1
            state.commit()
        if hvd.rank() == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        (step if in_graph else hvd.allreduce)(tf.ones([2]))

    with pytest.raises(JobBrokenError, match="fixed number of ranks") as caught:
        train(state)
    chain = [caught.value, caught.value.__cause__, caught.value.__cause__.__cause__]
    assert isinstance(chain[2], tf.errors.OpError), chain
    weight.assign([0.0, 0.0])
    state.restore()
    assert weight.numpy().tolist() == [1.0 - 3 * 2.0, 2.0 - 3 * 2.0] and state.steps == 3
    for job, rank in zip(jobs, ranks_in, strict=True):
        if rank is None:
            hvd.shutdown()
            continue
        job.enter(rank)
        state.on_reset()
        state.sync()
        for _ in range(2):
            _right(step, collectives)
    return traced


def _size() -> int:
    return hvd.size()


@pytest.mark.thorough
@pytest.mark.parametrize("in_graph", [True, False])
def test_after_a_broken_job_functions_go_on_in_jobs_of_other_sizes(fresh_ranks, generations, in_graph):
    pool = fresh_ranks(3)
    pool.run(_size, timeout=120)  # imports TensorFlow
    jobs = generations(2, 1, 2)
    places = [[1, None, 1], [], [0, 0, 0]]
    pool.start(_lives, [(1, jobs, ranks, in_graph) for ranks in places])
    first, _, third = pool.collect(timeout=120)
    assert first.ok and third.ok, [(each.error, pool.output(rank)) for rank, each in ((0, first), (2, third))]
    assert first.value == third.value == ["step", "collectives"], "traced once"
