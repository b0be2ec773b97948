"""Records of a data set in files: they become the tasks of a partition, and are read ahead of the training.

* :func:`list_records`: the files, or the folder of labelled images, as a :class:`RecordSet`, which has the tasks
* :class:`RecordReader`: reads the batches of a partition in a background thread
* :func:`convert_images`: makes shards of a folder of labelled images; the command ``hvdrun-records``

A format is a subclass of :class:`~horovodlike.data.records.source.RecordFile`, and its library is imported when the
first file of that format is opened.
"""

from horovodlike.data.records.convert import convert_images
from horovodlike.data.records.listing import RecordSet, list_records
from horovodlike.data.records.reader import RecordBatch, RecordReader

__all__ = ["RecordBatch", "RecordReader", "RecordSet", "convert_images", "list_records"]
