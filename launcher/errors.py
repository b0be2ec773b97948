"""The launcher's exceptions, and the wording of its messages for numbers and given values."""

from collections.abc import Iterable, Sequence


class UsageError(ValueError):
    """The job cannot be started as it was asked for; the message names the cause and the remedy."""


class HostsError(RuntimeError):
    """Some hosts cannot take part in the job; the message lists them with the reasons."""


class RankFailedError(RuntimeError):
    """A rank of ``horovodlike.run`` ended without a result.

    Attributes:
        rank: The rank, or -1 if the job failed as a whole.
        exit_code: The exit code of the rank, or of the job if ``rank`` is -1; 128 plus the number of the signal that
            killed it.
    """

    def __init__(self, message: str, rank: int, exit_code: int) -> None:
        """Store the rank and its exit code beside the message."""
        super().__init__(message)
        self.rank = rank
        self.exit_code = exit_code

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        """Pickle by constructor arguments; the default would pass the message alone."""
        return type(self), (self.args[0], self.rank, self.exit_code)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 rank``, ``2 ranks``."""
    return f"{number} {noun}{'s' * (number != 1)}"


def listed(noun: str, numbers: Sequence[int]) -> str:
    """Return a noun with its numbers: ``rank 1``, ``ranks 1, 2``."""
    return f"{noun}{'s' * (len(numbers) != 1)} {', '.join(map(str, numbers))}"


def ranges(numbers: Iterable[int]) -> str:
    """Return ascending numbers, with those that follow each other as ranges: ``0,2-5``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)


def given(name: str, value: object) -> str:
    """Return a name with its value: ``-np 2`` for a flag, ``np=2`` for other names."""
    return f"{name} {value}" if name.startswith("-") else f"{name}={value}"
