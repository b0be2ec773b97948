"""The file with the last commit: always complete, with a checksum."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import struct
from collections.abc import Iterator
from typing import BinaryIO

from horovodlike.errors import StateFileError

__all__ = ["StateFile"]

_MAGIC = b"HVLSTATE"
_VERSION = 1
_HEAD = struct.Struct(">8sIQQ32s")  # magic, version, commits, length of the state, its SHA-256


@contextlib.contextmanager
def replacing(path: str, what: str) -> Iterator[BinaryIO]:
    """Replace a file by the content written in the ``with`` block; a crash leaves either the old or the new content.

    Args:
        path: The file.
        what: The content, for the error.

    Yields:
        A file beside it, which takes its name when the block ends.

    Raises:
        OSError: The disk is full, the folder cannot be written and so on; the file has its old content, or the new one
            if only the last step, to synchronise the folder, has failed.
    """
    path = os.path.abspath(path)
    beside = f"{path}.new"
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(beside)  # left behind by a writer that was killed
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        if isinstance(error, OSError):
            raise OSError(error.errno, f"{what} cannot be written: {error.strerror}", path) from error
        raise
    folder = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


class StateFile:
    """The file that :meth:`State.persist` names. Written by one process at a time.

    Attributes:
        path: The absolute path of the file.
        written: The number of commits of the state that this process has last written; 0 before the first write.
    """

    def __init__(self, path: str, every: int = 1) -> None:
        if every < 1:
            raise ValueError(f"every={every}: write each commit (1), each second one (2) and so on")
        self.path = os.path.abspath(path)
        self.written = 0
        self._every = every
        folder = os.path.dirname(self.path)
        if not os.path.isdir(folder):
            raise ValueError(f"the state cannot be written to {self.path}: there is no folder {folder}")

    def is_due(self, commits: int) -> bool:
        """Return whether this commit is one of those to be written."""
        return commits % self._every == 0

    def write(self, commits: int, saved: bytes) -> None:
        """Replace the file; after a crash at any point it has either the old or the new content.

        Raises:
            OSError: The disk is full, the folder cannot be written and so on; the file has its old content, or the
                new one if only the last step, to synchronise the folder, has failed.
        """
        head = _HEAD.pack(_MAGIC, _VERSION, commits, len(saved), hashlib.sha256(saved).digest())
        with replacing(self.path, "the state") as file:
            file.write(head)
            file.write(saved)
        self.written = commits

    def commits(self) -> int:
        """Return how many commits the state in the file has seen; 0 if there is no file.

        Raises:
            StateFileError: :meth:`write` did not make the file, or other users could have written it.
        """
        return self._read(whole=False)[0]

    def read(self) -> tuple[int, bytes]:
        """Return the number of commits and the state; 0 and no bytes if there is no file.

        Raises:
            StateFileError: As for :meth:`commits`; or the content is damaged.
        """
        return self._read(whole=True)

    def _read(self, whole: bool) -> tuple[int, bytes]:
        if os.path.isdir(self.path):
            raise StateFileError(f"the state cannot be read from {self.path}: it is a folder")
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            return 0, b""
        except OSError as error:
            raise StateFileError(f"the state in {self.path} cannot be read: {error.strerror}") from error
        with open(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            self._check_owner(found)
            head = file.read(_HEAD.size)
            if len(head) < _HEAD.size or not head.startswith(_MAGIC):
                raise self._damaged("it is something else than a state that horovodlike wrote")
            _, version, commits, length, digest = _HEAD.unpack(head)
            if version != _VERSION:
                raise self._damaged(f"it has format {version}, and this release reads format {_VERSION}")
            if found.st_size != _HEAD.size + length:
                raise self._damaged(f"it has {found.st_size} bytes where {_HEAD.size + length} were written")
            if not whole:
                return commits, b""
            saved = file.read()
        if hashlib.sha256(saved).digest() != digest:
            raise self._damaged("its checksum is wrong")
        return commits, saved

    def _check_owner(self, found: os.stat_result) -> None:
        if not stat.S_ISREG(found.st_mode):
            raise StateFileError(f"the state cannot be read from {self.path}: it is not a file")
        if found.st_uid not in (os.geteuid(), 0) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise StateFileError(
                f"the state in {self.path} is not read: the file belongs to user {found.st_uid} and has mode "
                f"{stat.S_IMODE(found.st_mode):04o}, and reading runs what its writer chose. It must belong to user "
                f"{os.geteuid()} and be writable by nobody else: chmod 600"
            )

    def _damaged(self, what: str) -> StateFileError:
        return StateFileError(
            f"the state in {self.path} cannot be used: {what}. Put back a copy of it, or remove it to begin anew"
        )
