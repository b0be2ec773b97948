"""The driver: carries out the decisions of :mod:`horovodlike.launcher.elastic.membership`, and reports events to it."""

import selectors
import signal
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from horovodlike._bootstrap.bootstrap import RendezvousServer
from horovodlike._net.secure_channel import JobKey
from horovodlike.errors import RendezvousError
from horovodlike.launcher.agent.protocol import Frame, FrameKind, InvalidFrameError, decode_exit, encode_seconds
from horovodlike.launcher.elastic.agents import AgentPool
from horovodlike.launcher.elastic.called_hosts import CalledHosts
from horovodlike.launcher.elastic.events import (
    Abandon,
    Announce,
    Continued,
    Decision,
    End,
    Event,
    Exited,
    Finished,
    Form,
    HostLost,
    HostsFound,
    Kill,
    Ready,
    Remove,
    Report,
    Spawn,
    Stopped,
)
from horovodlike.launcher.elastic.membership import Membership
from horovodlike.launcher.elastic.rank_assignment import place_members
from horovodlike.launcher.elastic.state import Policy, Status
from horovodlike.launcher.elastic.worker_server import WorkerServer
from horovodlike.launcher.errors import UsageError, counted, listed
from horovodlike.launcher.planning import JobSpec
from horovodlike.launcher.planning.plan import JobIdentity
from horovodlike.launcher.supervisor import Supervisor, Wakeup, failure_attribution
from horovodlike.launcher.supervisor.connection import AgentConnections, FrameConnection, watch_descriptor
from horovodlike.launcher.supervisor.failure_attribution import Failure
from horovodlike.launcher.supervisor.job import AGENT_FAILED, GRACE_S, Outcome
from horovodlike.launcher.supervisor.node_job import explain_outcome
from horovodlike.launcher.supervisor.output import RankOutput

if TYPE_CHECKING:
    from horovodlike.monitor.server import Monitor


@dataclass
class _Process:
    """The process of a worker, from the decision to start it until it has exited."""

    host: str
    pid: int = 0


class Driver(Supervisor):
    """One elastic job from start to end. :meth:`tell` may be called from any thread, like :meth:`interrupt`."""

    def __init__(
        self,
        spec: JobSpec,
        policy: Policy,
        command: tuple[str, ...],
        environ: Mapping[str, str],
        identity: JobIdentity,
        output: RankOutput,
        wakeup: Wakeup,
        *,
        grace_period: float = GRACE_S,
        task: bytes | None = None,
        look_every: float | None = None,
        called: CalledHosts | None = None,
        monitor: "Monitor | None" = None,
    ) -> None:
        """Prepare the job; :meth:`run` starts it.

        Args:
            spec: The job.
            policy: The limits and timeouts that the user has asked for.
            command: The words that each worker executes.
            environ: The environment that the workers inherit.
            identity: The job's key and name.
            output: Takes the output of the workers.
            wakeup: Wakes :meth:`run` after a signal or a change by another thread.
            grace_period: How long workers may take to exit after a signal to this process, in seconds.
            task: The file that every worker can read.
            look_every: The longest wait of :meth:`run`, in seconds; between waits, a signal handler can raise.
            called: The hosts, if they call in; then only hosts that :meth:`tell` names may take part.
            monitor: The monitor of the job, or None.

        Raises:
            RendezvousError: The driver cannot listen for workers.
        """
        super().__init__(output, wakeup)
        self._spec = spec
        self._identity = identity
        self._key = JobKey(bytes.fromhex(identity.key))
        self._grace_period = grace_period
        self._look_every = look_every
        self._membership = Membership(policy, time.monotonic())
        self._events: deque[Event] = deque()
        self._news: deque[dict[str, int] | str] = deque()  # put there by other threads
        self._processes: dict[int, _Process] = {}
        self._failures: dict[int, Failure] = {}  # by the number of a worker that has exited
        self._offered: dict[str, int] = {}  # the hosts that have called in, as the membership knows them
        self._places: list[int] = []  # the members of the current generation, by rank
        self._generation = 0
        self._server: RendezvousServer | None = None
        self._connections = AgentConnections((), self, output, spec.network_timeout)
        on_log = (lambda _: None) if called is None else called.on_log
        self._workers = WorkerServer(self._key, identity.job_id, self._processes.keys, self._events.append, on_log)
        self._agents = AgentPool(
            spec,
            command,
            environ,
            identity,
            task,
            grace_period=grace_period,
            starts=called is None,
            on_frame=self.on_frame,
            on_ready=self._take_agent,
            on_lost=self._lose_host,
            say=self._say,
        )
        self._called = called
        self._monitor = monitor
        if called is not None:
            called.set_say(self._say)
        self.outcome = Outcome()
        self._decided = False
        self._ending_at: float | None = None  # when to end the workers that have not exited by themselves
        self._stop_reason = ""
        self._ended = False

    @property
    def members(self) -> tuple[int, ...]:
        """The workers of the last generation, by rank."""
        return tuple(self._places)

    def tell(self, news: dict[str, int] | str) -> None:
        """Take the hosts as they are now, or a message for the user. Callable from any thread."""
        self._news.append(news)
        self._wakeup.set()

    def run(self) -> Outcome:
        """Run until no process of the workers is left; return the outcome."""
        if self._called is not None:
            self._offer(self._called)
            if not self._offered:
                self._say("the job waits for hosts to call in")
        self._loop()
        killed = {each for each, failure in self._failures.items() if failure.status == -signal.SIGKILL}
        self.outcome.note_departure(self._output, self._places, killed & {*self._places}, "worker")
        if (failure := self.outcome.failure) is not None:
            self._describe(failure)
        self._output.drain(lambda: self.abandoned)
        self._check_output()
        return self.outcome

    def _watch(self, selector: selectors.BaseSelector) -> bool:
        self._think()
        if self._ended and not self._connections:
            return False
        watch_descriptor(selector, self._workers.fileno(), selectors.EVENT_READ, lambda: None)
        self._connections.watch(selector, self._abandoned)
        self._agents.watch(selector)
        if self._called is not None:
            watch_descriptor(selector, self._called.fileno(), selectors.EVENT_READ, lambda: None)
        return True

    def _react(self, selector: selectors.BaseSelector) -> None:
        self._workers.attend()
        self._connections.conclude(selector)
        self._agents.attend(selector)
        if self._called is not None:
            self._take_callers(self._called)
        self._handle_signals()
        self._advance()

    def close(self) -> None:
        """End all agents, and close the servers."""
        if self._called is not None:
            self._called.dismiss(*self._verdict)
        self._agents.close()
        self._workers.close()
        self._close_server()

    def _timeout(self) -> float | None:
        now = time.monotonic()
        deadlines = [self._connections.next_deadline(), self._agents.next_deadline(), self._workers.next_deadline()]
        deadlines.append(None if self._called is None else self._called.next_deadline())
        deadlines.append(None if self._look_every is None else now + self._look_every)
        deadlines.append(None if self._ended else self._ending_at)
        deadlines.append(None if self._ending_at is not None else self._membership.look_again())
        due = [deadline for deadline in deadlines if deadline is not None]
        return max(0.0, min(due) - now) if due else None

    # Events.

    def on_frame(self, frame: Frame, connection: FrameConnection) -> None:
        """See :class:`horovodlike.launcher.supervisor.connection.FrameHandler`."""
        worker = frame.number
        process = self._processes.get(worker)
        is_of_worker = frame.kind in (FrameKind.STARTED, FrameKind.EXITED, FrameKind.RESULT)
        if is_of_worker and process is not None and connection.host not in (None, process.host):
            raise InvalidFrameError(f"it speaks of worker {worker}, which it does not have")
        if frame.kind in (FrameKind.STDOUT, FrameKind.STDERR):
            self._output.add(worker, frame.kind, frame.payload)
        elif frame.kind is FrameKind.RESULT:
            self.outcome.results.setdefault(worker, bytearray()).extend(frame.payload)
        elif frame.kind is FrameKind.STARTED:
            if process is None:
                raise InvalidFrameError(f"it speaks of worker {worker}, which it does not have")
            process.pid = int(frame.payload)
            self._explain(f"worker {worker} is process {process.pid} on {process.host}")
        elif frame.kind is FrameKind.EXITED:
            self._on_exit(worker, *decode_exit(frame.payload), connection)
        elif frame.kind is FrameKind.STOPPED:
            self._explain(f"worker {worker} has been stopped")
            self._events.append(Stopped(worker))
        elif frame.kind is FrameKind.CONTINUED:
            self._explain(f"worker {worker} goes on")
            self._events.append(Continued(worker))
        elif frame.kind is FrameKind.LAST_LINES:
            self._output.keep_last_lines(worker, frame.payload)
        elif frame.kind is FrameKind.LEAVING and self._called is not None:
            self._called.leave(connection)
            self._offer(self._called)
        elif frame.kind is FrameKind.FAILED:
            self._agents.blame(connection, frame.payload.decode(errors="replace"))

    def _on_exit(self, worker: int, pid: int, status: int, connection: FrameConnection) -> None:
        self._processes.pop(worker, None)
        self._output.finish(worker)
        if self._server is not None and worker in self._places:
            how = failure_attribution.how_it_ended(worker, pid, status, connection.host, "worker")
            self._server.exited(self._places.index(worker), how)
        self._explain(f"worker {worker} ended with status {status}")
        self._failures[worker] = Failure(worker, pid, status, self._output.last_lines(worker), connection.host)
        if status != 0 and failure_attribution.leaves(self._output.tail(worker)):  # whatever has ended it
            status = -signal.SIGTERM
        self._workers.attend(None if status else worker)  # its last messages come before its exit
        answer = self.outcome.results.get(worker, b"")  # there if a function has returned, or raised an exception
        if status == 0 and answer:
            self._events.append(Finished(worker))
        said = bytes(answer) if answer and status else b"".join(self._failures[worker].last_lines[-1:])
        self._events.append(Exited(worker, status, started=pid != 0, said=said))

    def on_silence(self, connection: FrameConnection, seconds: float) -> None:
        """See :class:`horovodlike.launcher.supervisor.connection.FrameHandler`."""
        self._agents.blame(connection, f"it has been silent for {seconds:.0f} s; is it up, and reachable?")

    def on_nonsense(self, connection: FrameConnection, error: Exception) -> None:
        """See :class:`horovodlike.launcher.supervisor.connection.FrameHandler`."""
        self._agents.blame(connection, f"{connection.who} cannot be understood: {error}")

    def on_end(self, connection: FrameConnection, status: int) -> None:
        """See :class:`horovodlike.launcher.supervisor.connection.FrameHandler`."""
        self._agents.end(connection, status)
        if connection.host is not None:
            self._drop(connection.host)

    def _take_callers(self, called: CalledHosts) -> None:
        for caller in called.attend():
            self._agents.adopt(caller.name, caller.connection, caller.addresses)
            self._offer(called)

    def _drop(self, host: str, reason: str | None = None) -> None:
        """Forget a host that has called in, if it is one; tell its launcher how the job has ended, or the reason."""
        if self._called is None:
            return
        verdict = None if reason is None else (AGENT_FAILED, reason)
        self._called.drop(host, verdict if self._ending_at is None else self._verdict)
        self._offer(self._called)

    def _offer(self, called: CalledHosts) -> None:
        """Report the hosts that have called in, and are there, to the membership."""
        if (found := called.find()) != self._offered:
            self._offered = found
            self._events.append(HostsFound(found))

    @property
    def _verdict(self) -> tuple[int, str]:
        """The exit code for the launchers of hosts that have called in, and the text that they print."""
        if self._ending_at is None:
            return AGENT_FAILED, "hvdrun: node 0 was interrupted"
        return self.outcome.exit_code, explain_outcome(self.outcome, self._spec.here or "node 0", "worker").decode(
            errors="replace"
        )

    def _take_agent(self, connection: FrameConnection, addresses: tuple[str, ...]) -> int:
        self._workers.listen_on(addresses)
        if self._monitor is not None:
            try:
                self._monitor.listen_on(addresses)
            except RendezvousError as error:
                self._say(f"warning: {error}; the monitor does not show the ranks of that host")
        self._connections.add(connection)
        return self._workers.port

    def _lose_host(self, host: str, reason: str) -> None:
        for worker in [number for number, process in self._processes.items() if process.host == host]:
            del self._processes[worker]
            self._output.finish(worker)
        if self._ending_at is None:
            self._say(f"{host} cannot be used: {reason}")
        self._events.append(HostLost(host, reason))
        self._drop(host, f"hvdrun: node 0 says: this host cannot be used: {reason}")

    # Decisions.

    def _think(self) -> None:
        """Pass events to the membership and carry out its decisions until it has no more."""
        while self._news:
            news = self._news.popleft()
            if isinstance(news, str):
                self._say(news)
            elif self._called is not None:
                self._called.allow(news)
                self._offer(self._called)
            else:
                self._events.append(HostsFound(news))
                if not news:
                    self._say_that_no_host_is_found()
        while self._ending_at is None:
            now = time.monotonic()
            while self._events:
                self._membership.observe(self._events.popleft(), now)
            decisions = self._membership.decide(now)
            if decisions and isinstance(end := decisions[-1], End) and end.failure is not None:
                self.outcome.failure = self._failures.get(end.failure)
            for decision in decisions:
                self._carry_out(decision)
            if not decisions and not self._events:
                break
        if self._ending_at is None:
            self._release_hosts()
            return
        while self._events:
            event = self._events.popleft()
            if isinstance(event, Ready):  # or it would wait for its rank forever
                self._workers.say(event.worker, {"stop": self._stop_reason})

    def _carry_out(self, decision: Decision) -> None:
        if not isinstance(decision, Kill | End):  # their reasons are printed anyway
            self._explain(decision.reason)
        if isinstance(decision, Spawn):
            self._processes[decision.worker] = _Process(decision.host)
            self._expect_output(decision.worker)
            slots = self._membership.slots[decision.host]
            self._agents.start(decision.worker, decision.host, decision.slot, slots)
        elif isinstance(decision, Form):
            self._form(decision)
        elif isinstance(decision, Abandon):
            if decision.generation == self._generation:
                self._close_server()  # raises an error in a worker that still waits at the rendezvous
        elif isinstance(decision, Announce):
            change = {"number": decision.number, "added": decision.added, "removed": decision.removed}
            for worker in decision.members:
                self._workers.say(worker, {"changed": change})
        elif isinstance(decision, Remove):
            self._workers.say(decision.worker, {"removed": decision.reason})
        elif isinstance(decision, Kill):
            self._kill(decision)
        elif isinstance(decision, Report):
            self._report(decision)
        elif isinstance(decision, End):
            self._end(decision)

    def _expect_output(self, worker: int) -> None:
        if self._called is not None and self._called.prints(self._processes[worker].host):
            return
        try:
            self._output.expect(worker)
        except UsageError as error:
            if self._generation == 0:  # nothing is lost yet: let the user name another folder
                raise
            self._say(f"{error}; worker {worker} goes on without")

    def _form(self, form: Form) -> None:
        self._close_server()
        hosts = [self._processes[worker].host for worker in form.members]
        address = self._agents.addresses(iter(hosts))
        key = self._key.derive(b"horovodlike generation", str(form.generation).encode())
        server = RendezvousServer(key, len(hosts), address, self._identity.job_id)
        try:
            server.start()
        except RendezvousError as error:
            self._end(End(AGENT_FAILED, str(error)))
            return
        self._server = server
        self._generation = form.generation
        if self._places and (new := sorted({*form.members} - {*self._places})):
            joined = "has joined" if len(new) == 1 else "have joined"
            self._say(f"{listed('worker', new)} {joined}: the job has {counted(len(form.members), 'worker')}")
        self._places = list(form.members)
        places = place_members(form.generation, hosts, address, server.port)
        for worker, variables in zip(form.members, places, strict=True):
            self._workers.say(worker, {"place": {"generation": form.generation, "variables": variables}})

    def _close_server(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    def _kill(self, kill: Kill) -> None:
        process = self._processes.get(kill.worker)
        if process is None:
            return
        self._say(kill.reason)
        if not self._agents.signal(kill.worker, process.host, signal.SIGKILL):
            del self._processes[kill.worker]
            self._events.append(Exited(kill.worker, -signal.SIGKILL))

    def _report(self, report: Report) -> None:
        failure = self._failures.get(report.worker)
        if failure is not None and failure is not self.outcome.failure:  # which run() describes in the end
            self._describe(failure)

    def _describe(self, failure: Failure) -> None:
        is_above = self._output.ends_with_traceback_of(failure.rank)
        self._output.say(*failure_attribution.describe(failure, "worker", is_above=is_above))

    def _release_hosts(self) -> None:
        """End the agents of hosts that are not offered any more and have no worker."""
        used = {process.host for process in self._processes.values()}
        for host in self._agents.hosts():
            waits = self._called is not None and self._called.is_waiting(host)
            if host not in used and host not in self._membership.slots and not waits:
                self._agents.release(host)

    def _end(self, end: End) -> None:
        self._decide(end.exit_code)
        if end.exit_code != 0:
            self.outcome.trouble = end.reason
            self._say(end.reason)
        else:
            self._explain(end.reason)
        self._stop_reason = end.reason
        self._workers.say_to_all({"stop": end.reason})
        self._end_in(failure_attribution.SETTLE_S if self._processes else 0.0)
        self._close_server()

    def _end_in(self, seconds: float) -> None:
        """Give the workers this long to end by themselves; the job is over from now on."""
        self._ending_at = time.monotonic() + seconds
        if self._called is not None:
            self._called.note_end()

    def _decide(self, exit_code: int) -> None:
        if not self._decided:
            self._decided = True
            self.outcome.exit_code = exit_code

    def _advance(self) -> None:
        """End the remaining workers once the job is over."""
        if self._ending_at is None or self._ended:
            return
        if not any(process.pid for process in self._processes.values()) or time.monotonic() >= self._ending_at:
            self._ended = True
            self._agents.cut()
            self._connections.send(FrameKind.END, 0, encode_seconds(GRACE_S))

    def _handle_signals(self) -> None:
        if self._output.broken and self._ending_at is None:
            self._pass_on(signal.SIGPIPE, signal.SIGTERM)
        self._check_output()
        while self._signals:
            signum = self._signals.popleft()
            if self._ending_at is not None:  # a second signal, or a first one while a failed job is being ended
                self._abandoned = True
                self._connections.send(FrameKind.KILL)
                self._ending_at = time.monotonic()
            else:
                self._pass_on(signum, signum)

    def _pass_on(self, received: int, passed: int) -> None:
        self._decide(failure_attribution.exit_code(-received))
        if received != signal.SIGPIPE:
            self._say(
                f"{failure_attribution.signal_name(received)}: ending {counted(len(self._processes), 'worker')} within "
                f"{self._grace_period:g} s; a second signal kills at once"
            )
        self._request_end(f"hvdrun has got {failure_attribution.signal_name(received)}", passed)

    def _check_output(self) -> None:
        trouble = self._output.trouble
        if trouble is None or self.outcome.exit_code != 0:
            return
        self._decided = True
        self.outcome.exit_code = AGENT_FAILED
        self.outcome.trouble = trouble
        self._say(trouble)
        if self._ending_at is None:
            self._request_end(trouble, signal.SIGTERM)

    def _request_end(self, reason: str, signum: int) -> None:
        self._stop_reason = reason
        for worker in self._membership.workers.values():
            if worker.status is Status.READY:  # the others may want to commit before they leave
                self._workers.say(worker.number, {"stop": self._stop_reason})
        self._end_in(self._grace_period)
        self._agents.cut()
        self._connections.send(FrameKind.SIGNAL, signum, encode_seconds(self._grace_period))

    def _say_that_no_host_is_found(self) -> None:
        elastic = self._spec.elastic
        script = elastic.discovery_script if elastic is not None else None
        who = "the discovery of hosts" if script is None else f"--host-discovery-script {script}"
        self._say(f"{who} names no host: the job waits for some, as long as --elastic-timeout allows")

    def _say(self, text: str) -> None:
        self._output.say(f"hvdrun: {text}")

    def _explain(self, text: str) -> None:
        if self._monitor is not None:
            self._monitor.board.add_event("elastic", text)
        if self._spec.verbose:
            self._say(text)
