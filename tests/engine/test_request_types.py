"""Requests that are refused on their own rank: values of wrong types, and names in flight."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.ranks import RankPool

from horovodlike._engine.ops import DType, Kind, Request


@pytest.fixture
def modules() -> tuple[str, ...]:
    return ("torch",)


def _refused() -> dict[str, str]:
    import torch

    import horovodlike.torch as hvd
    from horovodlike import objects
    from horovodlike._engine.ops import DType, Kind, Request

    tensors = [(DType["float32"], (3,))]
    calls: dict[str, Callable[[], object]] = {
        "root": lambda: Request(Kind.BROADCAST, "x", tensors, root_rank="0"),  # type: ignore[arg-type]
        "large root": lambda: Request(Kind.BROADCAST, "x", tensors, root_rank=1 << 40),
        "op": lambda: Request(Kind.ALLREDUCE, "x", tensors, op="sum"),  # type: ignore[arg-type]
        "prescale": lambda: Request(Kind.ALLREDUCE, "x", tensors, prescale="2"),  # type: ignore[arg-type]
        "set": lambda: Request(Kind.ALLREDUCE, "x", tensors, process_set=None),  # type: ignore[arg-type]
        "shape": lambda: Request(Kind.ALLREDUCE, "x", [(DType["float32"], (3.5,))]),  # type: ignore[list-item]
        "splits": lambda: Request(Kind.ALLTOALL, "x", tensors, arguments=[1, 2.0]),  # type: ignore[list-item]
        "large split": lambda: Request(Kind.ALLTOALL, "x", tensors, arguments=[1, 1 << 70]),
        "name": lambda: Request(Kind.ALLREDUCE, 7, tensors),  # type: ignore[arg-type]
        "object": lambda: objects.broadcast_object({}, root_rank="0"),  # type: ignore[arg-type]
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
        "object": "TypeError: horovodlike.object.0: root_rank must be an integer, got '0' (str)",
        "removal": "TypeError: process_set must be a ProcessSet, got 1",
        "broadcast None": "TypeError: broadcast: root_rank must be an integer, got 0.0 (float)",
        "broadcast x": "TypeError: broadcast 'x': root_rank must be an integer, got 0.0 (float)",
    }


def test_the_engine_knows_each_data_type_of_its_header() -> None:
    assert list(DType) == list(range(len(DType)))
    for dtype in DType:
        Request(Kind.BROADCAST, "x", [(dtype, (3,))], root_rank=0)
    with pytest.raises(ValueError, match=f"unknown dtype {len(DType)}"):
        Request(Kind.BROADCAST, "x", [(len(DType), (3,))], root_rank=0)  # type: ignore[list-item]
