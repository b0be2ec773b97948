"""Numbers in messages, and how these speak of what the user has given."""

from collections.abc import Sequence

__all__ = ["counted", "given", "listed", "shown"]


def counted(number: int, noun: str) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{number} {noun}{'s' * (number != 1)}"


def listed(noun: str, numbers: Sequence[int]) -> str:
    """``rank 1``, ``ranks 1, 2``."""
    return f"{noun}{'s' * (len(numbers) != 1)} {', '.join(map(str, numbers))}"


def given(name: str, value: object) -> str:
    """What messages are to call a value: ``-np 2`` or, if it is not a flag's, ``np=2``."""
    return f"{name} {value}" if name.startswith("-") else f"{name}={value}"


def shown(value: object) -> str:
    """A value as Python writes it; it does not write out numbers of thousands of digits."""
    try:
        return repr(value)
    except ValueError:
        return "(a number of thousands of digits)"
