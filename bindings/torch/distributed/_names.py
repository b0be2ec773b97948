"""Names for the operations of a process group: the ranks make them in the same order, and match them by name.

The name of an operation follows from the `_BEFORE` operations before it, and not from itself. So ranks that disagree
about an operation have the same name for it, and get an error that says what differs. And a program that repeats its
operations gets the same names for the same operations, which the engine knows then. Where many operations in a row
are alike, `_ALIKE` of them have different names. Operations of one name follow one another in the engine.

Few names are better than many: what the engine keeps of a new one lies between the tensors of the program, and where a
large one is freed its memory may not do for the next one.

After one about which the ranks disagreed, operations may have different names, then: they wait until they time out. A
program that waits for each operation before it starts the next one gets the error first, and its next operation has
none before it (`restart`). If others have been started by then the ranks may restart at different operations, so the
group must not be used any more. A name that is right in any case would have to follow from operations that are known to
be complete, or from the number alone, by which few programs that repeat themselves would get the same names.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Hashable

from horovodlike.torch._ops.fast_path import FastPath
from horovodlike.torch._ops.handles import Call

_BEFORE = 3
_ALIKE = 8
_SIGNATURE_BITS = 12
_LAST = (1 << _SIGNATURE_BITS) - 1
_ALL = (1 << _SIGNATURE_BITS * _BEFORE) - 1
_CONTEXTS = 4093  # a prime number, so that all bits count
_SIGNATURES_KEPT = 4096
_CALLS_KEPT = 4


class Name:
    """A name, and what has been prepared for the operations that had it.

    Attributes:
        text: What the ranks match operations by.
        calls: By signature.
        fast_paths: By signature, of synchronous allreduces.
    """

    __slots__ = ("calls", "fast_paths", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.calls: dict[Hashable, Call] = {}
        self.fast_paths: dict[Hashable, FastPath | None] = {}

    def keep_call(self, signature: Hashable, call: Call) -> Call:
        """Keep what has been prepared for operations with this signature, and return it."""
        if len(self.calls) >= _CALLS_KEPT:
            self.calls.clear()
            self.fast_paths.clear()
        self.calls[signature] = call
        return call


class Names:
    """The names of a group's operations. Any thread may ask for one; the order must be the same on all ranks."""

    def __init__(self, prefix: str) -> None:
        """Begin; `prefix` is the same on all ranks, and no other group's."""
        self._prefix = prefix
        self._lock = threading.Lock()
        self._names: dict[int, Name] = {}
        self._hashes: dict[Hashable, int] = {}  # of signatures
        self._before = 0  # the hashes of the last operations
        self._alike = 0  # how many of them in a row have the last one's
        self.count = 0  # how many names have been given

    def next(self, signature: Hashable) -> Name:
        """Return the name of the next operation.

        Args:
            signature: What is the same on all ranks about it, and of which `repr` says all.
        """
        with self._lock:
            self.count += 1
            number = self._before % _CONTEXTS * _ALIKE + self._alike % _ALIKE
            name = self._names.get(number)
            if name is None:
                name = self._names[number] = Name(f"{self._prefix}.{number}")
            last = self._before & _LAST
            this = self._hashes.get(signature) or self._hash(signature)
            self._alike = self._alike + 1 if this == last else 0
            self._before = (self._before << _SIGNATURE_BITS | this) & _ALL
            return name

    def _hash(self, signature: Hashable) -> int:
        if len(self._hashes) >= _SIGNATURES_KEPT:
            self._hashes.clear()
        found = self._hashes[signature] = 1 + zlib.crc32(repr(signature).encode()) % _LAST
        return found

    def restart(self, number: int) -> bool:
        """Have the next operation have none before it, after operation `number`, about which the ranks disagreed.

        Returns:
            False if others have been started after it: then the ranks have no order any more.
        """
        with self._lock:
            self._before = self._alike = 0
            return number == self.count
