"""Reports of this rank to the collector of the job's monitor: one each second, from a thread of its own.

The collector (:mod:`horovodlike.monitor.collector`, which lists the fields of a report) is in ``hvdrun`` or on rank 0.
If it is slow, stuck or gone, this neither delays nor ends a rank: the thread drops the connection and tries again. A
report holds only what has changed since the last one on its connection, and is at most some ten kilobytes long.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil

from horovodlike._bootstrap.environment import (
    DRIVER_ADDRESS,
    MONITOR_PORT,
    RENDEZVOUS_ADDRESS,
    WORKER,
    RankInfo,
    generation,
)
from horovodlike._bootstrap.job_key import monitor_key, take_key
from horovodlike._bootstrap.topology import boot_id
from horovodlike._engine import sent_bytes
from horovodlike._engine.metrics import CollectiveRecord, metrics, sample_collectives
from horovodlike._engine.processor import Processor
from horovodlike._engine.stack_dump import describe_threads
from horovodlike._net.connect import dial
from horovodlike._net.secure_channel import ClientChannel, Identity, JobKey, job_digest
from horovodlike._net.secure_server import encode
from horovodlike._net.socket_options import set_keepalive
from horovodlike.errors import RendezvousError

if TYPE_CHECKING:
    from horovodlike._engine.profile import Attachment

__all__ = ["JOB", "Target", "slow_ranks", "start", "start_if_asked", "stop"]

JOB = job_digest("monitor")
"""The digest of the job's name in the handshake: the key alone distinguishes the jobs."""
PERIOD_S = 1.0
STALL_S = 3.0
"""A rank that has completed nothing for this long also reports its stacks, unless it often does."""
_GAPS = 3.0  # times as long as it often does
_GAP_DECAY = 0.98  # per report
_PATIENCE_S = 1.0  # for one step of a connection
_SHORTEST_PAUSE_S = 0.1
_NO_WAIT_S = 0.001
_LONGEST_PAUSE_S = 10.0
_STACK_BYTES = 4096
_MOST_COLLECTIVES = 32

_running: _Reporter | None = None


@dataclass(frozen=True)
class Target:
    """The collector of a job: its addresses, separated by commas, its port, and the key of its channel."""

    addresses: str
    port: int
    key: JobKey


def start_if_asked(place: RankInfo) -> None:
    """Start to report if the launcher has named a collector; for ``init()``."""
    key = take_key(os.environ)
    address = os.environ.get(DRIVER_ADDRESS) or os.environ.get(RENDEZVOUS_ADDRESS)
    if key is not None and address:
        start(Target(address, int(os.environ[MONITOR_PORT]), monitor_key(key)), place)


def start(target: Target, place: RankInfo) -> None:
    """Start to report; replaces a reporter that runs."""
    global _running
    stop()
    # For a profiler that --attach starts: Kineto would write lines into the output of the ranks, above all its errors.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    thread = _Reporter(target, place)
    thread.start()
    _running = thread


def stop() -> None:
    """Send the last report and end the thread, within two seconds; do nothing if none runs."""
    global _running
    if _running is not None:
        _running.stop()
        _running = None


def slow_ranks() -> list[dict[str, Any]]:
    """Return the verdicts of the monitor on slow ranks, on rank 0."""
    return [] if _running is None else _running.slow


class _Reporter(threading.Thread):
    def __init__(self, target: Target, place: RankInfo) -> None:
        super().__init__(name="horovodlike-monitor-report", daemon=True)
        self._target = target
        self._place = place
        self._generation = generation()
        self._stop_event = threading.Event()
        self.slow: list[dict[str, Any]] = []  # the verdicts of the monitor, on rank 0
        self._attachment: Attachment | None = None  # of an hvdrun that has asked this rank for something
        self._abandoned = False  # stop() has waited in vain; the next generation may have begun
        self._pid = os.getpid()

    def stop(self) -> None:
        self._stop_event.set()
        if self._pid == os.getpid():
            self.join(2 * _PATIENCE_S)
            if self._attachment is not None:
                self._attachment.close()
        self._abandoned = True

    def run(self) -> None:
        pause = PERIOD_S
        while not self._stop_event.is_set():
            try:
                with contextlib.closing(self._connect()) as channel:
                    if self._abandoned:
                        return
                    pause = PERIOD_S
                    try:
                        self._report(channel)
                    finally:
                        if self._attachment is not None:
                            self._attachment.cancel()
            except (OSError, RendezvousError):
                pass  # a lost connection, or a server without the key
            except Exception as error:  # nothing that a report does may end the rank
                text = f"rank {self._place.rank} does not report to the monitor any more: {error!r}"
                print(f"horovodlike warning: {text}", file=sys.stderr)
                return
            self._stop_event.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _connect(self) -> ClientChannel:
        with contextlib.closing(dial(self._target.addresses, self._target.port, _PATIENCE_S)) as connected:
            for each in connected:
                set_keepalive(each, 10, 5, 3)
                identity = Identity(self._place.rank, self._place.size, JOB)
                channel = ClientChannel(each, self._target.key, identity, time.monotonic() + _PATIENCE_S)
                try:
                    channel.receive(time.monotonic() + _PATIENCE_S)  # proves that the server has the key
                except BaseException:
                    channel.close()
                    raise
                return channel
        raise ConnectionRefusedError

    def _report(self, channel: ClientChannel) -> None:
        snapshots = _Snapshots(self._place, self._generation)
        while True:
            ends = self._stop_event.is_set()
            report = {**snapshots.take(time.monotonic()), **({"end": True} if ends else {})}
            channel.send(encode(report), time.monotonic() + _PATIENCE_S)
            if ends:
                return
            due = time.monotonic() + _until_next()
            self._receive(channel, _NO_WAIT_S)
            while (left := due - time.monotonic()) > 0 and not self._stop_event.is_set():
                pause = self._answer(channel)
                if pause is None:
                    self._stop_event.wait(left)
                else:
                    self._receive(channel, min(left, pause))

    def _receive(self, channel: ClientChannel, seconds: float) -> None:
        """Take the messages that come within some time, or those that are there if the first is."""
        with contextlib.suppress(TimeoutError):
            while True:
                message = json.loads(channel.receive(time.monotonic() + seconds))
                self.slow = message.get("slow", self.slow)
                if "ask" in message:
                    from horovodlike._engine.profile import Attachment

                    self._attachment = self._attachment or Attachment()
                    self._attachment.take(message["ask"])
                seconds = _NO_WAIT_S

    def _answer(self, channel: ClientChannel) -> float | None:
        """Send the answers to an attached ``hvdrun``; return how long it may be until it asks again."""
        if self._attachment is None:
            return None
        for answer in self._attachment.answers():
            channel.send(encode({"answer": answer}), time.monotonic() + _PATIENCE_S)
        return self._attachment.pause


def _until_next() -> float:
    """Return the time to the next report: all ranks report at the same moments, so that they disturb fewer steps."""
    pause = PERIOD_S - time.time() % PERIOD_S
    return pause if pause > _SHORTEST_PAUSE_S else pause + PERIOD_S


class _Snapshots:
    """The reports on one connection."""

    def __init__(self, place: RankInfo, generation: int) -> None:
        self._place = place
        self._generation = generation
        self._process = psutil.Process()
        self._processor = Processor()
        self._is_first = True
        self._sent: dict[str, dict[str, Any]] = {"counters": {}, "process": {}}
        self._late: list[Any] = []
        self._stack: str | None = None
        self._number = 0  # of the last collective that was reported
        self._progress = 0
        self._gap = 0.0  # the longest time without progress lately
        self._progress_at = 0.0

    def take(self, now: float) -> dict[str, Any]:
        """Return the next report, which is sent at this time, by the monotonic clock."""
        count: dict[str, Any] = dict(metrics())
        stragglers = count.pop("stragglers")
        done = getattr(sys.modules.get("horovodlike.progress"), "fraction", None)
        count |= {} if done is None else {"progress": done}
        if count["requests"] != self._progress or not self._progress_at:
            if self._progress:
                self._gap = max(self._gap * _GAP_DECAY, now - self._progress_at)
            self._progress, self._progress_at = count["requests"], now
        idle = now - self._progress_at
        report: dict[str, Any] = {"sent": now, "idle": round(idle, 3)}
        if self._is_first:
            report["rank"] = self._describe()
            self._is_first = False
        report |= self._changes("process", self._measure_process())
        if self._place.rank == 0:
            report |= self._find_late(stragglers)
        report |= self._changes("counters", count)
        if self._place.cross_size > 1:
            report["connections"] = sent_bytes.measure()
        records, self._number = sample_collectives(self._number, _MOST_COLLECTIVES)
        report["collectives"] = [_shorten(record) for record in records]
        report |= self._find_stack(idle)
        return report

    def _describe(self) -> dict[str, Any]:
        place = self._place
        return {
            **{"rank": place.rank, "size": place.size, "generation": self._generation, "pid": os.getpid()},
            **{"local_rank": place.local_rank, "host": place.node_id or socket.gethostname()},
            **{"boot": boot_id(), "worker": int(os.environ.get(WORKER) or place.rank)},
        }

    def _changes(self, part: str, values: dict[str, Any]) -> dict[str, Any]:
        sent = self._sent[part]
        changed = {name: value for name, value in values.items() if sent.get(name) != value}
        sent.update(changed)
        return {part: changed} if changed else {}

    def _measure_process(self) -> dict[str, Any]:
        values: dict[str, Any] = {"resident_bytes": self._process.memory_info().rss, **self._processor.measure()}
        torch = sys.modules.get("torch")
        with contextlib.suppress(Exception):  # a framework that is being imported, or another version
            if torch is not None and torch.cuda.is_initialized():
                values["gpu_bytes"] = torch.cuda.memory_allocated()
                values["gpu_reserved_bytes"] = torch.cuda.memory_reserved()
        return values

    def _find_late(self, stragglers: list[Any]) -> dict[str, Any]:
        before = self._late
        self._late = stragglers
        changed = [
            [rank, each["times_late"], round(each["seconds_waited_for"], 6)]
            for rank, each in enumerate(stragglers)
            if (rank >= len(before) and each["times_late"]) or (rank < len(before) and each != before[rank])
        ]
        return {"late": changed} if changed else {}

    def _find_stack(self, idle: float) -> dict[str, Any]:
        stack = (
            describe_threads(_STACK_BYTES).decode(errors="replace") if idle >= max(STALL_S, _GAPS * self._gap) else None
        )
        if stack == self._stack:
            return {}
        self._stack = stack
        return {"stack": stack}


def _shorten(record: CollectiveRecord) -> list[Any]:
    return [record["number"], record["kind"], record["name"], record["bytes"], round(record["enqueued"], 6)]
