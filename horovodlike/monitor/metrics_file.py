"""A file with the metrics of a job, which is replaced each second."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from pathlib import Path

from horovodlike.monitor import prometheus
from horovodlike.monitor.board import Board

PERIOD_S = 1.0
PATIENCE_S = 5.0
"""The longest wait for the file at the end of a job: its file system may hang."""


class MetricsFile(threading.Thread):
    """The thread that writes the file, so that a slow file system delays neither ranks nor readers."""

    def __init__(self, board: Board, path: Path) -> None:
        """Take the state of the job, and the path of the file."""
        super().__init__(name="horovodlike-monitor-file", daemon=True)
        self._board = board
        self._path = path
        self._ends = threading.Event()

    def close(self) -> None:
        """Write the file for the last time, and end the thread; do not wait for it if the file system hangs."""
        self._ends.set()
        self.join(PATIENCE_S)

    def run(self) -> None:
        """Replace the file each second; after an error, note it and give up."""
        ends = False
        try:
            while not ends:
                ends = self._ends.wait(PERIOD_S)
                self._replace(prometheus.render(self._board.snapshot(), names_job=True))
        except Exception as error:
            why = getattr(error, "strerror", None) or repr(error)
            self._board.add_event("warning", f"{self._path} cannot be written: {why}")

    def _replace(self, text: str) -> None:
        """Write another file, and give it the name of this one, so that a reader never sees a part of it."""
        descriptor, name = tempfile.mkstemp(dir=self._path.parent, prefix=f".{self._path.name}.")
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
                os.fchmod(file.fileno(), 0o644)
            os.replace(name, self._path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
