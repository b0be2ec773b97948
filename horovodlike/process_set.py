"""Process sets: sets of ranks that run collectives among themselves.

A set that has been registered on all ranks can be given to every operation. Operations on sets that have no rank in
common run at the same time. Names belong to a set: operations of the same name may be in flight on several sets.
"""

from __future__ import annotations

import hashlib
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from horovodlike import basics
from horovodlike._engine import ops
from horovodlike._engine.mpi_communicators import is_communicator, ranks_of
from horovodlike._engine.ops import Kind, Request
from horovodlike.errors import MismatchError

__all__ = ["ProcessSet", "add_process_set", "global_process_set", "remove_process_set"]


class ProcessSet:
    """A set of ranks that take part in a collective together.

    Args:
        ranks: Global ranks, in any order and without repetition; or an mpi4py communicator of ranks of the job.

    Attributes:
        process_set_id: The number of the set in the job; None while the set is not registered.
        ranks: The global ranks in ascending order; None for the global set before `init()`.
        mpi_comm: The communicator from which the set was made, or None. It is not used for communication.

    Raises:
        ValueError: An entry is no integer, is negative, or occurs twice; or MPI did not start the ranks of the job.
    """

    process_set_id: int | None
    mpi_comm: Any
    _ranks: list[int] | None

    def __init__(self, ranks: Iterable[int] | Any) -> None:
        """Describe a set; it has no id until it is registered with the job."""
        self.mpi_comm = ranks if is_communicator(ranks) else None
        if self.mpi_comm is not None:
            ranks = ranks_of(self.mpi_comm)
        try:
            chosen = sorted(operator.index(rank) for rank in ranks)
        except TypeError as error:
            raise ValueError(f"a process set is made of integer ranks, not of {ranks!r}") from error
        if len(set(chosen)) != len(chosen) or (chosen and chosen[0] < 0):
            raise ValueError(f"the ranks of a process set must be different and not negative, got {chosen}")
        self.process_set_id = None
        self._ranks = chosen

    @property
    def ranks(self) -> list[int] | None:
        """The global ranks in ascending order; None for the global set before `init()`."""
        return self._ranks

    def size(self) -> int | None:
        """Return the number of ranks in the set; None while the set is not registered."""
        return None if self.process_set_id is None or self.ranks is None else len(self.ranks)

    def rank(self) -> int | None:
        """Return this process's index in the set; None while the set is not registered.

        Raises:
            ValueError: This process is not in the set.
        """
        ranks = self.ranks
        if self.process_set_id is None or ranks is None:
            return None
        if basics.rank() not in ranks:
            raise ValueError(f"rank {basics.rank()} is not in {self!r}")
        return ranks.index(basics.rank())

    def included(self) -> bool | None:
        """Return whether this process is in the set; None for the global set before `init()`."""
        return None if self.ranks is None else basics.rank() in self.ranks

    def __deepcopy__(self, memo: dict[int, object]) -> ProcessSet:
        """Return the set itself, so that a copied model whose layers have a process set uses the registered set."""
        return self

    def __reduce__(self) -> tuple[Callable[..., ProcessSet], tuple[object, ...]]:
        """Pickle the ranks without the id, which another job may have given to another set."""
        return _of_ranks, (self.ranks,)

    def __repr__(self) -> str:
        """Return a text with id and ranks, and with the communicator if there is one."""
        communicator = "" if self.mpi_comm is None else f", mpi_comm={self.mpi_comm}"
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}{communicator})"

    def __str__(self) -> str:
        """Return the same text as Horovod, which names the communicator in any case."""
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"


def _of_ranks(ranks: list[int]) -> ProcessSet:
    """Return the set of these ranks that is registered here; a new one if there is none."""
    return find(ranks) or ProcessSet(ranks)


class _GlobalProcessSet(ProcessSet):
    """All ranks of the job; after another ``init()`` it has the ranks of the new job."""

    def __init__(self) -> None:
        super().__init__(())
        self.process_set_id = 0

    def __reduce__(self) -> str:  # type: ignore[override]
        """Have copies and pickles become the object `global_process_set` of the process that reads them."""
        return "global_process_set"

    @property
    def ranks(self) -> list[int] | None:
        return list(range(basics.size())) if basics.is_initialized() else None


global_process_set: ProcessSet = _GlobalProcessSet()

_registered: dict[int, ProcessSet] = {}  # by id, without the global set
_registrations: dict[int, int] = {}  # by id, see registration()
_of_all_ranks: list[ProcessSet] = []  # other sets with the id of the global set, see register()
_on_added: list[Callable[[int], None]] = []
_on_removed: list[Callable[[int], None]] = []
_counters: list[UnnamedCounter] = []
joined_sets: set[int] = set()  # ids of the sets whose ranks have called join(): they may have made different calls


def _forget_all() -> None:
    joined_sets.clear()
    _registrations.clear()
    while _registered:
        _registered.popitem()[1].process_set_id = None
    while _of_all_ranks:
        _of_all_ranks.pop().process_set_id = None


basics.on_shutdown(_forget_all)
basics.on_shutdown(ops.forget_interrupted)
basics.on_init(lambda _: _forget_all())


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Register a process set with the job, so that operations can use it.

    All ranks of the job have to call this with the same set, and make all changes of process sets in the same order.
    One thread at a time.

    Args:
        process_set: The set, or its ranks.

    Returns:
        The set, which now has an id. Ids of removed sets are reused.

    Raises:
        ValueError: The ranks are not valid, a registered set has the same ranks, or `init()` has not been called.
        HorovodInternalError: The ranks disagree about the set, or the job is broken or shut down.
    """
    chosen = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    if chosen.process_set_id is not None:
        raise ValueError(f"{chosen!r} is registered already")
    basics.size()  # raises before init()
    request = Request(Kind.ADD_PROCESS_SET, "add_process_set", [], arguments=chosen.ranks or [])
    (output,) = ops.carry_out_once(request, tuple(chosen.ranks or ()))
    process_set_id = int.from_bytes(output.memory[:], "little")
    _registered[process_set_id] = chosen
    _registrations[process_set_id] = 1 + max(_registrations.values(), default=0)
    joined_sets.discard(process_set_id)
    chosen.process_set_id = process_set_id
    for notify in _on_added:
        notify(process_set_id)
    return chosen


def add_by_members(ranks: Sequence[int]) -> int:
    """Register a set by calls on its members only, and return its id; for bindings. Other ranks do nothing.

    The set is separate from sets of `add_process_set`, even from one with the same ranks. It stays until the job ends.

    Args:
        ranks: The members, ascending; this rank is one of them.

    Raises:
        ValueError: The ranks are not valid, or this rank is not one of them.
        HorovodInternalError: The ranks disagree about the set, or the job is broken or shut down.
    """
    # Each list of ranks has a name of its own, since the coordinator waits for the ranks of a name's first request.
    name = f"add_process_set.by_members.{hashlib.sha256(str(list(ranks)).encode()).hexdigest()}"
    request = Request(Kind.ADD_PROCESS_SET, name, [], arguments=ranks, root_rank=ranks[0])
    (output,) = ops.carry_out_once(request, tuple(ranks))
    return int.from_bytes(output.memory[:], "little")


def on_added(notify: Callable[[int], None]) -> None:
    """Have ``notify`` called with the id of each set that is registered; for bindings."""
    _on_added.append(notify)


def on_removed(notify: Callable[[int], None]) -> None:
    """Have ``notify`` called with the id of each set that `remove_process_set` has removed; for bindings."""
    _on_removed.append(notify)


class UnnamedCounter:
    """Counts the unnamed operations of each process set; the members of a set make them in the same order.

    It begins with 0 in each job, since some of the ranks may be new, and when an id is given to another set.
    """

    def __init__(self) -> None:
        self._numbers: dict[int, Iterator[int]] = {}
        _counters.append(self)
        basics.on_init(lambda _: self._numbers.clear())
        on_added(self.forget)

    def next(self, set_id: int) -> int:
        """Return the number of the next operation. Any thread."""
        return next(self._numbers.setdefault(set_id, itertools.count()))

    def take_back(self, set_id: int, number: int) -> None:
        """Give ``number`` to the next operation: the one that had it was refused on this rank, and never sent."""
        self._numbers[set_id] = itertools.count(number)

    def forget(self, set_id: int) -> None:
        """Begin with 0 again for this set."""
        self._numbers.pop(set_id, None)


def forget_numbers(set_id: int) -> None:
    """Have all counters of a set begin with 0 again after a join, as its ranks may have made different calls."""
    for counter in _counters:
        counter.forget(set_id)
    joined_sets.add(set_id)


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set from the job. All ranks of the job have to call this. One thread at a time.

    Operations in flight on the set fail. The object can be registered again.

    Returns:
        False, having done nothing, if the set is the global one or is not registered.

    Raises:
        TypeError: The argument is no process set.
        HorovodInternalError: The ranks disagree about the set, or the job is broken or shut down.
    """
    if not isinstance(process_set, ProcessSet):
        raise TypeError(f"process_set must be a ProcessSet, got {process_set!r}")
    process_set_id = process_set.process_set_id
    if process_set is global_process_set or process_set_id is None:
        return False
    if process_set_id == 0:  # has all ranks, see register()
        _of_all_ranks.remove(process_set)
        process_set.process_set_id = None
        return True
    request = Request(Kind.REMOVE_PROCESS_SET, "remove_process_set", [], arguments=[process_set_id])
    ops.carry_out_once(request, process_set_id)
    del _registered[process_set_id]
    process_set.process_set_id = None
    for notify in _on_removed:
        notify(process_set_id)
    return True


def register(process_sets: Sequence[ProcessSet]) -> None:
    """Add the process sets that were given to `init()`.

    An entry may be made of communicators that `Split` returned, each rank having its own part's: all parts become
    sets, and the object on each rank is the one that the rank is in.

    In an elastic job, a set is left out if it has a rank that the job does not have at the moment; a set of all current
    ranks receives the id of the global set.

    Raises:
        ValueError: A set cannot be registered; the message says which.
    """
    for index, process_set in enumerate(process_sets):
        try:
            chosen = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
            if basics.is_elastic() and chosen.ranks == global_process_set.ranks:
                chosen.process_set_id = 0
                _of_all_ranks.append(chosen)
            elif not basics.is_elastic() or set(chosen.ranks or ()) <= set(global_process_set.ranks or ()):
                _add_one_or_parts(chosen)
        except (ValueError, MismatchError) as error:
            raise ValueError(f"init() could not register entry number {index} of process_sets: {error}") from error


def _add_one_or_parts(chosen: ProcessSet) -> None:
    """Add a set that all ranks describe alike, or the parts if each rank describes its own by a communicator.

    What the ranks tell each other for that is not authenticated; changed, it is an error of one of the calls.
    """
    try:
        add_process_set(chosen)
        return
    except MismatchError:
        ranks = range(basics.size())
        by_communicator = chosen.mpi_comm is not None and set(chosen.ranks or ()) <= set(ranks)
        own = bytes([by_communicator, *(rank in (chosen.ranks or ()) for rank in ranks)])
        gathered = ops.allgather_bytes("add_process_set.parts", own)
        rows = [gathered[start : start + len(own)] for start in range(0, len(gathered), len(own))]
        parts = [[rank for rank in ranks if row[1 + rank]] for row in rows]
        are_parts = all(rank in part and part == parts[part[0]] for rank, part in enumerate(parts))
        if not are_parts or not all(row[0] for row in rows):
            raise
    for rank, part in enumerate(parts):
        if rank == part[0]:
            add_process_set(chosen if part == chosen.ranks else ProcessSet(part))


basics.on_process_sets(register)


def ids_and_ranks() -> dict[int, list[int]]:
    """Return the ranks of all registered sets and of the global set, by id."""
    basics.size()  # raises before init()
    return {set_id: members(set_id) for set_id in (0, *sorted(_registered))}


def members(process_set_id: int) -> list[int]:
    """Return the ranks of a registered set, ascending."""
    ranks = (_registered[process_set_id] if process_set_id else global_process_set).ranks
    assert ranks is not None
    return ranks


def registration(process_set_id: int) -> int:
    """Return the number of the registration that gave a set its id. Unlike the id, this number is never reused.

    Equal on all ranks. 0 for the global set.
    """
    return _registrations.get(process_set_id, 0)


def find(ranks: Iterable[int]) -> ProcessSet | None:
    """Return the registered set of these ranks, or None; the global set is not one of those."""
    chosen = sorted(ranks)
    return next((one for one in _registered.values() if one.ranks == chosen), None)


def registered_of(ranks: Sequence[int]) -> ProcessSet:
    """Return the registered set of these ranks.

    Raises:
        ValueError: No such set is registered.
    """
    if (found := find(ranks)) is not None:
        return found
    chosen = sorted(ranks)
    raise ValueError(
        f"no process set of the ranks {chosen} is registered: call hvd.add_process_set({chosen}) on all ranks first"
    )


def check_registered(process_set: ProcessSet) -> int:
    """Return the id of a registered set; this rank does not need to be a member.

    Raises:
        TypeError: The argument is no process set.
        ValueError: The set is not registered.
    """
    if not isinstance(process_set, ProcessSet):
        raise TypeError(f"process_set must be a ProcessSet, got {process_set!r}")
    if process_set.process_set_id is None:
        raise ValueError(f"{process_set!r} is not registered: call hvd.add_process_set() with it on all ranks first")
    return process_set.process_set_id


def registered_id(process_set: ProcessSet) -> int:
    """Return the id of a registered set of which this rank is a member.

    Raises:
        TypeError: The argument is no process set.
        ValueError: The set is not registered, or this rank is no member.
    """
    if process_set is global_process_set:
        return 0
    process_set_id = check_registered(process_set)
    if not process_set.included():
        raise ValueError(f"rank {basics.rank()} is not a member of {process_set!r}")
    return process_set_id
