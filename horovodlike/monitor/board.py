"""The state of a job as its monitor shows it: the newest report of each rank, and a few minutes of history.

Ranks' reports, their output and events come in; :meth:`Board.snapshot` makes plain values of all that. Every method
may be called from any thread. Nothing grows without a bound: neither with the time nor with what ranks send.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from horovodlike.monitor.delays import Delays
from horovodlike.monitor.slow_ranks import Connections, Sample, SlowRanks, as_json

HISTORY = 300
"""How many points of its history a job has, one a second."""
RANK_HISTORY = 120
"""How many points of its history a rank has."""
SILENT_S = 5.0
"""A rank that has not reported for this long is shown as silent."""
_LEAST_S = 0.01  # between two reports of which rates are made
_EVENTS = 200
_LONGEST_EVENT = 8192
_TAIL_BYTES = 4096
_MOST_TAILS = 4096
_EVENT_KINDS = ("launcher", "elastic", "slow", "warning", "stall", "end")
_OWN_LINES = ("horovodlike warning:", "horovodlike error:")
_RATES = ("bytes", "batches", "requests", "executed", "steps", "samples")
TRANSPORTS = ("shared_memory", "tcp", "external", "nccl", "staging")
"""The transports that carry the bytes of tensors, by their names in the counters ``bytes_by_...``."""
_TRANSPORT_RATES = tuple(f"bytes_by_{name}" for name in TRANSPORTS)
_PARTS = ("waiting", "communicating", "computing")


@dataclass(eq=False)
class RankState:
    """The newest reports of one rank.

    Attributes:
        about: The fixed part: host, process id and so on, from its first report.
        counters: The newest counters, by the names of ``metrics()``.
        process: The newest numbers of its process.
        parts: The shares of the last second in which it waited, communicated and computed.
        rates: Bytes, batches, requests, executed requests, steps and samples per second; and bytes by each transport
            that is used.
        step_seconds: How long a step takes, on average since the last report in which one ended; 0: none is marked.
        connections: What they have sent, from the last report.
        heard_at: When its last report came, by the monotonic clock of the board.
        sent: When it was sent, by the rank's clock.
        idle: How long it had completed nothing, in seconds.
        stack: Where its Python threads are; None unless it has completed nothing for some seconds.
        ended: Whether it has said that this is the end.
        history: For each of the parts, and for its delay in milliseconds, the last points.
    """

    about: dict[str, Any]
    counters: dict[str, float] = field(default_factory=dict)
    process: dict[str, float] = field(default_factory=dict)
    parts: dict[str, float] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    step_seconds: float = 0.0
    connections: Connections = field(default_factory=dict)
    heard_at: float = 0.0
    sent: float = 0.0
    idle: float = 0.0
    stack: str | None = None
    ended: bool = False
    history: dict[str, array[int]] = field(
        default_factory=lambda: {name: array("H") for name in (*_PARTS, "late")}, repr=False
    )

    def measure(self, counters: Mapping[str, float], sent: float) -> None:
        """Take new counters; compute rates and parts from their changes."""
        before, seconds = dict(self.counters), sent - self.sent
        self.counters.update(counters)
        self.sent = sent
        if not before or seconds < _LEAST_S:
            return
        grown = {name: max(0.0, value - before.get(name, 0.0)) for name, value in self.counters.items()}
        used = (name for name in _TRANSPORT_RATES if self.counters.get(name))
        self.rates = {name: grown.get(name, 0.0) / seconds for name in (*_RATES, *used)}
        if grown.get("steps"):
            self.step_seconds = grown.get("step_seconds", 0.0) / grown["steps"]
        communicating = min(1.0, grown.get("communicating_seconds", 0.0) / seconds)
        waiting = min(1.0 - communicating, grown.get("waiting_seconds", 0.0) / seconds)
        self.parts = {"waiting": waiting, "communicating": communicating, "computing": 1.0 - waiting - communicating}

    def sample(self) -> Sample:
        """Return the sums that tell a slow rank from the others."""
        counters, process = self.counters, self.process
        return Sample(
            time=self.sent,
            steps=int(counters.get("steps", 0)),
            blocked=counters.get("blocked_seconds", 0.0),
            cpu=process.get("cpu_seconds", 0.0),
            delay=process.get("run_delay_seconds"),
            stolen=process.get("steal_seconds"),
            frequency=process.get("frequency_hertz"),
            has_gpu="gpu_bytes" in process,
        )

    def note(self, late: float) -> None:
        """Append a point to the history."""
        values = {**{name: round(100 * self.parts.get(name, 0.0)) for name in _PARTS}, "late": round(1000 * late)}
        for name, points in self.history.items():
            points.append(min(values[name], 65535))
            del points[:-RANK_HISTORY]


class Board:
    """All that the monitor knows of a job."""

    def __init__(
        self,
        job: str = "",
        version: str = "",
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        output_directory: str | None = None,
    ) -> None:
        """Start with a job of which nothing is known.

        Args:
            job: The name of the job.
            version: The version of the package.
            clock: Returns the time that is shown, in seconds since 1970.
            monotonic: Returns the time for durations, by a clock that is never set.
            output_directory: The folder with the output of each rank, to be named beside its tail.
        """
        self._lock = threading.Lock()  # guards everything below; a leaf
        self._clock, self._monotonic = clock, monotonic
        self._started = monotonic()
        self._about = {"job": job, "version": version, "started": clock(), "output_directory": output_directory}
        self._generation = 0
        self._size = 0
        self._ranks: dict[int, RankState] = {}
        self._stragglers: dict[int, tuple[int, float]] = {}  # rank -> times late, seconds
        self._delays = Delays()
        self._slow = SlowRanks()
        self._history: deque[dict[str, Any]] = deque(maxlen=HISTORY)
        self._events: deque[dict[str, Any]] = deque(maxlen=_EVENTS)
        self._num_events = dict.fromkeys(_EVENT_KINDS, 0)
        self._tails: OrderedDict[int, bytes] = OrderedDict()
        self._open_lines: dict[int, bytes] = {}  # unfinished lines of standard error
        self._open_events: dict[int, dict[str, Any]] = {}  # by rank: a warning that may go on in the next line
        self._ended = False
        self.announce: Callable[[str], object] = lambda text: None
        """Called with each verdict on a slow rank when it begins and when it ends; must not call the board."""

    # Ranks.

    def take_hello(self, about: dict[str, Any]) -> bool:
        """Take the first report of a connection; return False if it is of a generation that is over."""
        with self._lock:
            if about["generation"] < self._generation:
                return False
            if about["generation"] > self._generation or about["size"] != self._size:
                if self._generation:
                    self._add("elastic", f"generation {about['generation']}: {about['size']} ranks")
                self._generation, self._size = about["generation"], about["size"]
                self._ranks, self._stragglers, self._delays, self._slow = {}, {}, Delays(), SlowRanks()
            elif about["rank"] == 0:  # after shutdown() and init(), collectives are numbered from 1 again
                self._delays = Delays()
            self._ranks[about["rank"]] = RankState(about, heard_at=self._monotonic())
            return True

    def take_report(self, rank: int, about: dict[str, Any], report: Mapping[str, Any]) -> None:
        """Take the checked report of a rank; see :mod:`horovodlike.monitor.collector`.

        Args:
            rank: The rank.
            about: What the connection has given to :meth:`take_hello`. If another one has followed it, the report is of
                a process that is not this rank any more, and is dropped.
            report: The report.
        """
        with self._lock:
            state = self._ranks.get(rank)
            if state is None or state.about is not about:
                return
            now = state.heard_at = self._monotonic()
            state.measure(report["counters"], report["sent"])
            state.process.update(report["process"])
            state.connections = report["connections"]
            state.idle = report["idle"]
            if "stack" in report:
                state.stack = report["stack"]
            state.ended = report["end"]
            if rank == 0:
                self._stragglers.update((late, value) for late, value in report["late"].items() if late < self._size)
            clock = f"{about['host']} {about['boot']}"
            self._delays.take(rank, clock, report["sent"], now, report["collectives"])

    def age(self, rank: int) -> float:
        """Return for how many seconds a rank has not reported."""
        with self._lock:
            state = self._ranks.get(rank)
            return 0.0 if state is None else self._monotonic() - state.heard_at

    def pace(self, rank: int) -> tuple[int, float] | None:
        """Return the number of steps that a rank has marked, and the seconds of a step; None before the second step."""
        with self._lock:
            state = self._ranks.get(rank)
            count = 0 if state is None else int(state.counters.get("steps", 0))
            if state is None or count < 2:
                return None
            mean = state.counters.get("step_seconds", 0.0) / (count - 1)
            return count, min(mean, state.step_seconds or mean)

    def verdicts(self) -> list[dict[str, Any]]:
        """Return the verdicts on slow ranks."""
        with self._lock:
            return [as_json(each) for each in self._slow.verdicts.values()]

    def lose(self, rank: int, about: dict[str, Any]) -> None:
        """Note that the connection of a rank has ended."""
        with self._lock:
            state = self._ranks.get(rank)
            if state is not None and state.about is about and not state.ended:
                state.heard_at = min(state.heard_at, self._monotonic() - SILENT_S)

    # Output and events.

    def take_output(self, number: int, data: bytes, is_error: bool) -> None:
        """Take what a rank (in an elastic job, a worker) has written; find the package's own warnings in it."""
        with self._lock:
            self._tails[number] = (self._tails.pop(number, b"") + data)[-_TAIL_BYTES:]
            while len(self._tails) > _MOST_TAILS:
                oldest, _ = self._tails.popitem(last=False)
                self._open_lines.pop(oldest, None)
                self._open_events.pop(oldest, None)
            if is_error:
                *lines, rest = (self._open_lines.pop(number, b"") + data).split(b"\n")
                if rest:
                    self._open_lines[number] = rest[-_TAIL_BYTES:]
                for line in lines:
                    self._take_line(number, line.decode(errors="replace"))

    def _take_line(self, number: int, line: str) -> None:
        if line.startswith(_OWN_LINES):
            kind = "stall" if "stalled" in line else "warning"
            self._open_events[number] = self._add(kind, line, self._rank_of(number), number)
        elif (event := self._open_events.get(number)) is not None:
            if line.startswith((" ", "Where the missing")) and len(event["text"]) < _LONGEST_EVENT:
                event["text"] += "\n" + line[:_LONGEST_EVENT]
            else:
                del self._open_events[number]

    def _rank_of(self, worker: int) -> int | None:
        """Return the rank that a worker has now; without an elastic job, a worker is a rank."""
        if not self._ranks:
            return worker
        return next((rank for rank, state in self._ranks.items() if state.about["worker"] == worker), None)

    def add_event(self, kind: str, text: str) -> None:
        """Note what has happened; not again what the launcher then also prints.

        Args:
            kind: ``launcher``, ``elastic``, ``slow``, ``warning``, ``stall`` or ``end``.
            text: What has happened.
        """
        with self._lock:
            if not self._events or text != f"hvdrun: {self._events[-1]['text']}":
                self._add(kind, text)

    def _add(self, kind: str, text: str, rank: int | None = None, worker: int | None = None) -> dict[str, Any]:
        event = {"time": self._clock(), "kind": kind, "text": text[:_LONGEST_EVENT], "rank": rank, "worker": worker}
        self._num_events[kind] += 1
        self._events.append(event)
        return event

    # Time.

    def tick(self) -> None:
        """Add a point to the history; called each second."""
        with self._lock:
            now = self._monotonic()
            late = self._delays.evaluate(now, self._size)
            live = [state for state in self._ranks.values() if now - state.heard_at < SILENT_S]
            for rank, state in self._ranks.items():
                state.note(late.get(rank, 0.0))
            self._look_for_slow_ranks(now)
            if not live:
                return
            point: dict[str, Any] = {"time": round(self._clock(), 1), "ranks": len(live)}
            for name in _PARTS:
                point[name] = round(sum(state.parts.get(name, 0.0) for state in live) / len(live), 4)
            for name in {*_RATES, *(name for state in live for name in state.rates)}:
                point[name] = round(max(state.rates.get(name, 0.0) for state in live), 2)
            point["in_flight"] = max(state.counters.get("in_flight", 0) for state in live)
            point["step_seconds"] = round(max(state.step_seconds for state in live), 6)
            point["most_waiting"] = round(max(state.parts.get("waiting", 0.0) for state in live), 4)
            point["late"] = round(max(late.values(), default=0.0), 5)
            self._history.append(point)

    def _look_for_slow_ranks(self, now: float) -> None:
        live = {
            rank: state
            for rank, state in self._ranks.items()
            if state.counters and not state.ended and now - state.heard_at < SILENT_S
        }
        changes = self._slow.take(
            {rank: state.sample() for rank, state in live.items()},
            {rank: str(state.about["host"]) for rank, state in live.items()},
            {rank: state.connections for rank, state in live.items()},
        )
        for text in changes:
            self._add("slow", text)
            self.announce(text)

    def snapshot(self, with_history: bool = False) -> dict[str, Any]:
        """Return everything as JSON values, which later changes leave as they are.

        Args:
            with_history: Whether the history of each rank is included.
        """
        with self._lock:
            now = self._monotonic()
            late, recent = self._delays.by_rank, list(self._history)[-self._delays.window :]
            live = [each for each in self._ranks.values() if not each.ended and now - each.heard_at < SILENT_S]
            waits = any(each.counters.get("in_flight") for each in live)
            ranks = []
            for rank in sorted(self._ranks):
                state = self._ranks[rank]
                times, seconds = self._stragglers.get(rank, (0, 0.0))
                ranks.append(
                    {
                        **state.about,
                        "state": _state_of(state, now, waits),
                        "age": round(max(0.0, now - state.heard_at), 1),
                        "idle": round(state.idle, 1),
                        "counters": dict(state.counters),
                        "process": dict(state.process),
                        "rates": {name: round(value, 2) for name, value in state.rates.items()},
                        "parts": {name: round(value, 4) for name, value in state.parts.items()},
                        "step_seconds": round(state.step_seconds, 6),
                        "slower": round(self._slow.slower(rank) or 0.0, 4),
                        "late": round(late.get(rank, 0.0), 5),
                        "times_late": times,
                        "seconds_waited_for": round(seconds, 4),
                        "stack": state.stack,
                        **({"history": {k: list(v) for k, v in state.history.items()}} if with_history else {}),
                    }
                )
            return {
                **self._about,
                "time": self._clock(),
                "seconds": round(now - self._started, 3),
                "generation": self._generation,
                "size": self._size,
                "ended": self._ended,
                "ranks": ranks,
                "straggler": self._delays.verdict(sum(each["most_waiting"] for each in recent) / max(1, len(recent))),
                "slow": [as_json(each) for each in self._slow.verdicts.values()],
                "connections": self._slow.rates(),
                "tensors": self._delays.tensors(),
                "stall": _find_stall(ranks),
                "history": list(self._history),
                "events": [dict(event) for event in self._events],
                "event_counts": dict(self._num_events),
            }

    def output(self, number: int) -> bytes:
        """Return the last bytes that a rank (in an elastic job, a worker) has written."""
        with self._lock:
            return self._tails.get(number, b"")

    def end(self, text: str) -> None:
        """Note that the job has ended."""
        with self._lock:
            self._ended = True
            self._slow = SlowRanks()
            self._add("end", text)


def _state_of(state: RankState, now: float, is_waited_for: bool) -> str:
    """Return the state of a rank; ``is_waited_for``: some rank of the job is in a collective."""
    if state.ended:
        return "ended"
    if now - state.heard_at >= SILENT_S:
        return "silent"
    if state.stack is not None and is_waited_for:
        return "stalled"
    if not any(state.counters.get(name) for name in ("requests", "steps", "in_flight")):
        return "starting"
    return "running" if state.stack is None else "idle"


def _find_stall(ranks: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Group the ranks by their stacks if some wait and none has completed anything for some seconds; else None."""
    stuck = [each for each in ranks if each["state"] == "stalled"]
    live = sum(each["state"] not in ("silent", "ended") for each in ranks)
    if not stuck or len(stuck) < live:
        return None
    groups = Counter(each["stack"] for each in stuck)
    return {
        "seconds": min(each["idle"] for each in stuck),
        "stacks": [
            {"ranks": [each["rank"] for each in stuck if each["stack"] == stack], "stack": stack}
            for stack, _ in sorted(groups.items(), key=lambda item: item[1])[:16]
        ],
        "silent": [each["rank"] for each in ranks if each["state"] == "silent"],
    }
