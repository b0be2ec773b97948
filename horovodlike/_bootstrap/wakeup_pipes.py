"""The wake-up pipes of a job of several hosts: one for each rank; the ranks of its host write into it to wake it.

``poll()`` cannot wait for shared memory, so a rank waits for its sockets and its pipe. The other ranks of the host open
the pipe through ``/proc``; where that is forbidden, it is a named pipe in /dev/shm, unlinked once all have opened it.
"""

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from horovodlike._bootstrap import shared_memory
from horovodlike._bootstrap.shared_memory import Exchange
from horovodlike.errors import RendezvousError

# For reading, too: otherwise a write to the pipe of a rank that has exited would raise SIGPIPE.
_WRITE_FLAGS = os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass
class WakeupPipes:
    """This rank's descriptors of the pipes of its host's ranks, all non-blocking.

    Attributes:
        own: The read end of this rank's pipe.
        ends: The write ends of all pipes, by local rank.
    """

    own: int = -1
    ends: list[int] = field(default_factory=list)

    def close(self) -> None:
        """Close all descriptors. May be called again."""
        for fd in [self.own, *self.ends]:
            if fd >= 0:
                os.close(fd)
        self.own, self.ends = -1, []


def open_wakeup_pipes(rendezvous: Exchange, rank: int, ranks: Sequence[int], pids: Sequence[int]) -> WakeupPipes:
    """Make this rank's pipe and open the pipes of its host's ranks. Collective over all hosts.

    Args:
        rendezvous: The connection to the other ranks.
        rank: This rank.
        ranks: The ranks of this host, in order.
        pids: The process ids of these ranks.

    Raises:
        RendezvousError: The ranks of a host cannot open each other's pipes; the message names them and is the same
            on all ranks.
    """
    problems = []
    for way, share in (("through /proc", _share_pipes), ("in /dev/shm", _share_named_pipes)):
        wakeup_pipes = WakeupPipes()
        try:
            found = share(rendezvous, rank, ranks, pids, wakeup_pipes)
        except BaseException:
            wakeup_pipes.close()
            raise
        if not any(found):
            return wakeup_pipes
        wakeup_pipes.close()
        problems.append(f"{way}: " + next(f"rank {each}: {problem}" for each, problem in enumerate(found) if problem))
    raise RendezvousError(f"ranks of a host cannot open each other's pipes; {'; '.join(problems)}")


def _share_pipes(
    rendezvous: Exchange, rank: int, ranks: Sequence[int], pids: Sequence[int], wakeup_pipes: WakeupPipes
) -> list[str]:
    own = _Own(rank)
    with own.noting():
        wakeup_pipes.own, end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        wakeup_pipes.ends = [-1] * len(ranks)
        wakeup_pipes.ends[ranks.index(rank)] = end
    offers = rendezvous.exchange("wakeup_pipes.pipes", own.offer(wakeup_pipes.own, wakeup_pipes.own))
    for index, (other, pid) in enumerate(zip(ranks, pids, strict=True)):
        if other != rank and offers[other] and not own.problem:
            with own.noting():
                wakeup_pipes.ends[index] = _open(f"/proc/{pid}/fd/{offers[other][0]}", offers[other])
    return rendezvous.exchange("wakeup_pipes.pipes.opened", own.problem)


def _share_named_pipes(
    rendezvous: Exchange, rank: int, ranks: Sequence[int], _: Sequence[int], wakeup_pipes: WakeupPipes
) -> list[str]:
    own = _Own(rank)
    path = os.path.join(shared_memory.DIRECTORY, f"horovodlike-{secrets.token_hex(16)}")
    try:
        with own.noting():
            os.mkfifo(path, 0o600)
            wakeup_pipes.own = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
            wakeup_pipes.ends = [-1] * len(ranks)
        offers = rendezvous.exchange("wakeup_pipes.files", own.offer(wakeup_pipes.own, path))
        for index, other in enumerate(ranks):
            if offers[other] and not own.problem:
                with own.noting():
                    wakeup_pipes.ends[index] = _open(offers[other][0], offers[other])
        return rendezvous.exchange("wakeup_pipes.files.opened", own.problem)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)


class _Own:
    """This rank's report to the others: the offer of its pipe, or the error."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.problem = ""

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        try:
            yield
        except (OSError, RendezvousError) as error:
            self.problem = str(error)

    def offer(self, fd: int, where: int | str) -> list[Any]:
        """Return the pipe's descriptor or path, and its device and inode numbers; an empty list after an error."""
        if self.problem:
            return []
        found = os.fstat(fd)
        return [where, found.st_dev, found.st_ino]


def _open(path: str, offer: Sequence[Any]) -> int:
    before = os.stat(path)  # by accident the path could be a device, which must not even be opened
    if not stat.S_ISFIFO(before.st_mode) or [before.st_dev, before.st_ino] != list(offer[1:]):
        raise RendezvousError(f"{path} is not the pipe of a rank of this host")
    return os.open(path, _WRITE_FLAGS)
