"""What the launcher raises."""


class UsageError(ValueError):
    """The job cannot be started as it was asked for; the message names the culprit and the remedy."""


class HostsError(RuntimeError):
    """Some hosts cannot take part in the job; the message lists them, and why."""


class RankFailedError(RuntimeError):
    """A rank of ``horovodlike.run`` ended without a result.

    Attributes:
        rank: The rank, or -1 if the job failed as a whole.
        exit_code: Its exit code; 128 plus the number of the signal that killed it.
    """

    def __init__(self, message: str, rank: int, exit_code: int) -> None:
        """Keeps the facts beside the message."""
        super().__init__(message)
        self.rank = rank
        self.exit_code = exit_code

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        """Pickles by constructor arguments; the default would pass the message alone."""
        return type(self), (self.args[0], self.rank, self.exit_code)
