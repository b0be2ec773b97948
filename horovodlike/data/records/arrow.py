"""Parquet and Arrow IPC files: a record is a dictionary of a row's values."""

from __future__ import annotations

import bisect
import itertools
from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

from horovodlike.data.records.source import RecordFile, RecordSource, check_unchanged, damage, library, stamp_of
from horovodlike.errors import DamagedRecordsError

__all__ = ["ArrowFile", "ParquetFile"]


class _UnitsOfRows(RecordFile):
    """A file of row groups or record batches; the last one that was read stays in memory."""

    records_per_task = None

    def __init__(self, source: RecordSource) -> None:
        """Open a file."""
        check_unchanged(source.path, source.stamps[0])
        self._source = source
        self._file, self._reader = self._open(source.path, "OSFile")
        self._kept: tuple[int, Any] = (-1, None)

    @classmethod
    def scan(cls, path: str) -> RecordSource:
        """Count the rows of each unit."""
        stamp = stamp_of(path)
        file, reader = cls._open(path, "memory_map")  # reads no more than it needs; a file that shrinks is fatal
        with file, damage(path, 0, None, *_errors()):
            lengths = tuple(cls._lengths(reader))
        if min(lengths, default=0) < 0:
            raise DamagedRecordsError(path, 0, None, f"a unit has {min(lengths)} rows")
        ends = tuple(itertools.accumulate(lengths))
        return RecordSource(path, cls, ends, (stamp,))

    def read(self, start: int, end: int) -> list[Any]:
        """Return rows as dictionaries."""
        rows: list[Any] = []
        while start < end:
            unit = bisect.bisect_right(self._source.ends, start)
            first = self._source.ends[unit - 1] if unit else 0
            until = min(end, self._source.ends[unit])
            table = self._unit(unit, first, self._source.ends[unit])
            with damage(self._source.path, first, self._source.ends[unit], *_errors()):
                rows += table.slice(start - first, until - start).to_pylist()
            start = until
        return rows

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _unit(self, unit: int, first: int, end: int) -> Any:
        if self._kept[0] != unit:
            self._kept = (-1, None)  # release the memory first
            with damage(self._source.path, first, end, *_errors()):
                table = self._load(self._reader, unit)
                table.validate(full=True)
            if table.num_rows != end - first:
                reason = f"{table.num_rows} rows in place of {end - first}"
                raise DamagedRecordsError(self._source.path, first, end, reason)
            self._kept = (unit, table)
        return self._kept[1]

    @classmethod
    def _open(cls, path: str, way: str) -> tuple[Any, Any]:
        file = getattr(library("pyarrow", f"reading {path}"), way)(path)
        try:
            with damage(path, 0, None, *_errors()):
                return file, cls._reader_of(file, path)
        except BaseException:
            file.close()
            raise

    @classmethod
    @abstractmethod
    def _reader_of(cls, file: Any, path: str) -> Any: ...

    @classmethod
    @abstractmethod
    def _lengths(cls, reader: Any) -> Iterable[int]: ...

    @classmethod
    @abstractmethod
    def _load(cls, reader: Any, unit: int) -> Any: ...


class ParquetFile(_UnitsOfRows):
    """A Parquet file; its units are the row groups. Checksums of pages are compared, if it has some."""

    suffixes = (".parquet",)

    @classmethod
    def _reader_of(cls, file: Any, path: str) -> Any:
        return library("pyarrow.parquet", f"reading {path}").ParquetFile(file, page_checksum_verification=True)

    @classmethod
    def _lengths(cls, reader: Any) -> Iterable[int]:
        return (reader.metadata.row_group(unit).num_rows for unit in range(reader.num_row_groups))

    @classmethod
    def _load(cls, reader: Any, unit: int) -> Any:
        return reader.read_row_group(unit, use_threads=False)


class ArrowFile(_UnitsOfRows):
    """An Arrow IPC file (Feather version 2); its units are the record batches. The format has no checksums."""

    suffixes = (".arrow", ".feather", ".ipc")

    @classmethod
    def _reader_of(cls, file: Any, path: str) -> Any:
        pyarrow = library("pyarrow", f"reading {path}")
        if file.read_at(4, 0) == b"\xff\xff\xff\xff":
            raise ValueError(
                f"{path} has Arrow's format for streams, in which no record can be found without reading all before "
                "it: write it again with pyarrow.ipc.new_file"
            )
        return pyarrow.ipc.open_file(file, options=pyarrow.ipc.IpcReadOptions(use_threads=False))

    @classmethod
    def _lengths(cls, reader: Any) -> Iterable[int]:
        return (reader.get_batch(unit).num_rows for unit in range(reader.num_record_batches))

    @classmethod
    def _load(cls, reader: Any, unit: int) -> Any:
        return reader.get_batch(unit)


def _errors() -> tuple[type[Exception], ...]:
    return library("pyarrow", "reading records").ArrowException, OSError, UnicodeDecodeError
