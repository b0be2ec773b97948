"""Decides when a host may have workers again after failures there. Pure: the caller passes times."""

from dataclasses import dataclass, field

_DRAIN_S = 2.0
_TOLERATED = 4
_LOST_LOW_S = 5.0


@dataclass(frozen=True)
class Backoff:
    """The durations of back-offs, in which no workers are started on a host.

    Attributes:
        low: The first back-off, in seconds; each further one in a row is twice as long.
        high: The longest back-off, in seconds. The slot of a worker that was told to leave stays empty for as long.
        patient: True if a few failures cause no back-off. Otherwise the first failure does.
    """

    low: float = 1.0
    high: float = 60.0
    patient: bool = True


@dataclass
class HostHealth:
    """The failures of one host.

    Each failure adds one to a bucket, which loses one in two seconds outside back-offs. If failures are rare, a worker
    is replaced at once; if they are frequent, the host has back-offs, each longer than the one before until the bucket
    is empty.
    """

    rule: Backoff
    cooling_until: float = 0.0
    held: list[float] = field(default_factory=list)  # for each slot that stays empty: until when
    losses: int = 0  # how often in a row its agent was lost
    _level: float = 0.0
    _level_at: float = 0.0
    _in_a_row: int = 0

    def fail(self, now: float, slots: int) -> str:
        """Count the failure of a worker of the host. Return the consequence, in words."""
        self._drain(now)
        tolerated = max(_TOLERATED, 2 * slots)
        self._level = min(self._level, tolerated) + 1
        if self.rule.patient and self._level > tolerated:
            return self._cool(now, self.rule.low)
        if not self.rule.patient:
            return self._cool(now, self.rule.low)
        return "it is replaced at once"

    def lose(self, now: float) -> str:
        """Count a failure of the agent, which could not be started or has gone. Return the consequence, in words."""
        self.losses += 1
        self._drain(now)
        return self._cool(now, min(max(self.rule.low, _LOST_LOW_S), self.rule.high))

    def hold(self, now: float) -> None:
        """Note that a worker was told to leave; the scheduler that told it may want the slot."""
        self.held.append(now + self.rule.high)

    def held_slots(self, now: float) -> int:
        """Return how many slots stay empty."""
        self.held = [until for until in self.held if until > now]
        return len(self.held)

    def _drain(self, now: float) -> None:
        if now > self.cooling_until:
            self._level = max(0.0, self._level - (now - max(self._level_at, self.cooling_until)) / _DRAIN_S)
            if self._level == 0.0 and (self.rule.patient or now > self.cooling_until + 2 * self.rule.high):
                self._in_a_row = 0
        self._level_at = now

    def _cool(self, now: float, low: float) -> str:
        if now < self.cooling_until:  # failures that come together count once
            return f"its host is left alone for {self.cooling_until - now:.3g} s"
        seconds = min(self.rule.high, low * 2.0 ** min(self._in_a_row, 32))
        self._in_a_row += 1
        self.cooling_until = now + seconds
        return f"its host is left alone for {seconds:.3g} s"
