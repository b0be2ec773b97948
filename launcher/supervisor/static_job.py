"""The steps of every kind of job, and the steps of a job that this launcher starts through one agent per host."""

import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from horovodlike._net.secure_channel import JobKey
from horovodlike.launcher.agent.host_probe import find_free_port, has_served
from horovodlike.launcher.agent.protocol import FrameKind
from horovodlike.launcher.errors import UsageError
from horovodlike.launcher.planning import JobSpec
from horovodlike.launcher.planning.addresses import LOOPBACK, reachable_addresses
from horovodlike.launcher.planning.command import is_python, working_folder
from horovodlike.launcher.planning.hosts import Placement
from horovodlike.launcher.planning.plan import JobIdentity, RankPlan, plan_ranks, plan_servers, server_numbers
from horovodlike.launcher.supervisor import SignalHandler, Supervisor, Wakeup
from horovodlike.launcher.supervisor.agent_startup import (
    describe_hosts,
    describe_this_host,
    start_agents,
    start_message,
)
from horovodlike.launcher.supervisor.fold import Fold
from horovodlike.launcher.supervisor.job import Job, Outcome
from horovodlike.launcher.supervisor.output import OutputFiles, RankOutput, Screen
from horovodlike.launcher.supervisor.writer import Writer

if TYPE_CHECKING:
    from horovodlike.monitor.server import Monitor

_LOOK_S = 0.5


class Launch:
    """A job from the request to the exit code, in eight steps; a step does nothing where a job does not need it."""

    def __init__(
        self,
        spec: JobSpec,
        command: tuple[str, ...],
        environ: Mapping[str, str],
        stack: ExitStack,
        *,
        discovery: Any = None,
        task: bytes | None = None,
        take_signals: bool = False,
        reasons: Sequence[str] = (),
    ) -> None:
        """Take the arguments of ``launcher.launch.launch``, and the stack, which undoes the steps."""
        self._spec, self._command, self._environ, self._stack = spec, command, environ, stack
        self._discovery, self._task, self._take_signals = discovery, task, take_signals
        self._reasons = tuple(reasons) if spec.verbose else ()
        self._look_every = None if take_signals else _LOOK_S
        self._identity = JobIdentity(secrets.token_hex(8), secrets.token_hex(32), LOOPBACK, 0)
        self._folder = working_folder()
        self._files: OutputFiles | None = None
        self._monitor: Monitor | None = None

    def resolve(self) -> None:
        """Find the hosts of the job, and the ranks of each."""

    def probe(self) -> None:
        """Find out the hosts' processors and GPUs, and whether the job can run there."""

    def serve(self) -> None:
        """Listen for the ranks."""

    def plan(self) -> None:
        """Plan each rank."""

    def prepare_environment(self) -> None:
        """Make the messages that tell the agents which commands to start, and in which environment."""

    def start(self) -> None:
        """Start the ranks."""

    def supervise(self) -> None:
        """Run until no process of the ranks is left."""

    def attribute(self) -> Outcome:
        """Return how the job has ended, and which rank was the cause."""
        raise NotImplementedError

    def _open_files(self, size: int, ranks: Sequence[int] | None = None) -> None:
        """Make the files that ``--output-filename`` asks for."""
        if self._spec.output_directory is not None:
            called = self._spec.called("--output-filename")
            self._files = OutputFiles(
                self._spec.output_directory, size, ranks, servers=self._spec.servers, called=called
            )
            self._stack.callback(self._files.close)

    def _open_output(self) -> None:
        """Start the thread that writes the output of the ranks."""
        self._wakeup = Wakeup()
        self._stack.callback(self._wakeup.close)
        self._writer = Writer(self._wakeup.set)
        screens = Screen.pair(sys.stdout, sys.stderr, self._environ)
        self._num_ranks = self._spec.num_proc if self._spec.servers else None
        fold = None
        if self._spec.fold:
            fold = Fold(self._spec.num_proc if self._spec.elastic is None else None)
        given = screens, self._writer, self._files, self._spec.timestamps, self._num_ranks
        if self._monitor is None:
            self._output = RankOutput(*given, fold=fold, shown=self._spec.shown_ranks)
        else:
            from horovodlike.launcher.supervisor import live, monitoring

            watched = live.LiveOutput if self._spec.live else monitoring.WatchedOutput
            shown = self._spec.shown_ranks
            self._output = watched(self._monitor.board, self._wakeup, *given, fold=fold, shown=shown)

    def _close_output(self, abandoned: Callable[[], bool]) -> None:
        """Wait until all output is written, unless the job is abandoned."""
        if self._spec.live and self._monitor is not None:
            self._monitor.close()  # now, so that the last display has the last reports
        self._output.end()
        self._writer.close(abandoned)

    def _attach(self, supervisor: Supervisor) -> None:
        """Pass signals to the supervisor from now on; in the end wait for the writer, unless the job is abandoned."""
        if self._take_signals:
            self._stack.enter_context(SignalHandler(supervisor.interrupt, self._wakeup))
        self._stack.callback(self._close_output, lambda: supervisor.abandoned)

    def _say(self, *said: str) -> None:
        self._output.say(*(f"hvdrun: {line}" for line in (*said, *self._reasons)))

    def _serve_ranks(self, key: JobKey, size: int, address: str) -> None:
        """Start the rendezvous server, and note its port."""
        from horovodlike._bootstrap.bootstrap import RendezvousServer

        self._server = RendezvousServer(key, size, address, self._identity.job_id, servers=self._spec.servers)
        self._server.start()
        self._stack.callback(self._server.close)
        self._identity = replace(self._identity, key=key.hex(), address=address, port=self._server.port)
        self._open_monitor(address.split(","), size)

    def _open_monitor(self, addresses: Sequence[str], size: int | None = None) -> None:
        """Start the monitor, if it was asked for, on the addresses at which ranks reach this host."""
        if self._spec.monitor is not None:
            from horovodlike.launcher.supervisor.monitoring import open_monitor

            self._monitor = open_monitor(self._spec, self._spec.monitor, self._identity, addresses, size)
            self._stack.callback(self._monitor.close)
            self._identity = replace(self._identity, monitor_port=self._monitor.port)


class StaticLaunch(Launch):
    """A job whose ranks are the same from start to end."""

    def resolve(self) -> None:
        """See :meth:`Launch.resolve`."""
        self._placements = self._spec.placements

    def probe(self) -> None:
        """Describe this host, and check that its ranks fit; then start the agents and ask other hosts' agents."""
        self._hosts = {
            each.name: describe_this_host(self._spec, self._environ)
            for each in self._placements
            if each.name == self._spec.here
        }
        for placement in self._placements:
            if placement.name in self._hosts:
                self._plan_host(placement)
        self._open_files(self._spec.num_proc)
        # An agent takes 30 ms to start; meanwhile the module of the rendezvous server is imported.
        self._connections = start_agents(self._spec, self._placements, self._stack.callback)
        from horovodlike._bootstrap import bootstrap  # noqa: F401

        self._described = describe_hosts(self._spec, self._connections, self._command[0])
        self._hosts |= {host: description.host for host, description in self._described.items()}

    def serve(self) -> None:
        """Start the rendezvous server on addresses that the other hosts can reach."""
        found = reachable_addresses(self._described, self._spec.network_interface) if self._described else [LOOPBACK]
        self._serve_ranks(JobKey(bytes.fromhex(self._identity.key)), self._spec.num_proc, ",".join(found))
        first = self._described.get(self._placements[0].name)
        if first is None:
            master = found[0], find_free_port()
        else:
            master = first.seen_from[1] if first.seen_from else self._placements[0].name, first.free_port
        self._identity = replace(self._identity, master=master)

    def plan(self) -> None:
        """See :meth:`Launch.plan`."""
        planned = {placement.name: self._plan_host(placement) for placement in self._placements}
        self._plans = [
            [*plans, *plan_servers(self._spec, placement, self._identity)]
            for (plans, _), placement in zip(planned.values(), self._placements, strict=True)
        ]
        said = [lines for _, lines in planned.values()]
        if all(lines == said[0] for lines in said):
            self._said = said[0]
        else:
            self._said = [f"{host}: {line}" for host, (_, lines) in planned.items() for line in lines]

    def _plan_host(self, placement: Placement) -> tuple[list[RankPlan], list[str]]:
        """Plan the ranks of one host; return the plans, and the lines for the user."""
        spec, host = self._spec, self._hosts[placement.name]
        try:
            return plan_ranks(spec, self._command, placement, host, self._identity, self._environ)
        except UsageError as error:
            alone = placement.name == spec.here and placement.local_size == placement.size
            raise error if alone else UsageError(f"{placement.name}: {error}") from None

    def prepare_environment(self) -> None:
        """See :meth:`Launch.prepare_environment`."""
        self._messages = [
            start_message(
                ranks,
                self._environ,
                self._folder,
                elsewhere=connection.host is not None,
                grace_period=self._spec.grace_period,
            )
            for connection, ranks in zip(self._connections, self._plans, strict=True)
        ]

    def start(self) -> None:
        """See :meth:`Launch.start`."""
        self._open_output()
        self._job = Job(
            {
                connection: (*placement.ranks, *server_numbers(self._spec, placement))
                for connection, placement in zip(self._connections, self._placements, strict=True)
            },
            self._output,
            self._wakeup,
            verbose=self._spec.verbose,
            network_timeout=self._spec.network_timeout,
            look_every=self._look_every,
            on_gone=self._server.exited,
            grace_period=self._spec.grace_period,
            num_ranks=self._num_ranks,
        )
        self._attach(self._job)
        self._say(*self._said)
        for connection, message in zip(self._connections, self._messages, strict=True):
            if self._task is not None:
                connection.send_task(self._task)
            connection.send(FrameKind.START, 0, message)

    def supervise(self) -> None:
        """See :meth:`Launch.supervise`."""
        self._job.run()

    def attribute(self) -> Outcome:
        """See :meth:`Launch.attribute`; say so if the ranks of a Python program have worked without each other."""
        outcome = self._job.drain()
        if outcome.exit_code == 0 and self._worked_alone():
            size = self._placements[0].size
            self._output.say(
                f"hvdrun: none of the {size} ranks called hvd.init(), or made a group of torch.distributed: if they "
                "had to share the work, each has done all of it"
            )
        return outcome

    def _worked_alone(self) -> bool:
        program, master = self._command[0], self._identity.master
        if self._task is not None or self._placements[0].size == 1 or self._server.generation:
            return False
        if self._environ.get("MASTER_PORT") or self._placements[0].local_size < self._placements[0].size:
            return False  # connections of other hosts cannot be seen
        if master and has_served(master[1]):
            return False  # the ranks of torch.distributed connect to this port
        return is_python(program) or program.endswith(".py")
