"""The state of a training script, which is equal on all ranks and must not be lost."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

from horovodlike import basics
from horovodlike._bootstrap import driver_client
from horovodlike._engine import metrics, ops
from horovodlike._net.object_seal import dumps
from horovodlike.elastic import _membership
from horovodlike.elastic._state_file import StateFile
from horovodlike.errors import HostsUpdatedInterrupt, StateFileError
from horovodlike.objects import broadcast_object, highest

__all__ = ["ObjectState", "State", "check_results"]

# The bit of Horovod's update_res for added hosts: 1 removed, 2 added, 3 both.
_ADDED = 2

_MOST_RANKS = 1 << 24

# Horovod's states have no method of these names, and nothing here calls it by name.
_MAY_BE_HIDDEN = ("persist",)


class State:
    """A state that is saved at each commit, restored to the last commit when the job breaks, and sent to new ranks.

    A subclass implements :meth:`save`, :meth:`restore` and :meth:`sync`, and may adapt other things to the number of
    ranks in :meth:`reset`. The thread that trains calls all of these. Apart from Horovod's methods and :meth:`persist`,
    all attributes of the state itself are private, so that a script may use any other name.

    Args:
        bcast_object: ``bcast_object(obj, root_rank=0, name=None)``, which returns the root's object on all ranks.
        get_rank: Returns this process's rank.
    """

    # How many commits this state has seen, on this rank or on the ranks that it was taken from. A subclass saves and
    # restores the number with the rest, and takes the root's in sync().
    _commits: int

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int]) -> None:
        self._commits = 0
        self._bcast_object = bcast_object
        self._get_rank = get_rank
        self._reset_callbacks: list[Callable[[], Any]] = []
        self._updates = 0
        self._file: StateFile | None = None
        self._write_failed = False  # since the ranks have last agreed on changes
        self._saved_commit = 0  # the last commit that save() has copied whole

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Have functions called, in the order of registration, each time the job has restarted with other ranks.

        A collective in them must be one that a new rank's script calls between ``init()`` and the wrapped function.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Call :meth:`reset` and then the registered functions; called when the job has restarted."""
        self._updates = 0
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Note that the hosts have changed; all ranks act upon that at the next commit. Callable from any thread.

        hvdrun notifies its workers itself; this is for scripts that learn of changes in another way.

        Args:
            timestamp: Not used.
            update_res: 1 hosts were removed, 2 added, 3 both.
        """
        del timestamp
        self._updates |= int(update_res)

    def commit(self) -> None:
        """Save the state in memory on all ranks, and act upon changes of the job's members.

        Collective. When this has returned on any rank, the state is saved on all of them, and on disk as well with
        :meth:`persist`. If it cannot be written there, rank 0 warns, all ranks count this in ``metrics()`` as
        ``failed_writes``, and the training continues.

        Raises:
            HostsUpdatedInterrupt: The members of the job change; all ranks raise it at the same commit.
            HorovodInternalError: The job is broken; the state may be saved on some ranks only.
            SystemExit: This worker has been asked to leave (status 0); or any rank of a job without a driver (143). If
                the commit is not on disk either, the status is 75.
        """
        self._commits += 1
        self.save()
        self._saved_commit = self._commits
        if self._file is not None and self._file.is_due(self._commits):
            self._write_commit()
        basics.reach_fault_point("commit")
        self.check_host_updates()
        basics.reach_fault_point("step", self._commits)

    def check_host_updates(self) -> None:
        """Act upon changes of the job's members as :meth:`commit` does, but without saving the state."""
        failed, self._write_failed = self._write_failed, False
        agreed = _membership.agree_on_changes(bool(self._updates), bool(self._updates & _ADDED), failed)
        metrics.failed_writes += agreed.write_failed
        worker = driver_client.current()
        if worker is not None:
            worker.commits += 1
        if agreed.goes_on:
            return
        self._write_commit()  # in case all ranks have been asked to leave
        if agreed.leaves:
            self._leave()
        raise HostsUpdatedInterrupt(skip_sync=not agreed.adds)

    def _elect_root(self) -> int:
        """Return the rank whose state the others take: the lowest of those with the most commits. Collective.

        Raises:
            HorovodInternalError: The job is broken.
        """
        return _elect(self._commits)[1]

    def persist(self, path: str, every: int = 1) -> None:
        """Write commits to disk as well, so that a new job can continue after all processes of this one have died.

        Call this on all ranks, before the function that :func:`run` has wrapped. Rank 0 writes the file before
        :meth:`commit` returns on any rank, unless it cannot be written. When the members of the job change, it also
        writes the commit with which the training begins again, though it may not be due. If no rank has seen a commit
        when the wrapped function begins, each rank looks for the file, and the state with the most commits is used. The
        file is not removed when the training ends: remove it to start from the beginning.

        Args:
            path: The file, in a folder that rank 0 of a later job can read as well. It is replaced as a whole, so it
                always has a complete commit. It is a pickle, and reading it runs code that its writer chose: it must
                belong to the user (or to root) and be writable by no other user. It is created with mode 0600.
            every: Write each commit (1), each second one (2) and so on.

        Raises:
            ValueError: ``every`` is less than 1, or the folder does not exist.
        """
        self._file = StateFile(path, every)

    def _write_commit(self) -> None:
        """On rank 0, write the last commit to the file of :meth:`persist`, unless this process has written it last.

        :func:`run` calls it before it calls the training function again: the state at a generation's start is on disk.
        """
        file = self._file
        if file is None or self._get_rank() != 0 or file.written == self._commits:
            return
        saved = self._saved_to_bytes()
        try:
            file.write(self._commits, saved)
        except OSError as error:  # the others wait for this rank in the next agreement, which tells them
            self._write_failed = True
            print(f"horovodlike warning: commit {self._commits} is in memory only: {error}", file=sys.stderr)

    def _resume(self) -> None:
        """Take the state from disk if a rank has a file. Collective; :func:`run` calls it if no rank has seen a commit.

        Afterwards the rank that has read the file has the most commits, so that :meth:`sync` takes its state.

        Raises:
            StateFileError: The file is incomplete, is no state, is of another model, or can be written by other users.
        """
        here = 0 if self._file is None else self._file.commits()
        commits, reader = _elect(here)
        if commits and basics.rank() == reader:
            assert self._file is not None
            self._commits, saved = self._file.read()
            try:
                self._saved_from_bytes(saved)
                self.restore()
            except Exception as error:
                raise StateFileError(
                    f"the state in {self._file.path} does not fit this script: {error}. Resume with the script that "
                    "wrote it, or remove the file to start from the beginning"
                ) from error

    @contextlib.contextmanager
    def _departure(self) -> Iterator[None]:
        """Take SIGTERM as a notice in the ``with`` block; after a notice, an exception has this rank leave.

        Rank 0 writes the last commit when an exception ends its training, even without a notice: the same signal may
        have reached the processes of a data loader first.
        """
        preemption, is_alone = _membership.preemption(), driver_client.current() is None
        if is_alone and self._file is None:  # its commits do not outlive the job
            yield
            return
        with preemption.expected(lambda: "this rank leaves at the next commit, as SIGTERM has asked" + self._on_disk()):
            try:
                yield
            except BaseException as error:
                is_whole = self._saved_commit == self._commits
                if is_whole and basics.is_initialized():
                    with contextlib.suppress(Exception):  # the message below names the commit on disk
                        if self._file is None or self._file.commits() <= self._commits:  # not over newer work
                            self._write_commit()
                if preemption.noted and not isinstance(error, SystemExit):
                    self._leave(error)
                if said := self._on_disk():
                    print(f"{type(error).__name__} ends the training{said}", file=sys.stderr)
                raise
            if preemption.noted and (said := self._on_disk()):
                print(f"the training has ended{said}; nothing newer is lost", file=sys.stderr)

    def _leave(self, error: BaseException | None = None) -> NoReturn:
        """Leave the job because of SIGTERM, after a commit of all ranks or because of an error.

        Raises:
            SystemExit: Always; with status 75 if newer work than the commit on disk is lost, else 0 with a driver, 143
                without one.
        """
        worker, on_disk = driver_client.current(), self._on_disk()
        is_lost = error is not None or (bool(on_disk) and not on_disk.startswith(f"; commit {self._commits} is"))
        words = on_disk and on_disk + ("; newer work is lost" if is_lost else "; nothing newer is lost")
        if error is not None:
            words = f", after {' '.join(''.join(traceback.format_exception_only(error)).split())[:200]}{words}"
        if worker is None and error is None:
            with contextlib.suppress(Exception):  # of a data loader, too, whose processes the same signal has ended
                _membership.wait_for_all()  # a rank that is gone ends the others, and one of them writes the file
        basics.shutdown(error)
        if worker is not None:
            worker.leave(words, os.EX_TEMPFAIL if is_lost else 0)
        print(f"this rank leaves, as SIGTERM has asked{words}", file=sys.stderr)
        raise SystemExit(os.EX_TEMPFAIL if is_lost else 128 + signal.SIGTERM)

    def _on_disk(self) -> str:
        """Return which commit is on disk, to end a line; "" on ranks other than 0, which may not see the file."""
        if self._file is None or not basics.is_initialized() or basics.rank() != 0:
            return ""
        commits = 0
        with contextlib.suppress(StateFileError):
            commits = self._file.commits()
        return f"; commit {commits} is on disk" if commits else "; no commit is on disk"

    def save(self) -> None:
        """Copy the state in memory; later changes of the state do not affect the copy."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to the state that was saved last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Take the state of the rank that :meth:`_elect_root` returns, and save it. Collective."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt to another number of ranks, before :meth:`sync`."""

    def _saved_to_bytes(self) -> bytes:
        """Return the copies that :meth:`save` has made, for :meth:`persist`."""
        raise NotImplementedError(f"{type(self).__name__} cannot be persisted: it has no _saved_to_bytes()")

    def _saved_from_bytes(self, saved: bytes) -> None:
        """Replace the copies that :meth:`save` has made, so that :meth:`restore` goes back to ``saved``."""
        raise NotImplementedError(f"{type(self).__name__} cannot be resumed: it has no _saved_from_bytes()")


def check_results() -> None:
    """Raise an error if the job has ended; call it between copying computed values and saving them.

    If the job breaks, a collective on a GPU ends without a result, and without an error if the framework has not waited
    for it. But the engine knows that the job is broken before a value that the GPU computes from it can be read.

    Raises:
        HorovodInternalError: The job has ended, so the values may be wrong.
    """
    ended = ops.has_ended()
    if ended is not None:
        raise ended


def _elect(commits: int) -> tuple[int, int]:
    """Return the most commits of any rank, and the lowest rank that has them."""
    (most,) = highest("horovodlike.elastic.root", [commits * _MOST_RANKS + (_MOST_RANKS - 1 - basics.rank())])
    return most // _MOST_RANKS, _MOST_RANKS - 1 - most % _MOST_RANKS


class ObjectState(State):
    """A state of attributes: ``ObjectState(epoch=0, losses=[])`` has ``state.epoch`` and ``state.losses``.

    All values are saved as one deep copy, and sent as one pickle.

    Args:
        bcast_object: As for :class:`State`; horovodlike's own if None.
        get_rank: As for :class:`State`; horovodlike's own if None.
        **kwargs: The attributes. Others that are set later are not part of the state. One that is called ``persist``
            hides the method, which is ``ObjectState.persist(state, path)`` then.

    Raises:
        ValueError: A name is another method's, or is private.
    """

    def __init__(
        self,
        bcast_object: Callable[..., Any] | None = None,
        get_rank: Callable[[], int] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(bcast_object or broadcast_object, get_rank or basics.rank)
        self._names: tuple[str, ...] = ()
        self._saved: dict[str, Any] = {}
        for name in kwargs:
            if hasattr(self, name) and name not in _MAY_BE_HIDDEN:
                raise ValueError(f"an attribute of {type(self).__name__} cannot be called {name!r}: it has one already")
        self._names = tuple(kwargs)
        self._take(kwargs)
        ObjectState.save(self)  # not the save() of a subclass, whose __init__() has not ended yet

    def _values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._names}

    def _take(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)

    def save(self) -> None:
        self._saved = copy.deepcopy({"commits": self._commits, "values": self._values()})

    def restore(self) -> None:
        saved = copy.deepcopy(self._saved)
        self._commits = saved["commits"]
        self._take(saved["values"])

    def sync(self) -> None:
        root = self._elect_root()
        mine = {"commits": self._commits, "values": self._values()} if basics.rank() == root else None
        roots = self._bcast_object(mine, root_rank=root, name="horovodlike.elastic.state")
        self._commits = roots["commits"]
        self._take(roots["values"])
        self.save()

    def _saved_to_bytes(self) -> bytes:
        """Return a pickle of the attributes that were saved last."""
        return dumps(self._saved)

    def _saved_from_bytes(self, saved: bytes) -> None:
        """Replace the attributes that were saved last by the pickle's attributes."""
        self._saved = pickle.loads(saved)
