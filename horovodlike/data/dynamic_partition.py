"""The partition that assigns the data of an epoch to the ranks while the epoch runs."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from operator import index
from typing import Any, Literal, get_args

from horovodlike.data.sharding import RangeAssigner, Ranges, Step
from horovodlike.data.tasks import (
    Batch,
    Stream,
    check_batch_size,
    check_epoch,
    check_place,
    checked_tasks,
    current_place,
    ordered,
)

__all__ = ["DynamicPartition"]

Record = Literal["auto", "manual"]


class DynamicPartition:
    """A partition that assigns tasks to ranks that step together, and records the samples that any rank has done.

    Every sample of an epoch is committed exactly once, although ranks come and go between two steps. No messages are
    needed: each rank takes one batch in each step, so every rank knows which samples all others have read.

    A rank leases a task and reads it from its start to its end; then it takes the next task. When none is left, it
    takes half of the longest range that another rank still has to read. So all batches are full except in the
    last step, whose numbers of samples differ by one at most. A batch of that step may be empty
    (``len(batch) == 0``), and is yielded too: **all ranks take the same number of steps**. With an empty batch a rank
    takes part in the step with a gradient of zero. If gradients are weighted by samples, their sum over all ranks
    (``op=hvd.Sum``) is the mean over the step's samples::

        for batch in partition:
            loss = mean_loss(model, read(batch)) if batch else 0.0 * sum(p.sum() for p in model.parameters())
            (loss * (len(batch) / batch.total)).backward()
            optimizer.step()
            state.commit()  # after the step

    *When is a batch done?* With ``record="auto"``, a batch is done when the next one is asked for, or when
    :meth:`state_dict` is called, as a commit does in the body of the loop: commit after the step, never between taking
    a batch and training with it. With ``record="manual"``, for loaders that ask for batches ahead, the oldest batch is
    done when :meth:`record` is called, once for each step.

    *In elastic training*, make the partition part of the committed state: with :meth:`state_dict` and
    :meth:`load_state_dict`, or as an attribute of an ``ObjectState``. Such a state copies and pickles it, so iterate
    over ``state.partition``, which is another object after a restore. After a change of ranks, begin a new iteration,
    as a training function does when it is called again. Assigned samples that are not done are assigned again.

    Thread-safe: one thread may iterate and others call the other methods.

    Args:
        tasks: ``Task`` objects or tuples ``(source, start, end)``; the same on all ranks. Empty tasks are ignored.
        batch_size: Samples of one rank's batch.
        seed: The seed of the order of tasks. Samples keep their order within a task.
        shuffle: False to keep the order of ``tasks`` in every epoch.
        record: ``"auto"`` or ``"manual"``.
        rank: The rank of this process; None for its rank in the job when an iteration begins. Needs ``size``.
        size: The number of ranks; needs ``rank``.

    Attributes:
        recording: The argument ``record``, which does not change.

    Raises:
        ValueError: An argument has a bad value.
    """

    recording: Record

    def __init__(
        self,
        tasks: Iterable[tuple[str | int, int, int]],
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        record: Record = "auto",
        *,
        rank: int | None = None,
        size: int | None = None,
    ) -> None:
        """Begin with epoch 0, in which no sample is done."""
        if record not in get_args(Record):
            raise ValueError(f"record must be one of {', '.join(get_args(Record))}, got {record!r}")
        self._tasks = checked_tasks(tasks)
        self._batch_size = check_batch_size(batch_size)
        self._seed, self._shuffle, self.recording = seed, shuffle, record
        self._place = check_place(rank, size)
        described = json.dumps([self._tasks, seed, shuffle])
        self._digest = hashlib.sha256(described.encode()).hexdigest()[:16]
        self._lock = threading.Lock()  # guards the attributes below
        self._assigner: RangeAssigner | None  # of the current iteration
        self._assigned: deque[Step]  # steps whose batches were yielded and are not done
        self._has_ended: bool
        self._begin_epoch(0)

    @property
    def epoch(self) -> int:
        """The current epoch."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch. If it is the current one, samples that are done stay done, so a resumed script may call this.

        Raises:
            ValueError: The epoch is negative.
        """
        check_epoch(epoch)
        with self._lock:
            if epoch != self._epoch:
                self._begin_epoch(epoch)
            else:
                self._give_back()

    def __len__(self) -> int:
        """Return the number of batches that the current iteration, or else the next one, has still to yield."""
        _, size = current_place(self._place)
        with self._lock:
            return (self._assigner or self._new_assigner(size)).steps_left

    def __iter__(self) -> Iterator[Batch]:
        """Yield this rank's batches of the samples that are left in the epoch.

        An iteration ends with the epoch, after the same step on all ranks. It becomes invalid when another iteration
        begins, and by :meth:`reset`, :meth:`load_state_dict` and :meth:`set_epoch`.

        Raises:
            RuntimeError: The epoch has been iterated to its end, and no other epoch was set; or the iteration has
                become invalid.
        """
        rank, size = current_place(self._place)
        with self._lock:
            if self._has_ended and not self._assigned:
                raise RuntimeError(
                    f"all batches of epoch {self._epoch} have been read: call set_epoch({self._epoch + 1}) first"
                )
            self._give_back()
            self._assigner = assigner = self._new_assigner(size)
        return self._iterate(assigner, rank)

    def _iterate(self, assigner: RangeAssigner, rank: int) -> Iterator[Batch]:
        while True:
            with self._lock:
                if self._assigner is not assigner:
                    raise RuntimeError("the partition has been reset, or another iteration has begun: begin a new one")
                if self.recording == "auto":
                    self._note_done()
                step = assigner.next_step()
                if step is None:
                    self._has_ended = True
                    return
                self._assigned.append(step)
                total = sum(end - begin for ranges in step for begin, end in ranges)
                batch = self._stream.batch(step[rank], total)
            yield batch

    def record(self) -> None:
        """Record that the step with the oldest batch not yet recorded has been taken; for ``record="manual"``.

        Raises:
            RuntimeError: All batches that were yielded are recorded; or ``record`` is ``"auto"``.
        """
        with self._lock:
            if self.recording != "manual":
                raise RuntimeError('batches are recorded by themselves: make the partition with record="manual"')
            if not self._assigned:
                raise RuntimeError("all batches that were yielded are recorded")
            self._note(self._assigned.popleft())

    def reset(self, rank: int | None = None, size: int | None = None) -> None:
        """Reassign the samples that are left, after a change of ranks. Samples that are done stay done.

        With ``record="auto"`` the last batch counts as done, because the step with it has been taken; if that step
        failed, call :meth:`load_state_dict`, which forgets that batch.

        Args:
            rank: The rank of this process from now on; None for no change. Needs ``size``.
            size: The number of ranks; needs ``rank``.

        Raises:
            ValueError: There is no such rank.
        """
        place = check_place(rank, size)
        with self._lock:
            self._place = place or self._place
            self._give_back()

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch and the samples that are done: small, valid as JSON, and independent of the number of ranks.

        With ``record="auto"`` the batch that was yielded last counts as done.
        """
        with self._lock:
            if self.recording == "auto":
                self._note_done()
            return {"epoch": self._epoch, "done": [list(each) for each in self._done.ranges], "data": self._digest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state that :meth:`state_dict` has returned, on any rank of a job of any size.

        The batch size may differ from the batch size of the partition which returned the state.

        Raises:
            ValueError: ``state`` is no such state, or is of a partition with other tasks, ``seed`` or ``shuffle``.
        """
        try:
            epoch = check_epoch(index(state["epoch"]))
            done = [(index(begin), index(end)) for begin, end in state["done"]]
            digest = state["data"]
        except (KeyError, TypeError, ValueError) as problem:
            raise ValueError(f"this is no state of a DynamicPartition: {problem!r}") from problem
        if digest != self._digest:
            raise ValueError("the state is that of a DynamicPartition with other tasks, seed or shuffle")
        bounds = [0, *(bound for each in done for bound in each), self._stream.length]
        if bounds != sorted(bounds):
            raise ValueError(f"what the state calls done is not within 0 to {self._stream.length}, in ascending order")
        with self._lock:
            self._begin_epoch(epoch)
            self._begin_what_is_left(done)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickles and copies, which do not have the current iteration."""
        return {name: getattr(self, name) for name in _KEPT} | {"state": self.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore as :meth:`load_state_dict` does."""
        own = state.pop("state")
        vars(self).update(state)
        self._lock = threading.Lock()
        self._begin_epoch(0)
        self.load_state_dict(own)

    def __deepcopy__(self, memo: dict[int, Any]) -> DynamicPartition:
        """Copy as pickle does, but share constant members, because states are copied at each commit."""
        state = self.state_dict()
        other = DynamicPartition.__new__(type(self))
        with self._lock:
            vars(other).update({name: getattr(self, name) for name in (*_KEPT, "_epoch", "_stream")})
        other._lock = threading.Lock()
        other._begin_what_is_left(state["done"])
        return other

    # The methods below are called with the lock held.

    def _begin_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._stream = Stream(ordered(self._tasks, seed=self._seed, epoch=epoch, shuffle=self._shuffle))
        self._begin_what_is_left(())

    def _begin_what_is_left(self, done: Iterable[Sequence[int]]) -> None:
        self._done = Ranges((begin, end) for begin, end in done if begin < end)
        self._assigned = deque()
        self._assigner = None
        self._has_ended = False

    def _new_assigner(self, size: int) -> RangeAssigner:
        gaps = self._done.gaps(self._stream.length)
        queue = [each for begin, end in gaps for each in self._stream.cut(begin, end)]
        return RangeAssigner(queue, size, self._batch_size)

    def _note(self, step: Step) -> None:
        for ranges in step:
            for begin, end in ranges:
                self._done.add(begin, end)

    def _note_done(self) -> None:
        while self._assigned:
            self._note(self._assigned.popleft())

    def _give_back(self) -> None:
        if self.recording == "auto":
            self._note_done()
        self._assigned.clear()
        self._assigner = None
        self._has_ended = False


_KEPT = ("_tasks", "_batch_size", "_seed", "_shuffle", "recording", "_place", "_digest")
