"""Faults in the middle of what the engine does: the others get the right error, and no result."""

import signal
import time

import numpy as np
import pytest
from support.collectives import allreduce, enqueue

from horovodlike.testing import Fault, FaultPlan

STEPS = 3  # the fault is in the last one
SMALL, BIG = 10, 5_000_011
BOUND_S = 5.0


def plan(rank, point, action, seconds=0.0):
    faults = FaultPlan((Fault(rank, STEPS - 1, point, action, seconds),))
    return {"HOROVODLIKE_FAULT_PLAN": faults.to_json()}


def _train(length):
    """Returns when which step was done, on CLOCK_MONOTONIC, and what was raised."""
    from horovodlike import testing
    from horovodlike.errors import JobBrokenError

    done = []
    for step in range(STEPS):
        array = np.ones(length, np.float32)
        testing.reach("step", step)
        try:
            allreduce("gradient", array)
        except JobBrokenError as error:
            return done, time.monotonic(), str(error)
        assert (array == array[0]).all()
        done.append(float(array[0]))
    return done, time.monotonic(), ""


@pytest.mark.parametrize("length", [SMALL, BIG])
@pytest.mark.parametrize("point", ["data", "negotiation"])
@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_is_killed_leaves_the_others_without_a_result(fresh_ranks, victim, point, length):
    pool = fresh_ranks(3, plan(victim, point, "SIGKILL"))
    pool.start(_train, [(length,)] * 3)
    outcomes = pool.collect(30.0)
    assert outcomes[victim].exit_code == -signal.SIGKILL
    for outcome in (outcomes[rank] for rank in range(3) if rank != victim):
        done, _, error = outcome.value
        assert done == [3.0] * (STEPS - 1)
        assert f"rank {victim} (pid {pool.processes[victim].pid})" in error
        assert outcome.seconds < outcomes[victim].seconds + BOUND_S


@pytest.mark.parametrize("point", ["data", "negotiation"])
def test_an_engine_that_fails_breaks_the_job_where_the_scripts_wait(fresh_ranks, point):
    pool = fresh_ranks(2, plan(1, point, "raise"))
    for done, _, error in pool.run(_train, SMALL):
        assert done == [2.0] * (STEPS - 1)
        assert f"the engine of rank 1 (pid {pool.processes[1].pid}) failed" in error
        assert "horovodlike.testing" in error


@pytest.mark.parametrize("point", ["data", "negotiation"])
def test_a_slow_rank_delays_the_others_and_the_result_is_right(fresh_ranks, point):
    pool = fresh_ranks(2, plan(0, point, "slow", seconds=0.7))
    began = time.monotonic()
    for done, at, error in pool.run(_train, SMALL):
        assert (done, error) == ([2.0] * STEPS, "")
        assert at - began > 0.7


@pytest.mark.parametrize("point", ["data", "negotiation"])
def test_a_rank_that_stops_is_waited_for(fresh_ranks, point):
    pool = fresh_ranks(2, plan(1, point, "SIGSTOP"))
    pool.start(_train, [(BIG,)] * 2)
    pool.processes[1].wait_until_stopped(30.0)
    pool.kill(1, signal.SIGCONT)
    assert [outcome.value[::2] for outcome in pool.collect(30.0)] == [([2.0] * STEPS, "")] * 2


def _several_in_flight():
    from horovodlike import basics, testing
    from horovodlike._engine import ops
    from horovodlike._engine.ops import Kind, ReduceOp
    from horovodlike.errors import JobBrokenError

    testing.reach("step", STEPS - 1)
    arrays = [np.ones(BIG // 4, np.float32) for _ in range(4)]

    handles = [enqueue(Kind.ALLREDUCE, f"{i}", [array], op=ReduceOp.SUM) for i, array in enumerate(arrays)]
    complete = 0
    for handle, array in zip(handles, arrays, strict=True):
        try:
            ops.wait(handle)
        except JobBrokenError:
            continue
        complete += 1
        assert (array == basics.size()).all()
    return complete


def test_what_is_reported_complete_is_complete(fresh_ranks):
    """Tensors of a batch complete one by one: those before the fault may, with the right result; the others fail."""
    pool = fresh_ranks(2, plan(1, "data", "SIGKILL") | {"HOROVODLIKE_OVERLAP": "never"})
    pool.start(_several_in_flight)
    survivor, killed = pool.collect(30.0)
    assert killed.exit_code == -signal.SIGKILL
    assert survivor.ok, survivor.error
    assert survivor.value <= 2
