"""Start the agents of all hosts at the same time, and find out which hosts cannot take part, with the reasons."""

import functools
import os
import selectors
import time
from collections.abc import Callable, Mapping, Sequence

from horovodlike.launcher.agent.host_probe import (
    Host,
    HostDescription,
    decode_description,
    detect_host,
    encode_needs,
    find_gpus,
    installed_version,
)
from horovodlike.launcher.agent.protocol import (
    Frame,
    FrameKind,
    InvalidFrameError,
    decode_text,
    encode_seconds,
    encode_text,
    from_native,
)
from horovodlike.launcher.errors import HostsError, counted
from horovodlike.launcher.planning import JobSpec
from horovodlike.launcher.planning.command import working_folder
from horovodlike.launcher.planning.hosts import Placement
from horovodlike.launcher.planning.plan import OWN_NAMES, OWN_PREFIXES, RankPlan, forwarded, inherited
from horovodlike.launcher.schedulers.registry import scheduler_of
from horovodlike.launcher.schedulers.ssh import explain_failure
from horovodlike.launcher.supervisor.connection import (
    AgentConnection,
    FrameConnection,
    start_local_agent,
    start_remote_agent,
)
from horovodlike.launcher.supervisor.job import GRACE_S


def start_agents(
    spec: JobSpec, placements: Sequence[Placement], on_exit: Callable[[Callable[[], object]], object]
) -> list[AgentConnection]:
    """Start an agent on each host; do not wait for any.

    Args:
        spec: The job.
        placements: The hosts.
        on_exit: Called with a function that ends all agents at the same time, to be called in the end.

    Raises:
        HostsError: The program that starts agents, such as ssh, is not installed.
    """
    connections: list[AgentConnection] = []
    on_exit(functools.partial(_close, connections))
    for placement in placements:
        connections.append(start_agent(spec, placement.name, placement.name == spec.here))
    return connections


def start_agent(spec: JobSpec, host: str, here: bool) -> AgentConnection:
    """Start the agent of one host; do not wait for it.

    Args:
        spec: The job.
        host: The host.
        here: True if that is this machine.

    Raises:
        HostsError: The program that starts agents, such as ssh, is not installed.
    """
    if here:
        return start_local_agent()
    command = scheduler_of(spec.remote).start_command(host, spec.remote, spec.start_timeout)
    try:
        return start_remote_agent(command, host)
    except FileNotFoundError:
        raise HostsError(f"{command[0]} is not installed here: it starts what runs on other hosts") from None


def _close(connections: Sequence[AgentConnection]) -> None:
    for connection in connections:
        connection.cut()
    for connection in connections:
        connection.close()


def describe_this_host(spec: JobSpec, environ: Mapping[str, str]) -> Host:
    """Describe this host, as far as the job needs it.

    Args:
        spec: The job.
        environ: The environment that the ranks inherit.
    """
    return detect_host(gpus=find_gpus(environ) if spec.gpus_per_rank else None)


def describe_hosts(spec: JobSpec, connections: Sequence[AgentConnection], program: str) -> dict[str, HostDescription]:
    """Ask the agents of all other hosts at the same time to describe their hosts.

    Args:
        spec: The job.
        connections: The agents; this host's agent is not asked.
        program: The program that the ranks will execute.

    Returns:
        The description of each host.

    Raises:
        HostsError: Some hosts cannot take part; the message lists all of them with the reasons.
    """
    folder = working_folder()
    waiting = {connection.host: connection for connection in connections if connection.host is not None}
    for connection in waiting.values():
        ask_for_description(connection, spec, program, folder)
    found: dict[str, HostDescription] = {}
    failed: dict[str, str] = {}
    readable: set[str] = set()
    deadline = time.monotonic() + spec.start_timeout
    with selectors.DefaultSelector() as selector:
        while waiting and (left := deadline - time.monotonic()) > 0:
            for host, connection in waiting.items():
                connection.watch(selector, True, functools.partial(readable.add, host))
            for key, _ in selector.select(left):
                key.data()
            while readable:
                host = readable.pop()
                answer = receive_answer(waiting[host])
                if answer is None:
                    continue
                waiting[host].unwatch(selector)
                try:
                    found[host] = read_description(answer, waiting.pop(host), spec)
                except HostsError as error:
                    failed[host] = str(error)
    for host, connection in waiting.items():
        connection.kill()
        failed[host] = explain_delay(connection, spec)
    if failed:
        lines = [
            f"  {host}: {failed[host]}" for host in (connection.host for connection in connections) if host in failed
        ]
        raise HostsError("\n".join([f"{len(failed)} of {counted(len(connections), 'host')} cannot take part:", *lines]))
    return found


def ask_for_description(connection: FrameConnection, spec: JobSpec, program: str, folder: str) -> None:
    """Ask the agent of another host to describe it; the agent ends by itself if it hears nothing more."""
    connection.send(
        FrameKind.DESCRIBE, 0, encode_text(encode_needs(folder, program, spec.gpus_per_rank > 0, spec.files))
    )
    connection.send(FrameKind.ALIVE, 0, encode_seconds(spec.start_timeout + spec.network_timeout))


def explain_delay(connection: FrameConnection, spec: JobSpec) -> str:
    """Return the message about a host that has not answered in time."""
    said = f" ({'; '.join(connection.last_words)})" if connection.last_words else ""
    return f"it has not answered within {spec.start_timeout:g} s{said}; raise --start-timeout if need be"


def receive_answer(connection: FrameConnection) -> list[Frame] | Exception | None:
    """Return a host's frames, none if it has hung up; an exception if they are invalid; None if nothing has come."""
    try:
        frames = connection.receive()
    except (InvalidFrameError, OSError) as error:
        return error
    return [] if frames is None else frames or None


def read_description(answer: list[Frame] | Exception, connection: FrameConnection, spec: JobSpec) -> HostDescription:
    """Read the description that a host has sent.

    Args:
        answer: The result of :func:`receive_answer`.
        connection: The connection, which no selector watches any more.
        spec: The job.

    Raises:
        HostsError: The host cannot take part.
    """
    if answer == []:
        status = connection.close()
        if not isinstance(connection, AgentConnection):  # the host has called in
            raise HostsError(connection.explain_end(status))
        raise HostsError(explain_failure(scheduler_of(spec.remote).program, status, connection.last_words))
    try:
        if isinstance(answer, Exception):
            raise answer
        description = decode_description(decode_text(answer[0].payload))
    except (InvalidFrameError, OSError, ValueError) as error:
        raise HostsError(f"its agent is not understood ({error}); install the same horovodlike there") from None
    if description.version != installed_version():
        raise HostsError(
            f"horovodlike {description.version} is installed there, but {installed_version()} here; install the same"
        )
    if description.problems:
        raise HostsError("; ".join(description.problems))
    return description


def start_message(
    plans: Sequence[RankPlan],
    environ: Mapping[str, str],
    folder: str,
    *,
    elsewhere: bool = False,
    elastic: bool = False,
    grace_period: float = GRACE_S,
) -> bytes:
    """Encode the payload of START.

    Args:
        plans: The ranks of the host.
        environ: The environment of this process.
        folder: The folder in which the ranks start.
        elsewhere: True for another host, which keeps its own values of some variables.
        elastic: More ranks may follow.
        grace_period: How long the ranks may take to end once the agent has received a signal, in seconds.
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
            "is_server": plan.local_rank < 0,
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
