"""Numbers on the steps of a profile or of timelines: shares of time, tensors, batches, late ranks. Times are ns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from horovodlike.timeline._activity import Activity, activity_of
from horovodlike.timeline._batches import Match, RankBatch, matched
from horovodlike.timeline._intervals import Interval, common, total, union
from horovodlike.timeline._profile import RankProfile


@dataclass
class RankTimes:
    """The shares of the time of one rank.

    Attributes:
        profile: The profile of the rank.
        window: From its first mark to its last one; without marks, from its first request to its last batch.
        steps: Duration of each step.
        computing: Time in which operators ran, also while a collective did; where no operators were recorded, the time
            without ``waiting`` and ``exposed``.
        hidden: Time in which a collective ran beside operators; None: not known.
        exposed: Time in which a collective ran, or was negotiated by ranks that were all ready, and no operator did;
            where no operators were recorded, in which a collective ran.
        waiting: Time in which the rank waited for another one, and no operator ran; where no operators were recorded,
            it may have computed meanwhile.
        other: The rest; None: not known.
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
    """The part of the collectives that a tensor takes, by its share of the bytes of each batch."""

    num_bytes: int = 0
    count: int = 0
    time: float = 0


@dataclass
class Late:
    """A rank for which others waited.

    Attributes:
        batches: Number of batches for which it came last, and was late.
        waits: Time that each other rank waited for it, while it had nothing else to do.
    """

    batches: int = 0
    waits: dict[int, int] = field(default_factory=dict)


@dataclass
class Summary:
    """The numbers. Per-step values are averages over ranks.

    Attributes:
        ranks: The times of each rank.
        num_steps: Number of steps; 0: they are not marked.
        batches: One of each batch of the job, with its shortest duration: that on a rank that waited for no other.
        num_matched: Number of batches of which is known which rank came last.
        tensors: The cost of each tensor, by name.
        late: The ranks that were waited for.
        self_times: Time of each operator, on all ranks together.
    """

    ranks: list[RankTimes]
    num_steps: int
    batches: list[tuple[RankBatch, int]]
    num_matched: int
    tensors: dict[str, TensorCost]
    late: dict[int, Late]
    self_times: Counter[str]

    def per_step(self, ns: float) -> float:
        """Return ms in each step; or in all, if steps are not marked."""
        return ns / 1e6 / max(1, self.num_steps)

    @property
    def has_operators(self) -> bool:
        """True if the operators of all ranks were recorded."""
        return all(each.hidden is not None for each in self.ranks)

    @property
    def on_gpu(self) -> bool:
        """True if the ends of batches are not known, since the engine only gives them to a GPU."""
        return any(batch.on_gpu for batch, _ in self.batches)

    @property
    def num_bytes(self) -> int:
        """Bytes that a rank gave, in all batches."""
        return sum(batch.num_bytes for batch, _ in self.batches)

    @property
    def reduction_time(self) -> int:
        """Duration of all batches."""
        return sum(duration for _, duration in self.batches)


def summary_of(profiles: Sequence[RankProfile]) -> Summary:
    """Return the numbers on some ranks, whose clocks are aligned."""
    windows = {each.rank: _window(each) for each in profiles}
    batches = {each.rank: _within(each.batches or (), windows[each.rank]) for each in profiles}
    # Batches at the edge of the window may be in it on some ranks only.
    known = {
        (rank, batch.number): match
        for match in matched({each.rank: each.batches or () for each in profiles if each.correction is not None})
        for rank, batch in match.members.items()
    }
    in_window = [(rank, batch.number) for rank, of_rank in batches.items() for batch in of_rank]
    matches = {known[key].members[known[key].last].key: known[key] for key in in_window if key in known}
    late: dict[int, Late] = {}
    for match in matches.values():
        if match.is_late:
            late.setdefault(match.last, Late()).batches += 1
    self_times: Counter[str] = Counter()
    ranks = []
    for profile in profiles:
        times = RankTimes(profile, windows[profile.rank], _steps(profile))
        activity = activity_of(profile, times.window)
        if activity is not None:
            self_times += activity.self_times
        for last, lost in _split(times, activity, batches[profile.rank], known).items():
            late.setdefault(last, Late()).waits[profile.rank] = lost
        ranks.append(times)
    fastest = _fastest_of_each(batches)
    num_steps = max(len(each.steps) for each in ranks)
    return Summary(ranks, num_steps, fastest, len(matches), _tensors(fastest), late, self_times)


def _window(profile: RankProfile) -> Interval:
    if len(profile.marks) > 1:
        return profile.marks[0], profile.marks[-1]
    if not profile.batches:
        return 0, 0
    return min(each.first_request for each in profile.batches), max(each.ended for each in profile.batches)


def _steps(profile: RankProfile) -> list[int]:
    if profile.first_step is None:
        return []
    return [end - begin for begin, end in zip(profile.marks, profile.marks[1:], strict=False)]


def _within(batches: Sequence[RankBatch], window: Interval) -> list[RankBatch]:
    return [batch for batch in batches if batch.ended > window[0] and batch.first_request < window[1]]


def _split(
    times: RankTimes,
    activity: Activity | None,
    batches: Sequence[RankBatch],
    known: Mapping[tuple[int, int], Match],
) -> dict[int, int]:
    """Split the time of a rank into its parts; return for how long it waited for each other one."""
    rank = times.profile.rank
    waits: dict[int | None, list[Interval]] = {}
    negotiated = []
    for batch in batches:
        match = known.get((rank, batch.number))
        if match is None:  # nothing tells which rank was last: all of the negotiation counts as waiting
            waits.setdefault(None, []).append((batch.ready, batch.begun))
            continue
        all_ready = match.members[match.last].ready
        if match.last != rank:
            waits.setdefault(match.last, []).append((batch.ready, all_ready))
        negotiated.append((all_ready, batch.begun))
    window = [times.window]
    length = total(window)
    reducing = common(union((batch.begun, batch.ended) for batch in batches), window)
    computing = [] if activity is None or activity.computing is None else activity.computing
    busy = union([*reducing, *computing])
    waited = {last: common(union(each), window) for last, each in waits.items()}
    stalled = union([*busy, *(interval for each in waited.values() for interval in each)])
    times.waiting = total(stalled) - total(busy)
    times.exposed = total(busy) - total(computing)
    if activity is None or activity.computing is None:
        times.computing = length - times.waiting - times.exposed
    else:
        times.computing = total(computing)
        times.hidden = total(reducing) - times.exposed
        known_time = total(union([*stalled, *common(union(negotiated), window)]))
        times.exposed += known_time - total(stalled)
        times.other = length - known_time
    lost = {last: total(each) - total(common(each, busy)) for last, each in waited.items()}
    return {last: time for last, time in lost.items() if time and last is not None}


def _fastest_of_each(batches: Mapping[int, Sequence[RankBatch]]) -> list[tuple[RankBatch, int]]:
    shortest: dict[tuple[int, str, str, int], tuple[RankBatch, int]] = {}
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
            cost.num_bytes = request.num_bytes
            cost.count += 1
            cost.time += duration * (request.num_bytes / num_bytes if num_bytes else 1 / len(batch.requests))
    return found
