"""A job whose nodes each run their own ``hvdrun``, without ssh: the launcher of node 0 leads, the others follow.

Each node has its own command line, environment and screen. Node 0 decides how the job ends, so all launchers exit with
the same code and print the same reason.
"""

import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from horovodlike._net.secure_channel import JobKey
from horovodlike.launcher.agent.host_probe import find_free_port, installed_version
from horovodlike.launcher.agent.protocol import Frame, FrameKind, InvalidFrameError, decode_text, encode_text
from horovodlike.launcher.errors import HostsError, UsageError, listed
from horovodlike.launcher.planning import JobSpec, Nodes
from horovodlike.launcher.planning.addresses import bindable_addresses, resolve
from horovodlike.launcher.planning.hosts import Placement
from horovodlike.launcher.planning.plan import JobIdentity, plan_ranks
from horovodlike.launcher.supervisor import Supervisor, failure_attribution
from horovodlike.launcher.supervisor.agent_startup import describe_this_host, start_message
from horovodlike.launcher.supervisor.connection import FrameConnection, start_local_agent
from horovodlike.launcher.supervisor.job import Job, Outcome
from horovodlike.launcher.supervisor.node_connection import NodeConnection, NodeListener, connect_node
from horovodlike.launcher.supervisor.node_relay import Relay
from horovodlike.launcher.supervisor.static_job import StaticLaunch
from horovodlike.launcher.supervisor.waiting import Waiting, print_message


class _NodeLaunch(StaticLaunch):
    """The steps that all nodes have in common: each starts its own ranks, and has its own output.

    Used only in the main thread.
    """

    _placement: Placement

    @property
    def _nodes(self) -> Nodes:
        assert self._spec.nodes is not None
        return self._spec.nodes

    def probe(self) -> None:
        """Describe this host."""
        self._hosts = {self._placement.name: describe_this_host(self._spec, self._environ)}

    def plan(self) -> None:
        """Plan the ranks of this node."""
        plans, self._said = plan_ranks(
            self._spec, self._command, self._placement, self._hosts[self._placement.name], self._identity, self._environ
        )
        self._plans = [plans]
        self._open_files(self._placement.size, self._placement.ranks)

    def start(self) -> None:
        """Start the ranks of this node."""
        self._open_output()
        agent = start_local_agent()
        self._stack.callback(agent.close)
        self._say(*self._said)
        agent.send(FrameKind.START, 0, self._messages[0])
        self._attach(self._begin(agent))

    def prepare_environment(self) -> None:
        """See :meth:`Launch.prepare_environment`."""
        self._messages = [
            start_message(self._plans[0], self._environ, self._folder, grace_period=self._spec.grace_period)
        ]

    def _begin(self, agent: FrameConnection) -> Supervisor:
        """Make the supervisor of this node's agent, whose ranks are starting."""
        raise NotImplementedError


class LeaderLaunch(_NodeLaunch):
    """The steps of node 0, which decides how the job ends."""

    def resolve(self) -> None:
        """Wait for the launchers of the other nodes."""
        self._others = _gather(self._spec, self._nodes, self._stack)
        self._verdict = 1, b"hvdrun: node 0 could not start its ranks"
        self._stack.callback(self._dismiss)
        names = _unique([socket.gethostname(), *(str(connection.host) for connection in self._others)])
        counts = (self._spec.num_proc, *(connection.num_proc for connection in self._others))
        self._placements = tuple(Placement(names, counts, number) for number in range(self._nodes.count))
        self._placement = self._placements[0]

    def serve(self) -> None:
        """Start the rendezvous server on the address of node 0 that all nodes know."""
        address = ",".join(bindable_addresses(self._nodes.host, self._spec.network_interface))
        key = key_of_ranks(self._nodes.key, self._identity.job_id)
        self._serve_ranks(key, self._placement.size, address)
        self._identity = replace(self._identity, master=(self._nodes.host, find_free_port()))

    def _begin(self, agent: FrameConnection) -> Supervisor:
        """Tell the other nodes their ranks; return the supervisor of the whole job."""
        self._stack.callback(self._dismiss)  # runs before this node's agent is ended
        for connection, placement in zip(self._others, self._placements[1:], strict=True):
            connection.host = placement.name
            connection.send(FrameKind.PLACE, 0, _encode_place(placement, self._identity))
        self._job = Job(
            dict(zip((agent, *self._others), (placement.ranks for placement in self._placements), strict=True)),
            self._output,
            self._wakeup,
            verbose=self._spec.verbose,
            network_timeout=self._spec.network_timeout,
            on_gone=self._server.exited,
            grace_period=self._spec.grace_period,
        )
        return self._job

    def supervise(self) -> None:
        """Run until the job is over, and tell the other nodes, without waiting for this node's screen."""
        outcome = self._job.run()
        self._verdict = outcome.exit_code, explain_outcome(outcome, self._placement.name)
        self._dismiss()

    def _dismiss(self) -> None:
        while self._others:
            self._others.pop(0).dismiss(*self._verdict)


class FollowerLaunch(_NodeLaunch):
    """The steps of a node other than node 0."""

    def resolve(self) -> None:
        """Ask node 0 for this node's ranks."""
        spec, nodes = self._spec, self._nodes
        assert nodes.number is not None
        deadline = time.monotonic() + spec.start_timeout
        self._uplink = connect_node(nodes.key, nodes.number, nodes.count, nodes.host, nodes.port, deadline)
        self._stack.callback(self._uplink.hang_up)
        join = {"version": installed_version(), "host": socket.gethostname(), "num_proc": spec.num_proc}
        self._uplink.send(FrameKind.JOIN, 0, encode_text(join))
        # Node 0 waits for the others no longer than its own --start-timeout, and then sends OUTCOME.
        deadline = time.monotonic() + 2 * spec.start_timeout
        try:
            frame, *self._early = self._uplink.await_frame(deadline, FrameKind.PLACE, FrameKind.OUTCOME)
        except (OSError, InvalidFrameError) as error:
            raise HostsError(f"node 0 has gone, or is stuck ({error}); see what it prints") from None
        if frame.kind is FrameKind.OUTCOME:
            raise HostsError(f"node 0 says: {frame.payload.decode(errors='replace')}")
        self._placement, self._identity = _decode_place(frame, nodes)

    def serve(self) -> None:
        """Leave the rendezvous server to node 0."""

    def plan(self) -> None:
        """Plan the ranks of this node; tell node 0 if they do not fit."""
        try:
            super().plan()
        except UsageError as error:
            self._uplink.send(FrameKind.FAILED, 0, str(error).encode())
            raise

    def _begin(self, agent: FrameConnection) -> Supervisor:
        self._relay = Relay(agent, self._uplink, self._output, self._wakeup, self._spec.network_timeout)
        return self._relay

    def supervise(self) -> None:
        """Run until node 0 has ended the job."""
        self._exit_code = self._relay.run(self._early)

    def attribute(self) -> Outcome:
        """Return the exit code that node 0 has decided."""
        return Outcome(exit_code=self._exit_code, trouble=self._relay.why)


def _gather(spec: JobSpec, nodes: Nodes, stack: ExitStack) -> list[NodeConnection]:
    """Wait for the launchers of all other nodes; return their connections by node."""
    deadline = time.monotonic() + spec.start_timeout
    found: dict[int, NodeConnection] = {}
    waiting = Waiting()
    try:
        with NodeListener(nodes.key, nodes.count, listening_addresses(spec, nodes, deadline), nodes.port) as listener:
            while len(found) < nodes.count - 1:
                accepted = listener.accept(waiting.next_look(deadline))
                if accepted is not None:
                    connection, count, join = accepted
                    stack.callback(connection.hang_up)
                    refusal = _refusal(nodes, connection.node, count, found)
                    if refusal is not None:
                        print_message(f"{_host_of(join)}: {refusal}")
                        connection.dismiss(1, refusal.encode())
                        continue
                    found[connection.node] = connection
                    read_join(connection, join)
                elif time.monotonic() >= deadline:
                    raise _missing(spec, nodes, found, listener.denials)
                if len(found) < nodes.count - 1:
                    missing = listed("node", _missing_nodes(nodes, found))
                    waiting.note(f"waiting for {missing} of {nodes.count}{listener.denials}")
    except HostsError as error:
        for connection in found.values():
            connection.dismiss(1, str(error).encode())
        raise
    waiting.end(f"all {nodes.count} nodes have come")
    return [found[node] for node in sorted(found)]


def _missing_nodes(nodes: Nodes, found: Mapping[int, NodeConnection]) -> list[int]:
    return [node for node in range(1, nodes.count) if node not in found]


def _host_of(join: Frame) -> str:
    try:
        return f"a launcher on {decode_text(join.payload)['host']}"
    except (ValueError, TypeError, KeyError):
        return "a launcher"


def listening_addresses(spec: JobSpec, nodes: Nodes, deadline: float) -> list[str]:
    """Return the addresses on which node 0 listens; wait until its name, which may be new, can be resolved.

    Raises:
        HostsError: The name is still not this host's at the deadline.
    """
    waiting = Waiting()
    while not (found := bindable_addresses(nodes.host, spec.network_interface)):
        others = ", ".join(resolve(nodes.host))
        if time.monotonic() >= deadline:
            seen = f" (it is {others})" if others else " (it cannot be resolved)"
            raise HostsError(
                f"--rendezvous {nodes.host}:{nodes.port} is none of this host's addresses{seen}, but node 0 runs here; "
                "name this host, or say with --network-interface where to listen"
            )
        now = f"is {others}, and not yet an address of this host" if others else "cannot be resolved yet"
        waiting.note(f"waiting: the name of node 0, {nodes.host}, {now}")
        time.sleep(0.2)
    waiting.end(f"the name of node 0, {nodes.host}, is {', '.join(found)}")
    if not spec.network_interface and (others := ", ".join(sorted({*resolve(nodes.host)} - {*found}))):
        print_message(
            f"the name of node 0, {nodes.host}, is {others} as well, which is not this host: the other nodes may try "
            "that. Is there a second node 0, or one that is about to end?"
        )
    return found


def _missing(spec: JobSpec, nodes: Nodes, found: Mapping[int, NodeConnection], denials: str) -> HostsError:
    missing = [str(node) for node in _missing_nodes(nodes, found)]
    return HostsError(
        f"after {spec.start_timeout:g} s {len(missing)} of {nodes.count} nodes had not come: --node-rank "
        f"{', '.join(missing)}{denials}; does hvdrun run there, with the same --rendezvous? If they only need longer, "
        "raise --start-timeout"
    )


def _refusal(nodes: Nodes, node: int, count: int, found: dict[int, NodeConnection]) -> str | None:
    if count != nodes.count:
        return f"--nnodes is {count} on node {node} but {nodes.count} on node 0; give the same everywhere"
    if node in found and not _has_gone(found[node]):
        return f"two nodes claim to be --node-rank {node}; give each its own"
    return None


def _has_gone(connection: NodeConnection) -> bool:
    """Return True if a launcher that had joined has gone since, such as one that was started again."""
    try:
        return connection.receive() is None
    except (OSError, InvalidFrameError):
        return True


def read_join(connection: NodeConnection, join: Frame) -> dict[str, Any]:
    """Read a launcher's JOIN, and note the node's data; return all of it.

    Raises:
        HostsError: It makes no sense, or comes from another version.
    """
    who = f"node {connection.node}" if connection.node else "a node"
    try:
        said: dict[str, Any] = decode_text(join.payload)
        version, connection.host = str(said["version"]), str(said["host"])
        if version == installed_version():
            connection.num_proc = int(said["num_proc"])
            if connection.num_proc < 1:
                raise ValueError(f"it has {connection.num_proc} ranks")
    except (ValueError, TypeError, KeyError) as error:
        raise HostsError(
            f"{who} cannot be understood ({error!r}): is it another version of horovodlike? Install the same"
        ) from None
    if version != installed_version():
        raise HostsError(
            f"horovodlike {version} is installed on {who} ({connection.host}), but {installed_version()} on node 0; "
            "install the same"
        )
    return said


def _unique(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the nodes; if several have the same name, add their numbers."""
    count = Counter(names)
    return tuple(name if count[name] == 1 else f"{name}#{number}" for number, name in enumerate(names))


def key_of_ranks(key: JobKey, job_id: str) -> JobKey:
    """Derive the key of the ranks, a new one for each job: no message of one job is valid in another."""
    return key.derive(b"horovodlike ranks", job_id.encode())


def _encode_place(placement: Placement, identity: JobIdentity) -> bytes:
    place = {"names": placement.names, "counts": placement.counts, "number": placement.number}
    rendezvous = {"job_id": identity.job_id, "address": identity.address, "port": identity.port}
    return encode_text({**place, **rendezvous, "master": identity.master, "monitor_port": identity.monitor_port})


def _decode_place(frame: Frame, nodes: Nodes) -> tuple[Placement, JobIdentity]:
    try:
        said = decode_text(frame.payload)
        placement = Placement(tuple(said["names"]), tuple(said["counts"]), said["number"])
        job_id, address, port = str(said["job_id"]), str(said["address"]), int(said["port"])
        master, monitor_port = (str(said["master"][0]), int(said["master"][1])), int(said["monitor_port"])
    except (ValueError, TypeError, KeyError) as error:
        raise HostsError(f"node 0 cannot be understood ({error!r}); install the same horovodlike there") from None
    return placement, JobIdentity(job_id, key_of_ranks(nodes.key, job_id).hex(), address, port, master, monitor_port)


def explain_outcome(outcome: Outcome, here: str, kind: str = "rank") -> bytes:
    """Return the text that the other nodes print if the job has failed.

    Args:
        outcome: How it has ended.
        here: The name of this node.
        kind: The noun for its processes.
    """
    if (failure := outcome.failure) is not None:
        return b"\n".join(failure_attribution.describe(replace(failure, host=failure.host or here), kind))
    if outcome.trouble is not None:
        return f"hvdrun: {outcome.trouble}".encode()
    return b"" if outcome.exit_code == 0 else f"hvdrun: the job was ended from outside, on {here}".encode()
