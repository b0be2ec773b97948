"""Numbers on the steps of a profile or of timelines: shares of time, tensors, batches, late ranks. Times are ns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from horovodlike.timeline._activity import Activity, activity_of, extent_of
from horovodlike.timeline._batches import RankBatch, matched
from horovodlike.timeline._intervals import Interval, common, total, union, without
from horovodlike.timeline._profile import RankProfile

SMALL_BYTES = 64 << 10
"""A batch that is smaller takes about as long as an empty one."""
LATE_NS = 1_000_000
"""A rank is late for a batch if the others wait for it this long."""


@dataclass
class RankTimes:
    """The shares of the time of one rank.

    Attributes:
        profile: Of the rank.
        window: From its first mark to its last one; without marks, from its first request to its last batch; without
            batches, all that was recorded.
        steps: How long each step took.
        computing: In which operators ran, also while a collective did; where no operators were recorded, in which no
            collective waited or ran.
        hidden: In which a collective ran beside operators; None: not known.
        exposed: In which a collective ran, or was negotiated by ranks that were all ready, and no operator did.
        waiting: In which the rank waited for another one, and no operator ran.
        other: In which nothing of that happened; None: not known.
    """

    profile: RankProfile
    window: Interval
    steps: list[int]
    computing: int = 0
    hidden: int | None = None
    exposed: int = 0
    waiting: int = 0
    other: int | None = None

    @property
    def duration(self) -> int:
        """All of the time."""
        return max(1, self.window[1] - self.window[0])


@dataclass
class TensorCost:
    """The part of the collectives that a tensor takes: that of its bytes in each batch."""

    num_bytes: int | None = None
    count: int = 0
    time: float = 0
    rate_bytes: int = 0
    rate_time: int = 0


@dataclass
class Late:
    """A rank for which others waited.

    Attributes:
        batches: For how many it came last, and was late.
        waits: How long each other rank waited for it, while it had nothing else to do.
    """

    batches: int = 0
    waits: dict[int, int] = field(default_factory=dict)


@dataclass
class Summary:
    """The numbers. What is of a step is an average over the ranks.

    Attributes:
        ranks: Of each rank.
        num_steps: How many steps there were; 0: they are not marked.
        is_complete: Whether all ranks of the job were recorded, so that the rank that came last is known.
        batches: One of each batch of the job, with its shortest duration: that on a rank that waited for no other.
        num_matched: The number of batches of which is known which rank came last.
        tensors: By name.
        late: By rank.
        self_times: How long operators ran, on all ranks together.
    """

    ranks: list[RankTimes]
    num_steps: int
    is_complete: bool
    batches: list[tuple[RankBatch, int]]
    num_matched: int
    tensors: dict[str, TensorCost]
    late: dict[int, Late]
    self_times: Counter[str]

    def share(self, part: str) -> float:
        """Return a part of the ranks' time: 0 to 1."""
        return sum(getattr(each, part) or 0 for each in self.ranks) / sum(each.duration for each in self.ranks)

    def per_step(self, nanoseconds: float) -> float:
        """Return ms in each step; or in all, if steps are not marked."""
        return nanoseconds / 1e6 / max(1, self.num_steps)

    @property
    def typical_bytes(self) -> float:
        """The median size of a batch."""
        return median(batch.num_bytes for batch, _ in self.batches) if self.batches else 0

    @property
    def hosts(self) -> int:
        """How many hosts there are; 0: not known."""
        return len({each.profile.host for each in self.ranks} - {""})


def summary_of(profiles: Sequence[RankProfile]) -> Summary:
    """Return the numbers on some ranks, whose clocks are aligned."""
    size = profiles[0].size
    everything = {each.rank: each.batches for each in profiles if each.batches}
    windows = {each.rank: _window(each) for each in profiles}
    batches = {each.rank: _within(each.batches, windows[each.rank]) for each in profiles if each.batches}
    seen = {(rank, batch.number) for rank, of_rank in batches.items() for batch in of_rank}
    groups = [
        members
        for members in matched(everything, size)
        if any((rank, batch.number) in seen for rank, batch in members.items())
    ]
    known = {(rank, batch.number): members for members in groups for rank, batch in members.items()}
    late: dict[int, Late] = {}
    self_times: Counter[str] = Counter()
    ranks = []
    for profile in profiles:
        times = RankTimes(profile, windows[profile.rank], _steps(profile))
        activity = activity_of(profile, times.window)
        if activity is not None:
            self_times += activity.self_times
        _share_out(times, activity, batches.get(profile.rank, []), known, late)
        ranks.append(times)
    for members in groups:
        last, is_late = _last(members)
        if is_late:
            late.setdefault(last, Late()).batches += 1
    once = _once(batches)
    num_steps = max(len(each.steps) for each in ranks)
    is_complete = len(everything) == size
    return Summary(ranks, num_steps, is_complete, once, len(groups), _tensors(once), late, self_times)


def _window(profile: RankProfile) -> Interval:
    if len(profile.marks) > 1:
        return profile.marks[0], profile.marks[-1]
    if not profile.batches:
        return extent_of(profile)
    return min(each.first_request for each in profile.batches), max(each.ended for each in profile.batches)


def _steps(profile: RankProfile) -> list[int]:
    if profile.first_step is None:
        return []
    return [end - begin for begin, end in zip(profile.marks, profile.marks[1:], strict=False)]


def _within(batches: Sequence[RankBatch], window: Interval) -> list[RankBatch]:
    return [batch for batch in batches if batch.ended > window[0] and batch.first_request < window[1]]


def _last(members: Mapping[int, RankBatch]) -> tuple[int, bool]:
    """Return the rank that came last, and whether it was late by that."""
    last = max(members, key=lambda rank: members[rank].ready)
    before = max((batch.ready for rank, batch in members.items() if rank != last), default=members[last].ready)
    return last, members[last].ready - before >= LATE_NS


def _share_out(
    times: RankTimes,
    activity: Activity | None,
    batches: Sequence[RankBatch],
    known: Mapping[tuple[int, int], Mapping[int, RankBatch]],
    late: dict[int, Late],
) -> None:
    rank = times.profile.rank
    waits: dict[int | None, list[Interval]] = {}
    negotiated = []
    for batch in batches:
        members = known.get((rank, batch.number))
        if members is None:  # nothing tells which rank was last: all of the negotiation counts as waiting
            waits.setdefault(None, []).append((batch.ready, batch.begun))
            continue
        last = max(members, key=lambda each: members[each].ready)
        if last != rank:
            waits.setdefault(last, []).append((batch.ready, members[last].ready))
        negotiated.append((max(batch.ready, members[last].ready), batch.begun))
    window = [times.window]
    carried_out = common(union((batch.begun, batch.ended) for batch in batches), window)
    waiting = common(union(interval for each in waits.values() for interval in each), window)
    negotiating = without(common(union(negotiated), window), waiting)
    computing = None if activity is None else activity.computing
    busy = union([*carried_out, *(computing or ())])
    idle = without(window, busy)
    for cause, intervals in waits.items():
        lost = total(common(union(intervals), idle))
        if cause is not None and lost:
            late.setdefault(cause, Late()).waits[rank] = lost
    times.waiting = total(common(waiting, idle))
    times.exposed = total(without(carried_out, computing or [])) + total(common(negotiating, idle))
    if computing is None:
        times.computing = times.window[1] - times.window[0] - times.waiting - times.exposed
        return
    times.computing = total(computing)
    times.hidden = total(common(carried_out, computing))
    times.other = times.window[1] - times.window[0] - times.computing - times.waiting - times.exposed


def _once(batches: Mapping[int, Sequence[RankBatch]]) -> list[tuple[RankBatch, int]]:
    shortest: dict[tuple[int, str, str], tuple[RankBatch, int]] = {}
    for of_rank in batches.values():
        for batch in of_rank:
            before = shortest.get(batch.key)
            duration = batch.ended - batch.begun
            if before is None or duration < before[1]:
                shortest[batch.key] = batch, duration
    return list(shortest.values())


def _tensors(batches: Sequence[tuple[RankBatch, int]]) -> dict[str, TensorCost]:
    found: dict[str, TensorCost] = {}
    for batch, duration in batches:
        num_bytes = batch.num_bytes
        for request in batch.requests:
            cost = found.setdefault(request.name, TensorCost())
            share = (request.num_bytes or 0) / num_bytes if num_bytes else 1 / len(batch.requests)
            cost.count += 1
            cost.time += duration * share
            if request.num_bytes is not None:
                cost.num_bytes = request.num_bytes
                cost.rate_bytes += num_bytes
                cost.rate_time += duration
    return found
