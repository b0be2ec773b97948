"""Hierarchies: process sets that are made from keys of the ranks, such as the names of nodes, in levels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, TypeAlias

from horovodlike import basics
from horovodlike._engine.arguments import reduce_op
from horovodlike.arrays.functions import allgather_object, allreduce, broadcast
from horovodlike.arrays.memory import check_averages, describe
from horovodlike.basics import Adasum, Average, Sum
from horovodlike.errors import UnsupportedReductionError
from horovodlike.process_set import ProcessSet, add_process_set, find, global_process_set, remove_process_set

__all__ = ["Hierarchy", "Level"]

Ranks: TypeAlias = tuple[int, ...]


class Layout(NamedTuple):
    """The groups of one level, for all ranks.

    Attributes:
        groups: The ranks with the same keys down to this level; by their first rank within each group of the level
            above.
        across: If the level is cartesian, the ranks at the same place in the groups of one group of the level above;
            else the first ranks of these groups.
        is_cartesian: True if groups that belong to the same group of the level above have the same size.
    """

    groups: tuple[Ranks, ...]
    across: tuple[Ranks, ...]
    is_cartesian: bool


def layouts(keys: Sequence[Sequence[str]]) -> list[Layout]:
    """Return the layout of each level, the outermost first.

    Args:
        keys: The keys of each rank, by level; as many on each rank.
    """
    parents: tuple[Ranks, ...] = (tuple(range(len(keys))),)
    found = []
    for level in range(len(keys[0])):
        families = [_partition(parent, [keys[rank][level] for rank in parent]) for parent in parents]
        is_cartesian = all(len({len(group) for group in family}) == 1 for family in families)
        across: list[Ranks] = []
        for family in families:
            across += zip(*family, strict=True) if is_cartesian else [tuple(group[0] for group in family)]
        parents = tuple(group for family in families for group in family)
        found.append(Layout(parents, tuple(across), is_cartesian))
    return found


def _partition(ranks: Ranks, keys: Sequence[str]) -> list[Ranks]:
    """Return the ranks with the same key together, by the first rank of each group."""
    groups: dict[str, list[int]] = {}
    for rank, key in zip(ranks, keys, strict=True):
        groups.setdefault(key, []).append(rank)
    return [tuple(group) for group in groups.values()]


@dataclass(frozen=True)
class Level:
    """One level of a hierarchy, as this rank sees it.

    Attributes:
        name: The keys of this rank down to this level, as in ``"rack 2/node 7"``.
        intra: The ranks with the same keys.
        inter: The ranks at this rank's place in the groups of this level, if the level is cartesian. Else the first
            ranks of the groups, and None on all other ranks. In both cases only of groups that have the keys of the
            levels above in common.
        is_cartesian: True if the groups have the same size; only groups within the same group of the level above are
            compared.
    """

    name: str
    intra: ProcessSet
    inter: ProcessSet | None
    is_cartesian: bool


class Hierarchy:
    """Process sets by keys: ranks with the same key form a group, and the groups are connected with each other.

    A further key divides each of the groups. All ranks of the job make a hierarchy together, with as many keys. A set
    that is registered already is used; all others are registered, and `remove`, or the end of a ``with`` block, takes
    them out of the job. After another `init()`, as in an elastic job, make a new hierarchy. One thread at a time.

    Args:
        keys: The keys of this rank, the outermost level first: strings or integers.

    Attributes:
        levels: The levels, the outermost first.

    Raises:
        ValueError: A rank has no keys, another number of them, or a key that is neither a string nor an integer.
        HorovodInternalError: The job is broken or shut down.
    """

    levels: tuple[Level, ...]

    def __init__(self, *keys: str | int) -> None:
        """Register the sets. A collective call of all ranks of the job."""
        self._added: list[ProcessSet] = []
        of_all = _checked(allgather_object([f"{key}" if isinstance(key, (str, int)) else key for key in keys]))
        rank = basics.rank()
        levels = []
        for depth, layout in enumerate(layouts(of_all), start=1):
            sets = {ranks: self._set_of(ranks) for ranks in (*layout.groups, *layout.across)}
            intra = next(sets[ranks] for ranks in layout.groups if rank in ranks)
            inter = next((sets[ranks] for ranks in layout.across if rank in ranks), None)
            levels.append(Level("/".join(of_all[rank][:depth]), intra, inter, layout.is_cartesian))
        self.levels = tuple(levels)

    def _set_of(self, ranks: Ranks) -> ProcessSet:
        if len(ranks) == basics.size():
            return global_process_set
        if (registered := find(ranks)) is not None:
            return registered
        self._added.append(add_process_set(ranks))
        return self._added[-1]

    @property
    def intra(self) -> ProcessSet:
        """The ranks with the same keys on all levels."""
        return self.levels[-1].intra

    @property
    def inter(self) -> ProcessSet | None:
        """`Level.inter` of the innermost level."""
        return self.levels[-1].inter

    @property
    def is_cartesian(self) -> bool:
        """True if all levels are cartesian."""
        return all(level.is_cartesian for level in self.levels)

    def allreduce(self, array: Any, name: str | None = None, op: int | None = None) -> Any:
        """Reduce an array over all ranks, level by level, and return the result as a new array.

        First the ranks of each innermost group reduce it, then the groups of each level, from the innermost on.
        Floating-point results may differ in their last bits from results of `horovodlike.allreduce`, which takes care
        of the hosts itself and is faster. Any thread.

        Args:
            array: As for `horovodlike.allreduce`.
            name: As for `horovodlike.allreduce`.
            op: Average, Sum, Min, Max or Product; None as for `horovodlike.allreduce`.

        Raises:
            UnsupportedReductionError: `op` is Adasum.
            HorovodInternalError: The ranks disagree, or the job is broken or shut down.
            TypeError: `array` is not an array.
            ValueError: An argument cannot be used, or the sets have been removed.
        """
        if op is None:
            check_averages([describe(array, "Hierarchy.allreduce").dtype], "Hierarchy.allreduce")
            op = Average
        reduce_op(op, "allreduce", adasum=True)
        if op == Adasum:
            raise UnsupportedReductionError("Hierarchy.allreduce: Adasum is not a reduction by levels; use Average")
        step, scale = (Sum, 1 / basics.size()) if op == Average else (op, 1.0)
        value = allreduce(array, name, step, process_set=self.intra)
        for level in reversed(self.levels):
            postscale = scale if level is self.levels[0] else 1.0
            if level.inter is not None:
                value = allreduce(value, name, step, postscale_factor=postscale, process_set=level.inter)
            if not level.is_cartesian:
                value = broadcast(value, _first(level.intra), name, process_set=level.intra)
        return value

    def remove(self) -> None:
        """Take the sets that this hierarchy has registered out of the job. A collective call of all ranks of the job.

        Raises:
            HorovodInternalError: The job is broken or shut down.
        """
        while self._added:
            remove_process_set(self._added.pop())

    def __enter__(self) -> Hierarchy:
        """Return the hierarchy."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Remove the sets, unless an exception leaves the block: other ranks may not come to its end then."""
        if kind is None:
            self.remove()


def _first(process_set: ProcessSet) -> int:
    assert process_set.ranks is not None
    return process_set.ranks[0]


def _checked(keys: Sequence[Sequence[Any]]) -> Sequence[Sequence[str]]:
    """Return the keys of all ranks, by rank. All ranks raise the same error.

    Raises:
        ValueError: They cannot be used.
    """
    for rank, of_rank in enumerate(keys):
        if not of_rank:
            raise ValueError(f"Hierarchy: rank {rank} has given no key; give each rank one key for each level")
        if len(of_rank) != len(keys[0]):
            raise ValueError(
                f"Hierarchy: rank {rank} has given {len(of_rank)} keys, and rank 0 {len(keys[0])}: all ranks must give "
                "one key for each level"
            )
        for key in of_rank:
            if not isinstance(key, str):
                raise ValueError(f"Hierarchy: rank {rank} has given the key {key!r}; keys are strings or integers")
    return keys
