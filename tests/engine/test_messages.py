"""Messages from one rank to another: data, order, bad input, faults."""

from __future__ import annotations

import os
import signal
import time

import pytest

from horovodlike._engine.types import DType

SIZES = (0, 1, 4, 8192, 8193, 65_536, (16 << 20) + 3)  # bytes, on both sides of what is sent before it is asked for


def _pattern(num_bytes: int, seed: int):
    import numpy as np

    return np.random.default_rng([num_bytes, seed]).integers(0, 256, num_bytes, np.uint8)


def _send(array, peer: int, tag: int, **options) -> int:
    from horovodlike._engine import messages

    return messages.send(array.ctypes.data, array.nbytes, DType.uint8, peer=peer, tag=tag, **options)


def _receive(array, peer: int, tag: int, **options) -> int:
    from horovodlike._engine import messages

    return messages.receive(array.ctypes.data, array.nbytes, DType.uint8, peer=peer, tag=tag, **options)


def _on_hosts(hosts: str, seals: str = "0") -> None:
    """Start anew on several hosts in name: `hosts` has the letter of each rank's."""
    from horovodlike import basics

    rank = basics.rank()
    basics.shutdown()
    os.environ["HOROVODLIKE_HOSTID"] = hosts[rank]
    os.environ["HOROVODLIKE_SEAL_DATA"] = seals
    basics.init()
    assert basics.local_size() == hosts.count(hosts[rank])


def _all_to_all() -> None:
    """Each rank sends messages of all sizes to each rank, itself too; half of the receives are posted before."""
    import numpy as np

    from horovodlike import basics
    from horovodlike._engine import messages, ops

    rank, size = basics.rank(), basics.size()
    peers = range(size)
    expected = {(peer, n): _pattern(n, 10 * peer + rank) for peer in peers for n in SIZES}
    received = {key: np.zeros_like(array) for key, array in expected.items()}
    sent = {(peer, n): _pattern(n, 10 * rank + peer) for peer in peers for n in SIZES}
    early = [key for index, key in enumerate(received) if index % 2 == rank % 2]
    late = [key for key in received if key not in early]
    handles = {key: _receive(received[key], key[0], key[1]) for key in early}
    sends = [_send(array, peer, n) for (peer, n), array in sent.items()]
    for key in late[::-1]:
        handles[key] = _receive(received[key], key[0], key[1])
    for (peer, n), handle in handles.items():
        assert messages.wait_message(handle) == (peer, n)
    ops.wait_all(sends)
    for key, array in received.items():
        np.testing.assert_array_equal(array, expected[key])


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_messages_of_all_sizes_between_all_ranks(ranks, size):
    ranks(size).run(_all_to_all)


def _all_to_all_on_hosts(hosts: str, seals: str) -> None:
    _on_hosts(hosts, seals)
    _all_to_all()


@pytest.mark.parametrize("seals", ["0", "1"])
@pytest.mark.parametrize("hosts", ["ab", "aab", "abab"])
def test_messages_between_hosts(fresh_ranks, hosts, seals):
    fresh_ranks(len(hosts)).run(_all_to_all_on_hosts, hosts, seals)


def _all_dtypes() -> None:
    import numpy as np

    from horovodlike import basics
    from horovodlike._engine import messages, ops

    other = 1 - basics.rank()
    for dtype in DType:
        sent = _pattern(64, dtype + basics.rank())
        received = np.zeros_like(sent)
        handle = messages.receive(received.ctypes.data, 64, dtype, peer=other, tag=2**62)
        ops.wait(messages.send(sent.ctypes.data, 64, dtype, peer=other, tag=2**62))
        assert messages.wait_message(handle) == (other, 64)
        np.testing.assert_array_equal(received, _pattern(64, dtype + other))


def test_all_dtypes(ranks):
    ranks(2).run(_all_dtypes)


def _in_order(count: int) -> None:
    """Messages of one tag come in order, whatever their size; those of different tags in any."""
    import numpy as np

    from horovodlike import basics
    from horovodlike._engine import ops

    rank = basics.rank()
    lengths = np.random.default_rng(3).choice([1, 2, 1009, 4000], count) * 4
    arrays = [np.full(length // 4, index, np.int32) for index, length in enumerate(lengths)]
    tags = [index % 3 for index in range(count)]
    if rank == 0:
        ops.wait_all([_send(array, 1, tag) for array, tag in zip(arrays, tags, strict=True)])
        return
    received = [np.zeros_like(array) for array in arrays]
    handles = [_receive(received[index], 0, tags[index]) for tag in (2, 0, 1) for index in range(tag, count, 3)]
    ops.wait_all(handles)
    for got, expected in zip(received, arrays, strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("count", [6, 3000])
def test_messages_of_one_tag_come_in_the_order_of_their_sends(ranks, count):
    ranks(2).run(_in_order, count)


def _from_any() -> list[int]:
    import numpy as np

    from horovodlike import basics
    from horovodlike._engine import messages, ops

    rank, size = basics.rank(), basics.size()
    sources = []
    for n in (4, 65_536):
        if rank == 0:
            for _ in range(size - 1):
                array = np.zeros(n, np.uint8)
                received = messages.wait_message(_receive(array, messages.ANY_SOURCE, n))
                np.testing.assert_array_equal(array, received.source)
                sources.append(received.source)
        else:
            array = np.full(n, rank, np.uint8)
            ops.wait(_send(array, 0, n))
    return sources


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_receive_from_any_source_tells_which_it_was(ranks, size):
    sources = ranks(size).run(_from_any)[0]
    assert sorted(sources) == sorted([*range(1, size)] * 2)


def _unexpected(num_bytes: int, count: int) -> None:
    """All messages have arrived, or been announced, before the first is received."""
    import numpy as np
    from support.collectives import allreduce

    from horovodlike import basics
    from horovodlike._engine import messages, ops

    sent = _pattern(num_bytes, 1)
    if basics.rank() == 0:
        handles = [_send(sent, 1, tag) for tag in range(count)]
        allreduce("all are on their way", np.ones(1))
        ops.wait_all(handles)
        return
    allreduce("all are on their way", np.ones(1))
    for tag in reversed(range(count)):
        received = np.zeros_like(sent)
        assert messages.wait_message(_receive(received, 0, tag)) == (0, num_bytes)
        np.testing.assert_array_equal(received, sent)


@pytest.mark.parametrize(("num_bytes", "count"), [(0, 20_000), (4, 3), (8192, 500), (1 << 20, 8)])
def test_messages_wait_for_their_receives(ranks, num_bytes, count):
    """More of them than a rank keeps, too."""
    ranks(2).run(_unexpected, num_bytes, count)


def _exchange(num_bytes: int) -> None:
    import numpy as np

    from horovodlike import basics
    from horovodlike._engine import ops

    rank, size = basics.rank(), basics.size()
    sent, received = _pattern(num_bytes, rank), np.zeros(num_bytes, np.uint8)
    before, behind = (rank - 1) % size, (rank + 1) % size
    for _ in range(3):
        send = _send(sent, behind, 7)
        handle = _receive(received, before, 7)
        ops.wait(send)
        ops.wait(handle)
        np.testing.assert_array_equal(received, _pattern(num_bytes, before))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_large_messages_in_a_ring(ranks, size):
    ranks(size).run(_exchange, 32 << 20)


def _overtake(hosts: str) -> bool:
    import numpy as np

    from horovodlike import basics
    from horovodlike._engine import ops

    if hosts:
        _on_hosts(hosts)
    large, small = np.zeros(256 << 20, np.uint8), np.zeros(4, np.uint8)
    if basics.rank() == 0:
        ops.wait_all([_send(large, 1, 1), _send(small, 1, 2)])
        return True
    waits = _receive(large, 0, 1)
    ops.wait(_receive(small, 0, 2))
    overtakes = not ops.poll(waits)
    ops.wait(waits)
    return overtakes


@pytest.mark.parametrize("hosts", ["", "ab"])
def test_a_small_message_overtakes_a_large_one(fresh_ranks, hosts):
    assert fresh_ranks(2).run(_overtake, hosts) == [True, True]


def _mismatches(receives_first: bool) -> None:
    import numpy as np
    from support.collectives import allreduce

    from horovodlike import basics
    from horovodlike._engine import messages, ops
    from horovodlike.errors import MismatchError

    rank = basics.rank()
    for n in (8, 65_536):
        array = np.zeros(n, np.uint8)
        if (rank == 1) != receives_first:
            allreduce("the other one begins", np.ones(1))
        if rank == 0:
            handles = [messages.send(array.ctypes.data, n, DType.int32, peer=1, tag=tag) for tag in (1, 2, 3)]
        else:
            handles = [
                messages.receive(array.ctypes.data, num_bytes, dtype, peer=messages.ANY_SOURCE, tag=tag)
                for tag, (num_bytes, dtype) in enumerate(
                    [(n, DType.float32), (n - 4, DType.int32), (n, DType.int32)], 1
                )
            ]
        if (rank == 1) == receives_first:
            allreduce("the other one begins", np.ones(1))
        if rank == 0:
            ops.wait_all(handles)  # none fails
            continue
        with pytest.raises(
            MismatchError,
            match=f"a receive of {n} bytes of float32 got a message of {n} bytes of int32 from rank 0, tag 1: both "
            "must have the same size and dtype",
        ):
            messages.wait_message(handles[0])
        with pytest.raises(MismatchError, match=f"a receive of {n - 4} bytes of int32 got a message of {n} bytes"):
            ops.wait(handles[1])
        assert messages.wait_message(handles[2]) == (0, n)


@pytest.mark.parametrize("receives_first", [False, True])
def test_a_receive_of_another_size_or_dtype_fails_and_the_job_continues(ranks, receives_first):
    ranks(2).run(_mismatches, receives_first)


def _refused() -> None:
    import numpy as np

    from horovodlike import basics
    from horovodlike._engine import messages, ops

    array = np.zeros(8, np.uint8)
    good = {"address": array.ctypes.data, "num_bytes": 8, "dtype": DType.int32, "peer": 0, "tag": 1}
    for changed, error, text in [
        ({"peer": 2}, ValueError, "has the peer 2, but the ranks of this job are 0 to 1"),
        ({"peer": -2}, ValueError, "has the peer -2, but the ranks of this job are 0 to 1"),
        ({"tag": -1}, ValueError, "has the tag -1: use 0 at least"),
        ({"tag": 2**63}, ValueError, "tag is out of range: 9223372036854775808"),
        ({"tag": "one"}, TypeError, "tag must be an integer, got 'one'"),
        ({"peer": 0.0}, TypeError, r"peer must be an integer, got 0\.0"),
        ({"dtype": 99}, ValueError, "has the unknown dtype 99"),
        ({"num_bytes": -4}, ValueError, "has a negative number of bytes"),
        ({"num_bytes": 7}, ValueError, "of 7 bytes of int32 is no number of elements"),
        ({"address": 0}, ValueError, "a message has no memory for its 8 bytes"),
    ]:
        for post in (messages.send, messages.receive):
            arguments = {**good, **changed}
            with pytest.raises(error, match=text):
                post(arguments.pop("address"), arguments.pop("num_bytes"), arguments.pop("dtype"), **arguments)
    with pytest.raises(ValueError, match="a send has the peer -1"):
        _send(array, messages.ANY_SOURCE, 1)
    for post in (_send, _receive):
        with pytest.raises(ValueError, match="process set 7, which does not exist"):
            ops.wait(post(array, 1 - basics.rank(), 1, process_set=7))
    with pytest.raises(KeyError, match="unknown or was waited for already"):
        messages.wait_message(12345)


def test_bad_arguments(ranks):
    ranks(2).run(_refused)


def test_before_init():
    import numpy as np

    from horovodlike.errors import NotInitializedError

    with pytest.raises(NotInitializedError):
        _send(np.zeros(1, np.uint8), 0, 0)


def _never_sent() -> None:
    import numpy as np
    from support.collectives import allreduce

    from horovodlike import basics
    from horovodlike._engine import ops
    from horovodlike._engine.native import ffi, lib

    array = np.zeros(4, np.uint8)
    if basics.rank() == 1:
        handle = _receive(array, 0, 1)
        begin, used = time.monotonic(), time.process_time()
        assert lib.hvl_wait_message(handle, 0.5, ffi.NULL) == lib.HVL_IN_PROGRESS
        assert time.monotonic() - begin >= 0.5
        assert time.process_time() - used < 0.2  # it sleeps
        assert not ops.poll(handle)
    allreduce("now it is sent", np.ones(1))
    if basics.rank() == 0:
        sent = _pattern(4, 1)
        ops.wait(_send(sent, 1, 1))
    else:
        ops.wait(handle)
        np.testing.assert_array_equal(array, _pattern(4, 1))


def test_a_wait_for_a_message_that_is_not_sent_sleeps_and_ends_in_time(ranks):
    ranks(2).run(_never_sent)


def _wait_for_ever(any_source: bool, num_bytes: int) -> None:
    import numpy as np

    from horovodlike import basics
    from horovodlike._engine import messages, ops

    array = np.zeros(num_bytes, np.uint8)
    source = messages.ANY_SOURCE if any_source else 0
    handle = _receive(array, source, 1) if basics.rank() == 1 else _send(array, 0, 2)
    if basics.rank() == 0:
        handle = _receive(array, 1, 1)
    print("waits", flush=True)
    try:
        ops.wait(handle)
    except Exception:
        print(f"failed at {time.monotonic()}", flush=True)
        raise
    if basics.rank() == 2:  # a small message is on its way, and there is nothing to wait for
        ops.wait(_receive(array, 0, 3))


@pytest.mark.parametrize(("any_source", "num_bytes"), [(False, 4), (True, 1 << 20)])
def test_sigkill_fails_those_that_wait_within_a_second(fresh_ranks, any_source, num_bytes):
    pool = fresh_ranks(3)
    pool.start(_wait_for_ever, [(any_source, num_bytes)] * 3)
    deadline = time.monotonic() + 30
    while not all("waits" in pool.output(rank) for rank in range(3)):
        assert time.monotonic() < deadline
        os.sched_yield()
    pool.kill(0, signal.SIGKILL)
    killed = time.monotonic()
    for rank, outcome in enumerate(pool.collect(30.0)):
        if rank == 0:
            continue
        assert "JobBrokenError" in outcome.error
        assert f"rank 0 (pid {pool.processes[0].pid})" in outcome.error
        if rank == 1:
            [line] = [line for line in pool.output(1).splitlines() if line.startswith("failed at ")]
            assert float(line.removeprefix("failed at ")) - killed < 1.0


def _shut_down(num_bytes: int, hosts: str) -> str:
    """Rank 0 leaves: what it has sent is still received, and nothing else."""
    import numpy as np

    from horovodlike import basics
    from horovodlike._engine import messages, ops
    from horovodlike.errors import ShutDownError

    if hosts:
        _on_hosts(hosts)
    sent, received = _pattern(num_bytes, 1), np.zeros(num_bytes, np.uint8)
    if basics.rank() == 0:
        ops.wait(_send(sent, 1, 1))
        basics.shutdown()
        return ""
    never, handle = _receive(sent, 0, 2), _receive(received, 0, 1)
    try:
        with pytest.raises(ShutDownError, match="rank 0"):
            messages.wait_message(never)
        assert messages.wait_message(handle) == (0, num_bytes)
    finally:
        basics.shutdown()
    np.testing.assert_array_equal(received, _pattern(num_bytes, 1))
    return "received"


@pytest.mark.parametrize("hosts", ["", "ab"])
@pytest.mark.parametrize("num_bytes", [4, 1 << 20])
def test_shutdown_ends_receives_and_loses_nothing(fresh_ranks, num_bytes, hosts):
    assert fresh_ranks(2).run(_shut_down, num_bytes, hosts) == ["", "received"]


def _process_sets() -> None:
    import numpy as np

    from horovodlike import basics
    from horovodlike._engine import messages, ops
    from horovodlike.process_set import ProcessSet, add_process_set, remove_process_set

    rank = basics.rank()
    small, large = np.zeros(8, np.uint8), np.zeros(1 << 20, np.uint8)
    for turn in range(3):  # the ids are used again
        pair = add_process_set(ProcessSet([0, 2]))
        ids = (0, pair.process_set_id)
        if rank == 0:
            arrays = [np.full(8, id, np.uint8) for id in ids]
            ops.wait_all([_send(array, 2, 1, process_set=id) for array, id in zip(arrays, ids, strict=True)])
        if rank == 2:
            for id in reversed(ids):
                array = np.zeros(8, np.uint8)
                assert messages.wait_message(_receive(array, 0, 1, process_set=id)) == (0, 8)
                np.testing.assert_array_equal(array, id)
        if rank == 1:
            with pytest.raises(ValueError, match=r"rank 1 is not a member of process set"):
                ops.wait(_send(small, 0, 1, process_set=ids[1]))
        if rank == 0:
            with pytest.raises(ValueError, match=r"rank 1 is not a member of process set"):
                ops.wait(_receive(small, 1, 1, process_set=ids[1]))
        # Sends that are not received, and a receive of what is not sent, end with the set.
        pending = []
        if rank == 0:
            ops.wait(_send(small, 2, 10 + turn, process_set=ids[1]))  # must not reach the next set of this id
            pending += [_send(large, peer, 1, process_set=ids[1]) for peer in (0, 2)]
        if rank == 2:
            pending.append(_receive(small, 0, 9 + turn, process_set=ids[1]))
        remove_process_set(pair)
        for handle in pending:
            with pytest.raises(ValueError, match="has been removed"):
                ops.wait(handle)


def test_process_sets_are_namespaces_of_tags(ranks):
    ranks(3).run(_process_sets)


def _beside_collectives(rounds: int) -> None:
    """Threads that send, threads that receive, and threads that reduce, at the same time."""
    from concurrent.futures import ThreadPoolExecutor

    import numpy as np
    from support.collectives import allreduce

    from horovodlike import basics
    from horovodlike._engine import messages, ops

    rank, size = basics.rank(), basics.size()

    def talk(number: int) -> None:
        other, before = (rank + 1) % size, (rank - 1) % size
        for index in range(rounds):
            n = (4, 9000, 300_000)[index % 3]
            received = np.zeros(n, np.uint8)
            handle = _receive(received, before, number)
            sent = _pattern(n, index + number)
            ops.wait(_send(sent, other, number))
            assert messages.wait_message(handle) == (before, n)
            np.testing.assert_array_equal(received, sent)

    def reduce(number: int) -> None:
        for index in range(rounds):
            total = allreduce(f"beside.{number}", np.full(1 + 50_000 * (index % 2), rank + 1.0))
            np.testing.assert_array_equal(total, size * (size + 1) / 2)

    with ThreadPoolExecutor(4) as threads:
        for task in [threads.submit(function, number) for number in (0, 1) for function in (talk, reduce)]:
            task.result()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_messages_beside_collectives_of_several_threads(ranks, size):
    ranks(size).run(_beside_collectives, 60)


def _beside_collectives_on_hosts(hosts: str) -> None:
    _on_hosts(hosts)
    _beside_collectives(40)


def test_messages_beside_collectives_on_several_hosts(fresh_ranks):
    fresh_ranks(4).run(_beside_collectives_on_hosts, "aabb")


def _stalled() -> None:
    import numpy as np

    from horovodlike import basics
    from horovodlike._engine import ops

    if basics.rank() == 1:
        received = np.zeros(4, np.uint8)
        ops.wait(_receive(received, 0, 5))


def test_a_receive_without_a_message_ends_at_the_stall_limit(fresh_ranks):
    settings = {"HOROVODLIKE_STALL_CHECK_TIME_SECONDS": "1", "HOROVODLIKE_STALL_SHUTDOWN_TIME_SECONDS": "2"}
    pool = fresh_ranks(2, settings)
    pool.start(_stalled)
    outcome = pool.collect(30.0)[1]
    text = (
        f"rank 0 (pid {pool.processes[0].pid}) did not get on with a message to rank 1 with the tag 5 of process set 0"
    )
    assert "JobBrokenError: stalled: " in outcome.error and text in outcome.error
    assert text in pool.output(1)  # the warning
    assert 2.0 < outcome.seconds < 10.0
