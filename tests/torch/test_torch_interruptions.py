"""Signal handlers that raise at any point of a call, as Ctrl-C does: the engine has no memory that nothing keeps.

One rank is enough: for the package its requests do not end, whatever the engine says.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
from support.interruptions import EndlessEngine, Interrupter, Interruption
from support.ranks import RankPool


class _Endless(EndlessEngine):
    def note_fast_path(self, path: Any) -> None:
        """Note what a fast path enqueues; its calls of the engine are made in C."""
        enqueue = path.enqueue

        def noting(tensor: Any, kept: list[Any]) -> int:
            return self.note(enqueue(tensor, kept), None)

        path.enqueue, path.take = noting, lambda *_: self._lib.HVL_IN_PROGRESS


def _calls() -> dict[str, Callable[[], object]]:
    """Return calls by what they do."""
    import torch

    import horovodlike.torch as hvd

    small, large = torch.ones(5), torch.ones(50_000)
    model = torch.nn.Linear(700, 600)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(sgd, named_parameters=model.named_parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 700)).sum().backward()
        optimizer.step()

    return {
        "allreduce": lambda: hvd.allreduce(large, name="x"),
        "allreduce_": lambda: hvd.allreduce_(small, name="x"),
        "allreduce_async_": lambda: hvd.synchronize(hvd.allreduce_async_(large, name="x")),
        "allreduce_async_ of a small tensor": lambda: hvd.synchronize(hvd.allreduce_async_(small, name="x")),
        "grouped_allreduce_async_": lambda: hvd.synchronize(hvd.grouped_allreduce_async_([small, large], name="x")),
        "broadcast_": lambda: hvd.broadcast_(small, 0, name="x"),
        "broadcast_async_": lambda: hvd.synchronize(hvd.broadcast_async_(large, 0, name="x")),
        "allgather": lambda: hvd.allgather(large, name="x"),
        "broadcast_object": lambda: hvd.broadcast_object([1], 0, name="x"),
        "step": step,
    }


def _kept() -> set[int]:
    """Return the handles of requests whose memory something keeps."""
    from horovodlike._engine import requests
    from horovodlike.torch._ops import fast_path
    from horovodlike.torch._ops import handles as handles_module
    from horovodlike.torch._optimizer import reduction as reduction_module

    handles = {*handles_module._in_flight, *requests._given_up, *fast_path.in_flight}
    handles |= {handle for each in handles_module._abandoned for handle in each}
    for reduction in reduction_module._reductions:
        handles |= {*reduction._submission._handles, reduction._mask.handle}
    return handles


def _interrupt_everywhere(what: str) -> tuple[int, list[str]]:
    """Return at how many points a call was interrupted, and after which of these memory was not kept."""
    import horovodlike.torch as hvd
    from horovodlike import basics
    from horovodlike._engine import ops, requests
    from horovodlike.torch._ops import fast_path
    from horovodlike.torch._ops import handles as handles_module
    from horovodlike.torch._optimizer import reduction as reduction_module

    hvd.init()
    call = _calls()[what]
    call()
    reduction_module.Reduction.communicates = True  # though it is alone
    basics.overlaps = lambda: True
    call()
    gc.freeze()  # what is there need not be looked through each time
    lib, count, failures, is_over, is_on_fast_path = ops.lib, 0, [], False, False
    while not is_over:
        engine = _Endless(lib)
        ops.lib = requests.lib = engine
        known = handles_module._last.get("x")
        paths = [path for path in (known and known.copied, known and known.in_place) if path is not None]
        native_calls = [(path.enqueue, path.take) for path in paths]
        for path in paths:
            engine.note_fast_path(path)
        interrupter = Interrupter(count)
        try:
            with interrupter:
                call()
        except Interruption:
            pass
        is_over = interrupter.left >= 0
        gc.collect()
        is_on_fast_path |= any(of is None for of in engine.handles.values())
        lost = {*engine.handles} - _kept() - {0}
        if lost:
            failures.append(f"point {count}: {interrupter.where}")
        ops.lib = requests.lib = lib
        for path, calls in zip(paths, native_calls, strict=True):
            path.enqueue, path.take = calls
        for reduction in reduction_module._reductions:
            reduction.abandon()
        abandoned = [handle for each in handles_module._abandoned for handle in each]
        for handle in [*handles_module._in_flight, *requests._given_up, *fast_path.in_flight, *abandoned]:
            lib.hvl_wait(handle, 10.0, ops.ffi.NULL, ops.ffi.NULL)
        handles_module._in_flight.clear()
        fast_path.in_flight.clear()
        requests._given_up.clear()
        handles_module._abandoned.clear()
        count += 1
    assert is_on_fast_path == (what in ("allreduce_", "allreduce_async_ of a small tensor"))
    return count, failures


@pytest.mark.parametrize(
    "what",
    [
        "allreduce_",
        "allreduce_async_",
        "allreduce_async_ of a small tensor",
        "broadcast_object",
        "step",
        *(
            pytest.param(what, marks=pytest.mark.slow)
            for what in ("allreduce", "grouped_allreduce_async_", "broadcast_", "broadcast_async_", "allgather")
        ),
    ],
)
def test_memory_is_kept_wherever_a_handler_raises(what: str, fresh_ranks: Callable[..., RankPool]) -> None:
    ((count, failures),) = fresh_ranks(1).run(_interrupt_everywhere, what)
    assert count > 20
    assert not failures
