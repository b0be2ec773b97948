"""Calls that a signal handler has interrupted, as Ctrl-C does, and are made again."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from ranks import RankPool


@pytest.fixture
def modules() -> tuple[str, ...]:
    return ("torch",)


def _make_twice() -> dict[str, list[object]]:
    """Rank 0 is interrupted in each call and makes it again, while the others come to it."""
    import signal

    import torch
    from collectives import allreduce

    import horovodlike.torch as hvd
    from horovodlike import ops
    from horovodlike.keras import _arrays

    rank = hvd.rank()
    calls: dict[str, Callable[[], object]] = {
        "allreduce_": lambda: hvd.allreduce_(torch.full((3,), rank + 1.0), op=hvd.Sum, name="x").tolist(),
        "allreduce": lambda: hvd.allreduce(torch.full((3,), rank + 1.0), op=hvd.Sum, name="y").tolist(),
        "allgather": lambda: hvd.allgather(torch.full((rank + 1,), rank), name="x").tolist(),
        "broadcast_": lambda: hvd.broadcast_(torch.full((2,), rank), 1, name="x").tolist(),
        "alltoall": lambda: hvd.alltoall(torch.arange(2) + 10 * rank, name="x").tolist(),
        "keras": lambda: _arrays.allreduce(np.full(3, rank + 1.0), "x", hvd.Sum).tolist(),
    }
    chosen = hvd.ProcessSet([0])
    once: dict[str, Callable[[], object]] = {
        "barrier": hvd.barrier,
        "join": lambda: hvd.join() >= 0,
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
                allreduce(f"{what} was interrupted", np.ones(1))
            # What was interrupted counts as made; a call without tensors goes on with it.
            for _ in range(1 if rank == 0 or what in once else 2):
                results[what].append(call())
    finally:
        ops._before_waiting.remove(interrupt)
    assert not any(map(ops.is_in_flight, ops._given_up))
    return results


def test_a_name_that_an_interrupted_call_has_left_in_flight_can_be_used_again(ranks: Callable[[int], RankPool]) -> None:
    first, second = ranks(2).run(_make_twice)
    expected = {
        "allreduce_": [3.0] * 3,
        "allreduce": [3.0] * 3,
        "allgather": [0, 1, 1],
        "broadcast_": [1, 1],
        "keras": [3.0] * 3,
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


def _refused() -> dict[str, str]:
    import torch

    import horovodlike.torch as hvd
    from horovodlike import _exchange
    from horovodlike.ops import DType, Kind, Request

    tensors = [(DType.FLOAT32, (3,))]
    calls: dict[str, Callable[[], object]] = {
        "root": lambda: Request(Kind.BROADCAST, "x", tensors, root_rank="0"),  # type: ignore[arg-type]
        "large root": lambda: Request(Kind.BROADCAST, "x", tensors, root_rank=1 << 40),
        "op": lambda: Request(Kind.ALLREDUCE, "x", tensors, op="sum"),  # type: ignore[arg-type]
        "prescale": lambda: Request(Kind.ALLREDUCE, "x", tensors, prescale="2"),  # type: ignore[arg-type]
        "set": lambda: Request(Kind.ALLREDUCE, "x", tensors, process_set=None),  # type: ignore[arg-type]
        "shape": lambda: Request(Kind.ALLREDUCE, "x", [(DType.FLOAT32, (3.5,))]),  # type: ignore[list-item]
        "splits": lambda: Request(Kind.ALLTOALL, "x", tensors, arguments=[1, 2.0]),  # type: ignore[list-item]
        "large split": lambda: Request(Kind.ALLTOALL, "x", tensors, arguments=[1, 1 << 70]),
        "name": lambda: Request(Kind.ALLREDUCE, 7, tensors),  # type: ignore[arg-type]
        "object": lambda: _exchange.broadcast_object({}, root_rank="0"),  # type: ignore[arg-type]
        "removal": lambda: hvd.remove_process_set(1),  # type: ignore[arg-type]
    }
    for name in (None, "x"):
        calls[f"broadcast {name}"] = lambda name=name: hvd.broadcast_(torch.ones(3), 0.0, name)
    messages = {}
    for what, call in calls.items():
        try:
            call()
        except (TypeError, ValueError) as error:
            messages[what] = f"{type(error).__name__}: {error}"
    return messages


def test_values_of_wrong_types_are_named(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(1).run(_refused)[0] == {
        "root": "TypeError: x: root_rank must be an integer, got '0'",
        "large root": "ValueError: x: root_rank is out of range: 1099511627776",
        "op": "TypeError: x: op must be an integer, got 'sum'",
        "prescale": "TypeError: x: the prescale factor must be a number, got '2'",
        "set": "TypeError: x: process_set must be an integer, got None",
        "shape": "TypeError: x: an extent of the shape must be an integer, got 3.5",
        "splits": "TypeError: x: an argument must be an integer, got 2.0",
        "large split": "ValueError: x: an argument is out of range: 1180591620717411303424",
        "name": "TypeError: allreduce: name must be a string, got 7",
        "object": "TypeError: horovodlike.object.0: root_rank must be an integer, got '0'",
        "removal": "TypeError: process_set must be a ProcessSet, got 1",
        "broadcast None": "TypeError: broadcast: root_rank must be an integer, got 0.0",
        "broadcast x": "TypeError: broadcast 'x': root_rank must be an integer, got 0.0",
    }
