"""The batches of collectives that a rank has carried out, as its timeline tells. Times are ns since the epoch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

Event = dict[str, Any]
Number = int | float

START = "start_time_since_epoch_in_micros"
NEGOTIATE = "NEGOTIATE_"
CLIPPED = "older_than_timeline"
encoded = json.JSONEncoder(ensure_ascii=False).encode
"""An event as it is written. Perfetto reads no escapes of characters in all places."""

_JOINED_NS = 2  # a negotiation ends where the collective begins, but for rounding
_SLACK_NS = 1_000_000  # by which clocks may differ after they were aligned


class TensorRequest(NamedTuple):
    """A tensor of a batch.

    Attributes:
        name: The tensor's.
        at: When this rank requested the collective.
        num_bytes: How many this rank gave to it; None: the timeline does not tell.
        negotiation: The event until the batch began; None: it is not in the timeline.
        reduction: The event in which the batch was carried out.
    """

    name: str
    at: int
    num_bytes: int | None
    negotiation: Event | None
    reduction: Event


@dataclass(slots=True)
class RankBatch:
    """Tensors of one rank for which one collective is carried out.

    Attributes:
        number: Counts the collectives of the job; the same on all ranks.
        kind: ``ALLREDUCE`` and so on.
        begun: When this rank began to carry it out: all ranks had requested it then.
        ended: When it was done.
        on_gpu: Whether ``ended`` only says when it was given to the GPU.
        clipped: Whether a request is older than the timeline, so that its time is not known.
        requests: The tensors.
    """

    number: int
    kind: str
    begun: int
    ended: int
    on_gpu: bool = False
    clipped: bool = False
    requests: list[TensorRequest] = field(default_factory=list)

    @property
    def key(self) -> tuple[int, str, str]:
        """Identify the batch on all ranks."""
        return self.number, self.kind, self.requests[0].name

    @property
    def first_request(self) -> int:
        """When this rank requested the first tensor."""
        return min(request.at for request in self.requests)

    @property
    def ready(self) -> int:
        """When this rank had requested all tensors."""
        return max(request.at for request in self.requests)

    @property
    def num_bytes(self) -> int:
        """How many bytes this rank gave, as far as that is known."""
        return sum(request.num_bytes or 0 for request in self.requests)

    @property
    def title(self) -> str:
        """The batch in a few words."""
        more = f" + {len(self.requests) - 1} more" if len(self.requests) > 1 else ""
        return f"{self.requests[0].name}{more}"

    def shift(self, nanoseconds: int) -> None:
        """Correct the clock."""
        self.begun += nanoseconds
        self.ended += nanoseconds
        self.requests = [request._replace(at=request.at + nanoseconds) for request in self.requests]


def load(path: Path) -> Any:  # noqa: ANN401 - any JSON value
    """Return the content of a JSON file, with None for the numbers that JSON has no words for.

    Raises:
        OSError: It cannot be read.
        ValueError: It is no JSON, or a part of it is missing.
    """
    try:
        return json.loads(path.read_bytes(), parse_constant=lambda _: None)
    except (ValueError, RecursionError) as problem:
        raise ValueError(f"{path} is damaged, or was not written to its end: {problem}") from problem


def nanoseconds(microseconds: Number) -> int:
    """Convert the times of events."""
    return round(microseconds * 1000)


def microseconds(nanoseconds: int) -> float:
    """Convert to the times of events, which are exact to the nanosecond for some weeks from zero on."""
    return nanoseconds / 1000


def checked(events: object) -> list[Event]:
    """Return the events of a trace.

    Raises:
        ValueError: They are none, or one lacks its time.
    """
    if not isinstance(events, list):
        raise ValueError("it has no list of events: it is no trace")
    for number, event in enumerate(events):
        if not isinstance(event, dict) or not isinstance(event.get("ph"), str):
            raise ValueError(f"event {number} has no phase (ph): it is no trace")
        timed = ("ts", "dur") if event["ph"] == "X" else () if event["ph"] == "M" else ("ts",)
        for key in timed:
            if isinstance(event.get(key), bool) or not isinstance(event.get(key), Number):
                raise ValueError(f"event {number} has no number as its {key}")
    return events


def checked_timeline(events: object) -> list[Event]:
    """Return the events of a timeline, of one rank or merged.

    Raises:
        ValueError: They are not the events of one.
    """
    for number, event in enumerate(found := checked(events)):
        is_row = isinstance(event.get("pid"), int) and (event["ph"] == "M" or isinstance(event.get("tid"), int))
        if not is_row or not isinstance(event.get("name"), str) or not isinstance(event.get("args", {}), dict):
            raise ValueError(f"event {number} is not one of a timeline of horovodlike")
    start_of(found)
    return found


def start_of(events: Sequence[Event]) -> int:
    """Return when a timeline began, in µs since the epoch.

    Raises:
        ValueError: It does not say.
    """
    for event in events:
        if event["ph"] == "M" and isinstance(start := event.get("args", {}).get(START), Number):
            return int(start)
    raise ValueError("it does not say when it began: it is no timeline of horovodlike")


def names_of(events: Iterable[Event]) -> dict[int, str]:
    """Return the tensors, by the processes that they are in the trace."""
    return {event["pid"]: str(event["args"].get("name")) for event in events if event["name"] == "process_name"}


def batches_of(events: Sequence[Event]) -> dict[int, list[RankBatch]]:
    """Return the batches of each rank, in their order, from a timeline of one rank or a merged one."""
    start = start_of(events) * 1000
    names = names_of(events)
    ranks: dict[tuple[int, int], int] = {
        (event["pid"], event["tid"]): event["args"]["rank"]
        for event in events
        if event["name"] == "thread_name" and "rank" in event["args"]
    }
    waiting: dict[tuple[int, int], Event] = {}
    batches: dict[int, dict[int, RankBatch]] = {}
    for event in events:
        if event["ph"] != "X":
            continue
        tid: int = event["tid"]
        rank = ranks.get((event["pid"], tid), tid)
        row = event["pid"], rank
        if event["name"].startswith(NEGOTIATE):
            waiting[row] = event
            continue
        arguments = event.get("args", {})
        if not isinstance(number := arguments.get("collective"), int):
            continue
        begun = start + nanoseconds(event["ts"])
        negotiation = waiting.pop(row, None)
        at = begun
        if negotiation is not None:
            at = start + nanoseconds(negotiation["ts"])
            if abs(at + nanoseconds(negotiation["dur"]) - begun) > _JOINED_NS:  # that of an event that was dropped
                negotiation, at = None, begun
        batch = batches.setdefault(rank, {}).get(number)
        if batch is None:
            ended = begun + nanoseconds(event["dur"])
            batch = RankBatch(number, event["name"], begun, ended, arguments.get("device") == "gpu")
            batches[rank][number] = batch
        if negotiation is None or negotiation["ts"] <= 0 or CLIPPED in negotiation.get("args", {}):
            batch.clipped = True
        num_bytes = arguments.get("bytes")
        known = num_bytes if isinstance(num_bytes, int) else None
        batch.requests.append(TensorRequest(names.get(event["pid"], "?"), at, known, negotiation, event))
    return {rank: list(found.values()) for rank, found in batches.items()}


def matched(ranks: Mapping[int, Sequence[RankBatch]], size: int) -> list[dict[int, RankBatch]]:
    """Return the batches of which all is known, each by the ranks that took part in it.

    A rank without a batch may have taken no part in it, or its timeline may have begun later or ended earlier: then the
    rank that came last is not known, and the batch is left out. So is one of which the times contradict each other, as
    with a file that an earlier job has left.

    Args:
        ranks: The batches of each rank.
        size: The number of ranks of the job.
    """
    if len(ranks) < size or not all(ranks.values()):
        return []
    spans = {rank: (batches[0].number, batches[-1].number) for rank, batches in ranks.items()}
    starts, ends = sorted(first for first, _ in spans.values()), sorted(last for _, last in spans.values())
    found: dict[tuple[int, str, str], dict[int, RankBatch]] = {}
    for rank, batches in ranks.items():
        for batch in batches:
            found.setdefault(batch.key, {})[rank] = batch
    known = []
    for (number, _, _), members in found.items():
        in_all = starts[-1] <= number <= ends[0]
        if not in_all and not all(rank in members or spans[rank][0] < number < spans[rank][1] for rank in spans):
            continue
        each = members.values()
        if any(batch.clipped for batch in each):
            continue
        if max(batch.ready for batch in each) <= min(batch.begun for batch in each) + _SLACK_NS:
            known.append(members)
    return known
