"""SIGTERM as a notice: the process leaves the job at the next commit, so that no work is lost."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
from collections.abc import Callable, Iterator

__all__ = ["Preemption"]


class Preemption:
    """The request to this process, by SIGTERM, to leave the job.

    Attributes:
        noted: True once SIGTERM has arrived within :meth:`expected`. More signals change nothing: a scheduler that ends
            a job often signals all its processes, and then hvdrun signals them, too.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        """Keep ``wake``; the signal handler calls it on the main thread, between any two instructions there."""
        self.noted = False
        self._wake = wake
        self._is_expected = False

    @contextlib.contextmanager
    def expected(self, answer: Callable[[], str]) -> Iterator[None]:
        """Treat SIGTERM as a notice in the ``with`` block, if this is the main thread and the script has no handler.

        The handler writes the answer to standard error. If an exception follows, later SIGTERMs are ignored.
        """
        is_ours = (
            threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        )
        if is_ours:
            self._is_expected, self._answer = True, answer
            signal.signal(signal.SIGTERM, self._note)
        after = signal.SIG_DFL
        try:
            yield
        except BaseException:
            after = signal.SIG_IGN if self.noted else after
            raise
        finally:
            self._is_expected = False
            if is_ours and signal.getsignal(signal.SIGTERM) == self._note:
                signal.signal(signal.SIGTERM, after)

    def _note(self, *_: object) -> None:
        if not self.noted:
            self.noted = True
            with contextlib.suppress(OSError):  # sys.stderr cannot be used here: the signal may have interrupted it
                os.write(2, f"{self._answer()}\n".encode())
        self._wake()

    def forget_in_child(self) -> None:
        """Restore the default effect of SIGTERM in a forked child: process pools end their children with SIGTERM."""
        if self._is_expected and signal.getsignal(signal.SIGTERM) == self._note:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._is_expected = False

    def cancel(self) -> None:
        """Restore the default effect of SIGTERM as the job ends; if one has arrived, exit at once. From any thread."""
        if not self._is_expected:
            return
        # Only the main thread may call signal.signal(), and it may be in the middle of a long computation.
        set_handler = ctypes.pythonapi.PyOS_setsig
        set_handler.argtypes, set_handler.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
        set_handler(signal.SIGTERM, None)
        if self.noted:
            os.kill(os.getpid(), signal.SIGTERM)
