"""Jobs over the hosts that tests disturb: hvdrun, the events of their ranks, and what they may leave."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.hosts import Cluster, Host, environment
from cluster.namespaces import wait_until

HVDRUN = (sys.executable, "-m", "horovodlike.launcher")
PROGRAM = Path(__file__).with_name("fault_job.py")
SETTLE_S = 2.0  # what the other ranks have to end by themselves after a first failure
GRACE_S = 5.0  # from SIGTERM to SIGKILL
SLACK_S = 20.0  # what a busy machine may add to the end of a job
START_S = 60.0  # what a busy machine may take until all ranks are up and have reduced

started: list[Job] = []  # of the test that runs: what it leaves running is ended after it


@dataclass(frozen=True)
class Failure:
    """An exception of a rank, and its time by the machine's monotonic clock."""

    at: float
    kind: str
    error: str

    @property
    def named(self) -> set[int]:
        """The ranks that the message names."""
        return {int(rank) for rank in re.findall(r"\brank (\d+)", self.error)}


class Diaries:
    """The files that the ranks of a job with `fault_job.py` write.

    Args:
        folder: The folder of the files.
        size: The number of ranks.
    """

    def __init__(self, folder: Path, size: int) -> None:
        self.folder = folder
        self.size = size

    def events(self, rank: int, name: str) -> list[dict[str, Any]]:
        """Return the events of one name that a rank has written so far."""
        path = self.folder / f"rank{rank}.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        found = [json.loads(line) for line in lines if line.endswith("\n")]
        return [event for event in found if event["event"] == name]

    def pid(self, rank: int) -> int:
        return int(self.events(rank, "up")[0]["pid"])

    def host(self, rank: int) -> str:
        return str(self.events(rank, "up")[0]["host"])

    def kill(self, rank: int, number: signal.Signals = signal.SIGKILL) -> float:
        """Send a signal to a rank; when that was, by the machine's monotonic clock."""
        os.kill(self.pid(rank), number)
        return time.monotonic()

    def failure(self, rank: int) -> Failure:
        [event] = self.events(rank, "failed")
        return Failure(event["at"], event["kind"], event["error"])


class Job(Diaries):
    """One `hvdrun` with `fault_job.py`.

    Args:
        cluster: The hosts.
        folder: Where it runs, and its ranks write: a new one for each job.
        layout: The number of ranks of each host, from `h0` on.
        action: The task of the ranks and its arguments; see `fault_job.py`.
        options: Further words for hvdrun.
        python: What is started in place of the interpreter.
        settings: Variables of the environment.
    """

    def __init__(
        self,
        cluster: Cluster,
        folder: Path,
        layout: Sequence[int],
        *action: object,
        options: Sequence[object] = (),
        python: Sequence[object] = (sys.executable,),
        **settings: str,
    ) -> None:
        super().__init__(folder, sum(layout))
        self.cluster = cluster
        spec = ",".join(f"{host.name}:{slots}" for host, slots in zip(cluster.hosts, layout, strict=False))
        self.process = self._start(
            cluster.launcher, ["-H", spec, *options, *python, PROGRAM, folder, *action], settings
        )
        started.append(self)

    def _start(self, host: Host, words: Sequence[object], settings: dict[str, str]) -> subprocess.Popen[bytes]:
        with (self.folder / "out").open("wb") as out, (self.folder / "err").open("wb") as err:
            return host.popen(
                [*HVDRUN, *map(str, words)],
                cwd=self.folder,
                env=environment(OMP_NUM_THREADS="1", **settings),
                stdout=out,
                stderr=err,
            )

    @property
    def err(self) -> str:
        """Return the standard error of hvdrun so far."""
        return (self.folder / "err").read_text(errors="replace")

    def wait_for(
        self, name: str, ranks: Iterable[int] | None = None, *, times: int = 1, seconds: float = START_S
    ) -> None:
        """Wait until some ranks, or all, have noted an event this number of times."""
        awaited = list(range(self.size) if ranks is None else ranks)

        def noted() -> bool:
            ended = self.process.poll() is not None
            missing = [rank for rank in awaited if len(self.events(rank, name)) < times]
            assert not (ended and missing), f"ranks {missing} have ended before '{name}': {self.err}"
            return not missing

        wait_until(noted, f"'{name}' of the ranks", seconds)

    def wait_for_end(self, ranks: Iterable[int], seconds: float = GRACE_S + SLACK_S) -> None:
        """Wait until the processes of some ranks have ended."""
        pids = {self.pid(rank) for rank in ranks}
        wait_until(lambda: not pids & self.cluster.processes().keys(), f"the end of {pids}", seconds)

    def end(self) -> None:
        """End what still runs of a job whose test has failed, since the next test uses the same hosts."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(GRACE_S + SLACK_S)
            except subprocess.TimeoutExpired:
                self.process.kill()

    def go(self) -> None:
        """Let the ranks continue that wait for the word."""
        (self.folder / "go").touch()

    def finish(self, seconds: float) -> int:
        """Wait for the end of hvdrun; its exit code."""
        return self.process.wait(seconds + SLACK_S)

    def check_gone(self, hosts: Sequence[Host] | None = None, seconds: float = GRACE_S) -> None:
        """Check that nothing is left on some hosts, or on all, but their ssh servers."""
        hosts = self.cluster.machines if hosts is None else hosts

        def left() -> dict[int, str]:
            return {pid: words for host in hosts for pid, words in host.processes().items() if "listener" not in words}

        with contextlib.suppress(AssertionError):
            wait_until(lambda: not left(), "the end of the job", seconds + SLACK_S)
        assert not (still := left()), still
        files = [f"{host.name}:{entry}" for host in hosts for entry in host.shm_entries()]
        assert not files, files
