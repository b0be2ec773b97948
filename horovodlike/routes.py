"""The grammar of the settings that choose a transport by operation and size, such as ``CPU_OPERATIONS``.

A value is the name of a transport, or parts with commas between them: at most one name, for all operations that no
other part is about, and rules ``OPERATION=NAME`` or ``OPERATION:<SIZE=NAME``. Of an operation's rules, the first that
fits its size counts.
"""

import re
from collections.abc import Sequence

__all__ = ["OPERATIONS", "RuleError", "has_rules", "names", "normalise", "of_operation"]

OPERATIONS = ("allreduce", "allgather", "broadcast", "reducescatter", "alltoall", "gather", "scatter", "reduce")
"""The operations that a rule can be about: those that move tensors."""

_PART = re.compile(r"(?:(?P<operation>[^:=]*?)\s*(?::\s*<\s*(?P<size>[^:=<]*?)\s*)?=\s*)?(?P<name>[^:=]*)")
_SIZE = re.compile(r"([0-9]{1,18})([kmg]?)")
_UNITS = {"": 0, "k": 10, "m": 20, "g": 30}
_MOST = 2**62

Choice = tuple[int | None, str]
"""A size in bytes that an operation must be smaller than, None for any, and the name of a transport."""


class RuleError(ValueError):
    """A value is not in this grammar; the message names the part and the remedy."""


def has_rules(text: str) -> bool:
    """Return whether the value is more than the name of a transport."""
    return "," in text or "=" in text


def normalise(text: str, choices: Sequence[str]) -> str:
    """Check a value; return it without spaces and in lower case, so that equal values are equal texts.

    Args:
        text: The value.
        choices: The names of the transports.

    Raises:
        RuleError: The value is not accepted.
    """
    parts = [part.strip() for part in text.lower().split(",")]
    seen: dict[str, list[Choice]] = {}
    for part in parts:
        operation, below, name = _parse(part, choices)
        before = seen.setdefault(operation, [])
        _check_order(part, operation, below, before)
        before.append((below, name))
    return ",".join("".join(part.split()) for part in parts)


def of_operation(text: str, operation: str) -> list[Choice]:
    """Return the choices for one operation, by ascending size; the last one is for any size.

    Args:
        text: A result of :func:`normalise`.
        operation: One of :data:`OPERATIONS`.
    """
    rest = next((part for part in text.split(",") if "=" not in part), "auto")
    choices: list[Choice] = []
    for part in text.split(","):
        of, _, name = part.partition("=")
        about, _, size = of.partition(":<")
        if name and about == operation:
            choices.append((_bytes(size) if size else None, name))
    return choices if choices and choices[-1][0] is None else [*choices, (None, rest)]


def names(text: str) -> set[str]:
    """Return the transports that a result of :func:`normalise` chooses for any operation."""
    return {name for operation in OPERATIONS for _, name in of_operation(text, operation)}


def _parse(part: str, choices: Sequence[str]) -> tuple[str, int | None, str]:
    match = _PART.fullmatch(part)
    if match is None or not part:
        raise RuleError(
            f"{part!r} is none of its parts: write NAME, OPERATION=NAME or OPERATION:<SIZE=NAME, with commas between "
            "the parts, as in auto,broadcast=mpi"
        )
    operation, size, name = match["operation"], match["size"], match["name"]
    if name not in choices:
        raise RuleError(f"in {part!r}, {name!r} must be one of {', '.join(choices)}")
    if operation is None:
        return "", None, name
    if operation not in OPERATIONS:
        raise RuleError(f"in {part!r}, {operation!r} must be one of {', '.join(OPERATIONS)}")
    below = None if size is None else _bytes(size)
    if below is not None and not 0 < below <= _MOST:
        raise RuleError(
            f"in {part!r}, the size {size!r} must be a number of bytes greater than 0, such as 512, 64K or 1M"
        )
    return operation, below, name


def _bytes(size: str) -> int:
    """Return the number of bytes; 0 if it is not a size."""
    match = _SIZE.fullmatch(size)
    return 0 if match is None else int(match[1]) << _UNITS[match[2]]


def _check_order(part: str, operation: str, below: int | None, before: Sequence[Choice]) -> None:
    if not before:
        return
    last = before[-1][0]
    if not operation:
        raise RuleError(f"{part!r} is the second part without an operation: keep one of them")
    if last is None or (below is not None and below <= last):
        raise RuleError(
            f"{part!r} has no effect, since a part before it covers these sizes of {operation}: write the smaller size "
            "first, and the part without a size last, or leave it out"
        )
