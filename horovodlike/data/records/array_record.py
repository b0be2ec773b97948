"""ArrayRecord files: a record is its bytes."""

from __future__ import annotations

from typing import Any

from horovodlike.data.records.source import RecordFile, RecordSource, check_unchanged, damage, library, stamp_of
from horovodlike.errors import DamagedRecordsError

__all__ = ["ArrayRecordFile"]


class ArrayRecordFile(RecordFile):
    """An ArrayRecord file. Its library verifies the hash of each group of records that it decodes."""

    suffixes = (".array_record", ".arrayrecord")

    def __init__(self, source: RecordSource) -> None:
        """Open a file."""
        check_unchanged(source.path, source.stamps[0])
        self._path = source.path
        self._reader = _open(source.path)

    @classmethod
    def scan(cls, path: str) -> RecordSource:
        """Read the number of records from the end of the file."""
        stamp = stamp_of(path)
        reader = _open(path)
        count = reader.num_records()
        reader.close()
        return RecordSource(path, cls, (count,), (stamp,))

    def read(self, start: int, end: int) -> list[Any]:
        """Return the data of records as bytes."""
        try:
            return list(self._reader.read(start, end))
        except (RuntimeError, ValueError, IndexError) as error:
            lost = [number for number in range(start, end) if not self._can_read(number)] or [start, end - 1]
            raise DamagedRecordsError(self._path, lost[0], lost[-1] + 1, str(error)) from error

    def close(self) -> None:
        """Close the file."""
        self._reader.close()

    def _can_read(self, number: int) -> bool:
        try:
            self._reader.read([number])
        except (RuntimeError, ValueError, IndexError):
            return False
        return True


def _open(path: str) -> Any:
    module = library("array_record.python.array_record_module", f"reading {path}")
    with open(path, "rb"), damage(path, 0, None, RuntimeError, ValueError):  # the library does not say why it cannot
        reader = module.ArrayRecordReader(path, "readahead_buffer_size:0")
    if not reader.ok():
        raise DamagedRecordsError(path, 0, None, "it has no index: the file is truncated, or is no ArrayRecord file")
    return reader
