"""Numbers in messages."""

from collections.abc import Sequence

__all__ = ["counted", "listed"]


def counted(number: int, noun: str) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{number} {noun}{'s' * (number != 1)}"


def listed(noun: str, numbers: Sequence[int]) -> str:
    """``rank 1``, ``ranks 1, 2``."""
    return f"{noun}{'s' * (len(numbers) != 1)} {', '.join(map(str, numbers))}"
