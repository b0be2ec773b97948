"""Copies of the parts of servers: what was acknowledged survives a server that is killed or stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import horovodlike as hvd
from horovodlike.errors import HorovodInternalError
from horovodlike.parameter_server import ParameterServer

LENGTH = 300_000
PROGRAM = Path(__file__).parent / "replica_kills.py"


def _wait_for(pool, rank, text):
    deadline = time.monotonic() + 30
    while text not in pool.output(rank):
        assert time.monotonic() < deadline, pool.output(rank)
        os.sched_yield()


def _add(victim, pushes):
    """Rank `victim` serves only; the others add, and it is killed amid that."""
    server = ParameterServer(np.zeros(LENGTH, np.int64), name="ps", replicas=1)
    done = ParameterServer(np.zeros(3, np.int64), name="done", replicas=1)
    hvd.barrier()
    ones, handles = np.ones(LENGTH, np.int64), []
    if hvd.rank() == victim:
        print("ready", flush=True)
        signal.pause()
    for push in range(pushes):
        handles.append(server.send(ones))
        if len(handles) == 8:
            handles.pop(0).wait(30)
        if push == 50:
            print("ready", flush=True)
    for handle in handles:
        handle.wait(30)
    acknowledged = 2 * pushes
    deadline = time.monotonic() + 30
    while True:  # until the other rank has sent all, too
        values = server.receive().wait(30)
        assert pushes <= values.min() and values.max() <= acknowledged
        if (values == acknowledged).all():
            break
        assert time.monotonic() < deadline
    done.send(np.ones(3, np.int64)).wait(30)
    while done.receive().wait(30).min() < 2:  # the other rank has seen all of it, too
        assert time.monotonic() < deadline
    server.await_replicas().wait(30)
    print("complete", flush=True)
    while server.send(ones, "copy").wait(30) is None and not (server.receive().wait(30) == 1).all():
        pass
    return True


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_nothing_acknowledged_is_lost_with_a_killed_server(fresh_ranks, victim):
    pool = fresh_ranks(3)
    pool.start(_add, [(victim, 300)] * 3)
    for rank in range(3):
        _wait_for(pool, rank, "ready")
    pool.kill(victim)
    outcomes = pool.collect(60)
    for rank in {0, 1, 2} - {victim}:
        assert outcomes[rank].ok, outcomes[rank].error
    outputs = "".join(pool.output(rank) for rank in {0, 1, 2} - {victim})
    assert "this parameter server continues with the copy of shard" in outputs
    assert "this parameter server continues without a copy: " in outputs


def _stop(pids):
    for signum in (signal.SIGSTOP, signal.SIGCONT):
        os.kill(pids[0], signum)
        yield


def _stopped():
    """Rank 0 stops for longer than the others wait for it; then it learns that it has been replaced."""
    server = ParameterServer(np.zeros(LENGTH, np.int64), name="ps", replicas=1)
    ones, pids = np.ones(LENGTH, np.int64), hvd.allgather_object(os.getpid())
    hvd.barrier()
    server.send(ones).wait(30)
    hvd.barrier()
    if hvd.rank() == 1:
        steps, begun = _stop(pids), time.monotonic()
        next(steps)
        server.send(ones).wait(30)
        assert time.monotonic() - begun < 10
        assert (server.receive().wait(30) == 3).all()
        next(steps)
    hvd.barrier()
    assert (server.receive().wait(30) == 3).all()
    hvd.barrier()
    server.send(ones).wait(30)
    hvd.barrier()
    assert (server.receive().wait(30) == 5).all()
    server.close()


def test_a_stopped_server_is_replaced(fresh_ranks):
    pool = fresh_ranks(2, {"HOROVODLIKE_NETWORK_TIMEOUT": "1"})
    pool.run(_stopped)
    assert "this parameter server continues with the copy of shard 0" in pool.output(1)


def _both_lost():
    server = ParameterServer(np.zeros(LENGTH, np.int64), name="ps", replicas=1)
    hvd.barrier()
    print("ready", flush=True)
    if hvd.rank() < 2:
        signal.pause()
    with pytest.raises(HorovodInternalError, match="is lost with both of its servers"):
        while True:
            server.send(np.ones(LENGTH, np.int64)).wait(30)
    failed = time.monotonic()
    with pytest.raises(HorovodInternalError, match="is lost with both of its servers"):
        server.receive().wait(30)
    return failed


def test_both_servers_lost(fresh_ranks):
    pool = fresh_ranks(3)
    pool.start(_both_lost)
    for rank in range(3):
        _wait_for(pool, rank, "ready")
    pool.kill(0)
    pool.kill(1)
    killed = time.monotonic()
    outcome = pool.collect(60)[2]
    assert outcome.ok, outcome.error
    assert outcome.value - killed < 5.0


def _arguments():
    with pytest.raises(ValueError, match=r"replicas must be 0 or 1, got 2"):
        ParameterServer(np.zeros(10), replicas=2)
    with pytest.raises(ValueError, match=r"replicas must be 0 or more"):
        ParameterServer(np.zeros(10), replicas=-1)
    own = [hvd.add_process_set([rank]) for rank in range(2)][hvd.rank()]
    with pytest.raises(ValueError, match=r"replicas=1: there is one server"):
        ParameterServer(np.zeros(10), process_set=own, init="own", replicas=1)
    with pytest.raises(hvd.MismatchError, match="replicas differ between the ranks"):
        ParameterServer(np.zeros(10), replicas=hvd.rank())
    with ParameterServer(np.zeros(10)) as server, pytest.raises(ValueError, match="needs replicas=1"):
        server.await_replicas()
    with ParameterServer(np.zeros(10), replicas=1, staleness=0) as server:
        for step in range(1, 20):
            server.send(np.ones(10)).wait()
            server.tick().wait()
            assert (server.receive().wait() >= 2 * step).all()
            server.tick().wait()


def test_arguments_and_clocks(fresh_ranks):
    pool = fresh_ranks(2)
    pool.run(_arguments)
    for rank in range(2):
        assert "continues" not in pool.output(rank)
        assert "dropped" not in pool.output(rank)


@pytest.mark.thorough
@pytest.mark.parametrize("seal", ["0", "1"])
def test_random_kills(seal):
    command = [sys.executable, "-P", PROGRAM, "--seconds", "20"]
    environ = {**os.environ, "SEAL": seal}
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, env=environ, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "none lost" in done.stdout
