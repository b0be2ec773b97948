"""The requests of an attached ``hvdrun`` to this rank: where its threads are, or a profile of some steps.

The collector sends requests through the connection of the reports, and :class:`Attachment` answers them in the
reporter's thread. A request is an object with a number, ``id``, and what to ``do``; its answers have the number, too.

``stacks``
    Answered with ``stacks``: where the Python threads are.
``arm``
    Prepare a profile, of ``steps`` or of ``seconds``; replaces the one before. Answered with ``armed``: the number of
    the last step, the seconds that a step takes, and the time of this host. Then with ``recorded``, when that is so.
``begin``
    Begin at the end of the step with the number ``first``, or at this time. Answered with ``begun``: whether it is not
    past yet.
``fetch``
    Send a part of a ``file``, from an ``offset``. Answered with a frame that is not JSON: a zero, the number in 8 bytes
    and the part.
``cancel``
    End the profile; not answered.

Any of them, and the profile by itself, may be answered with ``failed``: the reason.
"""

from __future__ import annotations

import contextlib
import enum
import os
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
from typing import Any

from horovodlike._engine import ops, profilers, steps
from horovodlike._engine.native import lib
from horovodlike._engine.stack_dump import describe_threads
from horovodlike._net.secure_server import encode

__all__ = ["Attachment"]

_STACK_BYTES = 16384
_LONGEST_REASON = 1000
_MARK_S = 10.0  # a step is marked within this time, or within three times the average step
_MORE = 6  # so many times as long, when the profile has been armed: validation may come between steps
_MEASURED_STEPS, _MEASURED_S = 8, 1.0  # whichever is reached first, for the time of a step
_POLL_S = 0.05
_TRACE, _TIMELINE = "trace.json", "timeline.json"

_lock = threading.RLock()  # a leaf, reentrant for a signal handler that calls shutdown(); guards the states of profiles
_holder: _Profile | None = None
"""The profile that is called at each step, and alone may have a profiler. A next one waits until it has ended."""


class Attachment:
    """The requests of one collector and the profile that they control. Belongs to the reporter's thread."""

    def __init__(self) -> None:
        """Start without a profile."""
        self._profile: _Profile | None = None
        self._answers: deque[bytes] = deque()

    def take(self, request: dict[str, Any]) -> None:
        """Do what a request says; whatever goes wrong becomes an answer."""
        number = request["id"]
        try:
            self._do(number, request["do"], request)
        except Exception as error:
            self._answers.append(encode({"answer": {"id": number, "failed": _described(error)}}))

    def _do(self, number: int, what: str, request: dict[str, Any]) -> None:
        if what == "stacks":
            text = describe_threads(_STACK_BYTES).decode(errors="replace")
            self._answers.append(encode({"answer": {"id": number, "stacks": text}}))
        elif what == "arm":
            self.cancel()
            kind = _ProfileOfSteps if "steps" in request else _ProfileOfSeconds
            self._profile = kind(number, request["steps"] if "steps" in request else request["seconds"])
        elif (profile := self._profile) is None or profile.number != number:
            return  # it has been cancelled meanwhile
        elif what == "begin":
            self._answers.append(encode({"answer": {"id": number, "begun": profile.begin(request["first"])}}))
        elif what == "fetch":
            part = profile.read(request["file"], request["offset"])
            self._answers.append(b"\0" + number.to_bytes(8, "big") + part)
        else:
            self.cancel()

    def answers(self) -> Iterator[bytes]:
        """Return the answers that are due; prepare, start or end the profile if it is time."""
        if self._profile is not None and (answer := self._profile.advance()) is not None:
            self._answers.append(encode({"answer": {"id": self._profile.number, **answer}}))
        while self._answers:
            yield self._answers.popleft()

    @property
    def pause(self) -> float | None:
        """How long to wait for requests, in seconds; None: until the next report."""
        return None if self._profile is None else self._profile.pause()

    def cancel(self) -> None:
        """End the profile; a recording that another thread has to stop ends at its next step."""
        if self._profile is not None:
            self._profile.cancel()

    def close(self) -> None:
        """End the profile when the reporter's thread has ended; called by the thread that calls ``shutdown()``."""
        self.cancel()
        if (holder := _holder) is not None:
            holder.finish_here()


class _State(enum.Enum):
    WAITING = enum.auto()  # until no other profile is the holder
    ARMING = enum.auto()
    ARMED = enum.auto()
    SET = enum.auto()  # the begin is known
    RECORDING = enum.auto()
    RECORDED = enum.auto()
    FAILED = enum.auto()
    CANCELLED = enum.auto()


_OVER = (_State.RECORDED, _State.FAILED, _State.CANCELLED)


class _Profile:
    """A profile of this rank, of steps or of seconds.

    Two threads use it: the reporter's, and the first one that marks a step. The thread that calls the profiler has
    claimed it before (``_busy``) and holds no lock then. In ``_OVER`` states the profiler has been stopped.
    """

    _needs_steps: tuple[_State, ...] = (_State.WAITING,)  # states that end with a mark, which must come in time
    _remedy = "its former profile ends at the next one; try again then"

    def __init__(self, number: int, amount: float) -> None:
        self.number = number
        self._amount = amount
        self._state = _State.WAITING
        self._busy = False
        self._is_cancelled = False
        self._owner: int | None = None  # the thread that marks
        self._step = 0  # the last one
        self._seconds = 0.0  # of the steps since the first mark
        self._measured = 0  # how many these are
        self._first = 0.0
        self._marks: list[float] = []
        # The rest belongs to the thread that has claimed the profiler, and to the reporter's.
        self._reason = ""
        self._profiler: profilers.Profiler | None = None
        self._first_step: int | None = None
        self._folder = Path(tempfile.mkdtemp(prefix="horovodlike-profile-"))
        self._told = _State.WAITING
        count, _, seconds = steps.counted()
        self._patience = max(_MARK_S, 3 * seconds / max(1, count - 1))
        self._expect_mark()

    # The reporter's thread.

    def advance(self) -> dict[str, Any] | None:
        """Do what is due; return what there is to say."""
        if self._hold():
            self._expect_mark()
            self._act(self._arm, _State.WAITING)
        with _lock:
            is_late = self._state in self._needs_steps and not (self._busy or self._is_cancelled)
        if is_late and monotonic() > self._deadline:
            self.cancel()
            late = TimeoutError(f"it has marked no step within {self._within_s:.0f} s: {self._remedy}")
            return {"failed": _described(late)}
        self._look_at_clock()
        state = self._state
        if state is self._told:
            return None
        self._told = state
        if state is _State.ARMED:
            seconds = self._seconds / max(1, self._measured)
            return {"armed": {"step": self._step, "seconds": seconds, "time": time.time()}}
        if state is _State.RECORDED:
            try:
                return {"recorded": self._export()}
            except Exception as error:
                self._reason = _described(error)
        return {"failed": self._reason} if state in (_State.FAILED, _State.RECORDED) else None

    def pause(self) -> float | None:
        """See :attr:`Attachment.pause`."""
        return None if self._is_cancelled or self._state is _State.FAILED else _POLL_S

    def _hold(self) -> bool:
        """Become the holder if this waits for that and there is none."""
        global _holder
        with _lock:
            if self._state is not _State.WAITING or _holder is not None:
                return False
            _holder = self
            return True

    def _expect_mark(self, times: int = 1) -> None:
        """Set the time within which the next step has to be marked."""
        self._within_s = self._patience * times
        self._deadline = monotonic() + self._within_s

    def _arm(self) -> _State:
        raise NotImplementedError

    def _look_at_clock(self) -> None:
        pass

    def begin(self, first: float) -> bool:
        """Set the step or the time at whose end to begin; return whether it is not past yet."""
        with _lock:
            if self._state is not _State.ARMED or self._is_past(first):
                return False
            self._state, self._first = _State.SET, first
            self._expect_mark(_MORE)
            return True

    def _is_past(self, first: float) -> bool:
        raise NotImplementedError

    def cancel(self) -> None:
        """End the profile, or have it ended by the thread that has to."""
        with _lock:
            self._is_cancelled = True
            if not self._busy and self._state not in (*_OVER, _State.RECORDING):
                self._enter(_State.CANCELLED)
            profiler = self._profiler
        if profiler is not None and not profiler.is_bound:
            self._act(self._discard, _State.RECORDING)
        self._clean()

    def finish_here(self) -> None:
        """Stop the profiler of a cancelled profile if this thread has started it."""
        if self._owner == threading.get_ident():
            self._act(self._discard, _State.RECORDING)
        self._clean()

    def read(self, name: str, offset: int) -> bytes:
        """Return a part of a file."""
        if name not in (_TRACE, _TIMELINE):
            raise ValueError(f"there is no file {name!r}")
        with (self._folder / name).open("rb") as file:
            file.seek(offset)
            return file.read(profilers.CHUNK_BYTES)

    def _export(self) -> dict[str, Any]:
        profiler = self._profiler
        assert profiler is not None
        profiler.export(self._folder / _TRACE)
        sizes = {name: (self._folder / name).stat().st_size for name in (_TRACE, _TIMELINE)}
        profilers.check_size(sum(sizes.values()))
        return {
            **{"framework": profiler.framework, "note": profiler.note, "first_step": self._first_step},
            **{"marks": self._marks, "sizes": sizes},
        }

    def _clean(self) -> None:
        """Remove the files and the recording if they will not be fetched."""
        if self._is_cancelled or self._state is _State.FAILED:
            if self._state in _OVER:
                self._profiler = None
            shutil.rmtree(self._folder, ignore_errors=True)

    # The thread that has claimed the profiler.

    def _act(self, action: Callable[[], _State], state: _State) -> None:
        """Claim the profiler if this is the state and no thread has, and call it; an error ends the profile."""
        self._call(lambda: action if not self._busy and self._state is state else None)

    def _call(self, choose: Callable[[], Callable[[], _State] | None]) -> None:
        """Claim the profiler if there is something to do, and call it; an error ends the profile.

        Nothing that the profiler raises leaves this, but signals do.
        """
        action = None
        reason = "a signal has interrupted the profiler"
        after = _State.FAILED
        try:
            with _lock:
                action = choose()
                if action is None:
                    return
                self._busy = True
            after = action()
        except Exception as error:
            reason = _described(error)
        finally:
            if action is not None:
                self._settle(after, reason)

    def _settle(self, after: _State, reason: str) -> None:
        """Give the profiler free, in a state."""
        try:
            if after is _State.FAILED:
                self._reason = reason
                self._discard()
        finally:
            with _lock:
                if self._is_cancelled and after not in (*_OVER, _State.RECORDING):
                    after = _State.CANCELLED
                self._enter(after)
                self._busy = False
            self._clean()

    def _enter(self, state: _State) -> None:
        """Set the state, under the lock; another profile may be the holder when this one is over."""
        global _holder
        self._state = state
        if state in _OVER and _holder is self:
            steps.hook = _holder = None

    def _start(self) -> _State:
        assert self._profiler is not None
        ops.check(lib.hvl_start_profile_timeline(os.fsencode(self._folder / _TIMELINE)))
        self._profiler.start()
        return _State.RECORDING

    def _finish(self) -> _State:
        assert self._profiler is not None
        self._profiler.stop(save=True)
        lib.hvl_stop_profile_timeline()
        return _State.RECORDED

    def _discard(self) -> _State:
        if self._profiler is not None:
            lib.hvl_stop_profile_timeline()
            with contextlib.suppress(Exception):  # of a profile that is not wanted any more, or has failed already
                self._profiler.stop(save=False)
        return _State.CANCELLED

    def _hook(self, step: int, seconds: float) -> None:
        raise NotImplementedError


class _ProfileOfSteps(_Profile):
    """The thread that marks the steps starts and stops the profiler, so that it records this thread."""

    _needs_steps = (_State.WAITING, _State.ARMING, _State.SET, _State.RECORDING)
    _remedy = "call horovodlike.step() once in each step, or profile for some time with --seconds"

    def _arm(self) -> _State:
        self._profiler = profilers.choose(self._folder, all_threads=False)
        steps.hook = self._hook
        return _State.ARMING

    def pause(self) -> float | None:
        return None if self._state in (_State.SET, _State.RECORDING) else super().pause()

    def _is_past(self, first: float) -> bool:
        return self._step >= first

    def _hook(self, step: int, seconds: float) -> None:
        now, thread = time.time(), threading.get_ident()
        self._call(lambda: self._choose(step, seconds, now, thread))

    def _choose(self, step: int, seconds: float, now: float, thread: int) -> Callable[[], _State] | None:
        """Return what to do at a mark."""
        if self._owner is None:
            self._owner = thread
        if self._owner != thread or self._busy or self._state in _OVER:
            return None
        self._step = step
        self._expect_mark(1 if self._state is _State.ARMING else _MORE)
        if self._is_cancelled:
            return self._discard
        if self._state is _State.ARMING and seconds:
            self._seconds += seconds
            self._measured += 1
            is_measured = self._measured >= _MEASURED_STEPS or self._seconds >= _MEASURED_S
            return self._warm_up if is_measured else None
        if self._state is _State.SET and step >= self._first:
            return self._start if step == self._first else self._refuse
        if self._state is _State.RECORDING:
            if step != self._first + len(self._marks):
                return self._refuse
            self._marks.append(now)
            return self._finish if len(self._marks) > self._amount else None
        return None

    def _refuse(self) -> _State:
        raise RuntimeError(f"several threads mark its steps: {self._remedy}")

    def _warm_up(self) -> _State:
        assert self._profiler is not None
        self._profiler.warm_up()
        return _State.ARMED

    def _start(self) -> _State:
        state = super()._start()
        self._first_step = self._step + 1
        self._marks.append(time.time())  # the first step does not include the start of the profiler
        return state


class _ProfileOfSeconds(_Profile):
    """The reporter's thread starts and stops the profiler, and steps are noted if they are marked."""

    def _arm(self) -> _State:
        self._profiler = profilers.choose(self._folder, all_threads=True)
        self._profiler.warm_up()
        steps.hook = self._hook
        return _State.ARMED

    def _look_at_clock(self) -> None:
        if time.time() >= self._first:
            self._act(self._start, _State.SET)
        if time.time() >= self._first + self._amount:
            self._act(self._finish, _State.RECORDING)

    def _start(self) -> _State:
        state = super()._start()
        self._began = time.time()
        return state

    def _finish(self) -> _State:
        ended = time.time()
        state = super()._finish()
        with _lock:
            if len(self._marks) < 2:  # no step is in it: mark the recording itself
                self._first_step, self._marks = None, [self._began, ended]
        return state

    def _is_past(self, first: float) -> bool:
        return time.time() >= first

    def cancel(self) -> None:
        super().cancel()
        self._act(self._discard, _State.RECORDING)  # this thread has started the profiler

    def _hook(self, step: int, seconds: float) -> None:
        now = time.time()
        with _lock:
            if self._state is _State.RECORDING and len(self._marks) < profilers.MOST_MARKS:
                self._first_step = self._first_step or step + 1
                self._marks.append(now)


def _described(error: Exception) -> str:
    try:
        text = str(error)
    except Exception:  # of a framework
        text = "it has no text"
    return f"{type(error).__name__}: {text}"[:_LONGEST_REASON]
