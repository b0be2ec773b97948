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
    """The notice that asks this process to leave.

    Attributes:
        noted: True once SIGTERM has arrived within :meth:`expected`. More signals change nothing: a scheduler that ends
            a job often signals all its processes, and then hvdrun signals them, too.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        """Have the signal handler call ``wake``, on the main thread and between any two instructions of it."""
        self.noted = False
        self._wake = wake
        self._is_expected = False

    @contextlib.contextmanager
    def expected(self) -> Iterator[None]:
        """Treat SIGTERM as a notice in the ``with`` block: on the main thread, if the script has no handler itself."""
        is_ours = (
            threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        )
        if is_ours:
            self._is_expected = True
            signal.signal(signal.SIGTERM, self._note)
        try:
            yield
        finally:
            self._is_expected = False
            if is_ours and signal.getsignal(signal.SIGTERM) == self._note:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _note(self, *_: object) -> None:
        self.noted = True
        self._wake()

    def forget_in_child(self) -> None:
        """Give SIGTERM its ordinary effect in a forked child: pools of processes end their children with it."""
        if self._is_expected and signal.getsignal(signal.SIGTERM) == self._note:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._is_expected = False

    def cancel(self) -> None:
        """Have SIGTERM end this process, as the job ends: at once if it has arrived already. From any thread."""
        if not self._is_expected:
            return
        # signal.signal() is for the main thread only, and that may be in the middle of a long computation.
        set_handler = ctypes.pythonapi.PyOS_setsig
        set_handler.argtypes, set_handler.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
        set_handler(signal.SIGTERM, None)
        if self.noted:
            os.kill(os.getpid(), signal.SIGTERM)
