"""Puts the parts of a job together: agents, rendezvous server, plans, output."""

import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from horovodlike.launcher.agent.protocol import Kind, encode_text, from_native
from horovodlike.launcher.errors import UsageError
from horovodlike.launcher.planning.addresses import reachable_addresses
from horovodlike.launcher.planning.environment import OWN_NAMES, OWN_PREFIXES, forwarded, inherited, working_folder
from horovodlike.launcher.planning.hosts import Placement
from horovodlike.launcher.planning.job_spec import JobSpec
from horovodlike.launcher.planning.plan import JobIdentity, RankPlan, plan_ranks
from horovodlike.launcher.planning.topology import Host
from horovodlike.launcher.supervisor.agent_startup import describe_hosts, describe_this_host, start_agents
from horovodlike.launcher.supervisor.connection import AgentConnection
from horovodlike.launcher.supervisor.job import GRACE_S, Job, Outcome
from horovodlike.launcher.supervisor.output import OutputFiles, RankOutput, Screen
from horovodlike.launcher.supervisor.signals import SignalHandler, Wakeup
from horovodlike.launcher.supervisor.writer import Writer

if TYPE_CHECKING:
    from horovodlike._bootstrap.bootstrap import RendezvousServer

__all__ = ["run_job", "start_message"]

_LOOK_S = 0.5
_LOOPBACK = "127.0.0.1"


def run_job(
    spec: JobSpec,
    command: tuple[str, ...],
    environ: Mapping[str, str],
    *,
    task: bytes | None = None,
    take_signals: bool = False,
    reasons: Sequence[str] = (),
) -> Outcome:
    """Runs a job and returns when nothing is left of it.

    Args:
        spec: The job.
        command: What each rank executes.
        environ: The environment that the ranks inherit.
        task: The file that every rank can read.
        take_signals: Passes this process's signals on to the ranks; only in the main thread.
        reasons: What ``verbose`` has to say besides.

    Raises:
        UsageError: The job does not fit its hosts; nothing has been started.
        HostsError: Some hosts cannot take part; nothing is left of what was started.
        BaseException: Whatever interrupted it (KeyboardInterrupt); the ranks have been ended.
    """
    with ExitStack() as stack:
        placements = spec.placements
        folder = working_folder()
        identity = JobIdentity(secrets.token_hex(8), secrets.token_hex(32), _LOOPBACK, 0)
        planner = _Planner(spec, command, environ)
        hosts = {
            placement.name: describe_this_host(spec, environ) for placement in placements if placement.name == spec.here
        }
        for placement in placements:
            if placement.name in hosts:  # what does not fit is to be said before anything starts
                planner.plan(placement, hosts[placement.name], identity)
        files = None
        if spec.output_directory is not None:
            called = spec.called("--output-filename")
            files = OutputFiles(spec.output_directory, spec.num_proc, called=called)
            stack.callback(files.close)
        links = start_agents(spec, placements, stack.callback)  # takes 30 ms here, in which the server is loaded
        server, identity, described = _meet(spec, links, command[0], identity, stack.callback)
        plans = [planner.plan(place, (hosts | described)[place.name], identity) for place in placements]

        wakeup = Wakeup()
        stack.callback(wakeup.close)
        writer = Writer(wakeup.set)
        output = RankOutput(Screen.pair(sys.stdout, sys.stderr, environ), writer, files, spec.timestamps)
        job = Job(
            {link: placement.ranks for link, placement in zip(links, placements, strict=True)},
            output,
            wakeup,
            verbose=spec.verbose,
            network_timeout=spec.network_timeout,
            look_every=None if take_signals else _LOOK_S,
            on_gone=server.exited,
        )
        if take_signals:
            stack.enter_context(SignalHandler(job.interrupt, wakeup))
        stack.callback(writer.close, lambda: job.abandoned)
        output.say(*(f"hvdrun: {line}" for line in (*planner.said(), *(reasons if spec.verbose else ()))))
        for link, ranks in zip(links, plans, strict=True):
            if task is not None:
                link.send_task(task)
            link.send(Kind.START, 0, start_message(ranks, environ, folder, elsewhere=link.host is not None))
        job.run()
        return job.drain()


class _Planner:
    """Plans the ranks of one host after the other, and remembers what the user has to be told."""

    def __init__(self, spec: JobSpec, command: tuple[str, ...], environ: Mapping[str, str]) -> None:
        self._spec = spec
        self._command = command
        self._environ = environ
        self._said: dict[str, list[str]] = {}

    def plan(self, placement: Placement, host: Host, identity: JobIdentity) -> list[RankPlan]:
        alone = placement.name == self._spec.here and placement.local_size == placement.size
        try:
            plans, said = plan_ranks(self._spec, self._command, placement, host, identity, self._environ)
        except UsageError as error:
            raise error if alone else UsageError(f"{placement.name}: {error}") from None
        self._said[placement.name] = said
        return plans

    def said(self) -> list[str]:
        """What there is to say about the hosts, once if it is the same for all of them."""
        said = list(self._said.values())
        if all(lines == said[0] for lines in said):
            return said[0]
        return [f"{host}: {line}" for host, lines in self._said.items() for line in lines]


def _meet(
    spec: JobSpec,
    links: Sequence[AgentConnection],
    program: str,
    identity: JobIdentity,
    on_exit: Callable[[Callable[[], None]], Any],
) -> "tuple[RendezvousServer, JobIdentity, dict[str, Host]]":
    """Waits for the agents of other hosts, and starts the rendezvous server where they reach it.

    Returns:
        The server, the identity with its addresses, and the other hosts.
    """
    from horovodlike._bootstrap.bootstrap import RendezvousServer

    described = describe_hosts(spec, links, program)
    if described:
        identity = replace(identity, address=",".join(reachable_addresses(described, spec.network_interface)))
    server = RendezvousServer(bytes.fromhex(identity.key), spec.num_proc, identity.address, identity.job_id)
    server.start()
    on_exit(server.close)
    hosts = {host: description.host for host, description in described.items()}
    return server, replace(identity, port=server.port), hosts


def start_message(
    plans: Sequence[RankPlan],
    environ: Mapping[str, str],
    folder: str,
    *,
    elsewhere: bool = False,
    elastic: bool = False,
    grace_period: float = GRACE_S,
) -> bytes:
    """The payload of START.

    Args:
        plans: The ranks of the host.
        environ: The environment of this process.
        folder: Where the ranks start.
        elsewhere: It is another host, which has some variables for itself.
        elastic: More ranks may follow.
        grace_period: How long the ranks may take to end once the agent has got a signal, in seconds.
    """
    environ = inherited(environ)

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
    message = {
        "cwd": text(folder),
        "environ": texts(forwarded(environ) if elsewhere else environ),
        "own_names": OWN_NAMES if elsewhere else (),
        "own_prefixes": OWN_PREFIXES if elsewhere else (),
        "ranks": ranks,
        "elastic": elastic,
        "grace_period": grace_period,
    }
    return encode_text(message)
