"""The hosts of a job: host lists and files, and the ranks of each host. Pure."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from horovodlike.launcher.errors import UsageError

_NAME = r"[\w.-]+"
_IPV6 = r"\[[0-9A-Fa-f:.]+(?:%[\w.-]+)?\]"
_HOST = re.compile(rf"({_NAME}|{_IPV6}):([0-9]{{1,6}})", re.ASCII)
_LINE = re.compile(rf"({_NAME}|{_IPV6})(?::([0-9]{{1,6}})|\s+slots\s*=\s*([0-9]{{1,6}}))?", re.ASCII)


@dataclass(frozen=True)
class HostSlots:
    """A host, by the name that ssh takes, and how many ranks it may have."""

    host: str
    slots: int


@dataclass(frozen=True)
class Placement:
    """The ranks of one host, among the ranks of all hosts.

    Attributes:
        names: The hosts that have ranks, each name once, in the order of their ranks.
        counts: How many ranks each of them has.
        number: The index of this host in ``names``.
    """

    names: tuple[str, ...]
    counts: tuple[int, ...]
    number: int = 0

    @property
    def name(self) -> str:
        """The name of this host."""
        return self.names[self.number]

    @property
    def first_rank(self) -> int:
        """The lowest rank of this host."""
        return sum(self.counts[: self.number])

    @property
    def local_size(self) -> int:
        """The number of ranks on this host."""
        return self.counts[self.number]

    @property
    def ranks(self) -> range:
        """The ranks of this host."""
        return range(self.first_rank, self.first_rank + self.local_size)

    @property
    def size(self) -> int:
        """The number of ranks in the job."""
        return sum(self.counts)

    def cross(self, local_rank: int) -> tuple[int, int]:
        """Return this host's number among the hosts that have this local rank, and the number of these hosts."""
        having = [number for number, count in enumerate(self.counts) if count > local_rank]
        return having.index(self.number), len(having)


def parse_hosts(text: str) -> tuple[HostSlots, ...]:
    """Read ``host:slots,host:slots``; an IPv6 address stands in brackets.

    Raises:
        UsageError: The text has another form.
    """
    entries = [_HOST.fullmatch(entry.strip()) for entry in text.split(",")]
    if not all(entries):
        raise UsageError(
            f"Invalid host input {text!r}, please make sure it has format as : worker-0:2,worker-1:2 (for this machine "
            "alone, leave it out)."
        )
    return merge_hosts(HostSlots(_bare(entry[1]), int(entry[2])) for entry in entries if entry is not None)


def parse_hostfile(text: str, path: str) -> tuple[HostSlots, ...]:
    """Read lines of ``host slots=4``, ``host:4`` or ``host``; the last form means one slot.

    Empty lines, and comments that begin with ``#``, are ignored. The slots of a repeated host are added up.

    Args:
        text: The content of the file.
        path: The file's name, for messages.

    Raises:
        UsageError: A line has another form, or there is no host.
    """
    hosts = []
    for number, line in enumerate(text.splitlines(), 1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        try:
            hosts.append(parse_host_line(content, 1))
        except ValueError:
            raise UsageError(
                f"{path}, line {number}: {content!r} cannot be used; write it like: worker-0 slots=2"
            ) from None
    if not hosts:
        raise UsageError(f"{path} names no host; write lines like: worker-0 slots=2")
    return merge_hosts(hosts)


def parse_host_line(line: str, slots: int) -> HostSlots:
    """Read ``host slots=4``, ``host:4`` or ``host``; in the last form, the host has ``slots`` slots.

    Raises:
        ValueError: The line has another form.
    """
    match = _LINE.fullmatch(line.strip())
    if match is None:
        raise ValueError(line)
    return HostSlots(_bare(match[1]), int(match[2] or match[3] or slots))


def _bare(host: str) -> str:
    return host.strip("[]")


def merge_hosts(entries: Iterable[HostSlots]) -> tuple[HostSlots, ...]:
    """Merge entries of the same host: their slots are added up, and the first entry's position is kept."""
    slots: dict[str, int] = {}
    for entry in entries:
        slots[entry.host] = slots.get(entry.host, 0) + entry.slots
    return tuple(HostSlots(host, number) for host, number in slots.items())


def place_ranks(hosts: Sequence[HostSlots], num_proc: int | None) -> tuple[Placement, ...]:
    """Place ranks on the hosts: fill each host's slots before the next host's slots.

    Args:
        hosts: The hosts and their slots.
        num_proc: The number of ranks; None for as many as there are slots.

    Returns:
        A placement for each host that has ranks.

    Raises:
        UsageError: There are too few slots.
    """
    slots = sum(entry.slots for entry in hosts)
    wanted = slots if num_proc is None else num_proc
    if not 0 < wanted <= slots:
        shown = ", ".join(f"{entry.host}:{entry.slots}" for entry in hosts)
        raise UsageError(
            f"Requested more processes ({max(1, wanted)}) than there are available slots ({slots}): the hosts are "
            f"{shown}; give them more slots, or use a smaller -np"
        )
    before = [0, *accumulate(entry.slots for entry in hosts)]
    counts = [min(entry.slots, wanted - start) for entry, start in zip(hosts, before, strict=False)]
    names = tuple(entry.host for entry, count in zip(hosts, counts, strict=True) if count > 0)
    used = tuple(count for count in counts if count > 0)
    return tuple(Placement(names, used, number) for number in range(len(used)))
