"""Calls that are wrong: a clear error on every rank that it concerns, and the job goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

import horovodlike.torch as hvd


def _error(call: Callable[[], object]) -> str:
    """Return what a mismatch says; afterwards the same name works again."""
    with pytest.raises(hvd.HorovodInternalError) as caught:
        call()
    return str(caught.value)


def _works() -> None:
    assert hvd.allreduce(torch.ones(3), op=hvd.Sum, name="again").tolist() == [hvd.size()] * 3


def _mismatches() -> dict[str, str]:
    first = hvd.rank() == 0
    messages = {
        "shape": _error(lambda: hvd.allreduce(torch.ones(17, 17 if first else 16), name="again")),
        "dimensions": _error(lambda: hvd.allreduce(torch.ones((6,) if first else (2, 3)), name="again")),
        "dtype": _error(
            lambda: hvd.allreduce(torch.ones(3, dtype=torch.int32 if first else torch.float32), name="again")
        ),
        "op": _error(lambda: hvd.allreduce(torch.ones(3), op=hvd.Sum if first else hvd.Max, name="again")),
        "prescale": _error(lambda: hvd.allreduce(torch.ones(3), prescale_factor=1.0 if first else 2.5, name="again")),
        "root": _error(lambda: hvd.broadcast(torch.ones(3), 0 if first else 1, name="again")),
        "broadcast shape": _error(lambda: hvd.broadcast(torch.ones(3 if first else 4), 0, name="again")),
        "allgather rank": _error(lambda: hvd.allgather(torch.ones((2, 3) if first else (2, 3, 1)), name="again")),
        "allgather dimension": _error(lambda: hvd.allgather(torch.ones(2, 5 if first else 6), name="again")),
        "group": _error(lambda: hvd.grouped_allreduce([torch.ones(3)] * (2 if first else 3), name="again")),
    }
    _works()
    # A known request that has changed on one rank only.
    changed = torch.ones(3 if first else 4)
    messages["changed"] = _error(lambda: hvd.allreduce_(changed, op=hvd.Sum, name="again"))
    _works()
    return messages


@pytest.mark.parametrize("size", (2, 3))
def test_mismatches_name_the_tensor_the_ranks_and_both_values(ranks, size):
    on_ranks = ranks(size).run(_mismatches)
    assert on_ranks.count(on_ranks[0]) == size  # the same text everywhere
    both_values = {
        "shape": ("[17, 17]", "[17, 16]"),
        "dimensions": ("[6]", "[2, 3]"),
        "dtype": ("int32", "float32"),
        "op": ("Sum", "Max"),
        "prescale": ("1", "2.5"),
        "root": ("0", "1"),
        "broadcast shape": ("[3]", "[4]"),
        "allgather rank": ("2", "3"),
        "allgather dimension": ("5", "6"),
        "group": ("2", "3"),
        "changed": ("[3]", "[4]"),
    }
    for case, message in on_ranks[0].items():
        assert "again" in message, (case, message)
        assert "rank" in message, (case, message)
        for value in both_values[case]:
            assert value in message, (case, message)


def _kinds_mismatch() -> str:
    # The public functions put the operation before the name, so that names of two kinds always differ.
    from horovodlike._engine.ops import Kind
    from horovodlike.torch._ops import handles

    kind = Kind.ALLREDUCE if hvd.rank() == 0 else Kind.BROADCAST
    wrong = handles.Call(kind, "one name", root_rank=-1 if hvd.rank() == 0 else 0)
    return _error(lambda: handles.synchronize(handles.start_in_place(wrong, [torch.ones(3)], single=True)))


def test_operations_mismatch(ranks):
    for message in ranks(2).run(_kinds_mismatch):
        assert "one name" in message
        assert "allreduce" in message.lower() and "broadcast" in message.lower()


def _duplicate_name() -> None:
    handle = None
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(torch.ones(3), op=hvd.Sum, name="twice")
        with pytest.raises(ValueError, match="twice"):
            hvd.allreduce_async(torch.ones(3), op=hvd.Sum, name="twice")
    hvd.barrier()
    if handle is None:
        handle = hvd.allreduce_async(torch.ones(3), op=hvd.Sum, name="twice")
    assert hvd.synchronize(handle).tolist() == [hvd.size()] * 3
    _works()


def test_a_name_twice_in_flight(ranks):
    ranks(2).run(_duplicate_name)


def _refused() -> None:
    for dtype in (torch.complex64, torch.complex128):
        for call in (hvd.allreduce, hvd.allgather, hvd.allreduce_async_, lambda t, name: hvd.broadcast(t, 0, name)):
            with pytest.raises(ValueError, match=f"wrong.*{dtype}|{dtype}.*wrong"):
                call(torch.ones(3, dtype=dtype), name="wrong")
    with pytest.raises(ValueError, match="wrong.*sparse_coo.*to_dense"):
        hvd.allreduce(torch.eye(3).to_sparse(), name="wrong")
    hvd.allreduce_(torch.eye(3), name="wrong")
    with pytest.raises(ValueError, match="sparse"):  # under a name that is known for a dense tensor
        hvd.allreduce_(torch.eye(3).to_sparse(), name="wrong")
    with pytest.raises(ValueError, match="meta"):
        hvd.allreduce(torch.ones(3, device="meta"))
    with pytest.raises(TypeError, match=r"torch\.Tensor.*list"):
        hvd.allreduce_([1.0], name="wrong")
    with pytest.raises(ValueError):
        hvd.broadcast(torch.ones(3), hvd.size(), name="wrong")
    with pytest.raises(ValueError):
        hvd.broadcast(torch.ones(3), -1, name="wrong")
    with pytest.raises(ValueError):
        hvd.allreduce(torch.ones(3, dtype=torch.bool), op=hvd.Average, name="wrong")
    with pytest.raises(ValueError, match="op"):
        hvd.allreduce(torch.ones(3), op=17)
    with pytest.raises(ValueError, match="Adasum is for floating-point"):
        hvd.allreduce(torch.ones(3, dtype=torch.int32), op=hvd.Adasum)
    with pytest.raises(ValueError, match="Min, Max and Product"):
        hvd.reducescatter(torch.ones(3), op=hvd.Adasum)
    with pytest.raises(ValueError, match="empty"):
        hvd.grouped_allreduce([])
    for call in (hvd.grouped_allreduce, hvd.grouped_allreduce_, hvd.grouped_allgather, hvd.grouped_reducescatter):
        with pytest.raises(ValueError, match="same device"):
            call([torch.ones(2), torch.ones(2, device="meta")])
    some = hvd.ProcessSet([0])
    assert (some.process_set_id, some.ranks, some.size(), some.rank()) == (None, [0], None, None)
    for call in (hvd.allreduce, hvd.allreduce_, hvd.allgather, hvd.grouped_allgather):
        with pytest.raises(ValueError, match=r"ranks=\[0\]\) is not registered"):
            call(torch.ones(1), process_set=some)
    with pytest.raises(ValueError, match="not registered"):
        hvd.barrier(process_set=some)
    for ranks in ([0, 0], [-1], ["0"], 3, [0.5]):
        with pytest.raises(ValueError):
            hvd.ProcessSet(ranks)
    _works()


def test_what_is_refused_before_anybody_waits(ranks):
    ranks(2).run(_refused)


def _scalar_allgather() -> None:
    with pytest.raises((hvd.HorovodInternalError, ValueError), match="pebble.*dimension"):
        hvd.allgather(torch.tensor(1.0), name="pebble")
    _works()


def test_allgather_of_scalars(ranks):
    ranks(2).run(_scalar_allgather)


def _wait_is_interruptible() -> None:
    import signal

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    tensor = torch.ones(1000)
    if hvd.rank() == 0:
        previous = signal.signal(signal.SIGALRM, interrupt)
        handle = hvd.allreduce_async_(tensor, op=hvd.Sum, name="interrupted")
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            hvd.synchronize(handle)
        signal.signal(signal.SIGALRM, previous)
        assert not hvd.poll(handle)
        hvd.broadcast_object("go", name="go")
    else:
        hvd.broadcast_object(name="go", obj=None)
        handle = hvd.allreduce_async_(tensor, op=hvd.Sum, name="interrupted")
    assert hvd.synchronize(handle).unique().tolist() == [hvd.size()]


def test_an_interrupted_wait_can_be_resumed(ranks):
    ranks(2).run(_wait_is_interruptible)


def _from_threads() -> None:
    results: dict[int, list[float]] = {}

    def work(thread: int) -> None:
        results[thread] = [
            hvd.allreduce(torch.tensor([float(thread + i)]), name=f"thread.{thread}").item() for i in range(20)
        ]

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == {thread: [float(thread + i) for i in range(20)] for thread in range(4)}


def test_operations_of_several_threads(ranks):
    ranks(2).run(_from_threads)


def _life_cycle() -> None:
    hvd.shutdown()
    assert not hvd.is_initialized()
    assert hvd.global_process_set.ranks is None
    for call in (
        hvd.rank,
        hvd.size,
        hvd.local_rank,
        hvd.cross_size,
        hvd.barrier,
        lambda: hvd.allreduce(torch.ones(3)),
        lambda: hvd.allreduce_async_(torch.ones(3), name="early"),
        lambda: hvd.allgather(torch.ones(3)),
        lambda: hvd.broadcast_object(1),
        lambda: hvd.DistributedOptimizer(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)),
    ):
        with pytest.raises(ValueError, match=r"not been initialized; use hvd\.init"):
            call()
    hvd.init()
    hvd.init()
    assert hvd.size() == 1
    _works()
    hvd.shutdown()
    hvd.shutdown()
    hvd.init()
    _works()


def test_use_before_init_and_initialisation_again(fresh_ranks):
    fresh_ranks(1).run(_life_cycle)


def _new_job_of_two() -> float:
    # In a job that goes on, one rank has called more unnamed operations than the other that joins it anew.
    if hvd.rank() == 0:
        with pytest.raises(ValueError):
            hvd.allreduce(torch.ones(3, dtype=torch.bool))
    hvd.shutdown()
    hvd.init()
    return hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum).item()


def test_unnamed_operations_are_counted_anew_in_a_new_job(fresh_ranks):
    assert fresh_ranks(2).run(_new_job_of_two) == [3.0, 3.0]
