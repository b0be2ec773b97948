"""The base class of the event loops of jobs, and the classes by which signals and other threads wake a loop."""

import os
import selectors
import signal
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any

from horovodlike.launcher.supervisor.output import RankOutput


class Wakeup:
    """Makes a selector return; may be called from any thread and from a signal handler."""

    def __init__(self) -> None:
        """Open a pipe; it is closed by :meth:`close`."""
        self._read, self._write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def fileno(self) -> int:
        """Return a descriptor that is readable once :meth:`set` was called."""
        return self._read

    @property
    def write_end(self) -> int:
        """The end of the pipe for writing; a byte written to it makes the selector return, too."""
        return self._write

    def set(self) -> None:
        """Make the selector return."""
        try:
            os.write(self._write, b"\0")
        except (BlockingIOError, OSError):  # a full pipe wakes the selector anyway; a closed one: the job is over
            return

    def clear(self) -> None:
        """Make :meth:`fileno` unreadable until the next :meth:`set`."""
        os.read(self._read, 4096)

    def close(self) -> None:
        """Close the pipe."""
        read, write = self._read, self._write
        self._read = self._write = -1
        os.close(read)
        os.close(write)


class Supervisor:
    """The event loop of a job. Everything but :meth:`interrupt` belongs to one thread."""

    def __init__(self, output: RankOutput, wakeup: Wakeup) -> None:
        """Prepare the loop.

        Args:
            output: Takes the output of the ranks.
            wakeup: Wakes the loop after a signal or a change by another thread.
        """
        self._output = output
        self._wakeup = wakeup
        self._signals: deque[int] = deque()
        self._abandoned = False

    @property
    def abandoned(self) -> bool:
        """True if a signal has demanded an immediate end, or is not handled yet, such as one after the job's end."""
        return self._abandoned or bool(self._signals)

    def interrupt(self, signum: int) -> None:
        """Pass a signal on to the ranks; a second one kills them. Callable from a signal handler."""
        self._signals.append(signum)
        self._wakeup.set()

    def _loop(self) -> None:
        """Handle events until :meth:`_watch` returns False."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._wakeup, selectors.EVENT_READ, self._wakeup.clear)
            while self._watch(selector):
                for key, _ in selector.select(self._shorter(self._timeout())):
                    key.data()
                self._output.show_due()
                self._react(selector)

    def _shorter(self, timeout: float | None) -> float | None:
        """Shorten a wait so that no line of output waits longer than it should."""
        if (deadline := self._output.deadline) is None:
            return timeout
        left = max(0.0, deadline - time.monotonic())
        return left if timeout is None else min(left, timeout)

    def _watch(self, selector: selectors.BaseSelector) -> bool:
        """Register the descriptors that the loop waits for; return False when the job is over."""
        raise NotImplementedError

    def _timeout(self) -> float | None:
        """Return how long the loop waits at most, in seconds."""
        raise NotImplementedError

    def _react(self, selector: selectors.BaseSelector) -> None:
        """Act upon the events of the last wait."""
        raise NotImplementedError


_DEAF_S = 1.0


class SignalHandler:
    """While entered, signals go to a function instead of ending this process.

    Two SIGTERMs within a second count as one: ``timeout`` signals both the process and its group.
    """

    def __init__(self, take: Callable[[int], object], wakeup: Wakeup) -> None:
        """Prepare it; only the main thread can enter.

        Args:
            take: Called with the signal's number, in a signal handler.
            wakeup: Wakes the selector in which the main thread waits.
        """
        self._take = take
        self._wakeup = wakeup
        self._before: dict[int, Any] = {}
        self._deaf_until = 0.0  # a SIGTERM before this time is ignored

    def __enter__(self) -> None:
        """Install handlers, except for signals that are ignored."""
        # Without this, a signal just before the system call of select() would be noticed only when the call returns.
        self._wakeup_before = signal.set_wakeup_fd(self._wakeup.write_end, warn_on_full_buffer=False)
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(signum) is not signal.SIG_IGN:  # it is under nohup, or in a shell's background job
                self._before[signum] = signal.signal(signum, lambda number, _: self._hear(number))

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Restore the previous handlers."""
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(self._wakeup_before)

    def _hear(self, signum: int) -> None:
        if signum == signal.SIGTERM:
            now = time.monotonic()
            if now < self._deaf_until:
                return
            self._deaf_until = now + _DEAF_S
        self._take(signum)
