"""Files of records of each format, for tests; a record's number is found in its content."""

import random
import struct

import google_crc32c
import pyarrow
import pyarrow.parquet
from array_record.python.array_record_module import ArrayRecordWriter

UNIT = 20  # rows of a row group or record batch
SIZES = {"a": 70, "b": 33}
TOTAL = sum(SIZES.values())


def content_of(number, length=300):
    return b"%06d" % number + random.Random(number).randbytes(length)


def number_of(record):
    return int((record["content"] if isinstance(record, dict) else record)[:6])


def table(numbers):
    return pyarrow.table({"content": [content_of(number) for number in numbers], "number": list(numbers)})


def write_parquet(path, numbers):
    options = {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
    pyarrow.parquet.write_table(table(numbers), path, row_group_size=UNIT, **options)


def write_arrow(path, numbers):
    rows = table(numbers)
    with pyarrow.ipc.new_file(path, rows.schema) as file:
        file.write_table(rows, max_chunksize=UNIT)


def masked_crc(data):
    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def write_tfrecord(path, numbers):
    with open(path, "wb") as file:
        for data in map(content_of, numbers):
            length = struct.pack("<Q", len(data))
            file.write(length + masked_crc(length) + data + masked_crc(data))


def write_array_record(path, numbers):
    writer = ArrayRecordWriter(str(path), "group_size:5,uncompressed")
    for number in numbers:
        writer.write(content_of(number))
    writer.close()


WRITERS = {
    ".parquet": write_parquet,
    ".arrow": write_arrow,
    ".tfrecord": write_tfrecord,
    ".array_record": write_array_record,
}


def write_folder(folder, suffix):
    """Write two files, whose records are numbered from 0 through both."""
    first = 0
    for name, size in SIZES.items():
        WRITERS[suffix](folder / f"{name}{suffix}", range(first, first + size))
        first += size
    return folder
