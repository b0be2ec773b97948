"""The reader of a partition's batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from horovodlike.data.dynamic_partition import DynamicPartition
from horovodlike.data.loaders import AsyncDataLoaderMixin, BaseDataLoader
from horovodlike.data.records.listing import RecordSet
from horovodlike.data.records.source import RecordFile, damage
from horovodlike.data.static_partition import StaticPartition
from horovodlike.data.tasks import Batch, Task

__all__ = ["RecordBatch", "RecordReader"]


@dataclass(frozen=True)
class RecordBatch(Batch):
    """A batch of a partition, with its records.

    Attributes:
        records: The records of the batch's ranges, in their order; or the results of ``decode``.
    """

    records: tuple[Any, ...]


class RecordReader(AsyncDataLoaderMixin, BaseDataLoader):
    """The batches of a partition, with their records, read ahead by a background thread.

    A record of a Parquet or Arrow file is a dictionary of the row's values; one of a TFRecord or ArrayRecord file is
    its bytes; one of a folder of images is a dictionary with ``image`` (bytes of the file), ``label`` and ``name``. The
    checksums that a format has are compared. The batches come in the partition's order.

    Each iteration has a thread, which reads and decodes at most ``prefetch + 1`` batches ahead, and ends with the
    iteration, or when its loop is left. An error of the thread is raised in the loop. One file is open at a time, and
    of Parquet and Arrow files one row group or record batch is in memory.

    Not thread-safe; an iteration ends the one before.

    Args:
        records: The records, from ``list_records``.
        partition: A partition of the tasks of ``records``. A ``DynamicPartition`` that is read ahead must have
            ``record="manual"``, and ``partition.record()`` be called after each step.
        decode: A function that turns a record into the element of the batch; called in the thread.
        prefetch: The number of batches that are kept ready for the loop; with 0 there is no thread.

    Raises:
        TypeError: ``records`` is no ``RecordSet``.
        ValueError: ``prefetch`` is negative, or reads ahead of a partition that takes batches as done when the next one
            is asked for.
    """

    def __init__(
        self,
        records: RecordSet,
        partition: StaticPartition | DynamicPartition,
        decode: Callable[[Any], Any] | None = None,
        prefetch: int = 2,
    ) -> None:
        """Open nothing yet."""
        if not isinstance(records, RecordSet):
            raise TypeError(f"records must be what list_records returns, got {type(records).__name__}")
        if prefetch < 0:
            raise ValueError(f"prefetch must be 0 or more, got {prefetch}")
        if prefetch and isinstance(partition, DynamicPartition) and partition.recording != "manual":
            raise ValueError(
                'batches that are read ahead are not yet done: make the partition with record="manual", and call '
                "partition.record() after each step; or give prefetch=0"
            )
        super().__init__(async_loader_queue_size=prefetch)
        self._records = records
        self._partition = partition
        self._decode = decode

    @property
    def partition(self) -> StaticPartition | DynamicPartition:
        """The partition whose batches are read."""
        return self._partition

    def __len__(self) -> int:
        """Return the number of batches, as the partition does."""
        return len(self._partition)

    def __iter__(self) -> Iterator[RecordBatch]:
        """Yield the partition's batches of this epoch, or those that are left.

        Raises:
            DamagedRecordsError: A record cannot be read, does not match its checksum, or ``decode`` has raised an
                ``OSError`` for it, as Pillow does for a damaged image.
            RuntimeError: A file has changed since it was listed; or the partition cannot be iterated.
            ValueError: The partition has a task that is not of these records.
        """
        return super().__iter__()

    def _iterate(self) -> Iterable[RecordBatch]:
        with closing(_Sources(self._records)) as sources:
            partition = self._partition
            for batch in partition._batches() if isinstance(partition, StaticPartition) else partition:
                records = [record for task in batch.ranges for record in self._decoded(task, sources.read(task))]
                yield RecordBatch(batch.ranges, batch.total, tuple(records))

    def _process_batch(self, batch: RecordBatch) -> RecordBatch:
        if isinstance(self._partition, StaticPartition):
            self._partition._count(batch)  # now, and not when it is read ahead
        return batch

    def _decoded(self, task: Task, records: list[Any]) -> Iterator[Any]:
        if self._decode is None:
            yield from records
            return
        for number, record in enumerate(records, task.start):
            with damage(str(task.source), number, number + 1, OSError):
                decoded = self._decode(record)
            yield decoded


class _Sources:
    """The sources of a record set, of which the one that was read last is open."""

    def __init__(self, records: RecordSet) -> None:
        self._sources = {source.path: source for source in records.sources}
        self._path: str | int = ""
        self._file: RecordFile | None = None

    def read(self, task: Task) -> list[Any]:
        """Return the records of a task."""
        source = self._sources.get(str(task.source))
        if source is None or task.end > len(source):
            count = f"has {len(source)} records" if source else "is not listed"
            raise ValueError(f"the partition has the {task!r}, but its source {count}: make it of these records' tasks")
        if self._file is None or self._path != task.source:
            self.close()
            self._path, self._file = task.source, source.format(source)
        return self._file.read(task.start, task.end)

    def close(self) -> None:
        """Close the source that is open."""
        file, self._file = self._file, None
        if file is not None:
            file.close()
