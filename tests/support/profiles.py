"""Profiles of a made job, of which the right answers are known, and the rules that their traces must keep."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Event = dict[str, Any]

MS = 1_000_000
EPOCH = 1_790_000_000_000 * MS
STEP = 100 * MS
COMPUTE = 40 * MS
LATENCY = MS // 20  # from the last request to the start of a batch
REDUCTION = 5 * MS
FIRST_STEP = 1204


@dataclass
class MadeJob:
    """A job whose ranks compute for 40 ms in each step of 100 ms, and then reduce their gradients in one batch.

    Attributes:
        hosts: The host of each rank.
        delays: The additional time for which a rank computes, in ns.
        offsets: The time by which the clock of a host is ahead of the true time, in ns.
        tensors: The number of tensors, of 1 KiB each; a rank requests one each 10 us.
        skipped: The number of batches that a rank did not record, at the start and at the end.
    """

    hosts: Sequence[str]
    delays: dict[int, int] = field(default_factory=dict)
    offsets: dict[str, int] = field(default_factory=dict)
    tensors: int = 3
    num_steps: int = 4
    skipped: dict[int, tuple[int, int]] = field(default_factory=dict)
    pid: int = 77
    framework: str = "torch"

    def requested(self, rank: int, step: int, tensor: int) -> int:
        """Return when a rank requests a tensor, by the true time."""
        return EPOCH + step * STEP + COMPUTE + self.delays.get(rank, 0) + tensor * MS // 100

    def begun(self, step: int) -> int:
        """Return when the batch of a step begins, on all ranks."""
        last = max(self.requested(rank, step, self.tensors - 1) for rank in range(len(self.hosts)))
        return last + LATENCY

    def timeline(self, rank: int) -> list[Event]:
        """Return the timeline of a rank, as the engine writes it."""
        start = EPOCH - MS
        offset = self.offsets.get(self.hosts[rank], 0)
        head = {"name": f"rank {rank}", "rank": rank, "size": len(self.hosts)}
        head |= {"host": self.hosts[rank], "start_time_since_epoch_in_micros": (start + offset) // 1000}
        events: list[Event] = [{"ph": "M", "name": "process_name", "pid": 0, "args": head}]
        for tensor in range(self.tensors):
            name = {"name": f"grad.{tensor}"}
            events.append({"ph": "M", "name": "process_name", "pid": tensor + 1, "args": name})
        before, behind = self.skipped.get(rank, (0, 0))
        for step in range(before, self.num_steps - behind):
            begun = self.begun(step)
            for tensor in range(self.tensors):
                at = self.requested(rank, step, tensor)
                events.append(_slice("NEGOTIATE_ALLREDUCE", tensor + 1, rank, at - start, begun - start))
            for tensor in range(self.tensors):
                done = _slice("ALLREDUCE", tensor + 1, rank, begun - start, begun + REDUCTION - start)
                done["args"] = {"collective": step + 7, "ranks": len(self.hosts), "bytes": 1024, "dtype": "float32"}
                events.append(done)
        return events

    def trace(self, rank: int) -> dict[str, Any]:
        """Return the framework's trace of a rank: one operator in each step, with another one in it, and a flow."""
        events: list[Event] = [{"ph": "M", "name": "process_name", "pid": self.pid, "args": {"name": "python"}}]
        events += [{"ph": "M", "name": "thread_name", "pid": self.pid, "tid": self.pid, "args": {"name": "main"}}]
        for step in range(self.num_steps):
            begin, end = step * STEP, step * STEP + COMPUTE + self.delays.get(rank, 0)
            for name, from_, to in (("aten::linear", begin, end), ("aten::mm", begin + 10 * MS, begin + 30 * MS)):
                events.append({**_slice(name, self.pid, self.pid, from_, to), "cat": "cpu_op"})
            flow = {"cat": "fwdbwd", "name": "fwdbwd", "id": step, "pid": self.pid, "tid": self.pid}
            events.append({"ph": "s", **flow, "ts": begin / 1000})
            events.append({"ph": "f", "bp": "e", **flow, "ts": begin / 1000 + 20000})
        epoch = (EPOCH + self.offsets.get(self.hosts[rank], 0)) / 1000
        return {"schemaVersion": 1, "traceEvents": events, "epoch_us": epoch}

    def about(self, rank: int) -> dict[str, Any]:
        """Return a profile's facts about a rank."""
        offset = self.offsets.get(self.hosts[rank], 0)
        return {
            **{"rank": rank, "size": len(self.hosts), "host": self.hosts[rank], "pid": self.pid, "files": {}},
            **{"framework": self.framework, "first_step": FIRST_STEP, "steps": self.num_steps},
            "marks": [(EPOCH + step * STEP + offset) / 1e9 for step in range(self.num_steps + 1)],
        }

    def write(self, folder: Path, ranks: Sequence[int] | None = None) -> Path:
        """Write the profile of all ranks, or of some."""
        folder.mkdir(exist_ok=True)
        for rank in range(len(self.hosts)) if ranks is None else ranks:
            (folder / f"rank{rank}.json").write_text(json.dumps(self.about(rank)))
            (folder / f"rank{rank}.timeline.json").write_text(json.dumps(self.timeline(rank)))
            (folder / f"rank{rank}.trace.json").write_text(json.dumps(self.trace(rank)))
        return folder


def _slice(name: str, pid: int, tid: int, begin: int, end: int) -> Event:
    return {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": begin / 1000, "dur": (end - begin) / 1000}


def check_trace(events: Sequence[Event]) -> None:
    """Assert that a viewer shows all of a trace: slices of a thread nest, and arrows lead from slice to slice."""
    rows: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for event in events:
        assert isinstance(event["pid"], int) and isinstance(event["name"], str)
        if event["ph"] == "X":
            begin = round(event["ts"] * 1000)
            assert begin >= 0 and event["dur"] >= 0
            rows[event["pid"], event["tid"]].append((begin, begin + round(event["dur"] * 1000)))
    for slices in rows.values():
        open_ends: list[int] = []
        for begin, end in sorted(slices, key=lambda each: (each[0], -each[1])):
            while open_ends and open_ends[-1] <= begin:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1], "slices of a thread overlap"
            open_ends.append(end)
    ends: dict[tuple[str, str, int], list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] in ("s", "t", "f"):
            ends[event["cat"], event["name"], event["id"]].append(event)
            at = round(event["ts"] * 1000)
            assert any(begin <= at < end for begin, end in rows[event["pid"], event["tid"]]), "an arrow without a slice"
    for pair in ends.values():
        assert [event["ph"] for event in pair] == ["s", "f"]
        assert pair[0]["ts"] <= pair[1]["ts"] and pair[1]["bp"] == "e"


def arrows(events: Sequence[Event]) -> list[tuple[Event, Event]]:
    """Return the start and the end of each arrow between ranks."""
    ends: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "release":
            ends[event["id"]].append(event)
    return [(source, target) for source, target in ends.values()]
