"""The supervisor of a job: passes on the output of the ranks of all hosts, records their exits, and ends the job."""

import selectors
import signal
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from horovodlike.launcher.agent.protocol import Frame, FrameKind, InvalidFrameError, decode_exit, encode_seconds
from horovodlike.launcher.agent.run_task import unpack_answer
from horovodlike.launcher.errors import counted, listed
from horovodlike.launcher.supervisor import Supervisor, Wakeup, failure_attribution
from horovodlike.launcher.supervisor.connection import AgentConnections, FrameConnection
from horovodlike.launcher.supervisor.failure_attribution import Failure
from horovodlike.launcher.supervisor.output import RankOutput, server_of

GRACE_S = 5.0
"""The time from SIGTERM, or from a signal that was passed on, to SIGKILL."""
AGENT_FAILED = 1
"""The exit code of a job that ends because of the launcher, an agent or a host, and not because of a rank."""
_OF_A_RANK = frozenset(
    {
        *(FrameKind.STARTED, FrameKind.STDOUT, FrameKind.STDERR, FrameKind.RESULT),
        *(FrameKind.EXITED, FrameKind.GONE, FrameKind.LAST_LINES),
    }
)


@dataclass
class Outcome:
    """How a job has ended.

    Attributes:
        exit_code: The exit code of the launcher.
        failure: The rank that ended the job, or None.
        trouble: The error in the launcher itself, or None.
        results: The bytes that each rank, in an elastic job each worker, has written to its result descriptor.
        members: The workers of the last generation of an elastic job, by rank.
    """

    exit_code: int = 0
    failure: Failure | None = None
    trouble: str | None = None
    results: dict[int, bytearray] = field(default_factory=dict)
    members: tuple[int, ...] = ()

    def note_departure(self, output: RankOutput, ranks: Iterable[int], killed: Collection[int], noun: str) -> None:
        """If SIGTERM to the launcher or to a rank has ended the job, note how; ranks are called by the noun."""
        failure, is_departure = self.failure, self.trouble is None and self.exit_code == 128 + signal.SIGTERM
        if failure is not None:
            is_departure = failure_attribution.leaves(output.tail(failure.rank))
        written, whom = b"\n".join(map(output.tail, ranks)), listed(noun, sorted(killed)) if killed else ""
        if is_departure and (found := failure_attribution.departure(written, whom)) is not None:
            self.exit_code, words = found
            if failure is not None:
                self.failure = replace(failure, departure=words)
            else:
                self.trouble = words
                output.say(f"hvdrun: {words}")


class Job(Supervisor):
    """One job from its start to its end."""

    def __init__(
        self,
        connections: Mapping[FrameConnection, Sequence[int]],
        output: RankOutput,
        wakeup: Wakeup,
        *,
        verbose: bool = False,
        network_timeout: float = 30.0,
        look_every: float | None = None,
        on_gone: Callable[[int, str], None] | None = None,
        num_ranks: int | None = None,
        grace_period: float = GRACE_S,
    ) -> None:
        """Prepare the job; :meth:`run` supervises it.

        Args:
            connections: The connections to the hosts, and the ranks of each, which are about to start.
            output: Takes the output of the ranks.
            wakeup: Wakes :meth:`run` after a signal or a change by another thread.
            verbose: Decisions are explained.
            network_timeout: How long another host may be silent, in seconds.
            look_every: The longest wait of :meth:`run`, in seconds; between waits, a signal handler can raise.
            on_gone: Called with a rank whose process group is empty, and how it ended; its failure is recorded by then.
            num_ranks: See :func:`server_of`. Servers are ended when all ranks have ended, also after a signal. If a
                server exits before, the job fails.
            grace_period: How long ranks may take to end after a signal to this process, in seconds.
        """
        super().__init__(output, wakeup)
        self._connections = AgentConnections(connections, self, output, network_timeout)
        self._connection_of = {rank: connection for connection, ranks in connections.items() for rank in ranks}
        self._verbose = verbose
        self._network_timeout = network_timeout
        self._look_every = look_every
        self._tell_gone = on_gone
        self._num_ranks = num_ranks
        self._grace_period = grace_period
        self._outcome = Outcome()
        self._running: dict[int, int] = dict.fromkeys(self._connection_of, 0)  # rank -> process id
        self._failures: list[Failure] = []
        self._killed: list[int] = []
        self._signalled: set[FrameConnection | None] = set()  # the nodes whose launchers have received a signal
        self._failed_at: float | None = None
        self._ended = False
        self._servers_ended = False
        self._decided = False

    def run(self) -> Outcome:
        """Run until no process of the ranks is left; return the outcome."""
        self._connections.forgive_silence()
        self._loop()
        self._outcome.note_departure(self._output, filter(self._is_rank, self._connection_of), self._killed, "rank")
        if (failure := self._outcome.failure) is not None:
            is_above = self._output.ends_with_traceback_of(failure.rank)
            self._output.say(*failure_attribution.describe(failure, is_above=is_above))
        return self._outcome

    def drain(self) -> Outcome:
        """Wait until all output is on the screen; return the outcome, which is a failure if it cannot be written."""
        self._output.drain(lambda: self.abandoned)
        self._check_output()
        return self._outcome

    def _watch(self, selector: selectors.BaseSelector) -> bool:
        if self._connections:
            self._connections.watch(selector, self._abandoned)
        return bool(self._connections)

    def _react(self, selector: selectors.BaseSelector) -> None:
        self._connections.conclude(selector)
        self._handle_signals()
        self._advance()
        self._end_servers()

    def _timeout(self) -> float | None:
        deadlines = [] if self._look_every is None else [time.monotonic() + self._look_every]
        if self._failed_at is not None and not self._ended:
            deadlines.append(self._failed_at + failure_attribution.SETTLE_S)
        if (greeting := self._connections.next_deadline()) is not None:
            deadlines.append(greeting)
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    # Events.

    def on_silence(self, connection: FrameConnection, seconds: float) -> None:
        """See :class:`horovodlike.launcher.supervisor.connection.FrameHandler`."""
        # The ranks of other hosts notice the silence only after their own timeout: their time to end starts then.
        self._failed_at = self._failed_at or connection.heard_at + self._network_timeout
        self._blame(f"{connection.host} has been silent for {seconds:.0f} s; is it up, and reachable?")

    def on_nonsense(self, connection: FrameConnection, error: Exception) -> None:
        """See :class:`horovodlike.launcher.supervisor.connection.FrameHandler`."""
        self._blame(f"{connection.who} cannot be understood: {error}")

    def on_frame(self, frame: Frame, connection: FrameConnection) -> None:
        """See :class:`horovodlike.launcher.supervisor.connection.FrameHandler`."""
        if frame.kind in _OF_A_RANK and self._connection_of.get(frame.number) is not connection:
            raise InvalidFrameError(f"it speaks of rank {frame.number}, which it does not have")
        if frame.kind in (FrameKind.STDOUT, FrameKind.STDERR):
            self._output.add(frame.number, frame.kind, frame.payload)
        elif frame.kind is FrameKind.RESULT:
            self._outcome.results.setdefault(frame.number, bytearray()).extend(frame.payload)
        elif frame.kind is FrameKind.STARTED:
            self._running[frame.number] = int(frame.payload)
            where = "" if connection.host is None else f" on {connection.host}"
            self._explain(f"{self._name(frame.number)} is process {int(frame.payload)}{where}")
        elif frame.kind is FrameKind.EXITED:
            self._on_exit(frame.number, *decode_exit(frame.payload))
        elif frame.kind is FrameKind.GONE:
            if self._tell_gone is not None and not self._ended and self._is_rank(frame.number):
                pid, status = decode_exit(frame.payload)
                self._tell_gone(
                    frame.number, failure_attribution.how_it_ended(frame.number, pid, status, connection.host)
                )
        elif frame.kind is FrameKind.LAST_LINES:
            self._output.keep_last_lines(frame.number, frame.payload)
        elif frame.kind is FrameKind.SIGNAL:
            self._hear(signal.Signals(frame.number), connection)
        elif frame.kind is FrameKind.FAILED:
            where = "" if connection.host is None else f"{connection.host}: "
            self._blame(where + frame.payload.decode(errors="replace"))

    def _on_exit(self, rank: int, pid: int, status: int) -> None:
        self._running.pop(rank, None)
        self._output.finish(rank)
        self._explain(f"{self._name(rank)} ended with status {status}")
        if (server := server_of(rank, self._num_ranks)) is not None:
            if not self._ended and self._a_rank_runs():
                host = self._connection_of[rank].host
                how = failure_attribution.how_it_ended(server, pid, status, host, "server")
                self._blame(f"{how}, and the ranks need it")
            return
        if status == -signal.SIGKILL:
            self._killed.append(rank)
        if status != 0 and not self._decided and not self._ended:
            host = self._connection_of[rank].host
            raised, _ = unpack_answer(self._outcome.results.get(rank, b""))
            self._failures.append(Failure(rank, pid, status, self._output.last_lines(rank), host, raised))
            self._failed_at = self._failed_at or time.monotonic()

    def on_end(self, connection: FrameConnection, status: int) -> None:
        """See :class:`horovodlike.launcher.supervisor.connection.FrameHandler`."""
        self._advance()
        lost = sorted(rank for rank in self._running if self._connection_of[rank] is connection)
        for rank in lost:
            del self._running[rank]
            self._output.finish(rank)
        if (lost or status != 0) and not self._decided:
            lost = [*filter(self._is_rank, lost)]
            ranks = f"; {listed('rank', lost)} {'was' if len(lost) == 1 else 'were'} ended" if lost else ""
            self._blame(connection.explain_end(status) + ranks)

    def _blame(self, trouble: str) -> None:
        """End the job for a reason that is no rank's failure."""
        self._failed_at = self._failed_at or time.monotonic()
        if not self._decided:
            self._decided = True
            self._outcome.exit_code = AGENT_FAILED
            self._outcome.trouble = trouble
            self._output.say(f"hvdrun: {trouble}")

    # Decisions.

    def _handle_signals(self) -> None:
        if self._output.broken and not self._ended:
            self._pass_on(signal.SIGPIPE, signal.SIGTERM)
        self._check_output()
        while self._signals:
            self._hear(self._signals.popleft(), None)

    def _hear(self, signum: int, node: FrameConnection | None) -> None:
        """Act upon a signal to the launcher of a node, None for this one."""
        # A platform sends SIGTERM to all nodes: another node's is no second signal.
        is_known = signum == signal.SIGTERM and bool(self._signalled) and node not in self._signalled
        self._signalled.add(node)
        if not self._ended:
            self._pass_on(signum, signum)
        elif not is_known:  # a second one, or a first one while a failed job is being ended: kill
            self._abandoned = True
            self._connections.send(FrameKind.KILL)

    def _pass_on(self, received: int, passed: int) -> None:
        name = failure_attribution.signal_name(received)
        if not self._decided and not self._failures:
            self._decided = True
            self._outcome.exit_code = failure_attribution.exit_code(-received)
            if received != signal.SIGPIPE:
                self._output.say(
                    f"hvdrun: {name}: ending {counted(len([*filter(self._is_rank, self._running)]), 'rank')} within "
                    f"{self._grace_period:g} s; a second signal kills at once"
                )
        self._request_end(passed)

    def _check_output(self) -> None:
        if self._output.trouble is not None and not self._ended and not self._failures:
            self._blame(self._output.trouble)
            self._request_end(signal.SIGTERM)

    def _request_end(self, signum: int) -> None:
        self._ended = True
        self._connections.send(FrameKind.SIGNAL, signum, encode_seconds(self._grace_period))

    def _advance(self) -> None:
        if self._failed_at is None:
            return
        settled = time.monotonic() >= self._failed_at + failure_attribution.SETTLE_S
        over = settled or not self._a_rank_runs()
        if not self._decided:
            failure, reason = failure_attribution.choose(self._failures, over or self._ended)
            if failure is not None:
                self._decide(failure, reason)
        if over and not self._ended:
            self._ended = True
            if self._running:
                self._explain(f"ending {', '.join(map(self._name, sorted(self._running)))}")
            if (failure := self._outcome.failure) is not None and self._a_rank_runs():
                how = failure_attribution.how_it_ended(failure.rank, failure.pid, failure.status, failure.host)
                others = counted(len([*filter(self._is_rank, self._running)]), "rank")
                self._output.say(f"hvdrun: ending {others} that still run, since {how}")
            self._connections.send(FrameKind.END, 0, encode_seconds(GRACE_S))

    def _end_servers(self) -> None:
        if self._running and not self._servers_ended and not self._a_rank_runs():
            self._servers_ended = self._ended = True
            self._explain("all ranks have ended: ending the servers")
            self._connections.send(FrameKind.END, 0, encode_seconds(GRACE_S))

    def _a_rank_runs(self) -> bool:
        return any(map(self._is_rank, self._running))

    def _is_rank(self, number: int) -> bool:
        return server_of(number, self._num_ranks) is None

    def _name(self, number: int) -> str:
        server = server_of(number, self._num_ranks)
        return f"rank {number}" if server is None else f"server {server}"

    def _decide(self, failure: Failure, reason: str) -> None:
        self._decided = True
        self._outcome.failure = failure
        self._outcome.exit_code = failure_attribution.exit_code(failure.status)
        self._explain(reason)

    def _explain(self, text: str) -> None:
        if self._verbose:
            self._output.say(f"hvdrun: {text}")
