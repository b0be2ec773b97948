"""Columns of Arrow as NumPy arrays, and the batches of a rank from Parquet files."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from horovodlike.data import AsyncDataLoaderMixin, BaseDataLoader, StaticPartition

if TYPE_CHECKING:
    import numpy as np

    from horovodlike.spark.store import Store

Arrays = dict[str, "np.ndarray[Any, Any]"]
Transformation = Callable[[Arrays], Arrays]

_TASKS_PER_RANK = 8
_VECTOR = {"type", "size", "indices", "values"}


@dataclass(frozen=True)
class Shards:
    """Parquet files with the number of rows in each of their row groups. Can be pickled."""

    store: Store
    rows: Mapping[str, tuple[int, ...]]

    @classmethod
    def scan(cls, store: Store, path: str) -> Shards:
        """Read the footers of all Parquet files in a folder.

        Raises:
            ValueError: There are no rows.
        """
        import pyarrow.parquet

        filesystem, rows = store.filesystem(), {}
        for name in store.parquet_files(path):
            with filesystem.open(name, "rb") as file:
                metadata = pyarrow.parquet.ParquetFile(file).metadata
                rows[name] = tuple(metadata.row_group(group).num_rows for group in range(metadata.num_row_groups))
        found = cls(store, rows)
        if not len(found):
            raise ValueError(f"{path} has no rows in Parquet files")
        return found

    def __len__(self) -> int:
        return sum(map(sum, self.rows.values()))

    def tasks(self, size: int) -> list[tuple[str, int, int]]:
        """Return the rows as tasks, each within a row group, of a length that ``size`` ranks can share evenly."""
        longest = max(1, math.ceil(len(self) / (size * _TASKS_PER_RANK)))
        tasks = []
        for name, groups in self.rows.items():
            first = 0
            for rows in groups:
                tasks += [
                    (name, start, min(start + longest, first + rows)) for start in range(first, first + rows, longest)
                ]
                first += rows
        return tasks


@dataclass
class Batches(AsyncDataLoaderMixin, BaseDataLoader):
    """The batches of this rank as NumPy arrays by column, read ahead by a thread. Not thread-safe.

    Args:
        shards: The files.
        columns: The columns to read.
        batch_size: The rows of a batch.
        rank: This process's rank.
        size: The number of ranks.
        seed: The seed of the order; None to keep the order of the files.
        steps: The batches of an epoch; None for all. With more, the rank's rows are read again, if it has any.
        transformation: Applied to each batch, or None.
        keep: Keep all rows of this rank in memory after they were read once.
        pad: Give all ranks the same number of full batches; otherwise each row comes once, and ranks may differ.
    """

    shards: Shards
    columns: Sequence[str]
    batch_size: int
    rank: int
    size: int
    seed: int | None = None
    steps: int | None = None
    transformation: Transformation | None = None
    keep: bool = False
    pad: bool = True
    _epoch_number: int = 0
    _kept: dict[tuple[str, int], Arrays] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        """Make the partition; nothing is read yet."""
        super().__init__(async_loader_queue_size=2)
        self._partition = StaticPartition(
            self.shards.tasks(self.size),
            self.batch_size,
            seed=self.seed or 0,
            shuffle=self.seed is not None,
            tail="pad" if self.pad else "join",
            rank=self.rank,
            size=self.size,
        )

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        return len(self._partition) if self.steps is None else self.steps

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, which determines the order."""
        self._epoch_number = epoch

    def _iterate(self) -> Iterator[Arrays]:
        if self.steps is None:
            yield from self._once(self._epoch_number)
            return
        left = self.steps
        while left > 0:
            before = left
            for batch in self._once(self._epoch_number):
                yield batch
                left -= 1
                if not left:
                    return
            if left == before:
                return  # this rank has no rows; with pad=True each one has some

    def _once(self, epoch: int) -> Iterator[Arrays]:
        import numpy as np

        self._partition.set_epoch(epoch)
        last: tuple[tuple[str, int], Arrays] | None = None
        for batch in self._partition:
            parts: list[Arrays] = []
            for task in batch.ranges:
                source, start, end = str(task.source), task.start, task.end
                while start < end:
                    group, first, until = self._group(source, start)
                    if last is None or last[0] != (source, group):
                        last = (source, group), self._read(source, group, epoch)
                    stop = min(end, until)
                    parts.append({name: array[start - first : stop - first] for name, array in last[1].items()})
                    start = stop
            if parts:
                whole = {name: np.concatenate([part[name] for part in parts]) for name in self.columns}
                yield whole if self.transformation is None else self.transformation(whole)

    def _group(self, source: str, row: int) -> tuple[int, int, int]:
        first = 0
        for number, rows in enumerate(self.shards.rows[source]):
            if row < first + rows:
                return number, first, first + rows
            first += rows
        raise IndexError(row)

    def _read(self, source: str, group: int, epoch: int) -> Arrays:
        """Return the columns of a row group, in the order of this epoch."""
        import numpy as np
        import pyarrow.parquet

        arrays = self._kept.get((source, group))
        if arrays is None:
            with self.shards.store.filesystem().open(source, "rb") as file:
                table = pyarrow.parquet.ParquetFile(file).read_row_group(group, columns=list(self.columns))
            arrays = {name: to_numpy(table.column(name), name) for name in self.columns}
            if self.keep:
                self._kept[source, group] = arrays
        if self.seed is None:
            return arrays
        number = sorted(self.shards.rows).index(source)
        rows = self.shards.rows[source][group]
        order = np.random.default_rng((self.seed, epoch, number, group)).permutation(rows)
        return {name: array[order] for name, array in arrays.items()}


def to_numpy(column: Any, name: str) -> np.ndarray[Any, Any]:
    """Return a column of Arrow: ``[n]``, or ``[n, k]`` for lists, nested ones flattened, and for vectors of Spark.

    64-bit floats become 32-bit ones.

    Raises:
        ValueError: The column has nulls, or lists of different lengths.
        TypeError: The column has no numbers.
    """
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    rows = len(array)
    if array.null_count:
        raise ValueError(f"column {name!r} has {array.null_count} nulls in {rows} rows: fill or drop them before")
    if pa.types.is_struct(array.type) and {each.name for each in array.type} == _VECTOR:
        found = np.stack([_vector(row) for row in array.to_pylist()]) if rows else np.zeros((0, 0), np.float32)
    else:
        depth = 0
        while pa.types.is_list(array.type) or pa.types.is_large_list(array.type) or _is_fixed(array.type):
            if len(pc.unique(pc.list_value_length(array))) > 1:
                raise ValueError(f"column {name!r} has lists of different lengths")
            array = array.flatten()
            depth += 1
        if array.null_count or not (pa.types.is_primitive(array.type) or pa.types.is_boolean(array.type)):
            raise TypeError(f"column {name!r} is of {column.type}, and only numbers and lists of numbers can be used")
        found = array.to_numpy(zero_copy_only=False)
        found = found.reshape(rows, -1) if depth and rows else found
    return found.astype(np.float32) if found.dtype == np.float64 else found


def _is_fixed(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_fixed_size_list(kind))


def _vector(row: dict[str, Any]) -> np.ndarray[Any, Any]:
    import numpy as np

    if row["type"] == 1:
        return np.asarray(row["values"], np.float32)
    dense = np.zeros(row["size"], np.float32)
    dense[row["indices"]] = row["values"]
    return dense
