"""Why ranks hold up the others: slow compute, slow input or a slow network. Pure.

Ranks that train together take the same steps. So their time outside of collectives can be compared, second by second:
the rank that the others wait for has more of it. The kernel says how much of that its threads ran, and how much they
could have run while another process had the processor. The rest is waiting for something else, which is input, or a
GPU. One busy second says little: a verdict is made from the medians of a window, and stays until the slowness has
clearly gone.

A slow network holds up all ranks alike. It shows where the connections of one host are slower than those between the
others, so three hosts are needed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

COMPUTE, INPUT, NETWORK, UNKNOWN = KINDS = ("compute", "input", "network", "unknown")
WINDOW = 12
"""The number of points for a verdict; a point is a second, or several steps where these take longer."""
FEWEST = 10
_LAST = 6  # points that decide whether a verdict still holds
_STEPS = 3  # the fewest steps of a point
_PERIOD_S = 0.9
SLOW, _STILL_SLOW = 0.12, 0.06  # slower than the median of the others by this part of their time
_EXCESS, _STILL_EXCESS = 0.05, 0.02  # ... and by this part of a step
_SCARCE = 0.85  # others of the host had a processor for less of their runnable time: ranks take turns on it
_SLOW_TURNS = 0.3  # ranks take turns: a rank counts as slow only if it is slower by this much
_HELD_SHARE = 0.8  # the share of the points in which the rank must have been slower at all
_SLOWER = 0.05
_LEAST = 0.01  # a rank's own part of a step counts as this much at least
_COMPUTE_SHARE = 0.5  # the part of the excess that the kernel must explain
_DIFFERENT = 0.05  # frequencies differ by this part
_STOLEN = 0.1  # a processor's share, above the others' median, that counts as evidence
_SLOW_RATE, _STILL_SLOW_RATE = 0.5, 0.7  # relative to the rate between the other hosts
_FEWEST_BYTES = 1 << 20
_MOST_RATES = 64
_BLOCKED, _STILL_BLOCKED = 0.15, 0.08  # a network counts as slow if the ranks are blocked for this part of the time

Connections = Mapping[tuple[str, str], tuple[float, float]]
"""The bytes that were sent and the seconds that this took, by own and other address."""


class Sample(NamedTuple):
    """Sums of one rank, in seconds unless said otherwise; None where its kernel does not know.

    Attributes:
        time: The time when they were taken, by the monotonic clock of the rank.
        steps: The number of steps; 0 if nothing marks them.
        blocked: Seconds in which a thread waited for a collective, or in which collectives of a TensorFlow graph, for
            which no thread waits, were in flight.
        cpu: Seconds in which its threads ran.
        delay: Seconds in which its threads could have run, and another process had the processor.
        stolen: Seconds in which the hypervisor had a processor of its host.
        frequency: The present frequency of its processors, in hertz.
        has_gpu: Whether it uses a GPU.
    """

    time: float
    steps: int
    blocked: float
    cpu: float
    delay: float | None = None
    stolen: float | None = None
    frequency: float | None = None
    has_gpu: bool = False


class Measure(NamedTuple):
    """One rank's own time in one point, and its excess over the others' own time, each as a part of the time."""

    own: float
    cpu: float
    delay: float | None
    stolen: float
    slower: float
    excess: float
    excess_cpu: float
    excess_delay: float


@dataclass
class Verdict:
    """Ranks that hold up the others.

    Attributes:
        ranks: One rank; for a slow network, the host's ranks.
        kind: One of :data:`KINDS`.
        slower: The slowdown, as a part of the others' own time; for a network, of the rate between other hosts.
        since_step: The step at which the slowdown began.
        text: The verdict and the evidence, in one line.
    """

    ranks: list[int]
    kind: str
    slower: float
    since_step: int
    text: str


class SlowRanks:
    """The verdicts on the ranks of one generation."""

    def __init__(self) -> None:
        """Start without any."""
        self._before: dict[int, Sample] = {}
        self._sent: dict[tuple[str, str], tuple[float, float]] = {}
        self._points: deque[dict[int, Measure]] = deque(maxlen=WINDOW)
        self._steps: deque[int] = deque(maxlen=WINDOW)  # at the start of each point
        self._rates: deque[dict[tuple[str, str], tuple[float, float]]] = deque(maxlen=WINDOW)
        self._hosts: dict[int, str] = {}
        self.verdicts: dict[object, Verdict] = {}
        """The verdicts by rank; verdicts on a network by host."""

    def take(
        self, samples: Mapping[int, Sample], hosts: Mapping[int, str], sent: Mapping[int, Connections]
    ) -> list[str]:
        """Take the newest sums of all ranks that report; return the changes, in words.

        Args:
            samples: The sums of each rank, by rank.
            hosts: The host of each rank.
            sent: The connections of each rank.
        """
        if samples.keys() != self._before.keys():
            left = {*samples, *hosts.values()} if len(samples) > 1 else set[object]()
            self.verdicts = {key: each for key, each in self.verdicts.items() if key in left}
            self._begin(samples, hosts, _between_hosts(hosts, sent))
            self._points.clear()
            self._steps.clear()
            self._rates.clear()
            return []
        if len(samples) < 2 or not self._is_complete(samples):
            return []
        self._points.append(_measures(self._before, samples))
        self._steps.append(min(each.steps for each in self._before.values()))
        between = _between_hosts(hosts, sent)
        self._rates.append(_differences(self._sent, between))
        self._begin(samples, hosts, between)
        return self._judge() if len(self._points) >= _LAST else []

    def _begin(
        self,
        samples: Mapping[int, Sample],
        hosts: Mapping[int, str],
        between: dict[tuple[str, str], tuple[float, float]],
    ) -> None:
        self._before, self._hosts, self._sent = dict(samples), dict(hosts), between

    def _is_complete(self, samples: Mapping[int, Sample]) -> bool:
        """Return whether enough time and enough steps have passed for a point."""
        before = self._before
        if any(each.time - before[rank].time < _PERIOD_S for rank, each in samples.items()):
            return False
        marked = [each.steps - before[rank].steps for rank, each in samples.items() if each.steps]
        return not marked or min(marked) >= _STEPS

    def slower(self, rank: int) -> float | None:
        """Return by which part of the others' own time a rank was slower in the window, negative if it was faster."""
        found = [point[rank].slower for point in self._points if rank in point]
        return median(found) if found else None

    def rates(self) -> list[dict[str, Any]]:
        """Return the rates between hosts, the lowest first: the two hosts, and bytes per second of use."""
        lowest = sorted(_rates(self._rates).items(), key=lambda item: item[1])
        return [{"hosts": list(pair), "bytes_per_second": round(rate)} for pair, rate in lowest[:_MOST_RATES]]

    def _judge(self) -> list[str]:
        found: dict[object, Verdict] = {}
        for rank in self._before:
            verdict = self._judge_rank(rank)
            if verdict is not None:
                found[rank] = verdict
        slow = {self._hosts.get(rank) for rank, each in found.items() if isinstance(rank, int)}
        rates = [_rates(self._rates), _rates(list(self._rates)[-_LAST:])]
        for host in sorted(set(self._hosts.values()) - slow) if rates[0] else ():
            verdict = self._judge_host(host, rates)
            if verdict is not None:
                found[host] = verdict
        before, self.verdicts = self.verdicts, found
        changes = [each.text for key, each in found.items() if key not in before or before[key].kind != each.kind]
        return changes + [_ended(key, each) for key, each in before.items() if key not in found]

    def _judge_rank(self, rank: int) -> Verdict | None:
        before = self.verdicts.get(rank)
        points = [point[rank] for point in self._points]
        last = points[-_LAST:]
        slower, excess = median(each.slower for each in last), median(each.excess for each in last)
        if before is not None:
            if slower < _STILL_SLOW or excess < _STILL_EXCESS:
                return None
        elif slower < SLOW or excess < _EXCESS or not _has_lasted(points):
            return None
        kind = self._reason(rank, last, before)
        if before is None and kind == COMPUTE and self._takes_turns(rank, points):
            return None
        since = self._since(rank) if before is None else before.since_step
        begun = f" since step {since:,}" if self._before[rank].steps else ""
        where = {COMPUTE: " in compute", INPUT: " in input", UNKNOWN: ""}[kind]
        text = f"rank {rank} is {_percent(slower)} slower{where}{begun}: {self._evidence(rank, kind)}"
        return Verdict([rank], kind, slower, since, text)

    def _takes_turns(self, rank: int, mine: list[Measure]) -> bool:
        """Return whether the ranks of the host have too few processors, and this one only had shorter turns."""
        if median(each.slower for each in mine) >= _SLOW_TURNS:
            return False
        beside = [other for other, host in self._hosts.items() if other != rank and host == self._hosts.get(rank)]
        theirs = [point[other] for point in self._points for other in beside if other in point]
        return bool(theirs) and _supply(theirs) < _SCARCE and _has_shorter_turns(mine, theirs)

    def _reason(self, rank: int, last: list[Measure], before: Verdict | None) -> str:
        """Return the kind of a verdict: the former one, unless each of the last points says otherwise."""
        has_gpu = self._before[rank].has_gpu
        kind = _reason(last, has_gpu)
        if before is None or all(each.excess > _EXCESS and _reason([each], has_gpu) == kind for each in last):
            return kind
        return before.kind

    def _since(self, rank: int) -> int:
        """Return the step after which the rank was slower in every point."""
        since = self._steps[-1]
        for step, point in zip(reversed(self._steps), reversed(self._points), strict=True):
            if point[rank].slower <= _SLOWER:
                break
            since = step
        return since

    def _evidence(self, rank: int, kind: str) -> str:
        mine = [point[rank] for point in self._points]
        others = [each for point in self._points for other, each in point.items() if other != rank]
        if kind != COMPUTE:
            why = "" if kind == INPUT else ", but waited for a GPU, for input or for something else"
            return (
                f"for {_percent(_idle(mine))} of the time it neither computed nor was in a collective{why}; the others "
                f"for {_percent(_idle(others))}"
            )
        if _has_shorter_turns(mine, others):
            text = (
                f"when it could run, it had a processor for {_percent(_supply(mine))} of the time, the others for "
                f"{_percent(_supply(others))}"
            )
        else:
            more = median(each.cpu for each in mine) / max(_LEAST, median(each.cpu for each in others)) - 1
            text = f"its steps take {_percent(more)} more processor time than those of the others"
        frequency = self._before[rank].frequency
        theirs = [each.frequency for other, each in self._before.items() if other != rank and each.frequency]
        if frequency and theirs and frequency < (1 - _DIFFERENT) * median(theirs):
            text += (
                f"; its processors run at {frequency / 1e9:.1f} GHz, those of the others at {median(theirs) / 1e9:.1f}"
            )
        stolen = median(each.stolen for each in mine)
        if stolen > _STOLEN + median(each.stolen for each in others):
            text += f"; the hypervisor takes {stolen:.1f} processors from its host"
        return text

    def _judge_host(self, host: str, rates: list[dict[tuple[str, str], float]]) -> Verdict | None:
        """Judge by the rates in the window and in its last points; these alone decide whether a verdict still holds."""
        before = self.verdicts.get(host)
        found = [_compare(host, each) for each in rates[0 if before is None else 1 :]]
        if None in found or (before is None and len(self._points) < FEWEST):
            return None
        own, others = max((each for each in found if each is not None), key=lambda each: each[0] / each[1])
        if own / others > (_SLOW_RATE if before is None else _STILL_SLOW_RATE):
            return None
        blocked = 1 - median(each.own for point in self._points for each in point.values())
        if blocked < (_BLOCKED if before is None else _STILL_BLOCKED):
            return None
        ranks = sorted(rank for rank, its in self._hosts.items() if its == host)
        since = self._steps[0] if before is None else before.since_step
        begun = f" since step {since:,}" if any(each.steps for each in self._before.values()) else ""
        text = (
            f"host {host} ({_ranks(ranks)}) has a slow network{begun}: its connections carry {own / 1e6:,.0f} "
            f"MB/s, those between other hosts {others / 1e6:,.0f}; ranks are in collectives for "
            f"{_percent(blocked)} of the time"
        )
        return Verdict(ranks, NETWORK, 1 - own / others, since, text)


def _measures(before: Mapping[int, Sample], now: Mapping[int, Sample]) -> dict[int, Measure]:
    own, cpu, delay, stolen = [], [], [], []
    for rank, each in now.items():
        past = before[rank]
        seconds = each.time - past.time
        own.append(max(_LEAST, 1 - max(0.0, each.blocked - past.blocked) / seconds))
        cpu.append(max(0.0, each.cpu - past.cpu) / seconds)
        delay.append(max(0.0, (each.delay or 0.0) - (past.delay or 0.0)) / seconds)
        stolen.append(max(0.0, (each.stolen or 0.0) - (past.stolen or 0.0)) / seconds)
    others, others_cpu, others_delay = map(_medians_of_others, (own, cpu, delay))
    return {
        rank: Measure(
            *(own[i], cpu[i], None if now[rank].delay is None else delay[i], stolen[i]),
            *(own[i] / others[i] - 1, own[i] - others[i], cpu[i] - others_cpu[i], delay[i] - others_delay[i]),
        )
        for i, rank in enumerate(now)
    }


def _medians_of_others(values: list[float]) -> list[float]:
    """Return, for each of some values, the median of the others."""
    order, count = sorted(values), len(values) - 1

    def of_others(value: float) -> float:
        own = bisect_left(order, value)
        low, high = (order[index + (index >= own)] for index in ((count - 1) // 2, count // 2))
        return (low + high) / 2

    return [of_others(value) for value in values]


def _has_lasted(points: list[Measure]) -> bool:
    return (
        len(points) >= FEWEST
        and median(each.slower for each in points) >= SLOW
        and sum(each.slower > _SLOWER for each in points) >= _HELD_SHARE * len(points)
    )


def _reason(points: list[Measure], has_gpu: bool) -> str:
    explained = max(0.0, median(each.excess_cpu for each in points))
    explained += max(0.0, median(each.excess_delay for each in points))
    if explained >= _COMPUTE_SHARE * median(each.excess for each in points):
        return COMPUTE
    return UNKNOWN if has_gpu or points[-1].delay is None else INPUT


def _idle(points: list[Measure]) -> float:
    return max(0.0, median(each.own - each.cpu - (each.delay or 0.0) for each in points))


def _supply(points: list[Measure]) -> float:
    """Return the part of the time in which threads could run, and did."""
    return median(each.cpu / max(_LEAST, each.cpu + (each.delay or 0.0)) for each in points)


def _has_shorter_turns(points: list[Measure], others: list[Measure]) -> bool:
    return _supply(points) < (1 - _SLOWER) * _supply(others)


def _between_hosts(
    hosts: Mapping[int, str], sent: Mapping[int, Connections]
) -> dict[tuple[str, str], tuple[float, float]]:
    """Add up the connections between any two hosts, in both directions."""
    host_of = {here: hosts[rank] for rank, those in sent.items() if rank in hosts for here, _ in those}
    sums: dict[tuple[str, str], tuple[float, float]] = {}
    for those in sent.values():
        for (here, there), (num_bytes, seconds) in those.items():
            if here in host_of and there in host_of and host_of[here] != host_of[there]:
                pair = min(host_of[here], host_of[there]), max(host_of[here], host_of[there])
                before = sums.get(pair, (0.0, 0.0))
                sums[pair] = before[0] + num_bytes, before[1] + seconds
    return sums


def _differences(
    before: Mapping[tuple[str, str], tuple[float, float]], now: Mapping[tuple[str, str], tuple[float, float]]
) -> dict[tuple[str, str], tuple[float, float]]:
    return {
        pair: (max(0.0, now[pair][0] - before[pair][0]), max(0.0, now[pair][1] - before[pair][1]))
        for pair in now.keys() & before.keys()
    }


def _rates(points: Iterable[Mapping[tuple[str, str], tuple[float, float]]]) -> dict[tuple[str, str], float]:
    """Return bytes per second of use between any two hosts that have sent enough."""
    sums: dict[tuple[str, str], tuple[float, float]] = {}
    for point in points:
        for pair, (num_bytes, seconds) in point.items():
            before = sums.get(pair, (0.0, 0.0))
            sums[pair] = before[0] + num_bytes, before[1] + seconds
    return {pair: size / seconds for pair, (size, seconds) in sums.items() if size >= _FEWEST_BYTES and seconds > 0}


def _compare(host: str, rates: Mapping[tuple[str, str], float]) -> tuple[float, float] | None:
    """Return the highest rate between a host and another one, and the median between others; None if one is unknown."""
    own = [rate for pair, rate in rates.items() if host in pair]
    others = [rate for pair, rate in rates.items() if host not in pair]
    return (max(own), median(others)) if own and others else None


def _ended(key: object, verdict: Verdict) -> str:
    if verdict.kind == NETWORK:
        return f"the network of host {key} is not slower than that of the others any more"
    return f"rank {key} is not slower than the others any more"


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _percent(part: float) -> str:
    return f"{100 * part:.0f} %"


def as_json(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict as JSON values."""
    return {**vars(verdict), "slower": round(verdict.slower, 4)}
