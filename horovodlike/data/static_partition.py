"""The partition that assigns the data of an epoch to the ranks before the epoch begins."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, Literal, get_args

from horovodlike.data.tasks import (
    Batch,
    Stream,
    Task,
    check_batch_size,
    check_epoch,
    check_place,
    checked_tasks,
    current_place,
    ordered,
)

__all__ = ["StaticPartition"]

Tail = Literal["join", "drop", "pad"]


class StaticPartition:
    """A partition that assigns whole tasks to the ranks in turn, and yields this rank's batches.

    Every rank computes its own share, without messages. Tasks are read from start to end; only their order is shuffled,
    differently in each epoch. A batch may contain the end of one task and the beginning of the next.

    If the tasks do not divide evenly, ranks have different numbers of samples. ``tail`` says what happens then:

    * ``"join"``: each rank yields all its samples. Ranks may take different numbers of steps: those that are done call
      ``hvd.join()``. The last batch may be short.
    * ``"drop"``: all ranks yield as many full batches as the rank with the fewest samples has. The other samples are
      not read in this epoch.
    * ``"pad"``: all ranks yield as many full batches as the rank with the most samples needs. The others read their
      samples again from the beginning, or, if they have none, the first samples of the epoch.

    *To resume within an epoch*, load a :meth:`state_dict`. A batch is done when the next one is asked for, or when
    :meth:`state_dict` is called; a ``RecordReader``, which reads ahead, counts the batches that its loop has received.

    Not thread-safe.

    Args:
        tasks: ``Task`` objects or tuples ``(source, start, end)``; the same on all ranks. Empty tasks are ignored.
        batch_size: Samples of one rank's batch.
        seed: The seed of the order of tasks.
        shuffle: False to keep the order of ``tasks`` in every epoch.
        tail: What happens if ranks have different numbers of samples.
        rank: The rank of this process; None for its rank in the job when an iteration begins. Needs ``size``.
        size: The number of ranks; needs ``rank``.

    Raises:
        ValueError: An argument has a bad value.
    """

    def __init__(
        self,
        tasks: Iterable[tuple[str | int, int, int]],
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        tail: Tail = "join",
        *,
        rank: int | None = None,
        size: int | None = None,
    ) -> None:
        """Begin with epoch 0."""
        if tail not in get_args(Tail):
            raise ValueError(f"tail must be one of {', '.join(get_args(Tail))}, got {tail!r}")
        self._tasks = checked_tasks(tasks)
        self._batch_size = check_batch_size(batch_size)
        self._seed, self._shuffle, self._tail = seed, shuffle, tail
        self._place = check_place(rank, size)
        self._data = zlib.crc32(repr([self._tasks, batch_size, seed, shuffle, tail]).encode())
        self._progress = {"epoch": 0, "done": 0, "size": 0}  # of the last iteration: batches that are done, ranks
        self._start = 0  # how many batches the next iteration skips

    @property
    def epoch(self) -> int:
        """The epoch of the next iteration."""
        return self._progress["epoch"]

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iterations. An iteration that has begun continues with its own epoch.

        If it is the current one, a state that was loaded stays, so a resumed script may call this.

        Raises:
            ValueError: The epoch is negative.
        """
        if check_epoch(epoch) != self.epoch:
            self._progress, self._start = {"epoch": epoch, "done": 0, "size": 0}, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch and how many batches are done, the one that was yielded last included; valid as JSON."""
        return {**self._progress, "data": self._data}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have the next iteration continue from a state that :meth:`state_dict` has returned, on any rank.

        Raises:
            ValueError: ``state`` is no such state, or is of a partition with other arguments.
        """
        if state.get("data") != self._data:
            raise ValueError("the state is of no StaticPartition with these tasks, batch_size, seed, shuffle and tail")
        self._progress = {name: state[name] for name in self._progress}
        self._start = self._progress["done"]

    def __len__(self) -> int:
        """Return the number of batches that the next iteration yields on this rank."""
        rank, size = current_place(self._place)
        return len(self._steps(self._shares(size), rank))

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches of this rank, or those that are left after :meth:`load_state_dict`.

        Raises:
            ValueError: Another number of ranks has begun the epoch.
        """
        return map(self._count, self._batches())

    def _count(self, batch: Any) -> Any:
        self._progress["done"] += 1
        return batch

    def _batches(self) -> Iterator[Batch]:
        """Begin an iteration of which the caller counts the batches."""
        rank, size = current_place(self._place)
        shares = self._shares(size)
        stream = shares[rank]
        steps = self._steps(shares, rank)
        num_batches = steps.stop
        self._progress, self._start = {"epoch": self.epoch, "done": self._start, "size": size}, 0
        if self._tail == "pad":
            again = list(stream.tasks) or self._order()
            repetitions = math.ceil(num_batches * self._batch_size / max(Stream(again).length, 1))
            stream = Stream([*stream.tasks, *again * repetitions])
        return (stream.batch([self._range(step, stream)], self._total(step, shares)) for step in steps)

    def _steps(self, shares: list[Stream], rank: int) -> range:
        if self._start and len(shares) != (before := self._progress["size"]):
            raise ValueError(
                f"{before} ranks have begun epoch {self.epoch}, and {len(shares)} cannot continue it: use {before}, "
                "begin another epoch, or use a DynamicPartition"
            )
        return range(self._start, self._num_batches(shares, rank))

    def _range(self, step: int, stream: Stream) -> tuple[int, int]:
        begin = min(step * self._batch_size, stream.length)
        return begin, min(begin + self._batch_size, stream.length)

    def _total(self, step: int, shares: list[Stream]) -> int:
        if self._tail == "pad":
            return self._batch_size * len(shares)
        ranges = [self._range(step, share) for share in shares]
        return sum(end - begin for begin, end in ranges)

    def _order(self) -> list[Task]:
        return ordered(self._tasks, seed=self._seed, epoch=self.epoch, shuffle=self._shuffle)

    def _shares(self, size: int) -> list[Stream]:
        """Return the samples of each rank, by rank."""
        order = self._order()
        return [Stream(order[rank::size]) for rank in range(size)]

    def _num_batches(self, shares: list[Stream], rank: int) -> int:
        if self._tail == "join":
            return math.ceil(shares[rank].length / self._batch_size)
        if self._tail == "drop":
            return min(share.length for share in shares) // self._batch_size
        return math.ceil(max(share.length for share in shares) / self._batch_size)
