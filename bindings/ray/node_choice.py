"""The nodes that an elastic job uses: which run workers, how many, and which must leave it. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Node", "Snapshot", "Taken", "seconds_to_leave"]

_LEAVE_SECONDS = 30.0
_SHORTEST_LEAVE_SECONDS = 5.0
_LONGEST_LEAVE_SECONDS = 300.0
_SPARE_SECONDS = 2.0
"""The part of Ray's deadline for a node that is kept for the actor itself to end."""


@dataclass(frozen=True)
class Node:
    """A node that is alive.

    Attributes:
        name: Its id.
        address: Its address, which other nodes may have, too.
        free: How many more workers its free resources hold.
        is_sure: Whether that number has been the same for long enough to be relied on.
        is_draining: Whether Ray is about to take it away.
    """

    name: str
    address: str
    free: int
    is_sure: bool = True
    is_draining: bool = False


@dataclass(frozen=True)
class Taken:
    """The slots of an actor of the job.

    Attributes:
        node: The id of its node.
        slots: How many workers it holds.
        leaves: Whether it has been told to leave.
    """

    node: str
    slots: int
    leaves: bool = False


@dataclass(frozen=True)
class Snapshot:
    """The cluster and the job at the time when nodes are chosen.

    Attributes:
        nodes: The nodes that are alive.
        taken: The nodes, or parts of them, that the job uses.
        least: The fewest workers.
        most: The most workers; None for as many as there is room for.
        limits: The most workers of each address; None for any number on any node.
        resting: The nodes that run no workers for now.
    """

    nodes: Sequence[Node]
    taken: Sequence[Taken]
    least: int
    most: int | None = None
    limits: Mapping[str, int] | None = None
    resting: Collection[str] = ()

    @property
    def slots(self) -> int:
        """The number of workers that the job has room for, on nodes that stay."""
        unwanted = self._unwanted()
        return sum(each.slots for each in self.taken if not each.leaves and each.node not in unwanted)

    def leaving(self) -> set[str]:
        """Return the nodes that must leave: Ray drains them, or they are not among the limits any more."""
        unwanted = self._unwanted()
        return {each.node for each in self.taken if each.node in unwanted and not each.leaves}

    def starts(self) -> dict[str, int]:
        """Return the slots with which actors must be started, by node.

        Another actor starts on a node that has one only while workers are missing: a job that runs is not disturbed.
        """
        address = {node.name: node.address for node in self.nodes}
        used = Counter[str | None]()
        for each in self.taken:
            used[address.get(each.node)] += each.slots
        has_actor = {each.node for each in self.taken}
        slots, found = self.slots, dict[str, int]()
        for node in sorted(self._wanted(), key=lambda node: node.name in has_actor):
            is_needed = node.name not in has_actor or slots < self.least
            if not is_needed or not node.is_sure or node.name in self.resting:
                continue
            room = node.free
            if self.limits is not None:
                room = min(room, self.limits[node.address] - used[node.address])
            if self.most is not None:
                room = min(room, self.most - slots)
            if room > 0:
                found[node.name] = room
                used[node.address] += room
                slots += room
        return found

    def is_hopeless(self, refused: Collection[str]) -> bool:
        """Return whether a job that no node has joined yet can give up: all that could have room have refused.

        Args:
            refused: The nodes that have refused to take part.
        """
        nodes = [node for node in self._wanted() if node.free or not node.is_sure or node.name in refused]
        return not self.taken and bool(nodes) and all(node.name in refused for node in nodes)

    def _wanted(self) -> list[Node]:
        unwanted = self._unwanted()
        return [node for node in self.nodes if node.name not in unwanted]

    def _unwanted(self) -> set[str]:
        limits = self.limits
        return {
            node.name
            for node in self.nodes
            if node.is_draining or (limits is not None and limits.get(node.address, 0) < 1)
        }


def seconds_to_leave(deadline_ms: int, now: float) -> float:
    """Return how long the workers of a node may take to commit and exit.

    Args:
        deadline_ms: When Ray takes the node away, in milliseconds since 1970; 0 if it does not say.
        now: The time, in seconds since 1970.
    """
    left = deadline_ms / 1000 - now - _SPARE_SECONDS if deadline_ms else _LEAVE_SECONDS
    return round(min(max(left, _SHORTEST_LEAVE_SECONDS), _LONGEST_LEAVE_SECONDS))
