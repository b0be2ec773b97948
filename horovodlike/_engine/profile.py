"""The requests of an attached ``hvdrun`` to this rank: where its threads are, or a profile of some steps.

The collector sends requests through the connection of the reports, and :class:`Attachment` answers them in the
reporter's thread. A request is an object with a number, ``id``, and what to ``do``. Its answer has the number, too.

``stacks``
    Answered with ``stacks``: where the Python threads are.
``profile``
    Record ``steps`` steps after the step with the number ``first``, or record for ``seconds``, which begin ``ahead``
    seconds later. Replaces the profile before. Answered when the files are written, with ``recorded``: their sizes, and
    what is in them.
``read``
    Answered with ``part``: some bytes of a ``file`` from an ``offset``, in base64.
``cancel``
    End the profile, and remove its files; not answered.

Any of them may be answered with ``failed``: the reason.
"""

from __future__ import annotations

import base64
import contextlib
import enum
import os
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import Any

from horovodlike._engine import ops, profilers, steps
from horovodlike._engine.native import lib
from horovodlike._engine.stack_dump import describe_threads

__all__ = ["Attachment"]

_STACK_BYTES = 16384
_LONGEST_REASON = 1000
_MARK_S = 10.0
"""The longest time until a step is marked, or until the profile before has ended; or three times the average step."""
_ARMED_PATIENCE_FACTOR = 6
"""How many times as long the next step may take once a step was marked: validation may come between steps."""
_JOIN_S = 2.0
_POLL_S = 0.05
_TRACE, _TIMELINE = "trace.json", "timeline.json"
_REMEDY = "call horovodlike.step() once in each step, or profile for some time with --seconds"

_in_use = threading.Lock()
"""Held by a profile from before it is armed until its profiler has been stopped: a process has one profiler."""
_lock = threading.RLock()
"""A leaf; guards the states of profiles. Reentrant for a signal handler that calls ``shutdown()``."""
_recording: _ProfileOfSteps | None = None
"""The profile whose profiler the thread that marks the steps has started, and alone may stop."""


class Attachment:
    """The requests of one collector and the profile that they control. Belongs to the reporter's thread."""

    def __init__(self) -> None:
        """Start without a profile."""
        self._profile: _Profile | None = None
        self._thread: threading.Thread | None = None
        self._answers: deque[dict[str, Any]] = deque()

    def take(self, request: dict[str, Any]) -> None:
        """Do what a request says; whatever goes wrong becomes an answer."""
        try:
            self._do(request["do"], request)
        except Exception as error:
            self._answers.append({"id": request["id"], "failed": _described(error)})

    def _do(self, what: str, request: dict[str, Any]) -> None:
        number = request["id"]
        if what == "stacks":
            self._answers.append({"id": number, "stacks": describe_threads(_STACK_BYTES).decode(errors="replace")})
        elif what == "read":
            if self._profile is None:
                raise LookupError("its profile has been cancelled")
            self._answers.append({"id": number, "part": self._profile.read(request["file"], request["offset"])})
        else:
            self.cancel()
            if what == "profile":
                kind = _ProfileOfSteps if "steps" in request else _ProfileOfSeconds
                self._profile = kind(request, self._answers)
                self._thread = threading.Thread(target=self._profile.run, name="horovodlike-profile", daemon=True)
                self._thread.start()

    def answers(self) -> Iterator[dict[str, Any]]:
        """Return the answers that are due."""
        while self._answers:
            yield self._answers.popleft()

    @property
    def pause(self) -> float | None:
        """How long to wait for requests, in seconds; None: until the next report."""
        return None if self._profile is None else _POLL_S

    def cancel(self) -> None:
        """End the profile; the thread that marks the steps ends a recording at its next step."""
        if self._profile is not None:
            self._profile.cancel()
        self._profile = None

    def close(self) -> None:
        """End the profile when the reporter's thread has ended; called by the thread that calls ``shutdown()``."""
        self.cancel()
        if (recording := _recording) is not None:
            recording.end_here()
        if self._thread is not None:
            self._thread.join(_JOIN_S)


class _Profile:
    """A profile of this rank. A thread of its own prepares it, writes the files, and removes them in the end."""

    _all_threads: bool  # whether the profiler must record threads other than the one that starts it

    def __init__(self, request: dict[str, Any], answers: deque[dict[str, Any]]) -> None:
        self._number = request["id"]
        self._answers = answers
        self._is_over = threading.Event()  # the session has ended, or the profile was cancelled
        self._folder = Path()
        self._profiler = profilers.choose(all_threads=self._all_threads)
        self._first_step: int | None = None
        self._marks: list[float] = []
        count, _, seconds = steps.counted()
        self._patience = max(_MARK_S, 3 * seconds / max(1, count - 1))

    def run(self) -> None:
        """Answer once the files are written; then wait until they have been read."""
        try:
            with tempfile.TemporaryDirectory(prefix="horovodlike-profile-", ignore_cleanup_errors=True) as folder:
                self._folder = Path(folder)
                if not _in_use.acquire(timeout=self._patience):
                    raise TimeoutError("the profile before records until the next step: try again then")
                self._record()
                self._answers.append({"id": self._number, "recorded": self._export()})
                self._is_over.wait()
        except Exception as error:
            self._answers.append({"id": self._number, "failed": _described(error)})

    def cancel(self) -> None:
        self._is_over.set()

    def read(self, name: str, offset: int) -> str:
        """Return a part of a file in base64."""
        if name not in (_TRACE, _TIMELINE):
            raise ValueError(f"there is no file {name!r}")
        with (self._folder / name).open("rb") as file:
            file.seek(offset)
            return base64.b64encode(file.read(profilers.CHUNK_BYTES)).decode()

    def _record(self) -> None:
        """Record, and wait until that is done; release ``_in_use``."""
        raise NotImplementedError

    def _start(self) -> None:
        ops.check(lib.hvl_start_profile_timeline(os.fsencode(self._folder / _TIMELINE)))
        self._profiler.start()

    def _stop(self) -> None:
        try:
            self._profiler.stop()
        finally:
            lib.hvl_stop_profile_timeline()

    def _export(self) -> dict[str, Any]:
        if self._is_over.is_set():
            raise RuntimeError("its profile has been cancelled")
        self._profiler.export(self._folder / _TRACE)
        sizes = {name: (self._folder / name).stat().st_size for name in (_TRACE, _TIMELINE)}
        profilers.check_size(sum(sizes.values()))
        return {
            **{"framework": self._profiler.framework, "note": self._profiler.note, "first_step": self._first_step},
            **{"marks": self._marks, "sizes": sizes},
        }


class _ProfileOfSeconds(_Profile):
    """Its own thread starts and stops the profiler; steps are noted if they are marked."""

    _all_threads = True

    def __init__(self, request: dict[str, Any], answers: deque[dict[str, Any]]) -> None:
        super().__init__(request, answers)
        self._seconds: float = request["seconds"]
        self._begin = monotonic() + request["ahead"]

    def _record(self) -> None:
        try:
            self._profiler.warm_up()
            if self._is_over.wait(max(0.0, self._begin - monotonic())):
                raise RuntimeError("its profile has been cancelled")
            self._start()
            began = time.time()
            steps.hook = self._mark
            self._is_over.wait(self._seconds)
            ended = time.time()
        finally:
            steps.hook = None
            try:
                self._stop()
            finally:
                _in_use.release()
        if len(self._marks) < 2:  # no step is in it: mark the recording itself
            self._first_step, self._marks = None, [began, ended]

    def _mark(self, step: int) -> None:
        if len(self._marks) < profilers.MOST_MARKS:
            self._first_step = self._first_step or step + 1
            self._marks.append(time.time())


class _State(enum.Enum):
    IDLE = enum.auto()  # not armed yet, or over
    ARMED = enum.auto()
    RECORDING = enum.auto()


class _ProfileOfSteps(_Profile):
    """The thread that marks the steps starts and stops the profiler, so that it records this thread.

    ``ARMED`` ends when that thread enters ``RECORDING``, or when the profile is cancelled. Only that thread leaves
    ``RECORDING``: at the last step, or at the next one if the profile has been cancelled.
    """

    _all_threads = False

    def __init__(self, request: dict[str, Any], answers: deque[dict[str, Any]]) -> None:
        super().__init__(request, answers)
        self._first: int = request["first"]
        self._amount: int = request["steps"]
        self._state = _State.IDLE
        self._owner: int | None = None  # the thread that marks
        self._is_busy = False  # it is in _mark()
        self._is_warm = False
        self._error: Exception | None = None
        self._has_ended = threading.Event()

    def _record(self) -> None:
        self._expect_mark()
        with _lock:
            self._state = _State.ARMED
            if not self._is_over.is_set():
                steps.hook = self._mark
            else:
                self._leave()
        while not self._has_ended.wait(max(0.0, self._deadline - monotonic())):
            if monotonic() >= self._deadline:  # no step was marked meanwhile
                self.cancel()
                raise TimeoutError(f"it has marked no step within {self._within_s:.0f} s: {_REMEDY}")
        if self._error is not None:
            raise self._error

    def _expect_mark(self, times: int = 1) -> None:
        self._within_s = self._patience * times
        self._deadline = monotonic() + self._within_s

    def cancel(self) -> None:
        super().cancel()
        with _lock:
            if self._state is _State.ARMED:
                self._leave()
        self._has_ended.set()

    def _leave(self) -> None:
        """Enter ``IDLE``: another profile may use the profiler."""
        global _recording
        with _lock:
            self._state, _recording, steps.hook = _State.IDLE, None, None
        _in_use.release()
        self._has_ended.set()

    # The thread that marks the steps.

    def _mark(self, step: int) -> None:
        """Start or stop the profiler if it is time. No error of the profiler leaves this, but signals do."""
        now, thread = time.time(), threading.get_ident()
        with _lock:
            if self._is_busy or self._state is _State.IDLE or self._owner not in (None, thread):
                return
            self._owner, self._is_busy = thread, True
        try:
            self._advance(step, now)
        except Exception as error:
            self._error = error
            self._discard()
        except BaseException:
            self._error = RuntimeError("a signal has interrupted the profiler")
            self._discard()
            raise
        finally:
            self._is_busy = False

    def _advance(self, step: int, now: float) -> None:
        self._expect_mark(_ARMED_PATIENCE_FACTOR)
        if self._state is _State.RECORDING:
            self._marks.append(now)
            if self._is_over.is_set():
                self._discard()
            elif step != self._first + len(self._marks) - 1:
                raise RuntimeError(f"several threads mark its steps: {_REMEDY}")
            elif len(self._marks) > self._amount:
                self._stop()
                self._leave()
        else:
            if not self._is_warm:
                self._profiler.warm_up()
                self._is_warm = True
            if step > self._first:
                raise RuntimeError(f"step {self._first + 1} has begun before the request came: try again")
            if step == self._first and self._enter_recording():
                self._start()
                self._first_step = step + 1
                self._marks.append(time.time())  # the first step does not include the start of the profiler

    def _enter_recording(self) -> bool:
        """Return whether the profile was armed; else it has been cancelled."""
        global _recording
        with _lock:
            if self._state is not _State.ARMED:
                return False
            self._state, _recording = _State.RECORDING, self
            return True

    def _discard(self) -> None:
        """Stop the profiler of a profile that has been cancelled or has failed."""
        if self._state is _State.RECORDING or self._enter_recording():
            with contextlib.suppress(Exception):
                self._stop()
            self._leave()

    def end_here(self) -> None:
        """Stop the profiler if this thread has started it."""
        if self._owner == threading.get_ident() and not self._is_busy:
            self._discard()


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:_LONGEST_REASON]
