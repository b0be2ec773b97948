"""Names for the operations of a process group. The ranks start operations in the same order, and match them by name.

The name of an operation depends on the `_BEFORE` operations before it, and not on the operation itself. So ranks that
disagree about an operation have the same name for it, and receive an error that names the difference. And a program
that repeats its operations has the same names for the same operations, so the engine knows them already. Many equal
operations in a row cycle through `_ALIKE` names. The engine runs operations of the same name one after the other.

Few names are better than many: the data that the engine keeps for a new name lies between the tensors of the program,
and a large tensor freed between them leaves a gap that may be too small for the next one.

Behind an operation about which the ranks disagreed, operations have different names on the ranks for a while. They wait
until they time out, or are combined with another operation of the other ranks. The group is one sequence for the
engine, which then fails operations that complete. A program that waits for each operation before it starts the next one
receives the error first, and continues with new names (`restart`). If others were started before the error, the ranks
may restart at different operations, so the group must not be used any more.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Hashable

from horovodlike.torch._ops.fast_path import FastPath
from horovodlike.torch._ops.handles import Call

_BEFORE = 3
_ALIKE = 8
_SIGNATURE_BITS = 20
_LAST = (1 << _SIGNATURE_BITS) - 1
_ALL = (1 << _SIGNATURE_BITS * _BEFORE) - 1
_NAMES_KEPT = _SIGNATURES_KEPT = 4096
_CALLS_KEPT = 4


class Name:
    """A name, with the calls and fast paths of the operations that had it.

    Attributes:
        text: The name itself, by which the ranks match operations.
        calls: The calls, by signature.
        fast_paths: The fast paths of synchronous allreduces, by signature.
    """

    __slots__ = ("calls", "fast_paths", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.calls: dict[Hashable, Call] = {}
        self.fast_paths: dict[Hashable, FastPath | None] = {}

    def keep_call(self, signature: Hashable, call: Call) -> Call:
        """Keep the call of operations with this signature, and return it."""
        if len(self.calls) >= _CALLS_KEPT:
            self.calls.clear()
            self.fast_paths.clear()
        self.calls[signature] = call
        return call


class Names:
    """The names of a group's operations. Any thread may ask for one; the order must be the same on all ranks."""

    def __init__(self, prefix: str) -> None:
        """Begin without operations; `prefix` is the same on all ranks, and different for each group."""
        self._prefix = prefix
        self._lock = threading.Lock()
        self._names: dict[int, Name] = {}
        self._hashes: dict[Hashable, int] = {}  # of signatures
        self._before = 0  # the hashes of the last `_BEFORE` operations, as one number
        self._alike = 0  # how often the last hash has been repeated in a row
        self._restarted = 0  # the number of the operation after which the names restarted
        self.count = 0  # the number of names that have been given

    def next(self, signature: Hashable) -> Name:
        """Return the name of the next operation.

        Args:
            signature: The attributes that are equal on all ranks; its `repr` must contain all of them.
        """
        with self._lock:
            self.count += 1
            place = self._before * _ALIKE + self._alike % _ALIKE
            name = self._names.get(place) or self._make(place)
            last = self._before & _LAST
            this = self._hashes.get(signature) or self._hash(signature)
            self._alike = self._alike + 1 if this == last else 0
            self._before = (self._before << _SIGNATURE_BITS | this) & _ALL
            return name

    def _make(self, place: int) -> Name:
        if len(self._names) >= _NAMES_KEPT:
            self._names.clear()
        made = self._names[place] = Name(f"{self._prefix}.{self._restarted}.{place:x}")
        return made

    def _hash(self, signature: Hashable) -> int:
        if len(self._hashes) >= _SIGNATURES_KEPT:
            self._hashes.clear()
        found = self._hashes[signature] = 1 + zlib.crc32(repr(signature).encode()) % _LAST
        return found

    def restart(self, number: int) -> bool:
        """Give other names than before from now on, after the ranks disagreed about operation `number`.

        Returns:
            False, having done nothing, if it is not the last one.
        """
        with self._lock:
            if number != self.count:
                return False
            self._names.clear()
            self._before = self._alike = 0
            self._restarted = number
            return True
