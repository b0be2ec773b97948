"""Calls that a signal handler has interrupted, as Ctrl-C does, and are made again."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
from support.ranks import RankPool


@pytest.fixture
def modules() -> tuple[str, ...]:
    return ("torch",)


def _make_twice() -> dict[str, list[object]]:
    """Rank 0 is interrupted in each call and makes it again, while the others come to it."""
    import signal

    import numpy
    import torch
    from support.collectives import allreduce

    import horovodlike.torch as hvd
    from horovodlike._engine import ops, requests

    rank = hvd.rank()
    calls: dict[str, Callable[[], object]] = {
        "allreduce_": lambda: hvd.allreduce_(torch.full((3,), rank + 1.0), op=hvd.Sum, name="x").tolist(),
        "allreduce": lambda: hvd.allreduce(torch.full((3,), rank + 1.0), op=hvd.Sum, name="y").tolist(),
        "allgather": lambda: hvd.allgather(torch.full((rank + 1,), rank), name="x").tolist(),
        "broadcast_": lambda: hvd.broadcast_(torch.full((2,), rank), 1, name="x").tolist(),
        "alltoall": lambda: hvd.alltoall(torch.arange(2) + 10 * rank, name="x").tolist(),
    }
    chosen = hvd.ProcessSet([0])
    calls |= {"barrier": hvd.barrier, "join": lambda: hvd.join() >= 0}
    once: dict[str, Callable[[], object]] = {
        "add": lambda: hvd.add_process_set(chosen) is chosen,
        "remove": lambda: hvd.remove_process_set(chosen),
    }
    armed = []

    def interrupt() -> None:
        if armed:
            armed.pop()
            signal.raise_signal(signal.SIGINT)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    ops.before_waiting(interrupt)
    results: dict[str, list[object]] = {}
    try:
        for what, call in (calls | once).items():
            results[what] = []
            if rank == 0:
                armed.append(True)
                with pytest.raises(KeyboardInterrupt):
                    call()
            if what != "join":  # of a rank that has joined nothing else is waited for
                allreduce(f"{what} was interrupted", numpy.ones(1))
            # What was interrupted counts as made; a change of process sets goes on with it.
            for _ in range(1 if rank == 0 or what in once else 2):
                results[what].append(call())
    finally:
        requests._before_waiting.remove(interrupt)
    assert not any(requests.lib.hvl_poll(handle) == 0 for handle in requests._given_up)
    return results


def test_a_name_that_an_interrupted_call_has_left_in_flight_can_be_used_again(ranks: Callable[[int], RankPool]) -> None:
    first, second = ranks(2).run(_make_twice)
    expected = {
        "allreduce_": [3.0] * 3,
        "allreduce": [3.0] * 3,
        "allgather": [0, 1, 1],
        "broadcast_": [1, 1],
        "barrier": None,
        "join": True,
        "add": True,
        "remove": True,
    }
    for what, value in expected.items():
        assert first[what] == [value], what
        assert second[what][-1] == value, what
    assert first["alltoall"] == [[0, 10]]
    assert second["alltoall"][-1] == [1, 11]


def test_two_calls_of_one_name_at_the_same_time_are_refused_as_ever(ranks: Callable[[int], RankPool]) -> None:
    def wait_for_rank_0() -> None:
        import torch

        import horovodlike.torch as hvd

        if hvd.rank() == 0:
            handle = hvd.allreduce_async(torch.ones(3), name="twice")
            with pytest.raises(ValueError, match=r"'allreduce.twice' is already in flight"):
                hvd.allreduce(torch.ones(3), name="twice")
            hvd.barrier()
        else:
            hvd.barrier()
            handle = hvd.allreduce_async(torch.ones(3), name="twice")
        hvd.synchronize(handle)

    ranks(2).run(wait_for_rank_0)


class _Interruption(Exception):
    pass


def _interrupt(*_: object) -> None:
    raise _Interruption


def _a_result_that_was_there_when_a_handler_raised() -> list[float]:
    """Return the result of a wait that is interrupted when the request has just completed, and is done again."""
    import torch

    import horovodlike.torch as hvd
    from horovodlike._engine import ops

    class Interrupting:
        def __getattr__(self, name: str) -> object:
            def call(*arguments: object) -> int:
                status: int = getattr(lib, name)(*arguments)
                if name.startswith("hvl_wait") and status != lib.HVL_IN_PROGRESS:
                    signal.raise_signal(signal.SIGUSR2)
                return status

            return call if name.startswith("hvl_wait") else getattr(lib, name)

    handle = hvd.allgather_async(torch.full((1,), hvd.rank() + 1.0), name="interrupted at the end")
    before, lib = signal.signal(signal.SIGUSR2, _interrupt), ops.lib
    ops.lib = Interrupting()  # type: ignore[assignment]
    try:
        hvd.synchronize(handle)
    except _Interruption:
        pass
    finally:
        ops.lib = lib
        signal.signal(signal.SIGUSR2, before)
    result: list[float] = hvd.synchronize(handle).tolist()
    return result


def test_a_handler_that_raises_when_the_result_is_there_does_not_lose_it(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(2).run(_a_result_that_was_there_when_a_handler_raised) == [[1.0, 2.0]] * 2
