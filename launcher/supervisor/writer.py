"""Writes to screens that may be slow, blocked or closed, without keeping the job waiting."""

import contextlib
import functools
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TextIO

_LIMIT = 4 * 1024 * 1024

Write = Callable[[bytes], None]


def byte_writer(stream: TextIO) -> Write:
    """Return a function that writes bytes to a text stream: unbuffered to this process's own streams, else as text.

    A notebook replaces ``sys.stdout`` by an object that either has no descriptor or one that leads elsewhere.
    """
    with contextlib.suppress(Exception):  # closed, detached, or no file at all
        stream.flush()
    if stream in (sys.__stdout__, sys.__stderr__):
        with contextlib.suppress(OSError, ValueError):
            return functools.partial(_write_all, stream.fileno())

    def write(data: bytes) -> None:
        stream.write(data.decode(errors="replace"))
        stream.flush()

    return write


def _write_all(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


class Writer:
    """A thread that writes, with a queue that the owner keeps bounded by :attr:`full`.

    :meth:`put`, :attr:`full` and :meth:`close` belong to one thread, the owner's.
    """

    def __init__(self, on_change: Callable[[], None]) -> None:
        """Start the thread.

        Args:
            on_change: Called in the writer's thread when there is room again, or when a write has failed.
        """
        self._on_change = on_change
        self._changed = threading.Condition()
        # Guarded by _changed: everything below.
        self._queue: deque[tuple[Write, bytes]] = deque()
        self._bytes = 0
        self._closing = False
        self._errors: dict[Any, Exception] = {}  # the error of the write that failed, by target
        self._thread = threading.Thread(target=self._run, name="hvdrun-writer", daemon=True)
        self._thread.start()

    @property
    def full(self) -> bool:
        """Back-pressure: whether too many bytes wait for the owner to read more."""
        with self._changed:
            return self._bytes >= _LIMIT

    def error_of(self, write: Write) -> Exception | None:
        """Return the error of a write to a target that has failed, or None; later data for that target is dropped."""
        with self._changed:
            return self._errors.get(write)

    def put(self, write: Write, data: bytes) -> None:
        """Queue data, which is written in the order of the calls. Does not wait."""
        if data:
            with self._changed:
                self._queue.append((write, data))
                self._bytes += len(data)
                self._changed.notify()

    def drain(self, give_up: Callable[[], bool]) -> None:
        """Wait until all data queued so far is written; after that, :meth:`error_of` is final.

        Args:
            give_up: Called now and then; if it returns True, the rest is written later, unless the target is stuck.
        """
        with self._changed:
            while self._bytes and not give_up():
                self._changed.wait(0.1)

    def close(self, give_up: Callable[[], bool] = lambda: False) -> None:
        """Wait until all data is written.

        Args:
            give_up: Called now and then; if it returns True, the rest is abandoned, since the target is stuck.
        """
        with self._changed:
            self._closing = True
            self._changed.notify()
        while self._thread.is_alive() and not give_up():
            self._thread.join(0.1)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._closing:
                    self._changed.wait()
                if not self._queue:
                    return
                write, data = self._queue.popleft()
                skip = write in self._errors
            error = None if skip else self._attempt(write, data)
            with self._changed:
                was_full = self._bytes >= _LIMIT
                self._bytes -= len(data)
                news = error is not None or (was_full and self._bytes < _LIMIT)
                if error is not None:
                    self._errors[write] = error
                if not self._bytes:
                    self._changed.notify_all()
            if news:
                self._on_change()

    @staticmethod
    def _attempt(write: Write, data: bytes) -> Exception | None:
        try:
            write(data)
        except Exception as error:  # its reader has gone, the disk is full, the stream is closed
            return error
        return None
