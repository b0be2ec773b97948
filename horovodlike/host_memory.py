"""The memory that the ranks of a host share: one segment, made by local rank 0 and opened by the others.

That two ranks are on the same host is not believed but tried: they must have the same launcher's node, kernel boot id
and process namespace, and each one must find, at the start of the memory that it opened, the random token that local
rank 0 wrote there.

The first choice is an anonymous memory file, which no limit of /dev/shm applies to and which no crash can leave behind;
the others open it through ``/proc``. Where that is forbidden it is a file in /dev/shm, unlinked as soon as all have
opened it. All memory is allocated now: a lack of it is an error here and not a SIGBUS in the middle of training.
"""

import contextlib
import errno
import fcntl
import hmac
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from horovodlike._roll_call import name_ranks
from horovodlike.errors import RendezvousError
from horovodlike.place import Place

TOKEN_BYTES = 32
_DIRECTORY = "/dev/shm"
_MFD_NOEXEC_SEAL = 0x8  # Linux 6.3; needed where the sysctl vm.memfd_noexec is 2


class Exchange(Protocol):
    """The part of :class:`horovodlike.rendezvous.Rendezvous` that is needed here."""

    def exchange(self, topic: str, payload: Any) -> list[Any]:  # noqa: ANN401 - any JSON value
        """All-gathers a JSON value."""

    def barrier(self, topic: str) -> None:
        """Waits for all ranks."""


@dataclass
class _Attempt:
    """What one rank made of one way to share memory."""

    fd: int = -1
    problem: str = ""

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def open_segment(rendezvous: Exchange, place: Place, num_bytes: int) -> int:
    """Opens the shared memory of this host's ranks. Collective.

    Args:
        rendezvous: The connection to the other ranks.
        place: This process's place.
        num_bytes: The size of the segment, the same on all ranks.

    Returns:
        A descriptor of ``num_bytes`` zeroed bytes, which the caller closes. -1 if this host has one rank.

    Raises:
        RendezvousError: The ranks are on different hosts, or no memory could be shared; the message names the rank
            and the reason, the same one on all ranks.
    """
    if place.local_size == 1:
        return -1
    if num_bytes < TOKEN_BYTES:
        raise ValueError(f"a segment must have at least {TOKEN_BYTES} bytes, not {num_bytes}")
    _check_same_host(rendezvous.exchange("segment.host", {**_host_facts(place), "bytes": num_bytes}))
    leads = place.local_rank == 0
    problems = []
    for way, share in (("an anonymous memory file", _share_memfd), (f"a file in {_DIRECTORY}", _share_file)):
        attempt = _Attempt()
        try:
            problem = share(rendezvous, leads, num_bytes, attempt)
            if not problem:
                if leads:
                    os.pwrite(attempt.fd, bytes(TOKEN_BYTES), 0)
                rendezvous.barrier(f"segment.ready.{share.__name__}")
                return attempt.fd
        except BaseException:
            attempt.close()
            raise
        attempt.close()
        problems.append(f"with {way}: {problem}")
    raise RendezvousError(f"the ranks of this host cannot share {num_bytes} bytes of memory; {'; '.join(problems)}")


def _share_memfd(rendezvous: Exchange, leads: bool, num_bytes: int, attempt: _Attempt) -> str:
    offer: dict[str, Any] = {}
    if leads:
        with _noting(attempt):
            attempt.fd = _make_memfd(num_bytes)
            token = _write_token(attempt.fd)
            offer = {"path": f"/proc/{os.getpid()}/fd/{attempt.fd}", "token": token.hex()}
        offer["problem"] = attempt.problem
    found = _offer(rendezvous.exchange("segment.memfd", offer))
    if not leads and not found["problem"]:
        with _noting(attempt):
            attempt.fd = _open_and_verify(found["path"], num_bytes, bytes.fromhex(found["token"]), 0)
    return _verdict(rendezvous.exchange("segment.memfd.opened", attempt.problem))


def _share_file(rendezvous: Exchange, leads: bool, num_bytes: int, attempt: _Attempt) -> str:
    offer: dict[str, Any] = {}
    path = ""
    try:
        if leads:
            with _noting(attempt):
                path = os.path.join(_DIRECTORY, f"horovodlike-{secrets.token_hex(16)}")
                attempt.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
                _allocate(attempt.fd, num_bytes)
                offer = {"path": path, "token": _write_token(attempt.fd).hex()}
            offer["problem"] = attempt.problem
        found = _offer(rendezvous.exchange("segment.file", offer))
        if not leads and not found["problem"]:
            path = found["path"]
            with _noting(attempt):
                attempt.fd = _open_and_verify(path, num_bytes, bytes.fromhex(found["token"]), os.O_NOFOLLOW)
        return _verdict(rendezvous.exchange("segment.file.opened", attempt.problem))
    finally:
        # Every rank tries: one that is killed here leaves the rest to the others.
        if path:
            with contextlib.suppress(OSError):
                os.unlink(path)


@contextlib.contextmanager
def _noting(attempt: _Attempt) -> Iterator[None]:
    """A problem is kept, to be told to all ranks, and ends the attempt."""
    try:
        yield
    except (OSError, RendezvousError, AttributeError) as error:
        attempt.problem = str(error) or type(error).__name__


def _make_memfd(num_bytes: int) -> int:
    for extra in (0, _MFD_NOEXEC_SEAL):
        try:
            fd = os.memfd_create("horovodlike", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | extra)
            break
        except PermissionError:
            if extra:
                raise
    try:
        _allocate(fd, num_bytes)
        # Nobody can shrink it under the others' feet any more.
        with contextlib.suppress(OSError):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _allocate(fd: int, num_bytes: int) -> None:
    """Gives the file its size and its memory."""
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
    """How much room the file system has, if it is one that somebody limited."""
    with contextlib.suppress(OSError):
        found = os.fstatvfs(fd)
        if found.f_blocks and os.readlink(f"/proc/self/fd/{fd}").startswith(_DIRECTORY):
            size, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
            return (
                f": {_DIRECTORY} has {size} bytes, {free} of them free. Enlarge it (docker run --shm-size=1g; mount "
                f"-o remount,size=1G {_DIRECTORY}) or lower HOROVODLIKE_SLOT_BYTES"
            )
    return ": the machine or the container has too little memory; lower HOROVODLIKE_SLOT_BYTES or start fewer ranks"


def _write_token(fd: int) -> bytes:
    token = secrets.token_bytes(TOKEN_BYTES)
    os.pwrite(fd, token, 0)
    return token


def _open_and_verify(path: str, num_bytes: int, token: bytes, flags: int) -> int:
    before = os.stat(path)  # an unlucky path could be a device or a pipe, which must not even be opened
    if not stat.S_ISREG(before.st_mode) or before.st_size != num_bytes:
        raise RendezvousError(f"{path} is not the memory of local rank 0")
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags)
    try:
        found = os.fstat(fd)
        same = (found.st_dev, found.st_ino, found.st_size) == (before.st_dev, before.st_ino, num_bytes)
        if not same or not hmac.compare_digest(os.pread(fd, TOKEN_BYTES, 0), token):
            raise RendezvousError(f"{path} does not hold what local rank 0 wrote there: it is another host's")
    except BaseException:
        os.close(fd)
        raise
    return fd


def _offer(offers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return next(offer for offer in offers if offer)


def _verdict(problems: Sequence[str]) -> str:
    """The first problem that a rank had, and whose it was; empty if there was none."""
    return next((f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem), "")


def _host_facts(place: Place) -> dict[str, str]:
    facts = {"node": place.node_id or "", "boot": "", "pid_namespace": ""}
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        facts["boot"] = file.read().strip()
    with contextlib.suppress(OSError):
        facts["pid_namespace"] = os.readlink("/proc/self/ns/pid")
    return facts


_FACTS = {
    "node": ("are on different nodes of the launcher", "HOROVODLIKE_HOSTID can say that they share a host"),
    "boot": ("are on different machines", "start all ranks on one"),
    "pid_namespace": ("are in different process namespaces (containers)", "start all ranks in one container"),
    "bytes": ("ask for different amounts of shared memory", "give all ranks the same settings and version"),
}


def _check_same_host(facts: Sequence[dict[str, Any]]) -> None:
    for name, (difference, remedy) in _FACTS.items():
        ranks_of: dict[str, list[int]] = {}
        for rank, each in enumerate(facts):
            ranks_of.setdefault(str(each[name]), []).append(rank)
        if len(ranks_of) > 1:
            groups = ", ".join(f"{name_ranks(ranks)}: {value!r}" for value, ranks in ranks_of.items())
            also = "" if name == "bytes" else ". Several hosts are not supported yet"
            raise RendezvousError(f"the ranks {difference} ({groups}){also}; {remedy}")
