"""Signal handlers that raise at any point of a call, as Ctrl-C does: the engine has no memory that nothing keeps.

One rank is enough: for the package its requests do not end, whatever the engine says.
"""

from __future__ import annotations

import dis
import gc
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import pytest
from support.ranks import RankPool

# What Python runs signal handlers after, or instead of.
_CHECKING = {"CALL", "CALL_FUNCTION_EX", "CALL_KW", "RESUME", "JUMP_BACKWARD"}


class _Interruption(BaseException):
    """As KeyboardInterrupt: no one is to handle it."""


class _Interrupter:
    """Raises at one of the points at which Python would run a signal handler, by number, at the latest in a wait."""

    def __init__(self, number: int) -> None:
        self.left = number
        self.where = ""
        self._points: dict[CodeType, set[int]] = {}

    def __enter__(self) -> None:
        sys.settrace(self._trace)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        if "horovodlike" not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes = True
        if frame.f_code.co_name == "until_complete":
            self._interrupt(frame)
        if event == "opcode" and frame.f_lasti in self._points_of(frame.f_code):
            self.left -= 1
            if self.left < 0:
                self._interrupt(frame)
        return self._trace

    def _interrupt(self, frame: FrameType) -> None:
        sys.settrace(None)
        self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        raise _Interruption

    def _points_of(self, code: CodeType) -> set[int]:
        """Return the offsets of what comes after instructions behind which signal handlers run."""
        if code not in self._points:
            instructions = list(dis.get_instructions(code))
            pairs = zip(instructions, instructions[1:], strict=False)
            self._points[code] = {after.offset for before, after in pairs if before.opname in _CHECKING}
        return self._points[code]


class _Endless:
    """The engine, whose requests do not end."""

    def __init__(self, lib: Any) -> None:
        self._lib = lib
        self.handles: dict[int, Any] = {}  # with what is in flight by them

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._lib, name)
        if name in ("hvl_enqueue", "hvl_enqueue_inplace"):
            return lambda prepared, *rest: self._note(call(prepared, *rest), prepared)
        if name == "hvl_enqueue_all":
            return lambda prepared, data, count, handles: self._note_all(call, prepared, data, count, handles)
        if name == "hvl_handle_in_flight":
            return lambda prepared: max([0, *(handle for handle, of in self.handles.items() if of == prepared)])
        if name in ("hvl_try_wait", "hvl_wait"):
            return lambda *_: self._lib.HVL_IN_PROGRESS
        return call

    def _note(self, handle: int, prepared: Any) -> int:
        self.handles[handle] = prepared
        return handle

    def note_fast_path(self, path: Any) -> None:
        """Note what a fast path enqueues; its calls of the engine are made in C."""
        enqueue = path.enqueue

        def noting(tensor: Any, kept: list[Any]) -> int:
            return self._note(enqueue(tensor, kept), None)

        path.enqueue, path.take = noting, lambda *_: self._lib.HVL_IN_PROGRESS

    def _note_all(self, call: Callable[..., int], prepared: Any, data: Any, count: int, handles: Any) -> int:
        status = call(prepared, data, count, handles)
        self.handles |= {handles[index]: prepared[index] for index in range(count)}
        return status


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
        interrupter = _Interrupter(count)
        try:
            with interrupter:
                call()
        except _Interruption:
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
