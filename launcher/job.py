"""Runs a job: one agent per host, what the ranks write, how they end, and how everything ends."""

import os
import secrets
import selectors
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from horovodlike.launcher import verdict
from horovodlike.launcher.frames import (
    Frame,
    FrameError,
    Kind,
    decode_exit,
    encode_seconds,
    encode_text,
    from_native,
)
from horovodlike.launcher.link import AgentLink, start_local_agent
from horovodlike.launcher.output import OutputFiles, RankOutput, Screen
from horovodlike.launcher.plan import JobIdentity, RankPlan, plan_ranks
from horovodlike.launcher.spec import JobSpec
from horovodlike.launcher.topology import detect_host
from horovodlike.launcher.verdict import Failure
from horovodlike.launcher.writer import Writer

__all__ = ["AGENT_FAILED", "Job", "Outcome", "run_job"]

GRACE_S = 5.0
"""From SIGTERM, or from a signal that was passed on, to SIGKILL."""
AGENT_FAILED = 1
"""The exit code when not a rank but the launcher's own agent is to blame."""
_LOOK_S = 0.5
_ADDRESS = "127.0.0.1"


@dataclass
class Outcome:
    """How a job has ended.

    Attributes:
        exit_code: The exit code of the launcher.
        failure: The rank that ended the job, or None.
        trouble: What went wrong in the launcher itself, or None.
        results: What each rank has written to its result descriptor.
    """

    exit_code: int = 0
    failure: Failure | None = None
    trouble: str | None = None
    results: dict[int, bytearray] = field(default_factory=dict)


class _Wakeup:
    """Makes a selector return; may be called from any thread and from a signal handler."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def fileno(self) -> int:
        return self._read

    @property
    def write_end(self) -> int:
        """What is written here makes the selector return, too."""
        return self._write

    def set(self) -> None:
        try:
            os.write(self._write, b"\0")
        except (BlockingIOError, OSError):  # full: it returns anyway; closed: the job is over
            return

    def clear(self) -> None:
        os.read(self._read, 4096)

    def close(self) -> None:
        read, write = self._read, self._write
        self._read = self._write = -1
        os.close(read)
        os.close(write)


class Job:
    """One job from its start to its end. Everything but :meth:`interrupt` belongs to one thread."""

    def __init__(
        self,
        link: AgentLink,
        output: RankOutput,
        wakeup: _Wakeup,
        verbose: bool = False,
        look_every: float | None = None,
    ) -> None:
        """Takes the parts; :meth:`run` puts them to work.

        Args:
            link: The agent.
            output: Takes what the ranks write.
            wakeup: Makes :meth:`run` look at what other threads and signals have changed.
            verbose: Decisions are explained.
            look_every: After how many seconds :meth:`run` at least returns to Python code, where a signal can raise.
        """
        self._link = link
        self._output = output
        self._wakeup = wakeup
        self._verbose = verbose
        self._look_every = look_every
        self._outcome = Outcome()
        self._running: dict[int, int] = {}  # rank -> process id
        self._failures: list[Failure] = []
        self._failed_at: float | None = None
        self._ended = False
        self._decided = False
        self._signals: deque[int] = deque()
        self._abandoned = False
        self._listening = False

    @property
    def abandoned(self) -> bool:
        """Whether the user has insisted on an end at once, or wants one after the job's own end."""
        return self._abandoned or bool(self._signals)

    def interrupt(self, signum: int) -> None:
        """Passes a signal on to the ranks; a second one kills them. Callable from a signal handler."""
        self._signals.append(signum)
        self._wakeup.set()

    def run(self, plans: Sequence[RankPlan], environ: Mapping[str, str], task: bytes | None = None) -> Outcome:
        """Starts the ranks and returns when nothing is left of them.

        Args:
            plans: The ranks of this host.
            environ: The environment that all of them have.
            task: The file that every rank can read at ``HOROVODLIKE_TASK_FD``.
        """
        if task is not None:
            self._link.send_task(task)
        self._link.send(Kind.START, 0, _start_message(plans, environ))
        self._running = dict.fromkeys((plan.rank for plan in plans), 0)
        with selectors.DefaultSelector() as selector:
            selector.register(self._wakeup, selectors.EVENT_READ, self._wakeup.clear)
            at_end = False
            while not at_end:
                self._listen(selector, not self._output.full)
                for key, _ in selector.select(self._timeout()):
                    at_end |= key.data() is False
                self._handle_signals()
                self._advance()
        self._conclude(self._link.close())
        return self._outcome

    def _listen(self, selector: selectors.BaseSelector, wanted: bool) -> None:
        """Takes nothing more from the agent while the screen is behind."""
        if wanted and not self._listening:
            selector.register(self._link, selectors.EVENT_READ, self._receive)
        elif not wanted and self._listening:
            selector.unregister(self._link)
        self._listening = wanted

    def _timeout(self) -> float | None:
        if self._failed_at is None or self._ended:
            return self._look_every
        return max(0.0, self._failed_at + verdict.SETTLE_S - time.monotonic())

    # What the agent says.

    def _receive(self) -> bool:
        """Takes what the agent has sent; returns False at its end."""
        try:
            frames = self._link.receive()
        except (FrameError, OSError) as error:
            self._blame(f"the agent cannot be understood: {error}")
            return False
        for frame in frames or ():
            self._on_frame(frame)
        return frames is not None

    def _on_frame(self, frame: Frame) -> None:
        if frame.kind in (Kind.STDOUT, Kind.STDERR):
            self._output.add(frame.number, frame.kind, frame.payload)
        elif frame.kind is Kind.RESULT:
            self._outcome.results.setdefault(frame.number, bytearray()).extend(frame.payload)
        elif frame.kind is Kind.STARTED:
            self._running[frame.number] = int(frame.payload)
            self._explain(f"rank {frame.number} is process {int(frame.payload)}")
        elif frame.kind is Kind.EXITED:
            self._on_exit(frame.number, *decode_exit(frame.payload))
        elif frame.kind is Kind.FAILED:
            self._blame(frame.payload.decode(errors="replace"))

    def _on_exit(self, rank: int, pid: int, status: int) -> None:
        self._running.pop(rank, None)
        self._output.finish(rank)
        self._explain(f"rank {rank} ended with status {status}")
        if status != 0 and not self._decided and not self._ended:
            self._failures.append(Failure(rank, pid, status, self._output.last_lines(rank)))
            self._failed_at = self._failed_at or time.monotonic()

    def _blame(self, trouble: str) -> None:
        if not self._decided:
            self._decided = True
            self._outcome.exit_code = AGENT_FAILED
            self._outcome.trouble = trouble
            self._output.say(f"hvdrun: {trouble}")

    # What follows from it.

    def _handle_signals(self) -> None:
        if self._output.broken and not self._ended:
            self._pass_on(signal.SIGPIPE, signal.SIGTERM)
        while self._signals:
            signum = self._signals.popleft()
            if self._ended:  # the second one, or the first while a failed job is being ended: it means at once
                self._abandoned = True
                self._link.send(Kind.KILL)
            else:
                self._pass_on(signum, signum)

    def _pass_on(self, received: int, passed: int) -> None:
        if not self._decided and not self._failures:
            self._decided = True
            self._outcome.exit_code = verdict.exit_code(-received)
            if received != signal.SIGPIPE:
                self._output.say(
                    f"hvdrun: {verdict.signal_name(received)}: ending {len(self._running)} ranks; "
                    f"they have {GRACE_S:g} s, a second signal kills them at once"
                )
        self._ended = True
        self._link.send(Kind.SIGNAL, passed, encode_seconds(GRACE_S))

    def _advance(self) -> None:
        if self._failed_at is None:
            return
        over = not self._running or time.monotonic() >= self._failed_at + verdict.SETTLE_S
        if not self._decided:
            failure, reason = verdict.choose(self._failures, over or self._ended)
            if failure is not None:
                self._decide(failure, reason)
        if over and not self._ended:
            self._ended = True
            if self._running:
                self._explain(f"ending ranks {', '.join(map(str, sorted(self._running)))}")
                self._link.send(Kind.END, 0, encode_seconds(GRACE_S))

    def _decide(self, failure: Failure, reason: str) -> None:
        self._decided = True
        self._outcome.failure = failure
        self._outcome.exit_code = verdict.exit_code(failure.status)
        self._explain(reason)
        self._output.say(*verdict.describe(failure))

    def _conclude(self, status: int) -> None:
        self._advance()
        if (self._running or status != 0) and not self._decided:
            how = verdict.signal_name(-status) if status < 0 else f"code {status}"
            ranks = f"; ranks {', '.join(map(str, sorted(self._running)))} were ended" if self._running else ""
            self._blame(f"the agent (pid {self._link.pid}) ended with {how}{ranks}")

    def _explain(self, text: str) -> None:
        if self._verbose:
            self._output.say(f"hvdrun: {text}")


def _start_message(plans: Sequence[RankPlan], environ: Mapping[str, str]) -> bytes:
    def text(value: str) -> str:
        return from_native(os.fsencode(value))

    def texts(values: Mapping[str, str]) -> dict[str, str]:
        return {text(name): text(value) for name, value in values.items()}

    ranks = [
        {
            "rank": plan.rank,
            "environ": texts(plan.environ),
            "command": [text(word) for word in plan.command],
            "cpus": plan.cpus,
        }
        for plan in plans
    ]
    return encode_text({"cwd": text(os.getcwd()), "environ": texts(environ), "ranks": ranks})


class _Signals:
    """While entered, signals go to a job instead of ending this process."""

    def __init__(self, job: Job, wakeup: _Wakeup) -> None:
        self._job = job
        self._wakeup = wakeup
        self._before: dict[int, Any] = {}

    def __enter__(self) -> None:
        # A signal that comes just before the system call of select() would not be noticed before its end.
        self._wakeup_before = signal.set_wakeup_fd(self._wakeup.write_end, warn_on_full_buffer=False)
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(signum) is not signal.SIG_IGN:  # as nohup has it, and shells for jobs in the background
                self._before[signum] = signal.signal(signum, lambda number, _: self._job.interrupt(number))

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(self._wakeup_before)


def run_job(
    spec: JobSpec,
    command: tuple[str, ...],
    environ: Mapping[str, str],
    *,
    task: bytes | None = None,
    take_signals: bool = False,
    reasons: Sequence[str] = (),
) -> Outcome:
    """Runs a job on this machine and returns when nothing is left of it.

    Args:
        spec: The job.
        command: What each rank executes.
        environ: The environment that the ranks inherit.
        task: The file that every rank can read.
        take_signals: Passes this process's signals on to the ranks; only in the main thread.
        reasons: What ``verbose`` has to say besides.

    Raises:
        UsageError: The job does not fit here; nothing has been started.
        BaseException: Whatever interrupted it (KeyboardInterrupt); the ranks have been ended.
    """
    with ExitStack() as stack:
        identity = JobIdentity(secrets.token_hex(8), secrets.token_hex(8), secrets.token_hex(32), _ADDRESS, 0)
        host = detect_host()
        plan_ranks(spec, command, host, identity, environ)  # what does not fit is to be said before anything starts
        files = OutputFiles(spec.output_directory, spec.num_proc) if spec.output_directory is not None else None
        if files is not None:
            stack.callback(files.close)
        link = start_local_agent()  # takes some 30 ms, in which the server is loaded and started
        stack.callback(link.close)
        identity = _start_server(identity, spec.num_proc, stack.callback)
        plans, said = plan_ranks(spec, command, host, identity, environ)

        wakeup = _Wakeup()
        stack.callback(wakeup.close)
        writer = Writer(wakeup.set)
        output = RankOutput(Screen.pair(sys.stdout, sys.stderr, environ), writer, files, spec.timestamps)
        job = Job(link, output, wakeup, spec.verbose, None if take_signals else _LOOK_S)
        if take_signals:
            stack.enter_context(_Signals(job, wakeup))
        stack.callback(writer.close, lambda: job.abandoned)
        output.say(*(f"hvdrun: {line}" for line in (*said, *(reasons if spec.verbose else ()))))
        return job.run(plans, environ, task)


def _start_server(identity: JobIdentity, size: int, on_exit: Callable[[Callable[[], None]], Any]) -> JobIdentity:
    from horovodlike.rendezvous import RendezvousServer

    server = RendezvousServer(bytes.fromhex(identity.key), size, identity.address, identity.job_id)
    server.start()
    on_exit(server.close)
    return JobIdentity(identity.job_id, identity.node_id, identity.key, identity.address, server.port)
