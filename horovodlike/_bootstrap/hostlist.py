"""Slurm's short forms of lists: ``n[01-03,7],m2`` for host names, ``4(x2),3`` for one number per host. Pure."""

import itertools
import re

__all__ = ["MOST_HOSTS", "expand_counts", "expand_hosts"]

MOST_HOSTS = 65536
"""The most hosts of a list; a longer one is taken for a mistake."""

_PIECES = re.compile(r"([^\[\],\s]*)\[([0-9,-]+)\]|([^\[\],\s]+)")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")


def expand_hosts(text: str) -> list[str]:
    """Return the names that a host list stands for, in its order.

    Brackets hold numbers and ranges; leading zeros are kept. A name may have several pairs of brackets.

    Raises:
        ValueError: The text is no host list, or stands for more than :data:`MOST_HOSTS` names; the message shows it.
    """
    hosts: list[str] = []
    position = 0
    while True:
        choices: list[list[str]] = []
        while (piece := _PIECES.match(text, position)) is not None:
            before, numbers, plain = piece.groups()
            choices += [[plain]] if plain is not None else [[before], _numbers(text, numbers)]
            position = piece.end()
        if not choices or (position < len(text) and text[position] != ","):
            raise ValueError(f"{text!r} is not a list of hosts; something like n[01-03,7],m2 is expected")
        names = itertools.islice(itertools.product(*choices), MOST_HOSTS + 1)
        hosts += ["".join(parts) for parts in names]
        if len(hosts) > MOST_HOSTS:
            raise ValueError(f"{text!r} stands for more than {MOST_HOSTS} hosts")
        if position == len(text):
            return hosts
        position += 1


def _numbers(text: str, numbers: str) -> list[str]:
    found: list[str] = []
    for part in numbers.split(","):
        match = _RANGE.fullmatch(part)
        first, last = (match[1], match[2] or match[1]) if match else ("1", "0")
        if int(first) > int(last):
            raise ValueError(f"{text!r} is not a list of hosts: [{numbers}] must hold numbers and ascending ranges")
        if int(last) - int(first) >= MOST_HOSTS:
            raise ValueError(f"{text!r} stands for more than {MOST_HOSTS} hosts")
        found += [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    return found


def expand_counts(text: str) -> list[int]:
    """Return the numbers that ``4(x2),3`` stands for: ``[4, 4, 3]``.

    Raises:
        ValueError: The text has another form, or stands for more than :data:`MOST_HOSTS` numbers; the message shows it.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part)
        if match is None or len(counts) + int(match[2] or 1) > MOST_HOSTS:
            raise ValueError(f"{text!r} is not a number for each host; something like 4(x2),3 is expected")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts
