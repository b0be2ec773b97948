"""Measure how long an elastic job takes to continue after a rank is killed: `python -m benchmarks.elastic`.

A job of 4 ranks trains; time after time a random one of them gets SIGKILL, and hvdrun puts another in its place. The
workers write down when they notice, when they have met again, when they have the same state, and when they have taken
the first step. A phase lasts until the last survivor is through it, so the phases add up to the time without a step.
Prints the table, and writes docs/users/elastic.png: throughput and number of ranks over time.
"""

from __future__ import annotations

import argparse
import bisect
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt  # noqa: E402

from benchmarks.driver import BenchmarkError  # noqa: E402
from benchmarks.launch import COMMON_ENVIRONMENT, beside  # noqa: E402
from benchmarks.tables import human_time, table  # noqa: E402

ROOT = Path(__file__).parents[1]
RANK_SCRIPT = Path(__file__).with_name("elastic_rank.py")
PICTURE = ROOT / "docs" / "users" / "elastic.png"
PATIENCE_S = 120.0  # for anything that is waited for
STEPS_BETWEEN = 20  # taken by all ranks before the next one is killed
WINDOW_S = 0.25  # over which throughput is averaged
PHASES = {
    "detection": "broken",
    "re-rendezvous": "joined",
    "state sync": "begun",
    "first step": "step",
}

Event = dict[str, Any]


@dataclass(frozen=True)
class Kill:
    """One rank killed."""

    at: float  # on CLOCK_MONOTONIC, as all times here
    victim: int  # the worker's number
    survivors: tuple[int, ...]


class Job:
    """An hvdrun whose workers run elastic_rank.py, and the events that they have written."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self.process = process
        self.folder = folder
        self._read: dict[Path, int] = {}
        self.events: dict[int, list[Event]] = {}  # by the worker's number

    def update(self) -> None:
        """Read the events that are new."""
        for path in self.folder.glob("*.jsonl"):
            with path.open() as file:
                file.seek(self._read.get(path, 0))
                text = file.read()
            complete = text[: text.rfind("\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(complete)
            self.events.setdefault(int(path.stem), []).extend(json.loads(line) for line in complete.splitlines())

    def find(self, worker: int, name: str, since: float) -> Event | None:
        """Return the first event of this name of a worker after some time."""
        return next(self.find_all(worker, name, since), None)

    def find_all(self, worker: int, name: str, since: float) -> Iterator[Event]:
        """Return all events of this name, in the order of time."""
        events = self.events.get(worker, [])
        first = bisect.bisect_left(events, since, key=lambda event: float(event["at"]))
        return (events[index] for index in range(first, len(events)) if events[index]["event"] == name)

    def wait_for_steps(self, size: int, since: float) -> list[int]:
        """Wait until this number of ranks together have taken some steps; return their numbers."""

        def has_stepped(worker: int) -> bool:
            steps = (step for step in self.find_all(worker, "step", since) if step["size"] == size)
            return next(itertools.islice(steps, STEPS_BETWEEN - 1, None), None) is not None

        self.wait(lambda: sum(map(has_stepped, self.events)) == size, f"{size} ranks have taken {STEPS_BETWEEN} steps")
        return sorted(filter(has_stepped, self.events))

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until a condition holds for the events that are written."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            self.update()
            if condition():
                return
            if self.process.poll() is not None:
                raise BenchmarkError(f"hvdrun has ended with {self.process.returncode} before {what}: {self.output()}")
            if time.monotonic() > deadline:
                raise BenchmarkError(f"not within {PATIENCE_S:g} s: {what}: {self.output()}")
            time.sleep(0.05)  # the processors are for the ranks

    def output(self) -> str:
        """Return the end of hvdrun's output."""
        return (self.folder / "output").read_text(errors="replace")[-4000:]

    def kill_one(self, size: int, since: float, every: float, choose: random.Random) -> Kill:
        """Kills a random rank, when all of them have trained for a while; waits until the others train again."""
        members = self.wait_for_steps(size, since)
        self.wait(lambda: time.monotonic() > since + every, "it is time for the next one")
        victim = choose.choice(members)
        survivors = tuple(worker for worker in members if worker != victim)
        pid = self.events[victim][0]["pid"]
        at = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        kill = Kill(at, victim, survivors)
        self.wait(lambda: len(self.ends(kill)) == len(PHASES), f"{len(survivors)} ranks train without worker {victim}")
        return kill

    def ends(self, kill: Kill) -> list[float]:
        """When the last survivor was through each phase, as far as they have come."""
        ends: list[float] = []
        for name in PHASES.values():
            found = [self.find(worker, name, ends[-1] if name == "step" else kill.at) for worker in kill.survivors]
            if None in found:
                break
            ends.append(max(float(event["at"]) for event in found if event is not None))
        return ends

    def finish(self) -> None:
        """Tells the workers to stop, and checks that they have come to the right result."""
        (self.folder / "stop").touch()
        if status := self.process.wait(PATIENCE_S):
            raise BenchmarkError(f"hvdrun has ended with {status}: {self.output()}")
        self.update()
        ends = [event for events in self.events.values() for event in events if event["event"] == "end"]
        if not ends or len({(end["step"], end["error"]) for end in ends}) != 1:
            raise BenchmarkError(f"the workers have come to different results: {ends}")


@contextmanager
def start(size: int, smallest: int, parameters: int) -> Iterator[Job]:
    """Start a job, and end it with the context."""
    hvdrun = beside(sys.executable, "hvdrun")
    if hvdrun is None:
        raise BenchmarkError("hvdrun is not installed")
    with tempfile.TemporaryDirectory() as folder:
        options = ["--min-np", str(smallest), "--max-np", str(size), "-np", str(size)]
        script = [sys.executable, str(RANK_SCRIPT), folder, str(parameters)]
        with (Path(folder) / "output").open("wb") as output:
            process = subprocess.Popen(
                [hvdrun, *options, *script],
                cwd=folder,
                env={**os.environ, **COMMON_ENVIRONMENT},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            yield Job(process, Path(folder))
        finally:
            if process.poll() is None:
                process.terminate()  # hvdrun ends its workers
                process.wait()


def phases(job: Job, kill: Kill) -> dict[str, float]:
    """How long each phase has taken, in seconds, and all of them together."""
    times = [kill.at, *job.ends(kill)]
    lengths = {phase: end - begin for phase, begin, end in zip(PHASES, times, times[1:], strict=False)}
    return lengths | {"all": times[-1] - kill.at}


def document(rows: Sequence[dict[str, float]]) -> str:
    """Return the table: medians and maxima over all kills."""
    lines = [
        [phase, human_time(statistics.median(row[phase] for row in rows)), human_time(max(row[phase] for row in rows))]
        for phase in rows[0]
    ]
    return table(["phase", "median", "maximum"], lines)


def draw(job: Job, kills: Sequence[Kill], path: Path) -> None:
    """Write a PNG: batches of all ranks per second, and the number of ranks, over time."""
    steps = sorted(
        (event["at"], event["size"])
        for step in _steps(job).values()
        for event in [max(step, key=lambda event: float(event["at"]))]
    )
    begin = steps[0][0]
    times = [at - begin for at, _ in steps]
    figure, (rates, sizes) = plt.subplots(
        2, 1, figsize=(10.4, 5.2), sharex=True, height_ratios=(3, 1), layout="constrained"
    )
    per_window = [0.0] * (int(times[-1] / WINDOW_S) + 1)
    for at, (_, size) in zip(times, steps, strict=True):
        per_window[int(at / WINDOW_S)] += size / WINDOW_S
    complete = per_window[:-1]
    middles = [(index + 0.5) * WINDOW_S for index in range(len(complete))]
    rates.plot(middles, complete, color="#00798c", linewidth=1.2, drawstyle="steps-mid")
    rates.set_ylabel("batches of all ranks per second")
    rates.set_ylim(bottom=0)
    sizes.step(times, [size for _, size in steps], where="post", color="#2e4057")
    sizes.set_ylabel("ranks")
    sizes.set_ylim(0, max(size for _, size in steps) + 0.5)
    sizes.set_xlabel("time, s")
    for axis in (rates, sizes):
        for number, kill in enumerate(kills):
            label = "a rank is killed" if number == 0 else None
            axis.axvline(kill.at - begin, color="#d1495b", linewidth=0.8, linestyle=":", label=label)
        axis.grid(alpha=0.3)
    rates.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _steps(job: Job) -> dict[int, list[Event]]:
    """Return the ranks' events by step. A step that was rolled back and repeated counts once."""
    found: dict[int, list[Event]] = {}
    for events in job.events.values():
        for event in events:
            if event["event"] == "step":
                found.setdefault(event["step"], []).append(event)
    return found


def main() -> None:
    """Measures, prints and draws."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.elastic", description=__doc__)
    parser.add_argument("--np", type=int, default=4, help="ranks")
    parser.add_argument("--min-np", type=int, default=2)
    parser.add_argument("--kills", type=int, default=20)
    # Where workers fail more often than every 4 s, hvdrun takes the host to be at fault, and lets it cool down.
    parser.add_argument("--every", type=float, default=5.0, help="seconds from one kill to the next, at least")
    parser.add_argument("--parameters", type=int, default=1 << 20, help="float32 numbers of the model")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32), help="of who is killed")
    parser.add_argument("--picture", type=Path, default=PICTURE)
    args = parser.parse_args()
    print(f"seed {args.seed}", file=sys.stderr, flush=True)
    choose = random.Random(args.seed)
    kills: list[Kill] = []
    with start(args.np, args.min_np, args.parameters) as job:
        for number in range(args.kills):
            kills.append(job.kill_one(args.np, kills[-1].at if kills else 0.0, args.every, choose))
            print(f"{number + 1}: {phases(job, kills[-1])['all']:.3f} s", file=sys.stderr, flush=True)
        job.wait_for_steps(args.np, kills[-1].at)
        job.finish()
        print(document([phases(job, kill) for kill in kills]))
        draw(job, kills, args.picture)


if __name__ == "__main__":
    main()
