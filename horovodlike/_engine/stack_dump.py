"""Sends the coordinator the stacks of this rank's Python threads when other ranks have waited for it for long.

A thread sleeps in native code, without the interpreter's lock, until there is a stack-dump request
(``native/observe/stack_dump.h``). It answers while the main thread sleeps, waits or computes, but not while native code
keeps the interpreter's lock; the report then says that the rank did not answer. The signal handler of ``faulthandler``
could answer then, but a signal interrupts system calls of code that does not expect it, every signal may be in use by
some framework, and nothing shows when the handler's output is complete.
"""

from __future__ import annotations

import sys
import threading
import traceback
from types import FrameType

from horovodlike._engine.native import lib

__all__ = ["OWN_THREADS", "describe_threads", "start", "stop"]

_NAME = "hvl-stacks"
OWN_THREADS = (
    *(_NAME, "horovodlike-elastic", "horovodlike-monitor", "horovodlike-monitor-report", "horovodlike-metrics"),
    *("horovodlike-profile", "horovodlike-samples"),
)
"""The names of threads that do not show what delays the rank."""
_MAX_FRAMES_OF_OTHERS = 4

_answering: threading.Thread | None = None


def start() -> None:
    """Start the thread that answers; call this after the engine has started."""
    global _answering
    # A daemon: at exit the interpreter waits for all other threads before it calls shutdown(), which ends this one.
    _answering = threading.Thread(target=_answer, name=_NAME, daemon=True)
    _answering.start()


def stop() -> None:
    """Wait until the thread has ended; call this after the engine has ended."""
    global _answering
    if _answering is not None:
        _answering.join()
    _answering = None


def _answer() -> None:
    while question := lib.hvl_await_stack_request():
        lib.hvl_answer_stack_request(question, describe_threads(lib.HVL_STACK_BYTES))


def describe_threads(num_bytes: int) -> bytes:
    """Return the Python stacks of this process as text, the main thread's first.

    Args:
        num_bytes: The most bytes of the text. To fit, outermost calls are left out, and threads but the main one.
            Of the innermost calls, those in this package are shown as one line, which names the outermost of them.
    """
    main = threading.main_thread()
    names = {thread.ident or 0: thread.name for thread in threading.enumerate() if thread.name not in OWN_THREADS}
    frames = sys._current_frames()
    text = b""
    for thread in sorted(names.keys() & frames.keys(), key=lambda thread: thread != main.ident):
        head = f"    thread {names[thread]}:\n".encode()
        limit = None if thread == main.ident else _MAX_FRAMES_OF_OTHERS
        room = num_bytes - len(text) - len(head)
        stack = _describe_stack(frames[thread], limit, room)
        if not stack:
            break
        text += head + stack
    return text.rstrip(b"\n")


def _describe_stack(innermost: FrameType, limit: int | None, room: int) -> bytes:
    frames = list(traceback.walk_stack(innermost))
    num_ours = 0
    while num_ours < len(frames) and _is_ours(frames[num_ours][0]):
        num_ours += 1
    lines: list[bytes] = []
    if num_ours:  # of these calls, name only the one that the user's code has made
        called = frames[num_ours - 1][0]
        lines.append(f"      in {called.f_globals.get('__name__')}.{called.f_code.co_name}()\n".encode())
        room -= len(lines[0])
    # Without lines of the source: if it is a file system that delays the rank, reading them might never end.
    for frame, line in frames[num_ours:]:
        described = f'      File "{frame.f_code.co_filename}", line {line}, in {frame.f_code.co_name}\n'.encode()
        room -= len(described)
        if room < 0 or len(lines) == limit:
            break
        lines.append(described)
    return b"".join(reversed(lines))


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] == "horovodlike"
