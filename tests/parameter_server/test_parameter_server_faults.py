"""Servers and clients that die or stop: clients get an error that names the server, in time, and others continue."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import horovodlike as hvd
from horovodlike import basics
from horovodlike._engine import parameters
from horovodlike._net.secure_channel import ClientChannel, Identity, JobKey
from horovodlike.errors import HorovodInternalError, RendezvousError
from horovodlike.parameter_server import ParameterServer, _connections
from horovodlike.parameter_server._connections import _JOB, Client, Listener, facts_of, load_settings

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


def _call_until_it_fails(server, begun, errors):
    begun.wait()
    try:
        while True:
            server.send(np.ones((50, 20)))
            server.receive_rows([1, 2])
    except (ValueError, HorovodInternalError) as error:
        errors.append(str(error))


def _ended_amid_calls():
    """Threads are in calls while the object ends: they get an error, and use no memory that was freed."""
    for _ in range(30):
        server, begun, errors = ParameterServer(np.zeros((50, 20)), name="ps"), threading.Barrier(4), []
        threads = [threading.Thread(target=_call_until_it_fails, args=(server, begun, errors)) for _ in range(3)]
        for thread in threads:
            thread.start()
        begun.wait()
        server.end()
        for thread in threads:
            thread.join(30)
        assert len(errors) == 3
        assert all("ps cannot be used: it was closed" in error or "server" in error for error in errors), errors


def test_a_rank_that_ends_amid_its_calls(ranks):
    ranks(1).run(_ended_amid_calls)


def _failing_close():
    """A rank that fails in close() does not leave the others waiting."""
    server = ParameterServer(np.zeros(10), staleness=1)
    if hvd.rank() == 1:

        def fail():
            raise HorovodInternalError("the clock is lost")

        server._arrays[0].leave_clocks = fail
        with pytest.raises(HorovodInternalError, match="the clock is lost"):
            server.close()
    else:
        server.close()
    hvd.barrier()


def test_a_rank_that_fails_in_close(ranks):
    ranks(2).run(_failing_close)


def _bad_messages():
    """Each ends the connection of the peer that has sent it; the next client is served."""
    settings, lines = load_settings(), []
    key, facts = JobKey.random(), facts_of(basics.place(), settings)
    listener = Listener(key, "127.0.0.1", "the server", facts, settings, dict)
    listener._warn = lines.append
    good = {"name": "client", "pid": 0, "salt": "00" * 32, "memory": None, "own": False}
    bad = [{"pid": float("inf")}, {"pid": float("nan")}, {"pid": -1}, {"salt": "0"}, {"name": None, "pid": []}]
    try:
        for message in (b"\xff", b"[]", b"[" * 100_000, *(json.dumps(good | each).encode() for each in bad)):
            deadline = time.monotonic() + 10
            with socket.create_connection(listener.address[:2]) as connected:
                channel = ClientChannel(connected, key, Identity(0, 1, _JOB), deadline)
                channel.receive(deadline)
                channel.send(message, deadline)
                with pytest.raises(OSError):
                    channel.receive(deadline)
        while len(lines) < 3 + len(bad):  # the peer may see the end before
            assert time.monotonic() < deadline
            os.sched_yield()
        assert all("it sent an invalid message" in line for line in lines)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 64, hard))
        try:
            number = Client("late", facts, settings).connect(listener.address, key).number
            assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        parameters.remove_server(number)
        with socket.create_connection(listener.address[:2]) as connected:
            ClientChannel(connected, key, Identity(0, 1, _JOB), deadline).receive(deadline)
            assert len(_connections._own_salts) == 1
            listener.close()
        assert not _connections._own_salts
    finally:
        listener.close()


def test_what_a_peer_sends_ends_no_other_connection(ranks):
    ranks(1).run(_bad_messages)


def _too_little_memory():
    def fail(num_bytes):
        raise RendezvousError("there is too little memory")

    made, _connections.make_memfd = _connections.make_memfd, fail
    try:
        with ParameterServer(np.zeros(10)) as server:
            server.send(np.ones(10)).wait()
    finally:
        _connections.make_memfd = made


def test_without_memory_to_share_the_socket_is_used(ranks):
    ranks(2).run(_too_little_memory)
