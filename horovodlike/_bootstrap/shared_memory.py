"""The memory that the ranks of a host share: one segment, made by local rank 0 and opened by the others.

Two ranks are on the same host only if a test succeeds: each one must find, at the start of the memory that it
opened, the random token that local rank 0 wrote there. Ranks that cannot share memory count as on different hosts,
even if they have everything else in common.

The first choice is an anonymous memory file, to which no limit of /dev/shm applies and which no crash can leave behind;
the others open it through ``/proc``. Where that is forbidden, the segment is a file in /dev/shm, unlinked when all have
opened it. All memory is allocated at once: a lack of memory is an error here, and not a SIGBUS during training.
"""

import contextlib
import errno
import fcntl
import hmac
import os
import secrets
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from horovodlike._bootstrap.rendezvous_state import name_ranks
from horovodlike._bootstrap.topology import HostTable
from horovodlike.errors import RendezvousError

TOKEN_BYTES = 32
DIRECTORY = "/dev/shm"
_MFD_NOEXEC_SEAL = 0x8  # Linux 6.3; needed where the sysctl vm.memfd_noexec is 2


class Exchange(Protocol):
    """The part of :class:`horovodlike._bootstrap.bootstrap.Rendezvous` that is needed here."""

    def exchange(self, topic: str, payload: Any) -> list[Any]:  # noqa: ANN401 - any JSON value
        """All-gather a JSON value."""

    def barrier(self, topic: str) -> None:
        """Wait for all ranks."""


@dataclass
class _Attempt:
    """The attempt of one rank to share memory with one group of ranks."""

    ranks: tuple[int, ...]
    rank: int
    num_bytes: int
    fd: int = -1
    problem: str = ""
    trying: Sequence[tuple[int, ...]] = ()  # the groups that still try; this rank's group may have finished

    @property
    def takes_part(self) -> bool:
        return self.ranks in self.trying

    @property
    def leads(self) -> bool:
        return self.takes_part and self.rank == self.ranks[0]

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Keep an error for the report to all ranks; the error ends the attempt."""
        try:
            yield
        except (OSError, RendezvousError, AttributeError) as error:
            self.problem = str(error) or type(error).__name__

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


@dataclass
class Segment:
    """The memory of a host's ranks, and the hosts as :func:`open_segment` has found them.

    Attributes:
        table: The hosts of the job: the ranks of each one share memory.
        fd: The descriptor of the zeroed memory; the caller closes it. -1 if this rank's host has no other rank.
        problems: The reasons why ranks that seem to share a host do not share memory.
    """

    table: HostTable
    fd: int = -1
    problems: list[str] = field(default_factory=list)


def open_segment(rendezvous: Exchange, rank: int, table: HostTable, num_bytes: Callable[[HostTable], int]) -> Segment:
    """Open the shared memory of this rank's host. Collective over all hosts.

    If some ranks of a host cannot open the memory, the others stay together, and those ranks try among themselves.

    Args:
        rendezvous: The connection to the other ranks.
        rank: This rank.
        table: The hosts according to the facts that the ranks report.
        num_bytes: Returns the size of the segment of this rank's host, given a table of hosts.

    Raises:
        RendezvousError: The ranks of a host ask for different amounts of memory.
    """
    found = Segment(table)
    settled: set[tuple[int, ...]] = set()
    try:
        while undecided := [group for group in found.table.ranks if len(group) > 1 and group not in settled]:
            mine = found.table.ranks_beside(rank)
            attempt = _Attempt(mine, rank, num_bytes(found.table) if mine in undecided else 0)
            verdicts = _try_all(rendezvous, attempt, undecided)
            if attempt.fd >= 0:
                found.fd = attempt.fd
            groups = [group for group in found.table.ranks if group not in undecided]
            for group, verdict in verdicts.items():
                if verdict.failed:
                    groups += [part for part in (verdict.together, verdict.failed) if part]
                    found.problems.append(f"{name_ranks(group)}: {verdict.problem}")
                else:
                    settled.add(group)
                    groups.append(group)
            found.table = found.table.divided(groups)
        if settled:
            if found.fd >= 0 and found.table.ranks_beside(rank)[0] == rank:
                os.pwrite(found.fd, bytes(TOKEN_BYTES), 0)
            rendezvous.barrier("segment.ready")
    except BaseException:
        if found.fd >= 0:
            os.close(found.fd)
        raise
    return found


@dataclass
class _Verdict:
    """The result of one group of ranks: whether they share memory, or which of them could not and why."""

    together: tuple[int, ...]
    failed: tuple[int, ...] = ()
    problem: str = ""


def _try_all(
    rendezvous: Exchange, attempt: _Attempt, undecided: Sequence[tuple[int, ...]]
) -> dict[tuple[int, ...], _Verdict]:
    """Try both kinds of memory, for all groups at the same time; the verdicts are the same on all ranks."""
    verdicts: dict[tuple[int, ...], _Verdict] = {}
    for way, share in (("an anonymous memory file", _share_memfd), (f"a file in {DIRECTORY}", _share_file)):
        attempt.trying = [group for group in undecided if group not in verdicts or verdicts[group].failed]
        if not attempt.trying:
            break
        try:
            problems = share(rendezvous, attempt)
        except BaseException:
            attempt.close()
            raise
        for group in attempt.trying:
            verdict = _judge(group, problems, way)
            if group in verdicts:
                verdict.problem = f"{verdicts[group].problem}; {verdict.problem}"
            verdicts[group] = verdict
        if attempt.takes_part and verdicts[attempt.ranks].failed:
            attempt.close()
    return verdicts


def _judge(group: tuple[int, ...], problems: Sequence[str], way: str) -> _Verdict:
    failed = tuple(rank for rank in group if problems[rank])
    if not failed:
        return _Verdict(group)
    first = failed[0]
    if first == group[0]:  # the leader failed, so the others had nothing to open
        failed = group[1:]
    together = tuple(rank for rank in group if rank not in failed)
    return _Verdict(together, failed, f"with {way}, rank {first}: {problems[first]}")


def _share_memfd(rendezvous: Exchange, attempt: _Attempt) -> list[str]:
    offer: dict[str, Any] = {"bytes": attempt.num_bytes}
    if attempt.leads:
        with attempt.noting():
            attempt.fd = make_memfd(attempt.num_bytes)
            offer |= {"path": f"/proc/{os.getpid()}/fd/{attempt.fd}", "token": write_token(attempt.fd).hex()}
    found = _offer_of_leader(rendezvous.exchange("segment.memfd", offer), attempt)
    if found:
        with attempt.noting():
            token = bytes.fromhex(found["token"])
            attempt.fd = open_and_verify(found["path"], attempt.num_bytes, token, 0, is_sealed=True)
    return rendezvous.exchange("segment.memfd.opened", attempt.problem)


def _share_file(rendezvous: Exchange, attempt: _Attempt) -> list[str]:
    offer: dict[str, Any] = {"bytes": attempt.num_bytes}
    path = ""
    attempt.problem = ""
    try:
        if attempt.leads:
            with attempt.noting():
                path = os.path.join(DIRECTORY, f"horovodlike-{secrets.token_hex(16)}")
                attempt.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
                _allocate(attempt.fd, attempt.num_bytes)
                offer |= {"path": path, "token": write_token(attempt.fd).hex()}
        found = _offer_of_leader(rendezvous.exchange("segment.file", offer), attempt)
        if found:
            path = found["path"]
            with attempt.noting():
                token = bytes.fromhex(found["token"])
                attempt.fd = open_and_verify(path, attempt.num_bytes, token, os.O_NOFOLLOW)
        return rendezvous.exchange("segment.file.opened", attempt.problem)
    finally:
        # Every rank tries to unlink the file: one of them may be killed before it does.
        if path:
            with contextlib.suppress(OSError):
                os.unlink(path)


def _offer_of_leader(offers: Sequence[dict[str, Any]], attempt: _Attempt) -> dict[str, Any] | None:
    """Return the offer of memory that this rank must open, if there is one."""
    for group in attempt.trying:
        _check_sizes(group, offers)
    offer = offers[attempt.ranks[0]]
    return offer if attempt.takes_part and not attempt.leads and "path" in offer else None


def _check_sizes(group: Sequence[int], offers: Sequence[dict[str, Any]]) -> None:
    ranks_of: dict[int, list[int]] = {}
    for rank in group:
        ranks_of.setdefault(offers[rank]["bytes"], []).append(rank)
    if len(ranks_of) > 1:
        found = ", ".join(f"{name_ranks(ranks)}: {count}" for count, ranks in ranks_of.items())
        raise RendezvousError(
            f"the ranks of a host ask for different amounts of shared memory ({found}); give all ranks the same "
            "settings and the same horovodlike"
        )


def make_memfd(num_bytes: int) -> int:
    """Make anonymous shared memory of zeros, whose size cannot be changed any more; return its descriptor.

    Raises:
        OSError: The kernel does not allow it.
        RendezvousError: There is too little memory.
    """
    for extra in (0, _MFD_NOEXEC_SEAL):
        try:
            fd = os.memfd_create("horovodlike", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | extra)
            break
        except PermissionError:
            if extra:
                raise
    try:
        _allocate(fd, num_bytes)
        # From now on no process can shrink the file while others use it.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _allocate(fd: int, num_bytes: int) -> None:
    """Set the size of the file, and allocate memory for all of it."""
    try:
        os.ftruncate(fd, num_bytes)
        try:
            os.posix_fallocate(fd, 0, num_bytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
            _write_zeros(fd, num_bytes)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG):
            raise RendezvousError(f"{num_bytes} bytes could not be allocated ({error.strerror}){_space(fd)}") from error
        raise


def _write_zeros(fd: int, num_bytes: int) -> None:
    zeros = bytes(1 << 20)
    position = 0
    while position < num_bytes:
        position += os.pwrite(fd, zeros[: num_bytes - position], position)


def _space(fd: int) -> str:
    """Describe how much room the file system has, if its size is limited."""
    with contextlib.suppress(OSError):
        found = os.fstatvfs(fd)
        if found.f_blocks and os.readlink(f"/proc/self/fd/{fd}").startswith(DIRECTORY):
            size, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
            return (
                f": {DIRECTORY} has {size} bytes, {free} of them free. Enlarge it (docker run --shm-size=1g; mount "
                f"-o remount,size=1G {DIRECTORY}) or lower HOROVODLIKE_SLOT_BYTES"
            )
    return ": the machine or the container has too little memory; lower HOROVODLIKE_SLOT_BYTES or start fewer ranks"


def write_token(fd: int) -> bytes:
    """Write a random token to the beginning of shared memory, for :func:`open_and_verify`, and return it."""
    token = secrets.token_bytes(TOKEN_BYTES)
    os.pwrite(fd, token, 0)
    return token


def open_and_verify(path: str, num_bytes: int, token: bytes, flags: int, *, is_sealed: bool = False) -> int:
    """Open the shared memory of another process, by its path and with these flags of ``open()``.

    Args:
        path: The path of the memory.
        num_bytes: Its size.
        token: The token that :func:`write_token` wrote there.
        flags: More flags of ``open()``.
        is_sealed: Demand that no process can shrink it, as with :func:`make_memfd`.

    Raises:
        OSError: The path cannot be opened.
        RendezvousError: It is something else than the memory to which the token was written.
    """
    before = os.stat(path)  # by accident the path could be a device or a pipe, which must not even be opened
    if not stat.S_ISREG(before.st_mode) or before.st_size != num_bytes:
        raise RendezvousError(f"{path} is not the memory of local rank 0")
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags)
    try:
        found = os.fstat(fd)
        same = (found.st_dev, found.st_ino, found.st_size) == (before.st_dev, before.st_ino, num_bytes)
        if not same or not hmac.compare_digest(os.pread(fd, TOKEN_BYTES, 0), token):
            raise RendezvousError(f"{path} does not hold what local rank 0 wrote there: it is another host's")
        if is_sealed and not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise RendezvousError(f"{path} is not sealed: its process could shrink it while it is used")
    except BaseException:
        os.close(fd)
        raise
    return fd
