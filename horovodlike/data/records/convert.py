"""Shards of a folder of labelled images."""

from __future__ import annotations

import fcntl
import io
import itertools
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from horovodlike.data.records.images import ImageFolder
from horovodlike.data.records.listing import LABELS_FILE, list_records
from horovodlike.data.records.source import damage, library

__all__ = ["convert_images"]

_LOCK = "_lock"
"""The file that a process has locked while it writes to a folder; readers ignore it because of its name."""

_ROW_GROUP = 256
"""The images of a row group, which a reader has in memory at once."""


def convert_images(
    images: str | os.PathLike[str],
    output: str | os.PathLike[str],
    records_per_shard: int = 4096,
    shuffle: bool = False,
    seed: int = 0,
    on_progress: Callable[[int, int], object] = lambda done, total: None,
) -> list[Path]:
    """Write the images of a folder, which has a folder for each label, to Parquet files with checksums.

    The same images, options and version of PyArrow make the same bytes. The files have the columns ``image`` (the bytes
    of the image's file), ``label`` (the number of the label, in the order of names) and ``name``; beside them is
    ``_labels.json``, the list of the labels' names. The output appears at once, when all is written: until then it is
    in a folder beside it, ``.out.partial`` for ``out``, which is removed after an error. If the process is killed, the
    next one with the same output uses that folder again.

    Args:
        images: The folder.
        output: The folder to be made. It may exist if it is empty.
        records_per_shard: The images of each file but the last.
        shuffle: Write the images in an order drawn from ``seed``, instead of by label and name. Partitions
            shuffle tasks, not the records within a task.
        seed: The seed of the order.
        on_progress: Called with the number of images that are written, and of all images.

    Returns:
        The files.

    Raises:
        DamagedRecordsError: An image cannot be decoded.
        FileExistsError: The output exists and is not an empty folder, or another process is writing it.
        ImportError: PyArrow or Pillow is not installed.
        OSError: The images cannot be read, or the output cannot be written: for instance, the disk is full.
        ValueError: There are no labelled images, or ``records_per_shard`` is not positive.
    """
    if records_per_shard < 1:
        raise ValueError(f"records_per_shard must be at least 1, got {records_per_shard}")
    for module in ("pyarrow.parquet", "PIL.Image"):
        library(module, "converting images")
    target = _checked_output(Path(images).resolve(), Path(output).resolve())
    records = list_records(images)
    if any(source.format is not ImageFolder for source in records.sources):
        raise ValueError(f"{os.fspath(images)} has no folders of images, one for each label")
    folders = [(ImageFolder(source), len(source)) for source in records.sources]
    order = [(folder, number) for folder, length in folders for number in range(length)]
    if shuffle:
        random.Random(seed).shuffle(order)
    count = -(-len(order) // records_per_shard)
    names = [f"images-{number:05}-of-{count:05}.parquet" for number in range(count)]
    with _all_or_nothing(target) as folder:
        for number, name in enumerate(names):
            begin = number * records_per_shard
            shard = order[begin : begin + records_per_shard]
            for written in _write_shard(folder / name, shard):
                on_progress(begin + written, len(order))
        with open(folder / LABELS_FILE, "x") as file:
            json.dump(records.labels, file)
            _sync(file)
    return [Path(output) / name for name in names]


def _checked_output(images: Path, output: Path) -> Path:
    if output.is_relative_to(images):
        raise ValueError(f"the output {output} is in the folder of the images, {images}: give one beside it")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise FileExistsError(f"the output {output} exists and is not an empty folder: remove it, or give another")
    if not output.parent.is_dir():
        raise FileNotFoundError(f"the output {output} cannot be made, since {output.parent} does not exist")
    return output


@contextmanager
def _all_or_nothing(target: Path) -> Iterator[Path]:
    """Give an empty folder, which becomes the target in the end, or is removed after an error.

    If a process that was killed has left the folder, it is emptied and used again.
    """
    folder = target.with_name(f".{target.name}.partial")
    folder.mkdir(exist_ok=True)
    with _locked(folder / _LOCK, target):
        try:
            for left in folder.iterdir():
                if left.name != _LOCK:
                    left.unlink()
            yield folder
            _sync_folder(folder)
            folder.rename(target)  # fails if the target is not empty by now
        except BaseException as error:
            shutil.rmtree(folder)
            if isinstance(error, OSError) and error.filename is None:  # from a write, which does not know its file
                raise OSError(error.errno, f"{error.strerror}, so nothing was written", str(target)) from error
            raise
        (target / _LOCK).unlink()
    _sync_folder(target.parent)


@contextmanager
def _locked(path: Path, target: Path) -> Iterator[None]:
    """Hold a lock on a file, which is made if it does not exist; the lock ends with the process."""
    with open(path, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_free = os.path.samestat(os.fstat(file.fileno()), os.stat(path))  # False: its writer has just ended
        except (BlockingIOError, FileNotFoundError):
            is_free = False
        if not is_free:
            raise FileExistsError(f"another process is writing the output {target}: wait for it, or give another")
        yield


def _write_shard(path: Path, images: Sequence[tuple[ImageFolder, int]]) -> Iterator[int]:
    """Write a shard; yield how many images are written after each row group."""
    pyarrow, parquet = (library(name, "writing shards") for name in ("pyarrow", "pyarrow.parquet"))
    types = {"image": pyarrow.binary(), "label": pyarrow.int64(), "name": pyarrow.string()}
    schema = pyarrow.schema(list(types.items()))
    options = {"compression": "none", "use_dictionary": False, "write_page_checksum": True, "store_schema": False}
    rest = iter(images)
    written = 0
    with open(path, "xb") as file:
        with parquet.ParquetWriter(file, schema, **options) as writer:
            while group := list(itertools.islice(rest, _ROW_GROUP)):
                rows = [_checked_image(folder, number) for folder, number in group]
                writer.write_table(pyarrow.Table.from_pylist(rows, schema=schema), row_group_size=_ROW_GROUP)
                written += len(rows)
                yield written
        _sync(file)


def _checked_image(folder: ImageFolder, number: int) -> Any:
    """Return the record of an image after Pillow has decoded it."""
    image = library("PIL.Image", "converting images")
    (record,) = folder.read(number, number + 1)
    with damage(
        folder.path_of(number), number, number + 1, Exception
    ):  # Pillow's decoders raise errors of many classes
        image.open(io.BytesIO(record["image"])).load()
    return record


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
