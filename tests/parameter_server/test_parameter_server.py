"""Parameter servers of ranks: what is sent and received, by every rule, as NumPy computes it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import ml_dtypes
import numpy as np
import pytest

import horovodlike as hvd
from horovodlike._engine import parameters
from horovodlike._engine.types import DType
from horovodlike.parameter_server import ParameterServer, register_rule
from horovodlike.parameter_server._sharding import Part, blocks, split

SIZES = [1, 2, 3, 4]


def test_elements_are_split_evenly():
    assert split([10], 3, "p") == [[Part(0, 0, 4), Part(1, 4, 3), Part(2, 7, 3)]]
    assert split([2, 0, 5], 2, "p") == [[Part(0, 0, 2)], [Part(0, 0, 0)], [Part(0, 0, 2), Part(1, 2, 3)]]
    assert split([1, 1], 2, "p") == [[Part(0, 0, 1)], [Part(1, 0, 1)]]
    for count in range(7, 40):
        for servers in range(1, 8):
            (parts,) = split([count], servers, "p")
            assert [part.size for part in parts] == [
                count // servers + (server < count % servers) for server in range(servers)
            ]
            assert [part.offset for part in parts] == [sum(p.size for p in parts[:i]) for i in range(servers)]
    with pytest.raises(ValueError, match="p: 2 elements cannot be split among 3 servers; use a process set"):
        split([2], 3, "p")
    assert blocks([Part(0, 0, 65537), Part(1, 65537, 1)]) == [0, 65536, 65537]


def test_nothing_imports_it_before_it_is_used():
    program = "import sys, horovodlike as hvd; hvd.init(); hvd.barrier(); hvd.shutdown(); "
    program += "assert not [name for name in sys.modules if 'parameter_server' in name or name.endswith('.parameters')]"
    subprocess.run([sys.executable, "-P", "-c", program], check=True)


def _oracle(runs):
    """TorchMPI's test of its parameter server."""
    rank, size = hvd.rank(), hvd.size()
    for _ in range(runs):
        mine = np.full((911, 101), rank, np.float64)
        with ParameterServer(mine, init="own") as server:
            got = server.receive().wait()
            assert got.shape == (911, 101)
            assert (got.min(), got.max()) == (0, size - 1)
            hvd.barrier()
            if rank == 0:
                server.send(None, "zero").wait()
            hvd.barrier()
            got = server.receive().wait()
            assert not got.any()
            hvd.barrier()
            if rank == size - 1:
                server.send(mine, "copy").wait()
            hvd.barrier()
            server.receive(got).wait()
            assert (got == size - 1).all()
            hvd.barrier()
            server.send(mine).wait()
            hvd.barrier()
            assert (server.receive().wait() == (size - 1) + size * (size - 1) / 2).all()


@pytest.mark.parametrize("size", SIZES)
def test_the_oracle_of_torchmpi(ranks, size):
    ranks(size).run(_oracle, 3)


@pytest.mark.thorough
@pytest.mark.parametrize("size", SIZES)
def test_the_oracle_of_torchmpi_100_times(ranks, size):
    ranks(size).run(_oracle, 100, timeout=200)


def _connections_to_servers():
    peers, add_server = [], parameters.add_server

    def note(peer):
        peers.append(peer)
        return add_server(peer)

    parameters.add_server = note
    try:
        with ParameterServer(np.zeros(10)) as server:
            server.send(np.ones(10)).wait()
            hvd.barrier()
            assert (server.receive().wait() == hvd.size()).all()
    finally:
        parameters.add_server = add_server
    assert [peer.is_own for peer in peers] == [rank == hvd.rank() for rank in range(hvd.size())]


def test_a_process_recognises_itself_and_no_other(ranks):
    ranks(3).run(_connections_to_servers)


def _lists(length):
    """A list of arrays of several types and shapes, empty ones too; the root's elements come first."""
    rank, size = hvd.rank(), hvd.size()
    shapes = [
        ((3, length), np.float32),
        ((), np.float64),
        ((0, 2), np.int64),
        ((length,), np.int32),
        ((2, 2), np.uint8),
    ]
    mine = [np.full(shape, rank + 1, dtype) for shape, dtype in shapes]
    with ParameterServer(mine, root=size - 1, name="a list") as server:
        assert all((each == size).all() for each in server.receive().wait())
        hvd.barrier()
        handle = server.send([np.ones(shape, dtype) for shape, dtype in shapes])
        assert handle.wait() is None and handle.wait() is None and handle.done()
        hvd.barrier()
        got = server.receive().wait(30)
        for each, (shape, dtype) in zip(got, shapes, strict=True):
            assert each.shape == shape and each.dtype == dtype and (each == 2 * size).all()
        out = [np.zeros(shape, dtype) for shape, dtype in shapes]
        assert server.receive(out).wait() is out
        assert all(np.array_equal(a, b) for a, b in zip(out, got, strict=True))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("length", [1, 1009, 200_003])
def test_lists_of_arrays(ranks, size, length):
    ranks(size).run(_lists, length)


def _rules(dtype):
    rng = np.random.default_rng(7)
    begin, pushed = (rng.standard_normal(150_001).astype(dtype) for _ in range(2))
    expected = {
        "zero": np.zeros_like(begin),
        "copy": pushed,
        "add": begin + pushed,
        "max": np.maximum(begin, pushed),
        "min": np.minimum(begin, pushed),
        "scale_add": begin + np.asarray(0.25, dtype) * pushed,
        "sgd": begin - np.asarray(0.5, dtype) * pushed,
    }
    given = {"scale_add": {"scale": 0.25}, "sgd": {"lr": 0.5}}
    for rule, wanted in expected.items():
        with ParameterServer(begin) as server:
            if hvd.rank() == 0:
                server.send(pushed, rule, **given.get(rule, {})).wait()
            hvd.barrier()
            np.testing.assert_array_equal(server.receive().wait(), wanted, err_msg=rule)


def _remembering_rules():
    rng = np.random.default_rng(8)
    begin = rng.standard_normal(70_001)
    gradients = [rng.standard_normal(70_001) for _ in range(5)]
    values, velocity = begin.copy(), np.zeros_like(begin)
    with ParameterServer(begin) as server:
        for gradient in gradients:
            velocity = 0.9 * velocity + gradient
            values += -0.1 * velocity
            if hvd.rank() == 0:
                server.send(gradient, "momentum", lr=0.1, momentum=0.9).wait()
        hvd.barrier()
        np.testing.assert_allclose(server.receive().wait(), values, rtol=1e-14, atol=1e-14)
    values, mean, square = begin.copy(), np.zeros_like(begin), np.zeros_like(begin)
    with ParameterServer(begin) as server:
        for step, gradient in enumerate(gradients, 1):
            mean += (1 - 0.9) * (gradient - mean)
            square = 0.999 * square + (1 - 0.999) * gradient**2
            denominator = np.sqrt(square) / np.sqrt(1 - 0.999**step) + 1e-8
            values -= 0.01 / (1 - 0.9**step) * mean / denominator
            if hvd.rank() == 0:
                server.send(gradient, "adam", lr=0.01).wait()
        hvd.barrier()
        np.testing.assert_allclose(server.receive().wait(), values, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_every_rule_is_numpys(ranks, dtype):
    ranks(3).run(_rules, dtype)


def test_rules_that_remember(ranks):
    ranks(3).run(_remembering_rules)


def _layouts():
    mine = np.asfortranarray(np.arange(12.0).reshape(3, 4))
    with ParameterServer(mine) as server:
        out = np.zeros((4, 3)).T
        assert server.receive(out).wait() is out
        np.testing.assert_array_equal(out, mine)
        hvd.barrier()
        server.send(np.ones((3, 8))[:, ::2]).wait()
        hvd.barrier()
        np.testing.assert_array_equal(server.receive().wait(), mine + hvd.size())


def test_arrays_with_gaps(ranks):
    ranks(2).run(_layouts)


def _prefetch():
    with ParameterServer(np.zeros(5)) as server:
        server.prefetch()
        server.prefetch()
        hvd.barrier()
        first = server.receive().wait()
        server.send(np.ones(5)).wait()
        hvd.barrier()
        server.prefetch()
        out = np.full(5, -1.0)
        assert server.receive(out).wait() is out and (out == hvd.size()).all()
        assert (first <= hvd.size()).all() and (server.receive().wait() == hvd.size()).all()
        server.prefetch()  # no receive takes it


def test_prefetch(ranks):
    ranks(3).run(_prefetch)


def _rows(size_of_row):
    table = np.arange(50.0 * size_of_row).reshape(50, size_of_row)
    rng = np.random.default_rng(hvd.rank())
    with ParameterServer(table) as server:
        for indices in ([], [49, 0, 7], [3, 3, 3], rng.integers(0, 50, 30)):
            got = server.receive_rows(indices).wait()
            np.testing.assert_array_equal(got, table[np.asarray(indices, int)])
            out = np.zeros((len(indices), size_of_row))
            assert server.receive_rows(indices, out).wait() is out
            np.testing.assert_array_equal(out, got)
        hvd.barrier()
        chosen = [rng.integers(0, 50, 20) for _ in range(4)]
        for indices in chosen:
            server.send_rows(indices, np.ones((20, size_of_row)), "scale_add", scale=2.0).wait()
        expected = table.copy()
        for rank_choice in hvd.allgather_object(chosen):
            for indices in rank_choice:
                np.add.at(expected, indices, 2.0)
        np.testing.assert_array_equal(server.receive().wait(), expected)
        hvd.barrier()
        if hvd.rank() == 0:
            server.send_rows([1, 2], None, "zero").wait()
        hvd.barrier()
        assert not server.receive_rows([2, 1]).wait().any()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("size_of_row", [1, 33])
def test_rows(ranks, size, size_of_row):
    ranks(size).run(_rows, size_of_row)


def _own_rules():
    def decay(values, pushed, rate, floor=0.0):
        values *= rate
        np.maximum(values, floor, out=values)
        values += pushed

    def fail(values, pushed):
        raise ArithmeticError(f"no {pushed[0]:g}")

    register_rule("decay", decay)
    register_rule("fails", fail)
    with ParameterServer(np.full(100_000, 8.0)) as server:
        if hvd.rank() == hvd.size() - 1:
            server.send(np.ones(100_000), "decay", rate=0.5, floor=5.0).wait()
        hvd.barrier()
        assert (server.receive().wait() == 6).all()
        with pytest.raises(ValueError, match="ArithmeticError: no 3"):
            server.send(np.full(100_000, 3.0), "fails").wait()
        with pytest.raises(ValueError, match="TypeError: .*missing 1 required positional argument: 'rate'"):
            server.send(np.ones(100_000), "decay").wait()
        assert (server.receive().wait() == 6).all()


@pytest.mark.parametrize("size", SIZES)
def test_rules_of_the_user(ranks, size):
    ranks(size).run(_own_rules)


def _payloads(payload, tolerance):
    rng = np.random.default_rng(hvd.rank())
    steps = [rng.standard_normal(3_001).astype(np.float32) for _ in range(50)]
    with ParameterServer(np.zeros(3_001, np.float32), payload=payload) as server:
        for step in steps:
            server.send(step).wait()
        total = sum(sum(each) for each in hvd.allgather_object([step.astype(np.float64) for step in steps]))
        error = np.abs(server.receive().wait() - total).max()
        return float(error), tolerance


@pytest.mark.parametrize(("payload", "tolerance"), [(None, 1e-4), ("bfloat16", 0.1), ("int8", 0.2)])
def test_payloads_make_up_for_what_they_lose(ranks, payload, tolerance):
    """Without the feedback, the errors of 100 additions would add up to ten times as much."""
    for error, bound in ranks(2).run(_payloads, payload, tolerance):
        assert error < bound


def _threads():
    with ParameterServer(np.zeros(1_000)) as server:

        def add():
            for _ in range(50):
                server.send(np.ones(1_000)).wait()
                server.receive().wait()

        threads = [threading.Thread(target=add) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        hvd.barrier()
        assert (server.receive().wait() == 200 * hvd.size()).all()


def test_several_threads(ranks):
    ranks(2).run(_threads)


def _many_requests(count):
    """As many calls in flight as a thousand clients would have."""
    with ParameterServer(np.zeros(64)) as server:
        handles = [server.send(np.ones(64)) for _ in range(count)]
        receives = [server.receive() for _ in range(count // 10)]
        for handle in handles:
            handle.wait(30)
        for handle in receives:
            handle.wait(30)
        hvd.barrier()
        assert (server.receive().wait() == count * hvd.size()).all()
        hvd.barrier()
        for _ in range(100):
            server.send(np.ones(64))  # no thread waits for them
        server.receive().wait()


def test_the_requests_of_a_thousand_clients(ranks):
    ranks(3).run(_many_requests, 1_000)


def _sets():
    chosen = hvd.add_process_set([0, 2])
    try:
        if chosen.included():
            with ParameterServer(np.arange(5), process_set=chosen, root=2) as server:
                server.send(np.ones(5, int)).wait()
                hvd.barrier(process_set=chosen)
                assert (server.receive().wait() == np.arange(5) + 2).all()
    finally:
        hvd.remove_process_set(chosen)


def test_a_process_set(ranks):
    ranks(3).run(_sets)


def _clocks(steps, staleness):
    """Each rank notes how many steps all ranks have made when its tick has returned."""
    rank, seen = hvd.rank(), []
    with ParameterServer(np.zeros(hvd.size()), staleness=staleness) as server:
        for step in range(steps):
            mine = np.zeros(hvd.size())
            mine[rank] = 1
            server.send(mine).wait()
            server.tick().wait(30)
            made = server.receive().wait()
            seen.append((step + 1, made.min(), made.max()))
    return seen


@pytest.mark.parametrize("staleness", [0, 2])
def test_no_rank_is_further_ahead_than_the_staleness(ranks, staleness):
    for seen in ranks(3).run(_clocks, 20, staleness):
        assert all(slowest >= step - staleness for step, slowest, _ in seen)


def _blocked_clock():
    """Rank 0 stays at clock 0: a tick of the others is complete exactly as long as it is within the bound."""
    with ParameterServer(np.zeros(4), staleness=2) as server:
        done = []
        if hvd.rank():
            done = [server.tick() for _ in range(4)]
            for handle in done[:2]:
                handle.wait(30)
            with pytest.raises(TimeoutError, match="within 0.1 s"):
                done[2].wait(0.1)
            assert not done[2].done() and not done[3].done()
        hvd.barrier()
        if hvd.rank() == 0:
            server.tick().wait(30)
            hvd.barrier()
            server.tick().wait(30)
        else:
            done[2].wait(30)
            assert not done[3].done()
            hvd.barrier()
            done[3].wait(30)


def test_the_bound_of_the_clock_is_exact(ranks):
    ranks(3).run(_blocked_clock)


def _again():
    for _ in range(2):
        with ParameterServer(np.ones(10)) as server:
            server.send(np.ones(10)).wait()
        left = ParameterServer(np.ones(10))
        hvd.barrier()
        hvd.shutdown()
        assert not [thread.name for thread in threading.enumerate() if thread.name == "horovodlike-parameters"]
        with pytest.raises(ValueError, match="cannot be used: it was closed; make a new ParameterServer"):
            left.receive()
        left.close()
        hvd.init()


def test_nothing_is_left_after_the_job(fresh_ranks):
    pool = fresh_ranks(2)
    pool.run(_again)


def _over_tcp(sealed):
    """Between hosts there is no shared memory; so here."""
    from horovodlike.parameter_server import _connections

    def fail(num_bytes):
        raise OSError

    made, _connections.make_memfd = _connections.make_memfd, fail
    try:
        assert _connections.load_settings().seal_data == sealed
        _oracle(2)
        _lists(200_003)
        _rows(33)
        _many_requests(100)
        _threads()
    finally:
        _connections.make_memfd = made


@pytest.mark.parametrize("sealed", [False, True])
def test_over_tcp(fresh_ranks, sealed):
    fresh_ranks(2, {"HOROVODLIKE_SEAL_DATA": str(int(sealed))}).run(_over_tcp, sealed)


def _every_dtype(folder):
    for name in DType.__members__:
        value = np.arange(2 * hvd.size() + 1).astype(getattr(ml_dtypes, name, name))
        with ParameterServer(value) as server:
            if hvd.rank() == 0:
                server.save(f"{folder}/{name}")
                server.send(np.zeros_like(value), "copy").wait()
                assert server.receive().wait().tobytes() == bytes(value.nbytes), name
                server.load(f"{folder}/{name}")
                assert server.receive().wait().tobytes() == value.tobytes(), name
                server.send(value, "max").wait()
                got = server.receive().wait()
                assert got.dtype == value.dtype and got.tobytes() == value.tobytes(), name


def test_every_dtype(ranks, tmp_path):
    ranks(2).run(_every_dtype, str(tmp_path))


def _fire_and_forget():
    """Sends whose handles are dropped: those that wait for a server are bounded, and freed when it continues."""
    goes_on, kept = threading.Event(), parameters._MOST_ABANDONED

    def wait(values, pushed):
        goes_on.wait(30)

    register_rule("wait", wait)
    with ParameterServer(np.zeros(8)) as server:
        lengths = []

        def send():
            for _ in range(kept + 100):
                server.send(np.ones(8))
                lengths.append(len(parameters._abandoned))

        server.send(np.ones(8), "wait")
        sender = threading.Thread(target=send)
        sender.start()
        while sender.is_alive() and len(parameters._abandoned) < kept:  # the next one has to wait
            os.sched_yield()
        goes_on.set()
        sender.join(30)
        assert kept <= max(lengths) <= kept + 1
        assert (server.receive().wait(30) == kept + 100).all()
        server.send(np.ones(8)).wait(30)
        assert not parameters._abandoned and not parameters._borrowed


def test_sends_that_no_thread_waits_for(ranks):
    ranks(1).run(_fire_and_forget)


def _one_prefetch_for_two_threads():
    """Of two threads that receive at once, one gets what was prefetched, and the other one memory of its own."""
    with ParameterServer(np.zeros(100)) as server:
        for _ in range(200):
            server.prefetch()
            begun, got = threading.Barrier(2), []

            def receive(begun=begun, got=got):
                begun.wait()
                got.append(server.receive().wait(30))

            threads = [threading.Thread(target=receive) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(30)
            assert not np.shares_memory(*got)


def test_a_prefetch_is_for_one_thread(ranks):
    ranks(1).run(_one_prefetch_for_two_threads)
