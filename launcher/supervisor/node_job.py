"""A job whose nodes each run their own ``hvdrun``, without ssh: the launcher of node 0 leads, the others follow.

Each node has its own command line, environment and screen. What ends a job is decided on node 0, so all of them end
with the same exit code and say the same.
"""

import secrets
import socket
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

from horovodlike._bootstrap.bootstrap import RendezvousServer
from horovodlike._net.secure_channel import JobKey
from horovodlike.launcher.agent.protocol import Frame, FrameError, Kind, decode_text, encode_text
from horovodlike.launcher.errors import HostsError, UsageError
from horovodlike.launcher.planning.addresses import bindable_addresses
from horovodlike.launcher.planning.environment import working_folder
from horovodlike.launcher.planning.host_probe import installed_version
from horovodlike.launcher.planning.hosts import Placement
from horovodlike.launcher.planning.job_spec import JobSpec, Nodes
from horovodlike.launcher.planning.plan import JobIdentity, plan_ranks
from horovodlike.launcher.supervisor import failure_attribution
from horovodlike.launcher.supervisor.agent_startup import describe_this_host
from horovodlike.launcher.supervisor.connection import Connection, start_local_agent
from horovodlike.launcher.supervisor.job import Job, Outcome
from horovodlike.launcher.supervisor.node_connection import NodeConnection, NodeListener, connect_node
from horovodlike.launcher.supervisor.node_relay import Relay
from horovodlike.launcher.supervisor.output import OutputFiles, RankOutput, Screen
from horovodlike.launcher.supervisor.signals import SignalHandler, Wakeup
from horovodlike.launcher.supervisor.static_job import start_message
from horovodlike.launcher.supervisor.writer import Writer

__all__ = ["run_nodes"]


def run_nodes(
    spec: JobSpec, nodes: Nodes, command: tuple[str, ...], environ: Mapping[str, str], reasons: Sequence[str] = ()
) -> Outcome:
    """Runs this node's part of a job and returns when the whole job is over. Only in the main thread.

    Args:
        spec: This node's part; ``num_proc`` is the number of its ranks.
        nodes: The nodes.
        command: What each rank of this node executes.
        environ: The environment that the ranks of this node inherit.
        reasons: What ``verbose`` has to say besides.

    Raises:
        HostsError: The nodes have not found each other; the message says why.
        UsageError: This node's ranks do not fit; the other nodes are told.
    """
    with ExitStack() as stack:
        if nodes.number == 0:
            links = _gather(spec, nodes, stack)
            return _lead(spec, nodes, links, _Node(spec, command, environ, reasons, stack))
        deadline = time.monotonic() + spec.start_timeout
        uplink = connect_node(nodes.key, nodes.number, nodes.count, nodes.host, nodes.port, deadline)
        stack.callback(uplink.hang_up)
        return _follow(spec, nodes, uplink, _Node(spec, command, environ, reasons, stack))


class _Node:
    """What leading and following have in common: this node's ranks, and their output."""

    def __init__(
        self,
        spec: JobSpec,
        command: tuple[str, ...],
        environ: Mapping[str, str],
        reasons: Sequence[str],
        stack: ExitStack,
    ) -> None:
        self._spec, self._command, self._environ, self._stack = spec, command, environ, stack
        self._folder = working_folder()
        self._reasons = reasons if spec.verbose else ()
        self.wakeup = Wakeup()
        stack.callback(self.wakeup.close)

    def start(self, placement: Placement, identity: JobIdentity) -> tuple[Connection, RankOutput, Writer]:
        """Starts the ranks of this node."""
        spec, environ = self._spec, self._environ
        plans, said = plan_ranks(spec, self._command, placement, describe_this_host(spec, environ), identity, environ)
        files = None
        if spec.output_directory is not None:
            files = OutputFiles(spec.output_directory, placement.size, placement.ranks)
            self._stack.callback(files.close)
        agent = start_local_agent()
        self._stack.callback(agent.close)
        writer = Writer(self.wakeup.set)
        output = RankOutput(Screen.pair(sys.stdout, sys.stderr, environ), writer, files, spec.timestamps)
        output.say(*(f"hvdrun: {line}" for line in (*said, *self._reasons)))
        agent.send(Kind.START, 0, start_message(plans, environ, self._folder))
        return agent, output, writer

    def take_signals(self, taker: Job | Relay, writer: Writer) -> None:
        """Lets signals go to the job from now on."""
        self._stack.enter_context(SignalHandler(taker.interrupt, self.wakeup))
        self._stack.callback(writer.close, lambda: taker.abandoned)


def _gather(spec: JobSpec, nodes: Nodes, stack: ExitStack) -> list[NodeConnection]:
    """Waits for the launchers of all other nodes; returns their connections by node."""
    deadline = time.monotonic() + spec.start_timeout
    found: dict[int, NodeConnection] = {}
    try:
        with NodeListener(nodes.key, nodes.count, _addresses(spec, nodes, deadline), nodes.port) as listener:
            while len(found) < nodes.count - 1:
                accepted = listener.accept(deadline)
                if accepted is None:
                    raise _missing(spec, nodes, found)
                link, count, join = accepted
                stack.callback(link.hang_up)
                refusal = _refusal(nodes, link.node, count, found)
                if refusal is not None:
                    link.dismiss(1, refusal.encode())
                    continue
                found[link.node] = link
                _read_join(link, join)
    except HostsError as error:
        for link in found.values():
            link.dismiss(1, str(error).encode())
        raise
    return [found[node] for node in sorted(found)]


def _addresses(spec: JobSpec, nodes: Nodes, deadline: float) -> list[str]:
    """Where node 0 listens; its name may become known only a while after it has started."""
    while not (found := bindable_addresses(nodes.host, spec.network_interface)):
        if time.monotonic() >= deadline:
            raise HostsError(
                f"--rendezvous {nodes.host}:{nodes.port} is none of this host's addresses, but node 0 runs here; name "
                "this host, or say with --network-interface where to listen"
            )
        time.sleep(0.2)
    return found


def _missing(spec: JobSpec, nodes: Nodes, found: Mapping[int, NodeConnection]) -> HostsError:
    missing = [str(node) for node in range(1, nodes.count) if node not in found]
    return HostsError(
        f"after {spec.start_timeout:g} s {len(missing)} of {nodes.count} nodes had not come: --node-rank "
        f"{', '.join(missing)}; does hvdrun run there, with the same --rendezvous? If they only need longer, raise "
        "--start-timeout"
    )


def _refusal(nodes: Nodes, node: int, count: int, found: dict[int, NodeConnection]) -> str | None:
    if count != nodes.count:
        return f"--nnodes is {count} on node {node} but {nodes.count} on node 0; give the same everywhere"
    if node in found and not _has_gone(found[node]):
        return f"two nodes claim to be --node-rank {node}; give each its own"
    return None


def _has_gone(link: NodeConnection) -> bool:
    """Whether a launcher that had come has ended since, as one that was started again."""
    try:
        return link.receive() is None
    except (OSError, FrameError):
        return True


def _read_join(link: NodeConnection, join: Frame) -> None:
    try:
        said = decode_text(join.payload)
        version, link.host = str(said["version"]), str(said["host"])
        if version == installed_version():
            link.num_proc = int(said["num_proc"])
            if link.num_proc < 1:
                raise ValueError(f"it has {link.num_proc} ranks")
    except (ValueError, TypeError, KeyError) as error:
        raise HostsError(
            f"node {link.node} cannot be understood ({error!r}): is it another version of horovodlike? Install the same"
        ) from None
    if version != installed_version():
        raise HostsError(
            f"horovodlike {version} is installed on node {link.node} ({link.host}), but {installed_version()} on node "
            "0; install the same"
        )


def _lead(spec: JobSpec, nodes: Nodes, links: Sequence[NodeConnection], node: _Node) -> Outcome:
    names = _unique([socket.gethostname(), *(str(link.host) for link in links)])
    counts = (spec.num_proc, *(link.num_proc for link in links))
    placements = [Placement(names, counts, number) for number in range(nodes.count)]
    address = ",".join(bindable_addresses(nodes.host, spec.network_interface))
    job_id = secrets.token_hex(8)
    exit_code, why = 1, b"hvdrun: node 0 could not start its ranks"
    try:
        with RendezvousServer(_key_of_ranks(nodes, job_id), sum(counts), address, job_id) as server:
            identity = JobIdentity(job_id, _key_of_ranks(nodes, job_id).hex(), address, server.port)
            agent, output, writer = node.start(placements[0], identity)
            for link, placement in zip(links, placements[1:], strict=True):
                link.host = placement.name
                link.send(Kind.PLACE, 0, _encode_place(placement, identity))
            job = Job(
                dict(zip((agent, *links), (placement.ranks for placement in placements), strict=True)),
                output,
                node.wakeup,
                verbose=spec.verbose,
                network_timeout=spec.network_timeout,
                on_gone=server.exited,
            )
            node.take_signals(job, writer)
            outcome = job.run()
            exit_code, why = outcome.exit_code, _why(outcome, names[0])
    finally:
        for link in links:
            link.dismiss(exit_code, why)
    return job.drain()  # the others do not wait for this node's screen


def _follow(spec: JobSpec, nodes: Nodes, uplink: NodeConnection, node: _Node) -> Outcome:
    version, name = installed_version(), socket.gethostname()
    uplink.send(Kind.JOIN, 0, encode_text({"version": version, "host": name, "num_proc": spec.num_proc}))
    # Node 0 waits for the others no longer than its own --start-timeout, and then says so.
    try:
        frame, *more = uplink.await_frame(time.monotonic() + 2 * spec.start_timeout, Kind.PLACE, Kind.OUTCOME)
    except (OSError, FrameError) as error:
        raise HostsError(f"node 0 has gone, or is stuck ({error}); see what it prints") from None
    if frame.kind is Kind.OUTCOME:
        raise HostsError(f"node 0 says: {frame.payload.decode(errors='replace')}")
    placement, identity = _decode_place(frame, nodes)
    try:
        agent, output, writer = node.start(placement, identity)
    except UsageError as error:
        uplink.send(Kind.FAILED, 0, str(error).encode())
        raise
    relay = Relay(agent, uplink, output, node.wakeup, spec.network_timeout)
    node.take_signals(relay, writer)
    return Outcome(exit_code=relay.run(more))


def _unique(names: Sequence[str]) -> tuple[str, ...]:
    """The names of the nodes, with their numbers where two have the same name."""
    count = Counter(names)
    return tuple(name if count[name] == 1 else f"{name}#{number}" for number, name in enumerate(names))


def _key_of_ranks(nodes: Nodes, job_id: str) -> JobKey:
    """Another key for each job, so that nothing of one is of use in the next."""
    return nodes.key.derive(b"horovodlike ranks", job_id.encode())


def _encode_place(placement: Placement, identity: JobIdentity) -> bytes:
    place = {"names": placement.names, "counts": placement.counts, "number": placement.number}
    return encode_text({**place, "job_id": identity.job_id, "address": identity.address, "port": identity.port})


def _decode_place(frame: Frame, nodes: Nodes) -> tuple[Placement, JobIdentity]:
    try:
        said = decode_text(frame.payload)
        placement = Placement(tuple(said["names"]), tuple(said["counts"]), said["number"])
        job_id, address, port = str(said["job_id"]), str(said["address"]), int(said["port"])
    except (ValueError, TypeError, KeyError) as error:
        raise HostsError(f"node 0 cannot be understood ({error!r}); install the same horovodlike there") from None
    return placement, JobIdentity(job_id, _key_of_ranks(nodes, job_id).hex(), address, port)


def _why(outcome: Outcome, here: str) -> bytes:
    """What the other nodes say when the job has ended badly; ``here`` is the name of this one."""
    if outcome.failure is not None:
        return b"\n".join(failure_attribution.describe(replace(outcome.failure, host=outcome.failure.host or here)))
    if outcome.trouble is not None:
        return f"hvdrun: {outcome.trouble}".encode()
    return b"" if outcome.exit_code == 0 else f"hvdrun: the job was ended from outside, on {here}".encode()
