"""A source of records, and the interface of a file format."""

from __future__ import annotations

import importlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from horovodlike.errors import DamagedRecordsError

__all__ = ["RecordFile", "RecordSource", "Stamp", "check_unchanged", "damage", "library", "stamp_of"]

Stamp = tuple[int, int]
"""The size of a file in bytes, and the time of its last change in nanoseconds."""


@dataclass(frozen=True)
class RecordSource:
    """A source as it was when it was listed. Can be pickled.

    Attributes:
        path: The file; of images, the folder of a label.
        format: The class that reads it.
        ends: The number of records up to the end of each unit, which the format reads and decodes at once.
        stamps: The stamp of the file, or one for each image.
        index: The format's own data for finding a record.
    """

    path: str
    format: type[RecordFile]
    ends: Sequence[int]
    stamps: Sequence[Stamp]
    index: Any = None

    def __len__(self) -> int:
        """Return the number of records."""
        return self.ends[-1] if self.ends else 0


class RecordFile(ABC):
    """An open source of one format. Not thread-safe.

    Attributes:
        suffixes: The ends of the names of such files, in lower case.
        records_per_task: The records of a task unless another number is given; None for whole units.
    """

    suffixes: ClassVar[tuple[str, ...]]
    records_per_task: ClassVar[int | None] = 1024

    @classmethod
    @abstractmethod
    def scan(cls, path: str) -> RecordSource:
        """Count the records of a file without reading them.

        Raises:
            DamagedRecordsError: The file is damaged or truncated.
            ImportError: The format's library is not installed.
        """

    @abstractmethod
    def __init__(self, source: RecordSource) -> None:
        """Open a source.

        Raises:
            RuntimeError: It has changed since it was scanned.
        """

    @abstractmethod
    def read(self, start: int, end: int) -> list[Any]:
        """Return the records ``start`` to ``end - 1``.

        Raises:
            DamagedRecordsError: Some of them cannot be read, or do not match their checksum.
        """

    def close(self) -> None:  # noqa: B027 - most formats keep nothing open
        """Close the open files."""


def library(module: str, purpose: str) -> Any:
    """Import and return a module of an optional library.

    Raises:
        ImportError: It is not installed; the message names the extra.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        name = module.partition(".")[0]
        raise ImportError(f"{purpose} needs {name}: pip install 'horovodlike[records]'", name=name) from error


def stamp_of(path: str) -> Stamp:
    """Return the stamp of a file."""
    found = os.stat(path)
    return found.st_size, found.st_mtime_ns


def check_unchanged(path: str, stamp: Stamp) -> None:
    """Compare a file with its stamp.

    Raises:
        RuntimeError: The file has changed or is gone.
    """
    try:
        now = stamp_of(path)
    except FileNotFoundError:
        now = None
    if now != stamp:
        raise RuntimeError(
            f"{path} {'has changed' if now else 'is gone'} since its tasks were made: list the records again, and make "
            "a new partition of their tasks"
        )


@contextmanager
def damage(path: str, start: int, end: int | None, *errors: type[Exception]) -> Iterator[None]:
    """Raise a :class:`DamagedRecordsError` about the records ``start`` to ``end - 1`` for a library's errors."""
    try:
        yield
    except errors as error:
        raise DamagedRecordsError(path, start, end, str(error) or type(error).__name__) from error
