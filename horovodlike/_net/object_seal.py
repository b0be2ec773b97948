"""Objects for other ranks: how they are pickled, and end-to-end authentication of the bytes that are unpickled.

Collectives move bytes over connections, memory and libraries (TCP, shared memory, MPI) that may not detect changes.
So each rank puts its bytes into an *envelope*, and a receiver does not unpickle them before it has verified
the envelope's MAC. An envelope is a head, ``HMAC-SHA256(key; context, head, bytes)``, and the bytes:

* The key belongs to one generation of one job (:class:`~horovodlike._bootstrap.bootstrap.JobContext`), so
  envelopes of other generations and jobs are not valid.
* The context is the process set, its registration (ids are reused) and the name of the operation.
* The head holds the sender's rank, a sequence number, the root if the operation has one, whether there are bytes at
  all, and their length. An envelope that a rank has opened before is not valid again: the window against replay is
  as in IPsec (RFC 4303, 3.4.3), since operations of several threads may complete in any order.

The total length of the envelopes comes over the control plane, which is sealed; so a changed length in a head cannot
reach beyond the bytes that have been received.
"""

from __future__ import annotations

import hmac
import io
import itertools
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any, NamedTuple

import cloudpickle  # type: ignore[import-untyped]

from horovodlike._net.secure_channel import MAC_BYTES, JobKey
from horovodlike.errors import IntegrityError

__all__ = ["NO_ROOT", "Context", "ObjectSeal", "Opened", "dumps"]

NO_ROOT = -1

_HEAD = struct.Struct(">QQIiB")  # sequence number, length, rank, root, whether there are bytes
_CONTEXT = struct.Struct(">QQQ")  # id of the process set, its registration, length of the name
_PURPOSE = b"horovodlike object\0"
_WINDOW = 1024


class Context(NamedTuple):
    """The operation that an envelope belongs to.

    Attributes:
        name: The name by which the ranks match the operation.
        process_set: The id of the process set.
        registration: The number of the registration that gave the set this id.
        ranks: The members of the set, ascending.
    """

    name: str
    process_set: int
    registration: int
    ranks: Sequence[int]


class Opened(NamedTuple):
    """The content of an envelope.

    Attributes:
        rank: The sender.
        root: The root of the operation according to the sender, or ``NO_ROOT``.
        data: The bytes; None if the sender has none to send.
    """

    rank: int
    root: int
    data: memoryview | None


@dataclass
class _Window:
    """The sequence numbers of one sender that have been seen."""

    highest: int = -1
    seen: int = 0  # bit i: has `highest - i` been seen?

    def is_new(self, number: int) -> bool:
        age = self.highest - number
        return age < 0 or (age < _WINDOW and not self.seen >> age & 1)

    def note(self, number: int) -> None:
        ahead = number - self.highest
        if ahead > 0:
            self.highest = number
            self.seen = (self.seen << min(ahead, _WINDOW) | 1) & ((1 << _WINDOW) - 1)
        else:
            self.seen |= 1 << -ahead


class ObjectSeal:
    """Seals and opens the envelopes of one rank, in one generation of a job. May be used by any thread.

    Args:
        key: The key of this generation; None in a job of one rank, where nothing travels and nothing is verified.
        rank: This rank.
    """

    def __init__(self, key: JobKey | None, rank: int) -> None:
        self._key = key
        self._rank = rank
        self._numbers = itertools.count()
        self._windows: dict[tuple[int, int], _Window] = {}  # by registration and sender
        self._lock = threading.Lock()  # held while windows change; no other lock is taken under it

    def seal(self, context: Context, data: bytes | None, root: int = NO_ROOT) -> bytes:
        """Return an envelope with the bytes, or, if ``data`` is None, with the statement that there are none."""
        head = _HEAD.pack(next(self._numbers), len(data or b""), self._rank, root, data is not None)
        return b"".join((head, self._mac(context, head, data or b""), data or b""))

    def open(self, context: Context, envelopes: memoryview) -> list[Opened]:
        """Verify all envelopes of an operation, which stand one after the other in the order of the ranks.

        Ranks that have called ``join()`` have no envelope.

        Raises:
            IntegrityError: An envelope was changed on its way, or has been opened before. None of them can be used.
        """
        opened: list[Opened] = []
        position, previous = 0, -1
        while position < len(envelopes):
            start = position + _HEAD.size + MAC_BYTES
            if start > len(envelopes):
                raise self._invalid(context, None)
            head = envelopes[position : position + _HEAD.size]
            number, length, rank, root, has_data = _HEAD.unpack(head)
            sender = rank if rank in context.ranks and rank > previous else None
            data = envelopes[start : start + length]  # slicing past the end raises no error: data is then shorter
            if sender is None or not self._accepts(context, head, envelopes[start - MAC_BYTES : start], data, number):
                raise self._invalid(context, sender)
            opened.append(Opened(rank, root, data if has_data else None))
            position, previous = start + length, rank
        return opened

    def _accepts(self, context: Context, head: memoryview, mac: memoryview, data: memoryview, number: int) -> bool:
        if self._key is None:
            return True
        if not hmac.compare_digest(self._mac(context, head, data), mac):
            return False
        _, _, rank, _, _ = _HEAD.unpack(head)
        with self._lock:
            window = self._windows.setdefault((context.registration, rank), _Window())
            if not window.is_new(number):
                return False
            window.note(number)
        return True

    def _mac(self, context: Context, head: bytes | memoryview, data: bytes | memoryview) -> bytes:
        if self._key is None:
            return bytes(MAC_BYTES)
        name = context.name.encode(errors="surrogateescape")
        made = hmac.new(self._key.reveal(), _PURPOSE, "sha256")
        made.update(_CONTEXT.pack(context.process_set, context.registration, len(name)))
        made.update(name)
        made.update(head)
        made.update(data)
        return made.digest()

    def _invalid(self, context: Context, sender: int | None) -> IntegrityError:
        whose = "the envelope of an object" if sender is None else f"the object that rank {sender} has sent"
        return IntegrityError(
            f"{context.name}: {whose} is not authentic on rank {self._rank}: its bytes were changed on the way, or an "
            "older object was put in its place. It was not unpickled. Something between the ranks changes what they "
            "send, or memory or a network card is defective: find out what it is, and carry the job's network through "
            "an encrypted tunnel (docs/users/security.md)"
        )


_NO_FILE = "<dynamic-code>"  # cloudpickle from 3.1.3 on pickles this in place of the name of a function's file


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """A pickler that keeps the file names of functions: tracebacks and TensorFlow's AutoGraph read these files."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not CodeType:
            return super().reducer_override(obj)
        make, arguments = self.dispatch_table[CodeType](obj)
        return make, tuple(obj.co_filename if argument == _NO_FILE else argument for argument in arguments)


def dumps(obj: object) -> bytes:
    """Pickle an object, also functions and classes of scripts and notebooks, by cloudpickle.

    `pickle.loads` reads the result where cloudpickle is installed.

    Raises:
        Exception: The object's own `__reduce__` or `__getstate__` raises it.
        pickle.PicklingError: A part of the object cannot be pickled.
    """
    with io.BytesIO() as file:
        _Pickler(file).dump(obj)
        return file.getvalue()
