"""The table of hosts: which ranks share a host, from the facts that every rank reports about itself. Pure.

Ranks share a host if they have the same node name from the launcher (or the same ``HOROVODLIKE_HOSTID`` in its place),
kernel, process namespace and network namespace, and then succeed in sharing memory
(:mod:`horovodlike._bootstrap.shared_memory`). All ranks compute the same table. If it differs from the launcher's local
ranks, the table takes precedence.
"""

import contextlib
import os
import socket
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from horovodlike._bootstrap.environment import RankInfo
from horovodlike._bootstrap.rendezvous_state import name_ranks
from horovodlike.errors import RendezvousError


@dataclass(frozen=True)
class HostFacts:
    """The facts that a rank reports about where it runs.

    Attributes:
        node: The launcher's name for the host, or ``HOROVODLIKE_HOSTID``; None if there is neither.
        chosen: Whether ``node`` is ``HOROVODLIKE_HOSTID``.
        name: The name of the machine.
        boot: The kernel's boot id, which identifies the machine until it is restarted.
        pid_namespace: The namespace in which the process has its id.
        network_namespace: The namespace of its network interfaces.
        local_rank: The local rank according to the launcher.
        local_size: The local size according to the launcher.
    """

    node: str | None
    chosen: bool
    name: str
    boot: str
    pid_namespace: str
    network_namespace: str
    local_rank: int
    local_size: int

    @classmethod
    def collect(cls, place: RankInfo, *, chosen: bool) -> "HostFacts":
        """Collect the facts of this process."""
        return cls(
            place.node_id,
            chosen,
            socket.gethostname(),
            boot_id(),
            _namespace("pid"),
            _namespace("net"),
            place.local_rank,
            place.local_size,
        )

    def to_json(self) -> dict[str, Any]:
        """Return a JSON value for the other ranks; its fields are the constructor's arguments."""
        return asdict(self)

    @property
    def identity(self) -> tuple[str, ...]:
        """The facts that are equal on ranks that may share a host."""
        # A user who sets HOROVODLIKE_HOSTID may have given each rank a network namespace of its own.
        return self.node or "", self.boot, self.pid_namespace, "" if self.chosen else self.network_namespace


def boot_id() -> str:
    """Return the kernel's id of its current run, or an empty string if it has none."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()
    return ""


def _namespace(kind: str) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/self/ns/{kind}")
    return ""


@dataclass(frozen=True)
class HostTable:
    """The hosts of a job, numbered by their lowest ranks.

    Attributes:
        ranks: The ranks of each host in ascending order: the position of a rank is its local rank.
        facts: The facts that each rank reports, by rank.
    """

    ranks: tuple[tuple[int, ...], ...]
    facts: tuple[HostFacts, ...]

    @classmethod
    def of(cls, facts: Sequence[HostFacts]) -> "HostTable":
        """Return the table that follows from the facts alone, before ranks try to share memory.

        Raises:
            RendezvousError: The launcher gave ranks of a host the same local rank; the message names them.
        """
        groups: dict[tuple[str, ...], list[int]] = {}
        for rank, each in enumerate(facts):
            groups.setdefault(each.identity, []).append(rank)
        for group in groups.values():
            _check_local_ranks(facts, group)
        return cls(tuple(tuple(group) for group in groups.values()), tuple(facts))

    def divided(self, groups: Iterable[Iterable[int]]) -> "HostTable":
        """Return a table with the same facts whose hosts are these groups of ranks."""
        return replace(self, ranks=tuple(sorted(tuple(sorted(group)) for group in groups)))

    @property
    def hosts(self) -> list[int]:
        """The number of each rank's host, by rank."""
        number = {rank: host for host, group in enumerate(self.ranks) for rank in group}
        return [number[rank] for rank in range(len(self.facts))]

    @property
    def names(self) -> list[str]:
        """The name of each host for messages, by host; no two are equal."""
        found = [self.facts[group[0]].node or self.facts[group[0]].name for group in self.ranks]
        return [
            name if found.count(name) == 1 else f"{name} ({name_ranks(group)})"
            for name, group in zip(found, self.ranks, strict=True)
        ]

    def ranks_beside(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of this rank's host, including itself."""
        return next(group for group in self.ranks if rank in group)

    def place(self, place: RankInfo) -> RankInfo:
        """Return the rank info with local and cross ranks counted by this table."""
        group = self.ranks_beside(place.rank)
        local_rank = group.index(place.rank)
        across = [each for each in self.ranks if len(each) > local_rank]
        return replace(
            place,
            local_rank=local_rank,
            local_size=len(group),
            cross_rank=across.index(group),
            cross_size=len(across),
            is_homogeneous=len({len(each) for each in self.ranks}) == 1,
        )

    def surprises(self) -> list[str]:
        """Describe the ranks that the launcher put on one node, but that are on different hosts in this table."""
        found = []
        nodes: dict[str, list[int]] = {}
        for rank, facts in enumerate(self.facts):
            nodes.setdefault(facts.node or "", []).append(rank)
        for node, ranks in nodes.items():
            hosts = sorted({self.ranks_beside(rank) for rank in ranks})
            if all(self.facts[rank].local_size == len(group) for group in hosts for rank in group):
                continue
            if len(hosts) > 1:
                where = f"{name_ranks(ranks)}{f' of node {node!r}' if node else ''}"
                found.append(f"{where} do not share a host{self._difference(ranks)}")
        return found

    def _difference(self, ranks: Sequence[int]) -> str:
        differences = [
            what for fact, what in _DIFFERENCES.items() if len({getattr(self.facts[rank], fact) for rank in ranks}) > 1
        ]
        return f": they are {differences[0]}" if differences else ""


_DIFFERENCES = {
    "boot": "on different machines",
    "pid_namespace": "in different process namespaces (containers; --pid=host gives them one)",
    "network_namespace": "in different network namespaces (the same HOROVODLIKE_HOSTID says that they share a host)",
}


def _check_local_ranks(facts: Sequence[HostFacts], ranks: Sequence[int]) -> None:
    ranks_of: dict[int, list[int]] = {}
    for rank in ranks:
        ranks_of.setdefault(facts[rank].local_rank, []).append(rank)
    for local_rank, claimants in ranks_of.items():
        if len(claimants) > 1 and not any(facts[rank].chosen for rank in claimants):
            raise RendezvousError(
                f"{name_ranks(claimants)} are all local rank {local_rank} of the same host; see what set that in their "
                "environment. If they must count as different hosts, give each one a HOROVODLIKE_HOSTID"
            )
