"""How other threads, and signals, reach the thread that runs a job."""

import os
import signal
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

__all__ = ["SignalHandler", "Wakeup"]


class Wakeup:
    """Makes a selector return; may be called from any thread and from a signal handler."""

    def __init__(self) -> None:
        """Opens a pipe; it is closed by :meth:`close`."""
        self._read, self._write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def fileno(self) -> int:
        """Readable once :meth:`set` was called."""
        return self._read

    @property
    def write_end(self) -> int:
        """What is written here makes the selector return, too."""
        return self._write

    def set(self) -> None:
        """Makes the selector return."""
        try:
            os.write(self._write, b"\0")
        except (BlockingIOError, OSError):  # full: it returns anyway; closed: the job is over
            return

    def clear(self) -> None:
        """Makes :meth:`fileno` unreadable until the next :meth:`set`."""
        os.read(self._read, 4096)

    def close(self) -> None:
        """Closes the pipe."""
        read, write = self._read, self._write
        self._read = self._write = -1
        os.close(read)
        os.close(write)


_DEAF_S = 1.0


class SignalHandler:
    """While entered, signals go to a function instead of ending this process.

    Two of SIGTERM within a second count as one: who signals a process and its group, as ``timeout`` does, means one.
    """

    def __init__(self, take: Callable[[int], object], wakeup: Wakeup) -> None:
        """Prepares it; only the main thread can enter.

        Args:
            take: Called with the signal's number, in a signal handler.
            wakeup: What the main thread waits for, among others.
        """
        self._take = take
        self._wakeup = wakeup
        self._before: dict[int, Any] = {}
        self._deaf_until = 0.0  # to SIGTERM

    def __enter__(self) -> None:
        """Installs handlers, but for signals that are ignored."""
        # A signal that comes just before the system call of select() would not be noticed before its end.
        self._wakeup_before = signal.set_wakeup_fd(self._wakeup.write_end, warn_on_full_buffer=False)
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(signum) is not signal.SIG_IGN:  # as nohup has it, and shells for jobs in the background
                self._before[signum] = signal.signal(signum, lambda number, _: self._hear(number))

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Puts back what there was."""
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
