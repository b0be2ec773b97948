"""Faults while a program uses the backend `hvd`: survivors get an error in time, and it names the ranks."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.process_groups import own_engine, process_group
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import horovodlike.torch as hvd
from horovodlike.errors import HorovodInternalError

SLACK_S = 10.0  # the delay that a busy machine may add


def _train_until_killed(store: Path, victim: int) -> tuple[str, float]:
    """Return the error, and when it came; the victim writes when it has been killed beside the store."""
    dist.init_process_group("hvd", init_method=f"file://{store}", rank=hvd.rank(), world_size=hvd.size())
    module = DistributedDataParallel(nn.Linear(64, 64), bucket_cap_mb=0.001)
    try:
        for step in range(1000):
            if step == 3 and dist.get_rank() == victim:
                store.with_suffix(".killed").write_text(str(time.monotonic()))
                os.kill(os.getpid(), signal.SIGKILL)
            module(torch.randn(4, 64)).sum().backward()
    except RuntimeError as error:
        failed_at = time.monotonic()
        dist.destroy_process_group()
        return f"{type(error).__name__}: {error}", failed_at
    raise AssertionError("no error")


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_rank_that_is_killed_while_ddp_reduces(fresh_ranks, tmp_path, victim):
    pool = fresh_ranks(3)
    pool.start(_train_until_killed, [(tmp_path / "store", victim)] * 3)
    outcomes = pool.collect()
    assert outcomes[victim].exit_code == -signal.SIGKILL
    killed_at = float((tmp_path / "store.killed").read_text())
    for rank, outcome in enumerate(outcomes):
        if rank == victim:
            continue
        assert outcome.ok, outcome.error
        message, failed_at = outcome.value
        assert f"rank {victim}" in message, message
        assert failed_at - killed_at < 1.0


def _one_is_missing(store: Path, call: Callable[[], None], timeout: float) -> str:
    """All ranks but the last one call a function; the last one comes when they have given up."""
    with own_engine(store, timeout=timedelta(seconds=timeout)):
        if dist.get_rank() == dist.get_world_size() - 1:
            dist.distributed_c10d._get_default_store().wait(["over"], timedelta(seconds=60))
            return ""
        start = time.monotonic()
        with pytest.raises(RuntimeError) as caught:
            call()
        assert time.monotonic() - start < timeout + 2 + SLACK_S
        if dist.get_rank() == 0:
            dist.distributed_c10d._get_default_store().set("over", "1")
        return str(caught.value)


def test_a_rank_that_does_not_come_to_a_collective(fresh_ranks, tmp_path):
    """The engine ends the job after the timeout of the group."""
    pool = fresh_ranks(3)
    calls = (
        lambda: dist.all_reduce(torch.ones(1)),
        lambda: dist.barrier(async_op=True).wait(),
        lambda: dist.broadcast(torch.ones(1), 0, async_op=True).get_future().wait(),
    )
    for number, call in enumerate(calls):
        messages = pool.run(_one_is_missing, tmp_path / f"store{number}", call, 1.5)
        for message in messages[:2]:
            assert "missing on ranks [2]" in message, message


def _allreduce_within(seconds: float) -> None:
    options = dist.AllreduceOptions()
    options.asyncOp, options.timeout = False, timedelta(seconds=seconds)
    dist.group.WORLD.allreduce([torch.ones(1)], options)


def _wait_for_the_last_of_many(seconds: float) -> None:
    works = [dist.group.WORLD.barrier(timeout=timedelta(seconds=seconds)) for _ in range(100)]
    works[-1].wait()


def test_a_wait_that_takes_too_long(fresh_ranks, tmp_path):
    """The other ranks say in the store that they wait; the operation stays in flight, and the job continues."""
    pool = fresh_ranks(3)
    calls = (
        lambda: dist.all_reduce(torch.ones(1), async_op=True).wait(timedelta(seconds=0.5)),
        lambda: dist.barrier(timeout=timedelta(seconds=0.5)),
        lambda: dist.group.WORLD.monitored_barrier(timedelta(seconds=0.5)),
        lambda: _allreduce_within(0.5),
        lambda: _wait_for_the_last_of_many(0.5),
    )
    for number, call in enumerate(calls):
        messages = pool.run(_one_is_missing, tmp_path / f"store{number}", call, 30.0)
        for message in messages[:2]:
            assert "rank 2" in message and "0.5 s" in message, message
            assert "rank 0" not in message and "rank 1" not in message


def _monitored(store: Path) -> None:
    with process_group(store):
        for _ in range(3):
            dist.group.WORLD.monitored_barrier(timedelta(seconds=30), wait_all_ranks=True)


def test_a_monitored_barrier(ranks, tmp_path):
    ranks(3).run(_monitored, tmp_path / "store")


def _abort(store: Path) -> str:
    with own_engine(store):
        group = dist.group.WORLD
        if dist.get_rank() == 1:
            group.abort()
            return ""
        with pytest.raises(HorovodInternalError) as caught:
            dist.all_reduce(torch.ones(1))
        return str(caught.value)


def test_abort_ends_what_others_wait_for(ranks, tmp_path):
    messages = ranks(2).run(_abort, tmp_path / "store")
    assert "rank 1 has shut the job down" in messages[0]


def _interrupted(store: Path) -> None:
    """A signal handler raises in a wait, and the operation can be waited for again."""
    with process_group(store):
        tensor = torch.ones(3)
        if dist.get_rank() == 0:

            def interrupt(*_: object) -> None:
                raise KeyboardInterrupt

            before = signal.signal(signal.SIGUSR2, interrupt)
            work = dist.all_reduce(tensor, async_op=True)
            timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR2))
            timer.start()
            with pytest.raises(KeyboardInterrupt):
                work.wait()
            timer.join()
            signal.signal(signal.SIGUSR2, before)
            dist.distributed_c10d._get_default_store().set("interrupted", "1")
            work.wait()
        else:
            dist.distributed_c10d._get_default_store().wait(["interrupted"], timedelta(seconds=60))
            dist.all_reduce(tensor)
        assert tensor.tolist() == [2, 2, 2]


def test_an_interrupted_wait(ranks, tmp_path):
    ranks(2).run(_interrupted, tmp_path / "store")
