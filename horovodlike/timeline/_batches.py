"""The batches of collectives that a rank has carried out, as its timeline tells. Times are ns since the epoch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from horovodlike.timeline._events import Event, checked, is_time, to_ns

START = "start_time_since_epoch_in_micros"
NEGOTIATE = "NEGOTIATE_"
LATE_NS = 1_000_000
"""A rank that comes last is late if the first one waits for it this long; the same as in the engine's statistics."""

_JOINED_NS = 2  # a negotiation ends where the collective begins, but for rounding
_SLACK_NS = 1_000_000  # the difference that clocks may have after they were aligned


class TensorRequest(NamedTuple):
    """A tensor of a batch.

    Attributes:
        name: Name of the tensor.
        at: Time of the request on this rank.
        num_bytes: Bytes that this rank gave.
        negotiation: The event until the batch began; None: it is not in the timeline.
        reduction: The event in which the batch was carried out.
    """

    name: str
    at: int
    num_bytes: int
    negotiation: Event | None
    reduction: Event


@dataclass(slots=True)
class RankBatch:
    """Tensors of one rank for which one collective is carried out.

    Attributes:
        number: Place among the collectives of the job; the same on all ranks.
        kind: ``ALLREDUCE`` and so on.
        begun: Time at which this rank began to carry it out: all ranks had requested it then.
        ended: Time at which it was done.
        num_ranks: Number of ranks that take part.
        on_gpu: True if ``ended`` only says when it was given to the GPU.
        clipped: True if a request is older than the timeline, so that its time is not known.
        requests: The tensors.
    """

    number: int
    kind: str
    begun: int
    ended: int
    num_ranks: int
    on_gpu: bool = False
    clipped: bool = False
    requests: list[TensorRequest] = field(default_factory=list)

    @property
    def key(self) -> tuple[int, str, str, int]:
        """Identify the batch on all ranks; one of which a file lacks a tensor is another one."""
        return self.number, self.kind, self.requests[0].name, len(self.requests)

    @property
    def first_request(self) -> int:
        """Time at which this rank requested the first tensor."""
        return min(request.at for request in self.requests)

    @property
    def ready(self) -> int:
        """Time at which this rank had requested all tensors."""
        return max(request.at for request in self.requests)

    @property
    def num_bytes(self) -> int:
        """Bytes that this rank gave."""
        return sum(request.num_bytes for request in self.requests)

    @property
    def title(self) -> str:
        """The batch in a few words."""
        more = f" + {len(self.requests) - 1} more" if len(self.requests) > 1 else ""
        return f"{self.requests[0].name}{more}"

    def shift(self, ns: int) -> None:
        """Correct the clock."""
        self.begun += ns
        self.ended += ns
        self.requests = [request._replace(at=request.at + ns) for request in self.requests]


class Timeline(NamedTuple):
    """The timeline of a rank.

    Attributes:
        rank: The rank.
        size: Number of ranks of the job.
        host: Name of its host.
        start: Time 0 of the events.
        names: The tensors, by the processes that they are in the trace.
        batches: The batches, in their order.
        events: All events.
    """

    rank: int
    size: int
    host: str
    start: int
    names: dict[int, str]
    batches: list[RankBatch]
    events: list[Event]


def timeline_of(content: object) -> Timeline:
    """Return the contents of the file of a rank's timeline.

    Raises:
        ValueError: It is not the timeline of a rank.
    """
    if isinstance(content, dict):
        raise ValueError("it is not a timeline: of a profile, give the folder")
    events = checked(content)
    for number, event in enumerate(events):
        is_row = isinstance(event.get("pid"), int) and (event["ph"] == "M" or isinstance(event.get("tid"), int))
        if not is_row or "name" not in event:
            raise ValueError(f"event {number} is not one of a timeline of horovodlike")
    head = next((event["args"] for event in events if event["ph"] == "M" and START in event.get("args", {})), None)
    if head is None or not is_time(head[START]):
        raise ValueError("it does not say when it began, so it is not a timeline of horovodlike")
    rank, size, host = (head.get(key) for key in ("rank", "size", "host"))
    if not isinstance(rank, int) or not isinstance(size, int) or not isinstance(host, str) or not 0 <= rank < size:
        raise ValueError(
            "it is not the timeline of one rank: give the files of which it was merged; or another version of "
            "horovodlike has written it"
        )
    start = to_ns(head[START])
    names = {
        event["pid"]: str(event.get("args", {}).get("name")) for event in events if event["name"] == "process_name"
    }
    return Timeline(rank, size, host, start, names, _batches(events, start, names), events)


def check_one_job(ranks: Iterable[tuple[int, int]]) -> None:
    """Check that files, of which each has a rank and a size, can belong to one job.

    Raises:
        ValueError: They cannot.
    """
    found = [*ranks]
    if len({size for _, size in found}) > 1 or len({rank for rank, _ in found}) < len(found):
        described = ", ".join(f"rank {rank} of {size}" for rank, size in found)
        raise ValueError(f"there are files of several jobs, remove those of earlier ones: {described}")


def _batches(events: Sequence[Event], start: int, names: Mapping[int, str]) -> list[RankBatch]:
    waiting: dict[int, Event] = {}
    batches: dict[int, RankBatch] = {}
    for place, event in enumerate(events):
        if event["ph"] != "X":
            continue
        row: int = event["pid"]
        if event["name"].startswith(NEGOTIATE):
            waiting[row] = event
            continue
        arguments: dict[str, Any] = event.get("args", {})
        if not all(isinstance(arguments.get(key), int) for key in ("collective", "ranks", "bytes")):
            raise ValueError(f"event {place} lacks something of its collective: another version has written it")
        number: int = arguments["collective"]
        begun = start + to_ns(event["ts"])
        negotiation = waiting.pop(row, None)
        at = begun
        if negotiation is not None:
            at = start + to_ns(negotiation["ts"])
            if abs(at + to_ns(negotiation["dur"]) - begun) > _JOINED_NS:  # the negotiation of an event that was dropped
                negotiation, at = None, begun
        batch = batches.get(number)
        if batch is None:
            ended = begun + to_ns(event["dur"])
            batch = RankBatch(number, event["name"], begun, ended, arguments["ranks"], arguments.get("device") == "gpu")
            batches[number] = batch
        if negotiation is None or negotiation["ts"] <= 0:
            batch.clipped = True
        batch.requests.append(TensorRequest(names.get(row, "?"), at, arguments["bytes"], negotiation, event))
    return [*batches.values()]


class Match(NamedTuple):
    """A batch of which all is known.

    Attributes:
        members: The batch on each rank that took part.
        last: The rank that came last.
        is_late: True if the others waited for it for ``LATE_NS`` or longer.
    """

    members: dict[int, RankBatch]
    last: int
    is_late: bool


def matched(ranks: Mapping[int, Sequence[RankBatch]]) -> list[Match]:
    """Return the batches that all ranks that took part have recorded in whole.

    One of which the times contradict each other is left out, as with a file that an earlier job has left.
    """
    found: dict[tuple[int, str, str, int], dict[int, RankBatch]] = {}
    for rank, batches in ranks.items():
        for batch in batches:
            found.setdefault(batch.key, {})[rank] = batch
    matches = []
    for members in found.values():
        ready = {rank: batch.ready for rank, batch in members.items()}
        last = max(ready, key=lambda rank: ready[rank])
        if any(batch.clipped or batch.num_ranks != len(members) for batch in members.values()):
            continue
        if ready[last] <= min(batch.begun for batch in members.values()) + _SLACK_NS:
            matches.append(Match(members, last, ready[last] - min(ready.values()) >= LATE_NS))
    return matches
