"""Signal handlers that raise at any point of a call, as Ctrl-C does, for tests that the memory in flight is kept."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

# What Python runs signal handlers after, or instead of.
_CHECKING = {"CALL", "CALL_FUNCTION_EX", "CALL_KW", "RESUME", "JUMP_BACKWARD"}


class Interruption(BaseException):
    """As KeyboardInterrupt: no one is to handle it."""


class Interrupter:
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
        raise Interruption

    def _points_of(self, code: CodeType) -> set[int]:
        """Return the offsets of what comes after instructions behind which signal handlers run."""
        if code not in self._points:
            instructions = list(dis.get_instructions(code))
            pairs = zip(instructions, instructions[1:], strict=False)
            self._points[code] = {after.offset for before, after in pairs if before.opname in _CHECKING}
        return self._points[code]


class EndlessEngine:
    """The engine, whose requests do not end."""

    def __init__(self, lib: Any) -> None:
        self._lib = lib
        self.handles: dict[int, Any] = {}  # with what is in flight by them

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._lib, name)
        if name in ("hvl_enqueue", "hvl_enqueue_inplace"):
            return lambda prepared, *rest: self.note(call(prepared, *rest), prepared)
        if name in ("hvl_send", "hvl_receive"):
            return lambda *arguments: self.note(call(*arguments), None)
        if name == "hvl_enqueue_all":
            return lambda prepared, data, count, handles: self._note_all(call, prepared, data, count, handles)
        if name == "hvl_handle_in_flight":
            return lambda prepared: max([0, *(handle for handle, of in self.handles.items() if of == prepared)])
        if name in ("hvl_try_wait", "hvl_wait"):
            return lambda *_: self._lib.HVL_IN_PROGRESS
        return call

    def note(self, handle: int, prepared: Any) -> int:
        self.handles[handle] = prepared
        return handle

    def _note_all(self, call: Callable[..., int], prepared: Any, data: Any, count: int, handles: Any) -> int:
        status = call(prepared, data, count, handles)
        self.handles |= {handles[index]: prepared[index] for index in range(count)}
        return status
