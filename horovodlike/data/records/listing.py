"""The sources of a data set: files of records of one format, or a folder of labelled images."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from horovodlike.data.records.array_record import ArrayRecordFile
from horovodlike.data.records.arrow import ArrowFile, ParquetFile
from horovodlike.data.records.images import ImageFolder
from horovodlike.data.records.source import RecordFile, RecordSource
from horovodlike.data.records.tfrecord import TFRecordFile
from horovodlike.data.tasks import Task, cut_into_tasks
from horovodlike.errors import DamagedRecordsError

__all__ = ["LABELS_FILE", "RecordSet", "list_records"]

LABELS_FILE = "_labels.json"
"""The file beside shards of labelled images that has the names of the labels, as a list."""

_FORMATS: dict[str, type[RecordFile]] = {
    suffix: each for each in (ParquetFile, ArrowFile, TFRecordFile, ArrayRecordFile) for suffix in each.suffixes
}
_SHARD = re.compile(r"(.*-)(\d{5,})(-of-)(\d{5,})(\..*)")

Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


@dataclass(frozen=True)
class RecordSet:
    """The sources of a data set, as they were when they were listed. Can be pickled; ``len()`` counts the records.

    Attributes:
        sources: Files, or folders of images.
        labels: The names of the labels of images, by number; empty if the sources have no such labels.
    """

    sources: tuple[RecordSource, ...]
    labels: tuple[str, ...] = ()

    def __len__(self) -> int:
        """Return the number of records."""
        return sum(map(len, self.sources))

    def tasks(self, records_per_task: int | None = None) -> list[Task]:
        """Return the tasks for a partition: ranges of records, whose source is the path.

        Args:
            records_per_task: The most records of a task; None for a whole row group (Parquet) or record batch (Arrow),
                and for 1024 records of other sources. No task goes beyond a row group or record batch: these are read
                and decoded at once, so tasks that are far smaller cost time.

        Raises:
            ValueError: ``records_per_task`` is not positive.
        """
        tasks: list[Task] = []
        for source in self.sources:
            most = records_per_task if records_per_task is not None else source.format.records_per_task
            begin = 0
            for end in source.ends:
                pieces = cut_into_tasks([(source.path, end - begin)], max(end - begin, 1) if most is None else most)
                tasks += (Task(path, begin + first, begin + after) for path, first, after in pieces)
                begin = end
        return tasks


def list_records(paths: Paths) -> RecordSet:
    """Count the records in files, in a folder of files, or in a folder of labelled images.

    The format of a file follows from the end of its name: ``.parquet``; ``.arrow``, ``.feather``, ``.ipc``;
    ``.tfrecord``, ``.tfrecords``; ``.array_record``, ``.arrayrecord``. A folder of images has a folder for each label.
    In folders, names that begin with a dot or an underscore are ignored.

    All ranks must have the same tasks. Where files are on shared storage, one rank can list them for all, by
    ``hvd.broadcast_object``. Where each host has a copy, each rank must list its own.

    Args:
        paths: A file or a folder; or several files, all of one format. Files in a folder are ordered by name.

    Returns:
        The sources, from which the tasks of a partition are made, and which a ``RecordReader`` reads.

    Raises:
        DamagedRecordsError: A file is damaged, truncated or has no records; or a file of a folder is missing, because
            the others are ``shard-00000-of-00002`` and so on.
        ImportError: The library of a format is not installed; the message says how to install it.
        OSError: A file or folder cannot be read.
        ValueError: A file has an unknown format; there are several formats; there is no file, or one is named twice;
            the folder of a label has no images; ``_labels.json`` is not a list of names.
    """
    if isinstance(paths, (str, os.PathLike)):
        path = os.fspath(paths)
        if os.path.isdir(path):
            return _in_folder(path)
        return RecordSet(_files([path]))
    return RecordSet(_files([os.fspath(path) for path in paths]))


def _in_folder(path: str) -> RecordSet:
    with os.scandir(path) as folder:
        found = {each.path: each.is_dir() for each in folder if not each.name.startswith((".", "_"))}
    if not found:
        raise ValueError(f"the folder {path} has no records")
    names = sorted(found)
    if not any(found.values()):
        _check_shards(names)
        return RecordSet(_files(names), _labels(path))
    if not all(found.values()):
        file = next(name for name in names if not found[name])
        raise ValueError(
            f"{path} has folders, as those of labelled images have, and the file {file}: list it by itself"
        )
    sources = tuple(ImageFolder.scan(name, number) for number, name in enumerate(names))
    return RecordSet(sources, tuple(os.path.basename(name) for name in names))


def _labels(path: str) -> tuple[str, ...]:
    file = Path(path, LABELS_FILE)
    if not file.exists():
        return ()
    try:
        labels = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    if not isinstance(labels, list) or not all(isinstance(label, str) for label in labels):
        raise ValueError(f"{file} is not a list of the names of labels")
    return tuple(labels)


def _check_shards(names: list[str]) -> None:
    present = set(names)
    for begin, of, count, suffix in {match.group(1, 3, 4, 5) for match in map(_SHARD.fullmatch, names) if match}:
        for number in range(int(count)):
            name = f"{begin}{number:0{len(count)}}{of}{count}{suffix}"
            if name not in present:
                raise DamagedRecordsError(name, 0, None, "it is missing beside the other shards")


def _files(names: list[str]) -> tuple[RecordSource, ...]:
    if not names:
        raise ValueError("no files of records were given")
    formats: dict[type[RecordFile], str] = {}
    for name, times in Counter(names).items():
        if times > 1:
            raise ValueError(f"{name} was given {times} times: its records would be read so often in an epoch")
        formats.setdefault(_format(name), name)
    if len(formats) > 1:
        raise ValueError(f"these files have different formats: {', '.join(formats.values())}; list those of one format")
    return tuple(map(_source, names))


def _format(name: str) -> type[RecordFile]:
    suffix = os.path.splitext(name)[1].lower()
    if suffix not in _FORMATS:
        hint = "; list images by the folder that has a folder for each label" if suffix in ImageFolder.suffixes else ""
        raise ValueError(f"{name} has an unknown format: known names end in {', '.join(_FORMATS)}{hint}")
    return _FORMATS[suffix]


def _source(name: str) -> RecordSource:
    if not os.stat(name).st_size:
        raise DamagedRecordsError(name, 0, None, "the file is empty")
    source = _format(name).scan(name)
    if not len(source):
        raise DamagedRecordsError(name, 0, None, "it has no records")
    return source
