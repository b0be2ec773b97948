"""Names for the operations of a process group: the ranks make them in the same order, and match them by name.

The name of an operation follows from the operation before it and from its number, and not from itself. So ranks that
disagree about an operation have the same name for it, and get an error that says what differs. And a program that
repeats its operations gets the same names for the same operations, which the engine knows then: the name contains the
number modulo `IN_FLIGHT`, since several may be in flight.

The operation after one about which the ranks disagreed has different names, then: it waits until it times out. A
program that waits for each operation before it starts the next one gets the error first, and its next operation follows
none (`restart`). If others have been started by then the ranks may restart at different operations, so the group must
not be used any more. A name that is right in any case would have to follow from operations that are known to be
complete, or from the number alone, by which few programs that repeat themselves would get the same names.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Hashable

from horovodlike.torch._ops.fast_path import FastPath
from horovodlike.torch._ops.handles import Call

IN_FLIGHT = 32
"""Operations that may be in flight. One more waits for the first of them, if both have the same name."""

_BUCKETS = 512
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
        self._names: list[dict[int, Name]] = [{} for _ in range(IN_FLIGHT)]  # of a number, after each operation
        self._buckets: dict[Hashable, int] = {}
        self._last = 0
        self.count = 0  # how many names have been given

    def next(self, signature: Hashable) -> Name:
        """Return the name of the next operation.

        Args:
            signature: What is the same on all ranks about it, and of which `repr` says all.
        """
        with self._lock:
            place = self.count % IN_FLIGHT
            self.count += 1
            name = self._names[place].get(self._last)
            if name is None:
                name = self._names[place][self._last] = Name(f"{self._prefix}.{self._last}.{place}")
            bucket = self._buckets.get(signature)
            if bucket is None:
                bucket = self._bucket_of(signature)
            self._last = bucket
            return name

    def _bucket_of(self, signature: Hashable) -> int:
        if len(self._buckets) >= _SIGNATURES_KEPT:
            self._buckets.clear()
        bucket = self._buckets[signature] = 1 + zlib.crc32(repr(signature).encode()) % _BUCKETS
        return bucket

    def restart(self, number: int) -> bool:
        """Have the next operation follow none, after operation `number`, about which the ranks disagreed.

        Returns:
            False if others have been started after it: then the ranks have no order any more.
        """
        with self._lock:
            self._last = 0
            return number == self.count
