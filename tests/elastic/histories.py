"""Elastic jobs of tests/elastic/integers.py, and what their diaries tell."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from integers import advanced, value_of

HVDRUN = Path(sys.executable).with_name("hvdrun")
INTEGERS = Path(__file__).with_name("integers.py")
MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Entry:
    """One line of a diary."""

    worker: int
    event: str
    at: float
    pid: int
    what: Mapping[str, Any]

    def __getattr__(self, name: str) -> Any:
        try:
            return self.what[name]
        except KeyError:
            raise AttributeError(name) from None


class History:
    """The diaries of one job, and their evaluation.

    Args:
        folder: Where the workers write them.
    """

    said = ""
    """The output of the job."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.before = set(os.listdir("/dev/shm"))

    def entries(self, event: str | None = None) -> list[Entry]:
        """Return what has been written so far, in the order of time."""
        found = []
        for path in self.folder.glob("worker.*"):
            for line in path.read_text().splitlines():
                said = json.loads(line)
                entry = Entry(int(path.suffix[1:]), said.pop("event"), said.pop("at"), said.pop("pid"), said)
                if event is None or entry.event == event:
                    found.append(entry)
        return sorted(found, key=lambda entry: entry.at)

    def steps_of(self, worker: int) -> int:
        return sum(entry.worker == worker for entry in self.entries("step"))

    def pid(self, worker: int) -> int:
        return next(entry.pid for entry in self.entries("start") if entry.worker == worker)

    def check(self, samples: int) -> None:
        """Check that all who came to the end have the model of an oracle, and that every sample counted once."""
        ends = self.entries("end")
        assert ends, self.said
        assert len({(end.model, end.step) for end in ends}) == 1, [(end.worker, end.model, end.step) for end in ends]
        generation_of: dict[int, int] = {}  # by step, the generation in which it was done for good
        taken: dict[tuple[int, int], dict[int, Entry]] = defaultdict(dict)  # by step and generation, by rank
        for entry in self.entries("step"):
            generation_of[entry.step] = max(entry.generation, generation_of.get(entry.step, 0))
            taken[entry.step, entry.generation][entry.rank] = entry
        model = 1
        counted: Counter[tuple[int, int]] = Counter()
        models = {}
        for step in range(ends[0].step):
            ranks = taken[step, generation_of[step]]
            size = next(iter(ranks.values())).size
            assert sorted(ranks) == list(range(size)), f"step {step}: {sorted(ranks)} of {size}"
            total = 0
            for entry in ranks.values():
                counted.update((entry.epoch, sample) for sample in entry.samples)
                total += sum(map(value_of, entry.samples))
            model = advanced(model, total & MASK)
            models[step + 1] = model
        assert model == ends[0].model
        assert counted == Counter((epoch, sample) for epoch in range(ends[0].epochs) for sample in range(samples))
        # No commit was lost: what was committed anywhere is part of the history that the end has come from.
        for commit in self.entries("commit"):
            assert models[commit.step] == commit.model, f"step {commit.step} of worker {commit.worker}"

    def check_nothing_left(self) -> None:
        """Check that no worker lives and no shared memory is left."""
        for pid in {entry.pid for entry in self.entries("start")}:
            assert not Path(f"/proc/{pid}").exists(), f"process {pid} is left\n{self.said}"
        left = {name for name in set(os.listdir("/dev/shm")) - self.before if "horovodlike" in name}
        assert not left, left


class HistoryJob(History):
    """One hvdrun, as a context."""

    def __init__(
        self,
        folder: Path,
        *options: str,
        program: Sequence[str] = (),
        plan: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(folder)
        if plan is not None:
            (folder / "plan.yaml").write_text(plan)
            options = (*options, "--chaos", str(folder / "plan.yaml"))
        with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
            self.process = subprocess.Popen(
                [HVDRUN, "--verbose", *options, sys.executable, INTEGERS, folder, *program],
                stdout=out,
                stderr=err,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )

    def __enter__(self) -> HistoryJob:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    @property
    def said(self) -> str:  # type: ignore[override]
        return (self.folder / "out").read_text() + (self.folder / "err").read_text()

    def wait_for(self, what: str, condition: Any, timeout: float = 60.0) -> None:
        """Wait until something shows in the diaries."""
        deadline = time.monotonic() + timeout
        while not condition() and self.process.poll() is None:
            assert time.monotonic() < deadline, f"no {what} within {timeout} s\n{self.said}"
            time.sleep(0.01)
        assert condition(), f"the job ended with {self.process.returncode} before {what}\n{self.said}"

    def finish(self, timeout: float = 120.0) -> int:
        """Wait for the end; the exit code."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job did not end\n{self.said}") from None
