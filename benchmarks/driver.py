"""Starts the ranks of each peer and lets one peer measure at a time."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from benchmarks import launch
from benchmarks.protocol import SOCKET_VARIABLE, Channel, ConnectionLost, Message

START_SECONDS = 120.0
ANSWER_SECONDS = 300.0
END_SECONDS = 20.0


class BenchmarkError(RuntimeError):
    """A peer could not be started or failed while it measured."""


class Group:
    """The ranks of one peer. They sleep until `call` tells them to do something."""

    def __init__(self, launcher: launch.Launcher, size: int) -> None:
        """Start the ranks and wait until all of them are there.

        Raises:
            BenchmarkError: they did not come; the message has the end of their output.
        """
        self.name = launcher.name
        self.size = size
        self._scratch = tempfile.TemporaryDirectory(prefix="benchmark-")
        self._log = Path(self._scratch.name) / "log"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._channels: list[Channel] = []
        try:
            self._start(launcher)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def call(self, command: Message) -> list[Message]:
        """Has all ranks do something at the same time; returns their answers, by rank.

        Raises:
            BenchmarkError: a rank failed, ended or did not answer in time.
        """
        try:
            for channel in self._channels:
                channel.send(command)
            answers = [channel.receive() for channel in self._channels]
        except (OSError, ConnectionLost) as error:
            raise BenchmarkError(f"{self.name}, {command}: {error}\n{self._log_end()}") from error
        for rank, answer in enumerate(answers):
            if "error" in answer:
                raise BenchmarkError(f"{self.name}, rank {rank}, {command}:\n{answer['error']}")
        return answers

    def processor_seconds(self) -> float:
        """Return the processor time that the launcher's own processes have had, to the nanosecond."""
        tasks = (task for process in self._processes for task in Path(f"/proc/{process.pid}/task").iterdir())
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9

    def close(self) -> None:
        """End the ranks, by force if they do not end by themselves."""
        for channel in self._channels:
            with contextlib.suppress(OSError):
                channel.send({"do": "quit"})
            channel.close()
        patience = END_SECONDS if self._channels else 0.0
        for process in self._processes:
            try:
                process.wait(patience)
            except subprocess.TimeoutExpired:
                # Every process of the benchmark leads a process group that launchers do not leave.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self._processes, self._channels = [], []
        self._scratch.cleanup()

    def _start(self, launcher: launch.Launcher) -> None:
        scratch = Path(self._scratch.name)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener, self._log.open("wb") as log:
            listener.bind(str(scratch / "socket"))
            listener.listen(self.size)
            listener.settimeout(START_SECONDS)
            for command in launcher.commands(self.size, scratch):
                environment = os.environ | launch.COMMON_ENVIRONMENT | command.environment
                environment[SOCKET_VARIABLE] = str(scratch / "socket")
                self._processes.append(
                    subprocess.Popen(
                        command.argv,
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                )
            self._accept(listener)

    def _accept(self, listener: socket.socket) -> None:
        by_rank: dict[int, Channel] = {}
        while len(by_rank) < self.size:
            try:
                connection = self._accept_one(listener)
            except TimeoutError as error:
                raise BenchmarkError(
                    f"{self.name}: {len(by_rank)} of {self.size} ranks came\n{self._log_end()}"
                ) from error
            connection.settimeout(ANSWER_SECONDS)
            channel = Channel(connection)
            by_rank[channel.receive()["rank"]] = channel
            self._channels = [by_rank[rank] for rank in sorted(by_rank)]

    def _accept_one(self, listener: socket.socket) -> socket.socket:
        """Wait for a rank, in short steps so that a launcher that has failed is noticed at once."""
        listener.settimeout(0.5)
        for _ in range(int(START_SECONDS / 0.5)):
            with contextlib.suppress(TimeoutError):
                return listener.accept()[0]
            failed = [process for process in self._processes if process.poll() not in (None, 0)]
            if failed:
                raise BenchmarkError(
                    f"{self.name}: exit code {failed[0].returncode} of {failed[0].args!r}\n{self._log_end()}"
                )
        raise TimeoutError

    def _log_end(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-30:])


class Participant(Protocol):
    """One side that takes turns with other peers: a group, or a measurement of another kind."""

    name: str

    def call(self, command: Message) -> list[Message]:
        """See Group.call."""


class Case(Protocol):
    """Something to measure: the command for a peer's ranks, and how to read their answers. Hashable."""

    def supports(self, peer: str) -> bool:
        """Whether a peer can do this."""

    def command(self, iterations: int) -> Message:
        """Return the command for the ranks."""

    def seconds(self, answers: Sequence[Message]) -> float:
        """Return the time of one iteration."""


@contextlib.contextmanager
def started(launchers: Sequence[launch.Launcher], size: int) -> Iterator[list[Group]]:
    """Yield the groups of several peers, and end them together."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(Group(launcher, size)) for launcher in launchers]


def slowest(answers: Sequence[Message]) -> float:
    """Return the time of the slowest rank."""
    return max(float(answer["seconds"]) for answer in answers)


def interleave(
    groups: Sequence[Participant], cases: Sequence[Case], rounds: int, budget: float, fewest: int
) -> dict[tuple[str, Case], list[float]]:
    """Measures all cases on all peers, the peers taking turns.

    Args:
        groups: the peers.
        cases: the cases to measure.
        rounds: the number of rounds; a first round, which only finds the number of iterations, is not counted.
        budget: seconds that one measurement should take.
        fewest: iterations of a measurement, however long they take.

    Returns:
        Seconds of one iteration, a list over the rounds, by (peer, case).
    """
    samples: dict[tuple[str, Case], list[float]] = {}
    iterations: dict[tuple[str, Case], int] = {}
    for number in range(-1, rounds):
        for case in cases:
            able = [group for group in groups if case.supports(group.name)]
            for group in _rotated(able, number):
                key = (group.name, case)
                seconds = case.seconds(group.call(case.command(iterations.get(key, fewest))))
                if number < 0:
                    iterations[key] = min(max(fewest, int(budget / seconds)), 20_000)
                else:
                    samples.setdefault(key, []).append(seconds)
    return samples


def summary(seconds: Sequence[float]) -> Mapping[str, Any]:
    """Return the median and the spread of the rounds."""
    return {
        "seconds": statistics.median(seconds),
        "fastest": min(seconds),
        "slowest": max(seconds),
        "rounds": len(seconds),
    }


def _rotated(groups: list[Participant], number: int) -> list[Participant]:
    """Return the groups, starting with another one each round, so that none always follows the same neighbour."""
    first = number % len(groups) if groups else 0
    return groups[first:] + groups[:first]


def reports(script: Path, size: int, *arguments: object) -> list[dict[str, Any]]:
    """Return each rank's results, in no order: `script FOLDER ARGUMENTS` leaves FOLDER/<rank>.json."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        launcher = launch.horovodlike(script, (folder, *map(str, arguments)))
        if launcher.missing:
            raise BenchmarkError(launcher.missing)
        (command,) = launcher.commands(size, Path(folder))
        done = subprocess.run(
            command.argv, env=os.environ | launch.COMMON_ENVIRONMENT, capture_output=True, text=True, check=False
        )
        written = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    if done.returncode != 0 or len(written) != size:
        raise BenchmarkError(f"{script.name}, exit code {done.returncode}:\n{done.stdout}{done.stderr}")
    return written
