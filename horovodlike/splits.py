"""Layers that are split among the ranks of a process set, without their arithmetic; for the bindings.

A weight is split along one dimension. It may consist of several *blocks* along this dimension, such as the projections
of queries, keys and values: then each block is split, and a rank's part holds its part of each block.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from horovodlike import basics
from horovodlike.process_set import ProcessSet, UnnamedCounter, registered_id

Concatenate = Callable[[list[Any], int], Any]
R = TypeVar("R", bound="RegionBase")

_numbers = UnnamedCounter()


def even_share(count: int, what: str, num_ranks: int) -> int:
    """Return the size of each rank's part of `count` features, heads or words.

    Args:
        count: The number to divide.
        what: Its name for the message, such as "ColumnParallelLinear: out_features".
        num_ranks: The number of ranks.

    Raises:
        ValueError: The number is not a positive multiple of the number of ranks.
    """
    if count > 0 and count % num_ranks == 0:
        return count // num_ranks
    below = count - count % num_ranks
    multiples = f"{below} or {below + num_ranks}" if below > 0 else str(num_ranks)
    raise ValueError(
        f"{what}={count} cannot be split evenly among {num_ranks} ranks: take a multiple of {num_ranks}, such as "
        f"{multiples}, or a process set whose number of ranks divides it"
    )


@dataclass(eq=False)
class RegionBase:
    """The ranks that share a layer, and the name by which they match its collectives.

    Layers are numbered for each process set in the order in which they are made, the same on all of its ranks. A copy
    of a layer has a number of its own.

    Attributes:
        layer: The name of the layer's class.
        process_set: The ranks.
        name: The prefix of the names of the layer's collectives.
        place: This rank's index in the process set.
        num_ranks: The number of its ranks.
    """

    layer: str
    process_set: ProcessSet
    name: str
    place: int
    num_ranks: int

    @classmethod
    def of(cls: type[R], layer: str, process_set: ProcessSet, name: str | None = None) -> R:
        """Return the region of a layer; without a name, the region of a new layer.

        Raises:
            NotInitializedError: `init()` has not been called.
            TypeError: `process_set` is no process set.
            ValueError: The set is not registered, or this rank is no member.
        """
        basics.size()  # raises before init()
        set_id = registered_id(process_set)
        place, size = process_set.rank(), process_set.size()
        assert place is not None and size is not None
        return cls(layer, process_set, name or _numbered(layer, set_id), place, size)

    def __deepcopy__(self: R, memo: dict[int, object]) -> R:
        copied = copy.copy(self)
        copied.name = _numbered(self.layer, registered_id(self.process_set))
        return copied


def _numbered(layer: str, set_id: int) -> str:
    return f"{layer}.{_numbers.next(set_id)}"


@dataclass(frozen=True)
class Split:
    """The division of a weight of any array library whose arrays can be sliced as NumPy's.

    Attributes:
        dim: The dimension that is divided.
        blocks: The number of equal blocks along this dimension; each of them is divided.
    """

    dim: int
    blocks: int = 1

    def part(self, whole: Any, place: int, num_ranks: int, concatenate: Concatenate) -> Any:
        """Return the part of the rank at `place`, a new array; `concatenate` takes arrays and a dimension."""
        length = whole.shape[self.dim] // self.blocks // num_ranks
        starts = [(block * num_ranks + place) * length for block in range(self.blocks)]
        return concatenate([self._sliced(whole, start, length) for start in starts], self.dim)

    def join(self, parts: Sequence[Any], concatenate: Concatenate) -> Any:
        """Return the whole that has these parts, one for each rank in the order of their places."""
        length = parts[0].shape[self.dim] // self.blocks
        pieces = [self._sliced(part, block * length, length) for block in range(self.blocks) for part in parts]
        return concatenate(pieces, self.dim)

    def _sliced(self, array: Any, start: int, length: int) -> Any:
        return array[(slice(None),) * self.dim + (slice(start, start + length),)]
