"""Tasks, batches of their samples, and the order in which an epoch goes through them."""

from __future__ import annotations

import bisect
import itertools
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import NamedTuple

__all__ = ["Batch", "Stream", "Task", "cut_into_tasks"]


class Task(NamedTuple):
    """The samples ``start`` to ``end - 1`` of a source, such as a file. Unpacks as the tuple of its three attributes.

    Attributes:
        source: The name or number of the source from which the samples are read.
        start: The first sample.
        end: The sample after the last.
    """

    source: str | int
    start: int
    end: int


@dataclass(frozen=True)
class Batch:
    """The samples that one rank reads for one step; ``len()`` is their number.

    An empty batch is false: the rank has nothing to read, and takes part in the step because others have samples
    (:class:`DynamicPartition` says how).

    Attributes:
        ranges: Ranges of samples, to be read in this order.
        total: The number of samples that all ranks together read for this step.
    """

    ranges: tuple[Task, ...]
    total: int

    def __len__(self) -> int:
        """Return the number of samples."""
        return sum(task.end - task.start for task in self.ranges)

    def samples(self) -> Iterator[tuple[str | int, int]]:
        """Yield ``(source, index)`` of each sample."""
        for source, start, end in self.ranges:
            for sample in range(start, end):
                yield source, sample


def cut_into_tasks(
    sources: Mapping[str, int] | Mapping[int, int] | Iterable[tuple[str | int, int]], samples_per_task: int
) -> list[Task]:
    """Cut sources into tasks of ``samples_per_task`` samples each; the last task of a source may have fewer.

    Args:
        sources: The number of samples of each source: a mapping, or pairs ``(source, samples)``.
        samples_per_task: The size of a task. A rank reads a task from its start to its end, so long tasks suit files;
            short tasks are shuffled better.

    Raises:
        ValueError: A number of samples is negative, or ``samples_per_task`` is not positive.
    """
    if samples_per_task < 1:
        raise ValueError(f"samples_per_task must be at least 1, got {samples_per_task}")
    tasks: list[Task] = []
    for source, samples in sources.items() if isinstance(sources, Mapping) else sources:
        if samples < 0:
            raise ValueError(f"source {source!r} has {samples} samples; it must be 0 or more")
        starts = range(0, samples, samples_per_task)
        tasks.extend(Task(source, start, min(start + samples_per_task, samples)) for start in starts)
    return tasks


class Stream:
    """The samples of consecutive tasks as one sequence: an epoch's, or one rank's. Positions: 0 to ``length - 1``."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        """Compute the position at which each task starts."""
        self.tasks = tasks
        self.starts = [0, *itertools.accumulate(task.end - task.start for task in tasks)]
        self.length = self.starts.pop()

    def cut(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the positions ``begin`` to ``end - 1`` as ranges that lie within one task each."""
        number = bisect.bisect_right(self.starts, begin) - 1
        while begin < end:
            task = self.tasks[number]
            until = min(end, self.starts[number] + task.end - task.start)
            if begin < until:
                yield begin, until
            begin, number = until, number + 1

    def batch(self, ranges: Iterable[tuple[int, int]], total: int) -> Batch:
        """Return the batch at these positions; ranges that follow one another in a source become one."""
        found: list[Task] = []
        for begin, end in itertools.chain.from_iterable(itertools.starmap(self.cut, ranges)):
            number = bisect.bisect_right(self.starts, begin) - 1
            source, first, _ = self.tasks[number]
            start = first + begin - self.starts[number]
            piece = Task(source, start, start + end - begin)
            if found and (found[-1].source, found[-1].end) == (source, start):
                piece = Task(source, found.pop().start, piece.end)
            found.append(piece)
        return Batch(tuple(found), total)


def checked_tasks(tasks: Iterable[tuple[str | int, int, int]]) -> tuple[Task, ...]:
    """Return the tasks without the empty ones.

    Raises:
        ValueError: A task is not a valid range of samples.
    """
    checked = []
    task: Task | None
    for number, given in enumerate(tasks):
        try:
            source, start, end = given
            task = Task(source, index(start), index(end))
        except (TypeError, ValueError):
            task = None
        if task is None or not 0 <= task.start <= task.end:
            raise ValueError(f"task {number} is {given!r}; it must be (source, start, end) with 0 <= start <= end")
        if not isinstance(task.source, (str, int)):
            raise ValueError(f"task {number} has the source {task.source!r}; it must be a string or an integer")
        checked.append(task)
    return tuple(task for task in checked if task.start < task.end)


def ordered(tasks: Sequence[Task], *, seed: int, epoch: int, shuffle: bool) -> list[Task]:
    """Return the tasks in the order of an epoch: the same for the same arguments, on every rank."""
    order = list(tasks)
    if shuffle:
        random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


RankAndSize = tuple[int, int]


def check_place(rank: int | None, size: int | None) -> RankAndSize | None:
    """Return ``(rank, size)``, or None if neither is given.

    Raises:
        ValueError: Only one is given, or there is no such rank.
    """
    if rank is None and size is None:
        return None
    if rank is None or size is None:
        raise ValueError("give both rank and size, or neither of them: then they are those of the job")
    if not 0 <= rank < size:
        raise ValueError(f"there is no rank {rank} among {size}")
    return rank, size


def current_place(place: RankAndSize | None) -> RankAndSize:
    """Return ``place``, or if that is None, this process's rank and the size of the job.

    Raises:
        NotInitializedError: ``place`` is None, and ``init()`` has not been called.
    """
    if place is not None:
        return place
    from horovodlike import basics

    return basics.rank(), basics.size()


def check_batch_size(batch_size: int) -> int:
    """Return the batch size.

    Raises:
        ValueError: It is not positive.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    return batch_size


def check_epoch(epoch: int) -> int:
    """Return the epoch.

    Raises:
        ValueError: It is negative.
    """
    if epoch < 0:
        raise ValueError(f"epoch must be 0 or more, got {epoch}")
    return epoch
