"""Servers and clients that die or stop: clients get an error that names the server, in time, and others go on."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

import horovodlike as hvd
from horovodlike.errors import HorovodInternalError
from horovodlike.parameter_server import ParameterServer

LENGTH = 4 << 20


def _send_for_ever(victim):
    """Send until it fails; a rank of the job is lost as well, so only the calls of the parameter server are timed."""
    server = ParameterServer(np.zeros(LENGTH, np.float32), name="ps")
    mine = np.ones(LENGTH, np.float32)
    server.send(mine).wait()
    hvd.barrier()
    print("ready", flush=True)
    if hvd.rank() == victim:
        signal.pause()
    while True:
        try:
            server.send(mine).wait()
        except HorovodInternalError as error:
            failed = time.monotonic()
            with pytest.raises(HorovodInternalError, match=f"rank {victim}"):
                server.receive().wait()
            return failed, str(error)


def _wait_for(pool, rank, text):
    deadline = time.monotonic() + 30
    while text not in pool.output(rank):
        assert time.monotonic() < deadline, pool.output(rank)
        os.sched_yield()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_server_fails_its_clients_within_a_second(fresh_ranks, victim):
    pool = fresh_ranks(3)
    pool.start(_send_for_ever, [(victim,)] * 3)
    for rank in range(3):
        _wait_for(pool, rank, "ready")
    pool.kill(victim)
    killed = time.monotonic()
    outcomes = pool.collect(30)
    for rank in {0, 1, 2} - {victim}:
        assert outcomes[rank].ok, outcomes[rank].error
        failed, error = outcomes[rank].value
        assert failed - killed < 1.0
        assert f"the parameter server of rank {victim}" in error


def _await_stop(pid):
    """Wait until all threads of a process are stopped."""
    deadline = time.monotonic() + 10
    folder = f"/proc/{pid}/task"
    while not all("T (stopped)" in Path(f"{folder}/{thread}/status").read_text() for thread in os.listdir(folder)):
        assert time.monotonic() < deadline
        os.sched_yield()


def _stopped_server():
    """Rank 1 stops; a wait of rank 0 ends in time, and is complete when rank 1 goes on."""
    server = ParameterServer(np.zeros(LENGTH, np.float32), name="ps")
    mine, pids = np.ones(LENGTH, np.float32), hvd.allgather_object(os.getpid())
    hvd.barrier()
    if hvd.rank() == 0:
        os.kill(pids[1], signal.SIGSTOP)
        _await_stop(pids[1])
        handle, begun = server.send(mine), time.monotonic()
        with pytest.raises(TimeoutError, match=r"not carried out the call within 0.5 s"):
            handle.wait(0.5)
        assert 0.5 <= time.monotonic() - begun < 2.0
        assert not handle.done()
        os.kill(pids[1], signal.SIGCONT)
        handle.wait(30)
    hvd.barrier()
    assert (server.receive().wait() == 1).all()
    server.close()


def test_a_stopped_server_does_not_stop_the_wait(fresh_ranks):
    fresh_ranks(2).run(_stopped_server)


def _stalled_client():
    """Rank 2 stops amid its sends; the calls of the others go on."""
    server = ParameterServer(np.zeros(LENGTH, np.float32), name="ps")
    mine, pids = np.ones(LENGTH, np.float32), hvd.allgather_object(os.getpid())
    two = hvd.add_process_set([0, 1])
    small = ParameterServer(np.zeros(100), process_set=two) if two.included() else None
    hvd.barrier()
    if hvd.rank() == 2:
        handles = [server.send(mine) for _ in range(5)]
        os.kill(os.getpid(), signal.SIGSTOP)
        for handle in handles:
            handle.wait(30)
    else:
        if hvd.rank() == 0:
            _await_stop(pids[2])
        hvd.barrier(process_set=two)
        begun = time.monotonic()
        for _ in range(10):
            small.send(np.ones(100)).wait(10)
        assert time.monotonic() - begun < 5.0
        hvd.barrier(process_set=two)
        if hvd.rank() == 0:
            os.kill(pids[2], signal.SIGCONT)
        small.close()
    hvd.barrier()
    assert (server.receive().wait() == 5).all()
    server.close()


def test_a_stopped_client_stalls_no_other(fresh_ranks):
    fresh_ranks(3).run(_stalled_client)


def _killed_client():
    """Rank 2 is killed amid its sends; ranks 0 and 1 lose its part, and go on with a parameter server of their own."""
    two = hvd.add_process_set([0, 1])
    small = ParameterServer(np.zeros(100), process_set=two) if two.included() else None
    server = ParameterServer(np.zeros(LENGTH, np.float32), name="ps")
    mine = np.ones(LENGTH, np.float32)
    hvd.barrier()
    if hvd.rank() == 2:
        handles = [server.send(mine) for _ in range(3)]
        print("ready", flush=True)
        while True:
            handles = [*handles[1:], server.send(mine)]
            handles[0].wait()
    with pytest.raises(HorovodInternalError, match="the parameter server of rank 2"):
        while True:
            server.receive().wait()
    for _ in range(10):
        small.send(np.ones(100)).wait(10)
    deadline = time.monotonic() + 10
    while not (small.receive().wait(10) == 20).all():
        assert time.monotonic() < deadline


def test_a_killed_client_is_dropped_and_named(fresh_ranks):
    pool = fresh_ranks(3)
    pool.start(_killed_client)
    _wait_for(pool, 2, "ready")
    pool.kill(2)
    outcomes = pool.collect(30)
    for rank in (0, 1):
        assert outcomes[rank].ok, outcomes[rank].error
        assert "a client of this parameter server is dropped" in pool.output(rank)
        assert "rank 2 on " in pool.output(rank) and "client of ps" in pool.output(rank)
