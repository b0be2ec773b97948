"""Process sets: which ranks take part in a collective.

This release runs every collective on the global set, which holds all ranks. Others can be described already, and are
refused where they would be used.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

from horovodlike import basics


class ProcessSet:
    """A set of ranks that take part in a collective together.

    Args:
        ranks: Global ranks, in any order and without repetition.

    Raises:
        ValueError: An entry is no integer, is negative, or occurs twice.
    """

    process_set_id: int | None
    _ranks: list[int] | None

    def __init__(self, ranks: Iterable[int]) -> None:
        """Describe a set; it has no id until it is registered with the job."""
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
        """Number of ranks in the set; None while the set is not registered."""
        return None if self.process_set_id is None or self.ranks is None else len(self.ranks)

    def rank(self) -> int | None:
        """This process's place in the set; None while the set is not registered.

        Raises:
            ValueError: This process is not in the set.
        """
        ranks = self.ranks
        if self.process_set_id is None or ranks is None:
            return None
        if basics.rank() not in ranks:
            raise ValueError(f"rank {basics.rank()} is not in {self}")
        return ranks.index(basics.rank())

    def included(self) -> bool | None:
        """Whether this process is in the set; None for the global set before `init()`."""
        return None if self.ranks is None else basics.rank() in self.ranks

    def __repr__(self) -> str:
        """Id and ranks."""
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


class _GlobalProcessSet(ProcessSet):
    """All ranks of the job. Its ranks follow the job through shut-down and initialisation with another size."""

    def __init__(self) -> None:
        super().__init__(())
        self.process_set_id = 0

    @property
    def ranks(self) -> list[int] | None:
        return list(range(basics.size())) if basics.is_initialized() else None


global_process_set: ProcessSet = _GlobalProcessSet()


def registered_id(process_set: ProcessSet) -> int:
    """Return the id that the engine knows the set by.

    Raises:
        NotImplementedError: The set is not the global one.
        TypeError: It is no process set.
    """
    if process_set is global_process_set:
        return 0
    if not isinstance(process_set, ProcessSet):
        raise TypeError(f"process_set must be a ProcessSet, got {process_set!r}")
    raise NotImplementedError(
        f"{process_set} cannot be used: this release runs collectives on global_process_set, all ranks, only"
    )
