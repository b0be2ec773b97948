"""Communicators of mpi4py, which scripts may give in place of lists of ranks. MPI moves no data here."""

from __future__ import annotations

import operator
import os
from typing import Any

from horovodlike._bootstrap.environment import find_rank_info

__all__ = ["check_comm", "is_communicator", "ranks_of"]


def is_communicator(given: Any) -> bool:
    """Return whether an object is a communicator of mpi4py; does not import mpi4py."""
    return hasattr(given, "Get_group")


def ranks_of(communicator: Any) -> list[int]:
    """Return the ranks of the job that a communicator of mpi4py has, in the communicator's order.

    Raises:
        ValueError: MPI did not start the job's ranks, or the communicator is null or has a process that is no rank.
    """
    from mpi4py import MPI

    place, world = find_rank_info(os.environ), MPI.COMM_WORLD
    if (world.Get_rank(), world.Get_size()) != (place.rank, place.size):
        raise ValueError(
            f"a communicator says nothing about this job: in MPI.COMM_WORLD this process is rank {world.Get_rank()} of "
            f"{world.Get_size()}, in the job rank {place.rank} of {place.size}. Give a list of ranks, or start the "
            "job with mpirun"
        )
    if communicator == MPI.COMM_NULL:
        raise ValueError("the communicator is MPI.COMM_NULL, which has no ranks: on this rank, give a list of ranks")
    group, all_ranks = communicator.Get_group(), world.Get_group()
    ranks: list[int] = MPI.Group.Translate_ranks(group, list(range(group.Get_size())), all_ranks)
    group.Free()
    all_ranks.Free()
    if MPI.UNDEFINED in ranks:
        raise ValueError("the communicator has a process that is not in MPI.COMM_WORLD, and so is no rank of the job")
    return ranks


def check_comm(comm: Any) -> None:
    """Make sure that an argument stands for all ranks: None, an empty list, or a list or communicator of all.

    Raises:
        NotImplementedError: Ranks are missing, or in another order.
        ValueError: The argument is neither a list of ranks of the job nor a communicator.
    """
    if comm is None:
        return
    if is_communicator(comm):
        ranks = ranks_of(comm)
    else:
        try:
            ranks = [operator.index(rank) for rank in comm]
        except TypeError:
            raise ValueError(f"comm must be a list of ranks or a communicator of mpi4py, got {comm!r}") from None
    size = find_rank_info(os.environ).size
    if len(set(ranks)) != len(ranks) or not all(0 <= rank < size for rank in ranks):
        raise ValueError(f"comm must be different ranks from 0 to {size - 1}, got {ranks}")
    if ranks and ranks != list(range(size)):
        raise NotImplementedError(
            f"init(comm=...) with ranks {ranks} is not supported: a job has all {size} ranks, in their order. Leave "
            f"comm out, and give hvd.ProcessSet({sorted(ranks)}) to init(process_sets=[...]) and then to each operation"
        )
