"""Names for the operations of a process group: the ranks make them in the same order, and match them by name.

The name of an operation follows from the operations before it, and not from itself. So ranks that disagree about an
operation have the same name for it, and get an error that says what differs. And a program that repeats its operations
gets the same names for the same operations, which the engine knows then: a name is that of the operation before, to
which a small number is added, since several may be in flight.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Hashable

from horovodlike.torch._ops.fast_path import FastPath
from horovodlike.torch._ops.handles import Call

IN_FLIGHT = 32
"""Operations after the same kind of operation that may be in flight. One more waits for the first of them."""

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


class _After:
    """The names of operations that come after one kind of operation."""

    __slots__ = ("count", "names")

    def __init__(self) -> None:
        self.count = 0
        self.names: list[Name] = []


class Names:
    """The names of a group's operations. Any thread may ask for one; the order must be the same on all ranks."""

    def __init__(self, prefix: str) -> None:
        """Begin; `prefix` is the same on all ranks, and no other group's."""
        self._prefix = prefix
        self._lock = threading.Lock()
        self._after: dict[int, _After] = {}
        self._buckets: dict[Hashable, int] = {}
        self._last = 0
        self.count = 0  # how many names have been given

    def next(self, signature: Hashable) -> Name:
        """Return the name of the next operation.

        Args:
            signature: What is the same on all ranks about it, and of which `repr` says all.
        """
        with self._lock:
            self.count += 1
            after = self._after.get(self._last)
            if after is None:
                after = self._after[self._last] = _After()
            place = after.count % IN_FLIGHT
            after.count += 1
            if place == len(after.names):
                after.names.append(Name(f"{self._prefix}.{self._last}.{place}"))
            bucket = self._buckets.get(signature)
            if bucket is None:
                bucket = self._bucket_of(signature)
            self._last = bucket
            return after.names[place]

    def _bucket_of(self, signature: Hashable) -> int:
        if len(self._buckets) >= _SIGNATURES_KEPT:
            self._buckets.clear()
        bucket = self._buckets[signature] = 1 + zlib.crc32(repr(signature).encode()) % _BUCKETS
        return bucket

    def restart(self) -> None:
        """Have the next operation follow none, after one about which the ranks disagreed."""
        with self._lock:
            self._last = 0
