"""The agents of an elastic job, whose hosts come and go; no operation waits for a slow host.

The pool starts an agent on a host for its first worker, or adopts the agent of a host that has called in, which has an
environment, a folder and a command of its own.
"""

import functools
import selectors
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from horovodlike.launcher.agent.host_probe import Host, HostDescription
from horovodlike.launcher.agent.protocol import Frame, FrameKind, encode_seconds
from horovodlike.launcher.elastic.rank_assignment import OF_A_PLACE
from horovodlike.launcher.errors import HostsError, UsageError
from horovodlike.launcher.planning import JobSpec
from horovodlike.launcher.planning.addresses import LOOPBACK, reachable_addresses
from horovodlike.launcher.planning.command import working_folder
from horovodlike.launcher.planning.plan import (
    JobIdentity,
    RankPlan,
    bind,
    common_variables,
    gpu_variables,
    tuning_variables,
)
from horovodlike.launcher.supervisor.agent_startup import (
    ask_for_description,
    describe_this_host,
    explain_delay,
    read_description,
    receive_answer,
    start_agent,
    start_message,
)
from horovodlike.launcher.supervisor.connection import FrameConnection
from horovodlike.launcher.supervisor.job import GRACE_S


@dataclass
class _Agent:
    """One host with its agent."""

    name: str
    connection: FrameConnection
    deadline: float
    seen_from: tuple[str, str] | None = None  # if it was adopted: the addresses of this host and of its own
    host: Host | None = None  # None until its agent is ready
    addresses: tuple[str, ...] = ()  # this machine's, at which the host reaches it
    slots: int = 1
    waiting: list[tuple[int, int]] = field(default_factory=list)  # workers to be started, and their slots
    answered: bool = False  # the agent has sent something, or hung up
    trouble: str = ""
    leaving: bool = False


class AgentPool:
    """Starts agents, and workers through them. Belongs to one thread."""

    def __init__(
        self,
        spec: JobSpec,
        command: tuple[str, ...],
        environ: Mapping[str, str],
        identity: JobIdentity,
        task: bytes | None,
        *,
        grace_period: float,
        starts: bool,
        on_frame: Callable[[Frame, FrameConnection], None],
        on_ready: Callable[[FrameConnection, tuple[str, ...]], int],
        on_lost: Callable[[str, str], None],
        say: Callable[[str], None],
    ) -> None:
        """Prepare the pool, without any agent.

        Args:
            spec: The job.
            command: The words that each worker executes.
            environ: The environment that all workers have.
            identity: The job's identity.
            task: The file that every worker can read.
            grace_period: How long the workers may take to end once an agent has received a signal, in seconds.
            starts: Whether agents of other hosts can be started; else they can only be adopted.
            on_frame: Takes the frames of an adopted agent, except its description, before it is ready.
            on_ready: Takes over the connection to an agent that is ready. Also takes the addresses at which its host
                reaches this one; returns the port at which the driver listens there; may raise RendezvousError.
            on_lost: Called with a host that cannot take part, and the reason.
            say: Prints a message for the user.
        """
        self._spec = spec
        self._folder = working_folder()  # which may be deleted while the job runs
        self._command = command
        self._environ = {name: value for name, value in environ.items() if name not in OF_A_PLACE}
        self._identity = identity
        self._task = task
        self._grace_period = grace_period
        self._starts = starts
        self._on_frame = on_frame
        self._on_ready = on_ready
        self._on_lost = on_lost
        self._say = say
        self._said: set[str] = set()
        self._agents: dict[str, _Agent] = {}
        self._port = 0

    def hosts(self) -> list[str]:
        """List the hosts that have an agent, or are about to have one."""
        return list(self._agents)

    def adopt(self, host: str, connection: FrameConnection, seen_from: tuple[str, str]) -> None:
        """Take over the connection to an agent that was not started by the pool.

        Args:
            host: The name of its host, which has no agent yet.
            connection: The connection.
            seen_from: The addresses of this host and of the other one in this connection.
        """
        self._agents[host] = _Agent(host, connection, time.monotonic() + self._spec.start_timeout, seen_from)
        ask_for_description(connection, self._spec, self._command[0], self._folder)

    def start(self, worker: int, host: str, slot: int, slots: int) -> None:
        """Start a worker as soon as the agent of its host is ready.

        Args:
            worker: The worker's number.
            host: Its host.
            slot: The number of its slot on the host.
            slots: How many slots the host has.
        """
        agent = self._agents.get(host)
        if agent is None:
            agent = self._reach(host)
            if agent is None:
                return
        agent.slots = max(slots, slot + 1)
        if agent.host is None or agent.leaving:
            agent.waiting.append((worker, slot))
        else:
            self._launch(agent, agent.host, worker, slot)

    def signal(self, worker: int, host: str, signum: int) -> bool:
        """Send a worker a signal.

        Returns:
            False if the worker was still waiting for its agent; then it is not started any more.
        """
        agent = self._agents[host]
        entry = next((entry for entry in agent.waiting if entry[0] == worker), None)
        if entry is None:
            agent.connection.send(FrameKind.SIGNAL_RANK, worker, b"%d" % signum)
            return True
        agent.waiting.remove(entry)
        return False

    def addresses(self, hosts: Iterator[str]) -> str:
        """Return the addresses to listen on so that these hosts can connect, separated by commas."""
        found = dict.fromkeys(address for host in hosts for address in self._agents[host].addresses)
        return ",".join(found) or LOOPBACK

    def release(self, host: str) -> None:
        """Tell the agent of a host, if there is one, to end; do not wait: :meth:`end` is called later."""
        agent = self._agents.get(host)
        if agent is not None and not agent.leaving:
            agent.leaving = True
            agent.connection.send(FrameKind.END, 0, encode_seconds(GRACE_S))

    def blame(self, connection: FrameConnection, trouble: str) -> None:
        """Note the fault of a host whose connection is about to end."""
        agent = self._find(connection)
        if agent is not None:
            agent.trouble = agent.trouble or trouble

    def end(self, connection: FrameConnection, status: int) -> None:
        """Remove an agent whose connection has ended; report the host as lost, unless it was released."""
        agent = self._find(connection)
        if agent is None:
            return
        del self._agents[agent.name]
        if not agent.leaving or agent.trouble:
            self._on_lost(agent.name, agent.trouble or connection.explain_end(status))
            return
        for worker, slot in agent.waiting:  # meanwhile the host was offered again
            self.start(worker, agent.name, slot, agent.slots)

    def cut(self) -> None:
        """Give up the hosts whose agents have not answered."""
        for agent in list(self._agents.values()):
            if agent.host is None:
                del self._agents[agent.name]
                if agent.seen_from is None:  # else its launcher waits to be told how the job ends
                    agent.connection.kill()
                    agent.connection.close()

    def close(self) -> None:
        """End all agents, and wait until they have ended."""
        for agent in self._agents.values():
            agent.connection.cut()
        for agent in self._agents.values():
            agent.connection.close()

    # Agents that have not answered yet.

    def watch(self, selector: selectors.BaseSelector) -> None:
        """Update the events for which a selector waits."""
        for agent in self._agents.values():
            if agent.host is None:
                agent.connection.watch(selector, True, functools.partial(setattr, agent, "answered", True))

    def next_deadline(self) -> float | None:
        """Return when :meth:`attend` will have something to do even if no host answers."""
        return min((each.deadline for each in self._agents.values() if each.host is None), default=None)

    def attend(self, selector: selectors.BaseSelector) -> None:
        """Read the answers that have come, and give up the hosts whose time is over."""
        now = time.monotonic()
        for agent in [each for each in self._agents.values() if each.host is None]:
            if agent.answered:
                agent.answered = False
                self._take_answer(agent, selector)
            elif now >= agent.deadline:
                agent.connection.unwatch(selector)
                self._fail(agent, explain_delay(agent.connection, self._spec))

    @functools.cached_property
    def _this_host(self) -> Host:
        return describe_this_host(self._spec, self._environ)

    def _find(self, connection: FrameConnection) -> _Agent | None:
        return next((agent for agent in self._agents.values() if agent.connection is connection), None)

    def _reach(self, name: str) -> _Agent | None:
        here = name == self._spec.here
        if not (here or self._starts):
            self._on_lost(name, "it has gone")
            return None
        try:
            connection = start_agent(self._spec, name, here)
        except (HostsError, OSError) as error:
            self._on_lost(name, str(error))
            return None
        agent = self._agents[name] = _Agent(name, connection, time.monotonic() + self._spec.start_timeout)
        if here:
            self._begin(agent, self._this_host, ())
        else:
            ask_for_description(connection, self._spec, self._command[0], self._folder)
        return agent

    def _take_answer(self, agent: _Agent, selector: selectors.BaseSelector) -> None:
        answer = receive_answer(agent.connection)
        if agent.seen_from is not None and isinstance(answer, list) and answer:
            answer = self._hear(answer, agent.connection)
        if answer is None:
            return
        agent.connection.unwatch(selector)
        try:
            description = read_description(answer, agent.connection, self._spec)
            if agent.seen_from is not None:
                description = replace(description, seen_from=agent.seen_from)
            self._begin(agent, description.host, self._find_addresses(agent.name, description))
        except (HostsError, UsageError, RuntimeError) as error:
            self._fail(agent, str(error))

    def _hear(self, frames: list[Frame], connection: FrameConnection) -> list[Frame] | Exception | None:
        """Pass on an adopted agent's frames except its description; return that, or None if it has not come."""
        try:
            for frame in frames:
                if frame.kind is not FrameKind.DESCRIPTION:
                    self._on_frame(frame, connection)
        except ValueError as error:
            return error
        return [frame for frame in frames if frame.kind is FrameKind.DESCRIPTION] or None

    def _find_addresses(self, name: str, description: HostDescription) -> tuple[str, ...]:
        return tuple(reachable_addresses({name: description}, self._spec.network_interface))

    def _fail(self, agent: _Agent, reason: str) -> None:
        del self._agents[agent.name]
        if agent.seen_from is None:  # else its launcher is told the reason
            agent.connection.kill()
            agent.connection.close()
        self._on_lost(agent.name, reason)

    # Workers.

    def _begin(self, agent: _Agent, host: Host, addresses: tuple[str, ...]) -> None:
        self._port = self._on_ready(agent.connection, addresses)
        agent.host, agent.addresses = host, addresses
        if self._task is not None:
            agent.connection.send_task(self._task)
        waiting, agent.waiting = agent.waiting, []
        for worker, slot in waiting:
            self._launch(agent, host, worker, slot)

    def _launch(self, agent: _Agent, host: Host, worker: int, slot: int) -> None:
        most = self._spec.elastic.max_np if self._spec.elastic is not None else None
        slots = agent.slots if most is None else min(agent.slots, max(most, slot + 1))
        try:
            cpus, _ = bind(self._spec.bind_to, host, slots)
            # GPUs are given by slot, since no two live workers share one; to all slots, since any may be used.
            called = self._spec.called("--gpus-per-rank")
            gpus = gpu_variables(self._spec.gpus_per_rank, host.gpus, agent.slots, called)
        except UsageError as error:
            agent.trouble = str(error)
            self.release(agent.name)
            return
        adopted = agent.seen_from is not None
        tuning, said = ({}, []) if adopted else tuning_variables(self._environ, host.usable_cpus, slots)
        for line in said:
            if line not in self._said:
                self._said.add(line)
                self._say(line)
        identity = replace(self._identity, key="") if adopted else self._identity  # its launcher knows the key
        environ = {
            **common_variables(self._spec, agent.name, identity),
            **tuning,
            **gpus[slot],
            "HOROVODLIKE_ELASTIC": "1",
            "HOROVOD_ELASTIC": "1",
            "HOROVODLIKE_WORKER": str(worker),
            "HOROVODLIKE_DRIVER_ADDR": ",".join(agent.addresses) or LOOPBACK,
            "HOROVODLIKE_DRIVER_PORT": str(self._port),
            "HOROVOD_HOSTNAME": agent.name,
        }
        plan = RankPlan(worker, slot, environ, () if adopted else self._command, cpus[slot])
        message = start_message(
            [plan],
            {} if adopted else self._environ,
            self._folder,
            elsewhere=agent.connection.host is not None,
            elastic=True,
            grace_period=self._grace_period,
        )
        agent.connection.send(FrameKind.START, 0, message)
