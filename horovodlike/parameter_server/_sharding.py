"""The parts of arrays that servers have. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from horovodlike._engine.parameters import BLOCK


class Part(NamedTuple):
    """The consecutive elements of one array that one server has.

    Attributes:
        server: The index of the server.
        offset: The first element in the array.
        size: The number of elements.
    """

    server: int
    offset: int
    size: int


def split(counts: Sequence[int], servers: int, label: str) -> list[list[Part]]:
    """Split arrays, one after the other, evenly among servers: the first ones have an element more if need be.

    Args:
        counts: The number of elements of each array.
        servers: The number of servers.
        label: The name of the parameter server, for the error.

    Returns:
        For each array its parts, in the order of its elements; one that is empty if the array is.

    Raises:
        ValueError: There are fewer elements than servers.
    """
    total = sum(counts)
    if total < servers:
        raise ValueError(
            f"{label}: {total} element{'s' * (total != 1)} cannot be split among {servers} servers; use a process set "
            "with fewer ranks, or fewer servers"
        )
    each, more = divmod(total, servers)
    parts: list[list[Part]] = [[] for _ in counts]
    array, begin = 0, 0  # the place of the next element
    for server in range(servers):
        left = each + (server < more)
        while left:
            size = min(left, counts[array] - begin)
            if size:
                parts[array].append(Part(server, begin, size))
            begin, left = begin + size, left - size
            if begin == counts[array]:
                array, begin = array + 1, 0
    return [found or [Part(0, 0, 0)] for found in parts]


def blocks(parts: Sequence[Part]) -> list[int]:
    """Return where each block of an array begins: the core counts the updates by 'adam' of each block of a part."""
    return [part.offset + begin for part in parts for begin in range(0, part.size, BLOCK)]
