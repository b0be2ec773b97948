"""The partition of samples among the ranks of a job, and the preparation of batches in the background.

* :class:`Task`, :func:`cut_into_tasks`: the data of an epoch as ranges of samples
* :class:`StaticPartition`: assigns the tasks to the ranks once for each epoch
* :class:`DynamicPartition`: assigns the tasks while the epoch runs, for jobs whose ranks come and go
* :func:`list_records`, :class:`RecordReader`: tasks of files of records, and the records of a partition's batches
* :class:`BaseDataLoader`, :class:`AsyncDataLoaderMixin`: loaders that prepare batches in a background thread

A partition says *which* samples a rank reads; the script reads them, or a :class:`RecordReader`::

    tasks = cut_into_tasks({"a.bin": 70000, "b.bin": 52000}, samples_per_task=1000)
    partition = StaticPartition(tasks, batch_size=32)
    for epoch in range(epochs):
        partition.set_epoch(epoch)
        for batch in partition:
            for source, start, end in batch.ranges:
                ...  # samples start to end - 1 of the file `source`
"""

from horovodlike.data.dynamic_partition import DynamicPartition
from horovodlike.data.loaders import AsyncDataLoaderMixin, BaseDataLoader
from horovodlike.data.records import RecordBatch, RecordReader, RecordSet, convert_images, list_records
from horovodlike.data.static_partition import StaticPartition
from horovodlike.data.tasks import Batch, Task, cut_into_tasks

__all__ = [
    "AsyncDataLoaderMixin",
    "BaseDataLoader",
    "Batch",
    "DynamicPartition",
    "RecordBatch",
    "RecordReader",
    "RecordSet",
    "StaticPartition",
    "Task",
    "convert_images",
    "cut_into_tasks",
    "list_records",
]
