"""Processes that a rank has forked, such as the workers of a data loader, and the end of that rank."""

import os
import signal
import time

import pytest


def _reduce_until_it_fails(victim: int) -> None:
    """The ranks are on a host each, and the victim has a child that outlives it."""
    import numpy as np
    from support.collectives import allreduce

    from horovodlike import basics

    rank = basics.rank()
    basics.shutdown()
    os.environ["HOROVODLIKE_HOSTID"] = f"host {rank}"
    basics.init()
    assert basics.cross_size() == basics.size()
    if rank == victim:
        child = os.fork()
        if child == 0:
            signal.pause()
        print(f"child {child}.", flush=True)
    try:
        while True:
            allreduce("x", np.ones(1000, np.float32))
    except Exception:
        print(f"failed at {time.monotonic()}.", flush=True)
        raise


def _number_after(text: str, pool, rank: int) -> float:
    deadline = time.monotonic() + 30
    while not pool.output(rank).partition(text)[2].endswith(".\n"):
        assert time.monotonic() < deadline, pool.output(rank)
        os.sched_yield()
    return float(pool.output(rank).partition(text)[2].strip().removesuffix("."))


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_is_missed_on_other_hosts_although_a_child_of_it_lives(fresh_ranks, victim):
    pool = fresh_ranks(3)
    pool.start(_reduce_until_it_fails, [(victim,)] * 3)
    child = int(_number_after("child ", pool, victim))
    others = {0, 1, 2} - {victim}
    try:
        pool.kill(victim, signal.SIGKILL)
        killed = time.monotonic()
        for rank in others:
            assert _number_after("failed at ", pool, rank) - killed < 1.0
    finally:
        os.kill(child, signal.SIGKILL)
    outcomes = pool.collect(10)
    for rank in others:
        assert "JobBrokenError" in outcomes[rank].error
        assert f"rank {victim} on host" in outcomes[rank].error
