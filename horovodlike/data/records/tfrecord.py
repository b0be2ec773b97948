"""TFRecord files: a record is its bytes.

A record is its length (8 bytes), the masked CRC-32C of these, the data, and the masked CRC-32C of the data. TensorFlow
offers no access to the middle of a file, and it would take memory of every GPU, so the framing is read here.
"""

from __future__ import annotations

import struct
from array import array
from typing import Any

from horovodlike.data.records.source import RecordFile, RecordSource, check_unchanged, library, stamp_of
from horovodlike.errors import DamagedRecordsError

__all__ = ["TFRecordFile"]

_HEAD = struct.Struct("<QI")
_CHECKSUM = struct.Struct("<I")
_COMPRESSED = (b"\x1f\x8b", b"\x78\x01", b"\x78\x5e", b"\x78\x9c", b"\x78\xda")  # how gzip and zlib begin


class TFRecordFile(RecordFile):
    """A TFRecord file that is not compressed. The index has the position of each record, and the size of the file."""

    suffixes = (".tfrecord", ".tfrecords")

    def __init__(self, source: RecordSource) -> None:
        """Open a file."""
        check_unchanged(source.path, source.stamps[0])
        self._source = source
        self._file = open(source.path, "rb")  # noqa: SIM115 - closed by close()

    @classmethod
    def scan(cls, path: str) -> RecordSource:
        """Find the records by their lengths."""
        stamp = stamp_of(path)
        size = stamp[0]
        positions = array("Q", [0])
        with open(path, "rb") as file:
            while (at := positions[-1]) < size:
                file.seek(at)
                head = file.read(_HEAD.size)
                if at == 0 and head.startswith(_COMPRESSED) and not _is_head(head):
                    raise ValueError(f"{path} is compressed, so no record can be found in it: decompress it first")
                if len(head) == _HEAD.size and not _is_head(head):
                    reason = "the checksum of a length does not match"
                    raise DamagedRecordsError(path, len(positions) - 1, None, reason)
                end = at + _HEAD.size + _CHECKSUM.size + (_HEAD.unpack(head)[0] if len(head) == _HEAD.size else 0)
                if end > size:
                    raise DamagedRecordsError(path, len(positions) - 1, None, f"the file ends at byte {size}")
                positions.append(end)
        return RecordSource(path, cls, (len(positions) - 1,), (stamp,), positions)

    def read(self, start: int, end: int) -> list[Any]:
        """Return the data of records as bytes."""
        positions = self._source.index
        self._file.seek(positions[start])
        content = memoryview(self._file.read(positions[end] - positions[start]))
        return [self._data(content, number, positions[start]) for number in range(start, end)]

    def _data(self, content: memoryview, number: int, offset: int) -> bytes:
        begin, end = (self._source.index[each] - offset for each in (number, number + 1))
        framed = content[begin:end]
        data = bytes(framed[_HEAD.size : -_CHECKSUM.size])
        if len(framed) != end - begin or not _is_head(framed[: _HEAD.size]):
            raise DamagedRecordsError(self._source.path, number, None, "the checksum of a length does not match")
        if _CHECKSUM.unpack(framed[-_CHECKSUM.size :])[0] != _masked_crc(data):
            raise DamagedRecordsError(self._source.path, number, number + 1, "its checksum does not match")
        return data

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _is_head(head: bytes | memoryview) -> bool:
    return len(head) == _HEAD.size and _HEAD.unpack(head)[1] == _masked_crc(bytes(head[:8]))


def _masked_crc(data: bytes) -> int:
    crc: int = library("google_crc32c", "reading TFRecord files").value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
