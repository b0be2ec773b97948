"""The state of the rendezvous: which ranks have arrived at which topic, and the reply to each. Pure.

A *topic* is one all-gather: it is over when every rank has arrived, or when it is certain that one will not. Topics
are named ``group/name``; the group is a generation (one ``init()`` of all ranks). The failure of a topic fails all
later topics of its group, so that a rank that is late learns the reason at once. A generation starts with a topic of
the group ``join``; its failures are not remembered, so that ``init()`` may be tried again.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

JOIN = "join"
_REMEMBERED_GROUPS = 8


@dataclass(frozen=True)
class Reply:
    """A reply to a rank.

    Attributes:
        rank: The receiver.
        topic: The topic for which the receiver waits.
        result: The payloads by rank, if the topic is complete.
        error: Why the topic failed, if it did.
    """

    rank: int
    topic: str
    result: list[Any] | None = None
    error: str | None = None


@dataclass
class _Topic:
    name: str
    since: float
    deadline: float
    payloads: dict[int, Any] = field(default_factory=dict)


def name_ranks(ranks: Iterable[int]) -> str:
    """Return the ranks in words: ``rank 2``, ``ranks 2, 3``; the first 16 and the number of the others."""
    found = sorted(ranks)
    shown = ", ".join(str(rank) for rank in found[:16])
    if len(found) > 16:
        shown += f" and {len(found) - 16} more"
    return f"{'rank' if len(found) == 1 else 'ranks'} {shown}"


class RendezvousState:
    """The state of all topics. Callers pass ``time.monotonic()`` as the time; nothing here reads a clock."""

    def __init__(self, size: int) -> None:
        """Expect ranks 0 to ``size - 1``."""
        self.size = size
        self.generation = 0  # the number of times that all ranks have joined
        self._topics: dict[str, _Topic] = {}
        self._waiting: dict[int, str] = {}
        self._failed_groups: dict[str, str] = {}
        self._lost: dict[int, str] = {}
        self._seen: set[int] = set()

    def connected(self, rank: int) -> None:
        """Note that a rank has authenticated itself, for the first time or again."""
        self._seen.add(rank)
        self._lost.pop(rank, None)

    def arrive(self, rank: int, name: str, payload: Any, now: float, timeout: float) -> list[Reply]:  # noqa: ANN401
        """Note that a rank has arrived at a topic; return the replies."""
        if rank in self._waiting:
            return self._fail_all(f"rank {rank} came to {name!r} while it waited for {self._waiting[rank]!r}")
        failure = self._failed_groups.get(_group(name))
        if failure is not None:
            return [Reply(rank, name, error=failure)]
        topic = self._topics.setdefault(name, _Topic(name, now, now + timeout))
        topic.payloads[rank] = payload
        self._waiting[rank] = name
        missing = self._missing(topic)
        if not missing:
            return self._complete(topic)
        gone = [other for other in self._lost if other in missing]  # the first loss may have caused the others
        if gone:
            return self._fail(topic, self._lost[gone[0]])
        if len(self._waiting) == self.size:
            where = "; ".join(f"{name_ranks(each.payloads)}: {each.name!r}" for each in self._topics.values())
            return self._fail_all(f"the ranks disagree about what comes next: {where}")
        return []

    def abort(self, rank: int, group: str, reason: str) -> list[Reply]:
        """Note that a rank gives up a generation, and why."""
        reason = f"rank {rank} failed: {reason}"
        self._remember(group, reason)
        return [
            reply
            for topic in list(self._topics.values())
            if _group(topic.name) == group
            for reply in self._fail(topic, reason)
        ]

    def left(self, rank: int) -> list[Reply]:
        """Note that a rank has said that it leaves; it may connect again for another generation."""
        return self._forget(rank, f"rank {rank} left")

    def lost(self, rank: int, reason: str) -> list[Reply]:
        """Note that a rank's connection has broken: all open topics fail."""
        self._lost[rank] = reason
        return [*self._forget(rank, reason), *self._fail_all(reason)]

    def exited(self, rank: int, reason: str) -> list[Reply]:
        """Note that the process of a rank without a connection has exited: no open topic can complete without the rank.

        A process that connects as this rank later, such as one that a wrapper has left behind, is accepted.

        Args:
            rank: The rank.
            reason: How the process has exited, such as ``rank 1 exited with code 0``.
        """
        if rank in self._lost:  # its connection broke first
            return []
        when = "called init() again" if rank in self._seen else "called init()"
        reason = f"{reason} before it {when}; every rank of the job must call it"
        self._lost[rank] = reason
        return self._fail_all(reason)

    def last_failure(self) -> str | None:
        """Return why the current generation has failed, if it has."""
        return self._failed_groups.get(str(self.generation))

    def fail_all(self, reason: str) -> list[Reply]:
        """Fail every topic that any rank waits for."""
        return self._fail_all(reason)

    def expire(self, now: float) -> list[Reply]:
        """Fail the topics whose deadline has passed."""
        replies = []
        for topic in [each for each in self._topics.values() if each.deadline <= now]:
            missing = self._missing(topic)
            unseen = [rank for rank in missing if rank not in self._seen]
            detail = f" ({name_ranks(unseen)} never connected)" if unseen else ""
            replies += self._fail(
                topic,
                f"after {topic.deadline - topic.since:g} s {name_ranks(missing)} of {self.size} had not "
                f"arrived{detail}; see whether they run and what they print. If they only need longer, raise "
                "--start-timeout (HOROVODLIKE_START_TIMEOUT)",
            )
        return replies

    def next_deadline(self) -> float | None:
        """Return the earliest deadline of a topic, for :meth:`expire`; None without topics."""
        return min((topic.deadline for topic in self._topics.values()), default=None)

    def _missing(self, topic: _Topic) -> list[int]:
        return [rank for rank in range(self.size) if rank not in topic.payloads]

    def _complete(self, topic: _Topic) -> list[Reply]:
        result = [topic.payloads[rank] for rank in range(self.size)]
        self._drop(topic)
        if _group(topic.name) == JOIN:
            self.generation += 1
        return [Reply(rank, topic.name, result=result) for rank in range(self.size)]

    def _fail(self, topic: _Topic, reason: str) -> list[Reply]:
        self._drop(topic)
        self._remember(_group(topic.name), reason)
        return [Reply(rank, topic.name, error=reason) for rank in sorted(topic.payloads)]

    def _fail_all(self, reason: str) -> list[Reply]:
        return [reply for topic in list(self._topics.values()) for reply in self._fail(topic, reason)]

    def _drop(self, topic: _Topic) -> None:
        del self._topics[topic.name]
        for rank in topic.payloads:
            self._waiting.pop(rank, None)

    def _forget(self, rank: int, reason: str) -> list[Reply]:
        """Fail the topic of a rank that has stopped waiting: it cannot receive the result."""
        name = self._waiting.pop(rank, None)
        if name is None:
            return []
        topic = self._topics[name]
        del topic.payloads[rank]
        return self._fail(topic, reason)

    def _remember(self, group: str, reason: str) -> None:
        if group == JOIN:
            return
        self._failed_groups.setdefault(group, reason)
        while len(self._failed_groups) > _REMEMBERED_GROUPS:
            del self._failed_groups[next(iter(self._failed_groups))]


def _group(name: str) -> str:
    return name.partition("/")[0]
