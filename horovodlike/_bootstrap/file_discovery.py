"""Discovery of ranks of one host without a launcher: a file that belongs to the user and is named after the job.

Rank 0 writes the port of its rendezvous server and the job's fresh key into a file of mode 0600, in a directory of
mode 0700 that belongs to the user, and removes it when all ranks have connected. The file appears by an atomic rename,
so that no rank reads half of it; a file that a crashed job of the same name has left behind is replaced.
"""

import contextlib
import hashlib
import json
import os
import secrets
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from horovodlike._net.secure_channel import JobKey
from horovodlike.errors import RendezvousError

_FILE_LIMIT = 4096
_STALE_SECONDS = 24 * 3600.0
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_PRIVATE = stat.S_IRWXG | stat.S_IRWXO


@dataclass(frozen=True)
class Endpoint:
    """The addresses and the port of rank 0's server, and the job's key.

    Attributes:
        port: The port; 0 for any free port.
        key: The job's key.
        hosts: The addresses, separated by commas.
    """

    port: int
    key: JobKey
    hosts: str = "127.0.0.1"


class Discovery(Protocol):
    """The interface of discovery: rank 0 publishes the endpoint of its server, and the other ranks read it.

    Attributes:
        where: The place where the other ranks look for the endpoint, in words for messages.
    """

    where: str

    def choose_endpoint(self) -> Endpoint:
        """Return the endpoint at which the server must listen. Called on rank 0."""

    def publish(self, endpoint: Endpoint) -> None:
        """Make the endpoint known to the other ranks until :meth:`unpublish`. Called on rank 0."""

    def unpublish(self) -> None:
        """Undo :meth:`publish` on rank 0 when all ranks have connected or one has failed. May be called again."""

    def read(self) -> Endpoint | None:
        """Return the endpoint that rank 0 has published; None if there is none yet. Called on the other ranks."""


class FileDiscovery:
    """Discovery by a file, one for each job."""

    def __init__(self, job: str, environ: Mapping[str, str]) -> None:
        """Choose the name of the file, but do not access it.

        Args:
            job: The job's name, the same on all ranks.
            environ: The environment, which names the user's runtime directory.
        """
        self.directory = _directory(environ)
        digest = hashlib.sha256(b"horovodlike discovery\0" + job.encode(errors="surrogateescape")).hexdigest()
        self._name = f"{digest[:32]}.json"
        self._published: tuple[int, int] | None = None
        self.where = f"in {self.path}"

    @property
    def path(self) -> str:
        """The path of the file, for messages."""
        return os.path.join(self.directory, self._name)

    def choose_endpoint(self) -> Endpoint:
        """Return an endpoint with a new key and any free port."""
        return Endpoint(0, JobKey.random())

    def publish(self, endpoint: Endpoint) -> None:
        """Write the file; replace an old one.

        Raises:
            RendezvousError: The directory is not safe, or cannot be written.
        """
        content = json.dumps({"port": endpoint.port, "key": endpoint.key.hex()}).encode()
        draft = f"{self._name}.{secrets.token_hex(8)}"
        with self._opened(create=True) as directory:
            _remove_stale(directory)
            try:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                descriptor = os.open(draft, flags, 0o600, dir_fd=directory)
                with open(descriptor, "wb") as file:
                    file.write(content)
                    found = os.fstat(descriptor)
                os.rename(draft, self._name, src_dir_fd=directory, dst_dir_fd=directory)
            except OSError as error:
                with contextlib.suppress(OSError):
                    os.unlink(draft, dir_fd=directory)
                raise RendezvousError(f"rank 0 cannot write {self.path}: {error.strerror}") from error
        self._published = (found.st_dev, found.st_ino)

    def unpublish(self) -> None:
        """Remove the file that :meth:`publish` wrote, unless another job has replaced it. May be called again."""
        if self._published is None:
            return
        with contextlib.suppress(OSError, RendezvousError), self._opened(create=False) as directory:
            found = os.stat(self._name, dir_fd=directory, follow_symlinks=False)
            if (found.st_dev, found.st_ino) == self._published:
                os.unlink(self._name, dir_fd=directory)
        self._published = None

    def read(self) -> Endpoint | None:
        """Read the file; return None if it does not exist (yet).

        Raises:
            RendezvousError: The directory or the file could belong to another user, or the content is invalid.
        """
        try:
            with self._opened(create=False) as directory:
                descriptor = os.open(self._name, _READ_FLAGS, dir_fd=directory)
                with open(descriptor, "rb") as file:
                    _check_private(self.path, os.fstat(descriptor), stat.S_IFREG, "chmod 600, or remove it")
                    content = file.read(_FILE_LIMIT)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise RendezvousError(f"{self.path} cannot be read: {error.strerror}") from error
        try:
            fields = json.loads(content)
            return Endpoint(int(fields["port"]), JobKey(bytes.fromhex(fields["key"])))
        except (ValueError, KeyError, TypeError):
            raise RendezvousError(f"{self.path} does not hold what rank 0 writes; remove it") from None

    @contextlib.contextmanager
    def _opened(self, *, create: bool) -> Iterator[int]:
        try:
            if create:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(self.directory, 0o700)
            descriptor = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            if isinstance(error, FileNotFoundError) and not create:
                raise
            raise RendezvousError(
                f"{self.directory} cannot be used ({error.strerror}): it must be a directory of your own and no "
                "symbolic link; remove it, or set XDG_RUNTIME_DIR"
            ) from error
        try:
            _check_private(self.directory, os.fstat(descriptor), stat.S_IFDIR, "chmod 700, or remove it")
            yield descriptor
        finally:
            os.close(descriptor)


def _directory(environ: Mapping[str, str]) -> str:
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(runtime):
        with contextlib.suppress(OSError):
            found = os.stat(runtime)
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & _PRIVATE:
                return os.path.join(runtime, "horovodlike")
    import tempfile

    return os.path.join(tempfile.gettempdir(), f"horovodlike-{os.geteuid()}")


def _check_private(path: str, found: os.stat_result, kind: int, remedy: str) -> None:
    if stat.S_IFMT(found.st_mode) != kind:
        raise RendezvousError(f"{path} is not of the kind that it should be; remove it")
    if found.st_uid != os.geteuid():
        raise RendezvousError(f"{path} belongs to user {found.st_uid}, not to user {os.geteuid()}: it is not trusted")
    if found.st_mode & _PRIVATE:
        raise RendezvousError(
            f"{path} has mode {stat.S_IMODE(found.st_mode):04o}, so that others could use it: {remedy}"
        )


def _remove_stale(directory: int) -> None:
    """Remove the files of jobs that were killed while they started: no server accepts their keys any more."""
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if time.time() - entry.stat(follow_symlinks=False).st_mtime > _STALE_SECONDS:
                    os.unlink(entry.name, dir_fd=directory)
