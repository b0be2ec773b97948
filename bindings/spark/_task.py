"""The part of a job that runs on the executors: each task of a barrier stage starts one rank and watches it.

The task of partition 0 leads, as ``hvdrun`` of node 0 does with ``--nnodes``: it makes the job's key, runs the
rendezvous server and the supervisor of all ranks, and returns their results. The other tasks are relays. Spark's
``allGather`` carries the key and the address. Ranks are processes of their own under an agent, which ends them when the
task's Python worker ends, for any reason.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from horovodlike import config
from horovodlike._net.interfaces import choose_address, local_addresses
from horovodlike._net.secure_channel import JobKey
from horovodlike.errors import ConfigError
from horovodlike.launcher.agent.host_probe import VISIBLE, detect_host, find_free_port, installed_version
from horovodlike.launcher.agent.protocol import FrameKind
from horovodlike.launcher.agent.run_task import LENGTH
from horovodlike.launcher.errors import HostsError
from horovodlike.launcher.planning import JobSpec
from horovodlike.launcher.planning.addresses import LOOPBACK, bindable_addresses
from horovodlike.launcher.planning.hosts import Placement
from horovodlike.launcher.planning.plan import JobIdentity, RankPlan, plan_ranks
from horovodlike.launcher.run import RUN_TASK
from horovodlike.launcher.supervisor import Wakeup
from horovodlike.launcher.supervisor.agent_startup import start_message
from horovodlike.launcher.supervisor.connection import FrameConnection, start_local_agent
from horovodlike.launcher.supervisor.job import Job, Outcome
from horovodlike.launcher.supervisor.node_connection import NodeListener, connect_node
from horovodlike.launcher.supervisor.node_relay import Relay
from horovodlike.launcher.supervisor.writer import Writer
from horovodlike.spark._output import Row, TaskOutput

if TYPE_CHECKING:
    import pyarrow
    from pyspark import BarrierTaskContext

SCHEMA = "rank int, kind int, at long, piece binary"
"""A row: output of a rank with the time in nanoseconds, a piece of its result, or how the job has ended."""
_PIECE = 4 * 1024 * 1024
_BATCH_ROWS = 1024
_OF_SPARK = re.compile(
    r"PYTHON_WORKER_FACTORY_\w+|PYTHON_UNIX_DOMAIN_\w+|PYSPARK_\w*SECRET\w*|_?SPARK_AUTH_\w+|_SPARK_SSL_\w+"
)
"""Variables of a Python worker that its children must not have."""


@dataclass(frozen=True)
class Request:
    """The request of the driver, as it travels to the tasks.

    Attributes:
        job: The name of the job, new for each submission.
        version: The driver's release of horovodlike.
        task: The pickle of the function with its arguments.
        environ: Variables for the ranks, besides the executor's own.
        executable: The Python interpreter of the ranks; the executor's if None.
        network_interface: The network between the hosts, as in the setting of this name.
        start_timeout: How long tasks and ranks wait for each other, in seconds.
        verbose: Whether decisions are explained.
        output: Whether the caller wants the output of the ranks.
        log: Whether the output goes to the executor's log as well.
        ended: The names of earlier jobs, whose notes on executors are of no use any more.
        secret: The place where the driver takes output, with the key for it; None if it does not listen.
    """

    job: str
    version: str
    task: bytes
    environ: Mapping[str, str]
    executable: str | None
    network_interface: str
    start_timeout: float
    verbose: bool
    output: bool = True
    log: bool = True
    ended: tuple[str, ...] = ()
    secret: str | None = field(default=None, repr=False)


@dataclass(frozen=True)
class _Member:
    """The facts that each task tells the others.

    Attributes:
        host: The executor's host, as Spark names it.
        version: The release of horovodlike there.
        attempt: The number of this attempt of the task, which no other one has.
        earlier: The attempts of tasks of this job that were on this executor before.
        leader: Facts that only the task of partition 0 reports: key, job, address and ports. Or the ``trouble`` of any
            task.
    """

    host: str
    version: str
    attempt: int
    earlier: tuple[int, ...]
    leader: Mapping[str, Any] = field(repr=False)


def run_task(request: Request) -> Iterator[pyarrow.RecordBatch]:
    """Run this task's rank, and yield rows of :data:`SCHEMA`. Runs in a task of a barrier stage."""
    from pyspark import BarrierTaskContext

    yield from _batches(_rows(request, BarrierTaskContext.get()))


def _rows(request: Request, context: BarrierTaskContext) -> Iterator[Row]:
    number = context.partitionId()
    with ExitStack() as stack:
        hosts = [_host_of(info.address) for info in context.getTaskInfos()]
        offer = _Offer({})
        try:
            config.load(_environment(request.environ, ()))
        except ConfigError as error:
            offer = _Offer({"trouble": f"executor host {hosts[number]}: {error}"})
        else:
            if number == 0:
                offer = _offer(request, hosts, stack)
        mine = _Member(
            hosts[number],
            installed_version(),
            context.taskAttemptId(),
            _earlier_attempts(request, context.taskAttemptId()),
            offer.facts,
        )
        told = [json.loads(text) for text in context.allGather(json.dumps(asdict(mine)))]
        members = [_Member(**facts) for facts in told]
        trouble = _why_not(request, members)
        if trouble is not None:
            if number == 0:
                yield _outcome_row(Outcome(1, trouble=trouble), lost=_is_retry(members))
            return
        task = _Task(request, number, members, _gpus_of(context), stack)
        yield from task.lead(offer) if number == 0 else task.follow()


def _host_of(address: str) -> str:
    """Return the host of ``host:port``."""
    return address.rpartition(":")[0].strip("[]") or address


def _gpus_of(context: BarrierTaskContext) -> tuple[str, ...]:
    found = context.resources().get("gpu")
    return () if found is None else tuple(found.addresses)


def _earlier_attempts(request: Request, attempt: int) -> tuple[int, ...]:
    """Note this attempt on the executor; return those that were noted before. Spark does not tell a task of a retry."""
    from pyspark import SparkFiles

    folder = SparkFiles.getRootDirectory()
    prefix = f".horovodlike-{request.job}-"
    stale = tuple(f".horovodlike-{job}-" for job in request.ended)
    try:
        names = os.listdir(folder)
        for name in names:
            if name.startswith(stale):
                with suppress(FileNotFoundError):  # another task of this executor was faster
                    os.remove(os.path.join(folder, name))
        found = tuple(int(name.removeprefix(prefix)) for name in names if name.startswith(prefix))
        with open(os.path.join(folder, f"{prefix}{attempt}"), "wb"):
            return found
    except OSError:
        return ()


def _is_retry(members: list[_Member]) -> bool:
    known = {member.attempt for member in members}
    return any(attempt not in known for member in members for attempt in member.earlier)


def _why_not(request: Request, members: list[_Member]) -> str | None:
    """Return the reason why the job cannot run; the same on all tasks."""
    for member in members:
        if member.version != request.version:
            return (
                f"horovodlike {member.version} is installed on executor host {member.host}, but {request.version} "
                "on the driver; install the same"
            )
    if _is_retry(members):
        return "Spark has lost a task of the job, and its stage would begin anew"
    return next((str(member.leader["trouble"]) for member in members if "trouble" in member.leader), None)


class _Offer:
    """The listeners of the task of partition 0, which are open before it tells the others where."""

    def __init__(self, facts: Mapping[str, Any], listener: NodeListener | None = None, server: Any = None) -> None:
        self.facts = facts
        self.listener = listener
        self.server = server


def _offer(request: Request, hosts: list[str], stack: ExitStack) -> _Offer:
    from horovodlike._bootstrap.bootstrap import RendezvousServer

    key, job = JobKey(secrets.token_bytes(32)), secrets.token_hex(8)
    ranks_key = key.derive(b"horovodlike ranks", job.encode())
    try:
        address = _address(hosts, request.network_interface)
        server = RendezvousServer(ranks_key, len(hosts), address, job)
        server.start()
        stack.callback(server.close)
        listener = stack.enter_context(NodeListener(key, len(hosts), [address], 0))
    except (RuntimeError, ValueError) as error:
        return _Offer({"trouble": f"the task of rank 0 on {hosts[0]} cannot listen for the others: {error}"})
    facts = {
        **{"key": key.hex(), "ranks_key": ranks_key.hex(), "job": job, "address": address},
        **{"rendezvous_port": server.port, "port": listener.port, "master_port": find_free_port()},
    }
    return _Offer(facts, listener, server)


def _address(hosts: list[str], network_interface: str) -> str:
    """Return the address of this host at which the other executors reach it."""
    if len(set(hosts)) == 1:
        return LOOPBACK
    found = bindable_addresses(hosts[0], network_interface)
    usable = [address for address in found if not address.startswith("127.") and address != "::1"]
    return usable[0] if usable else choose_address(network_interface, local_addresses())


class _Task:
    """One rank from its start to its end."""

    def __init__(
        self, request: Request, number: int, members: list[_Member], gpus: tuple[str, ...], stack: ExitStack
    ) -> None:
        self._request, self._number, self._stack = request, number, stack
        self._size = len(members)
        self._leader = members[0].leader
        self._key = JobKey(bytes.fromhex(self._leader["key"]))
        self._hosts = [member.host for member in members]
        self._ranks = ranks_of(self._hosts)
        self._rank = self._ranks[number]
        self._environ = _environment(request.environ, gpus)
        self._wakeup = Wakeup()
        stack.callback(self._wakeup.close)
        writer = Writer(self._wakeup.set)
        self._output = TaskOutput(writer, self._size, log=request.log, wanted=request.output, secret=request.secret)
        stack.callback(self._output.close)
        stack.callback(writer.close)
        values = config.load(self._environ)
        self._network_timeout = values.network_timeout

    def lead(self, offer: _Offer) -> Iterator[Row]:
        """Supervise all ranks; yield how the job has ended, and the results."""
        assert offer.listener is not None
        try:
            others = self._gather(offer.listener)
        except HostsError as error:
            outcome = Outcome(1, trouble=str(error))
        else:
            agent = self._start_agent()
            supervisor = Job(
                {agent: [self._rank], **{others[number]: [self._ranks[number]] for number in others}},
                self._output,
                self._wakeup,
                verbose=self._request.verbose,
                network_timeout=self._network_timeout,
                on_gone=offer.server.exited,
            )
            self._start_rank(agent)
            outcome = supervisor.run()
            for connection in others.values():
                connection.dismiss(outcome.exit_code, b"")
            outcome = supervisor.drain()
        yield from self._output.rows()
        for rank, answer in sorted(outcome.results.items()):
            for start in range(0, len(answer), _PIECE):
                yield rank, FrameKind.RESULT, 0, bytes(answer[start : start + _PIECE])
        yield _outcome_row(outcome)

    def follow(self) -> Iterator[Row]:
        """Relay between this task's agent and the task of rank 0."""
        deadline = time.monotonic() + self._request.start_timeout
        leader = self._leader
        try:
            uplink = connect_node(self._key, self._number, self._size, leader["address"], leader["port"], deadline)
            self._stack.callback(uplink.hang_up)
            uplink.send(FrameKind.JOIN)
            frame, *early = uplink.await_frame(
                deadline + self._request.start_timeout, FrameKind.PLACE, FrameKind.OUTCOME
            )
        except (HostsError, OSError, ValueError) as error:  # the task of rank 0 misses this one, and says so
            print(f"horovodlike: rank {self._rank} cannot join the job: {error}", file=sys.stderr)
            return
        if frame.kind is FrameKind.PLACE:
            agent = self._start_agent()
            relay = Relay(agent, uplink, self._output, self._wakeup, self._network_timeout)
            self._start_rank(agent)
            relay.run(early)
            yield from self._output.rows()

    def _gather(self, listener: NodeListener) -> dict[int, Any]:
        """Wait for the other tasks; return their connections by partition."""
        deadline = time.monotonic() + self._request.start_timeout
        found: dict[int, Any] = {}
        while len(found) < self._size - 1:
            accepted = listener.accept(deadline)
            if accepted is None:
                missing = [number for number in range(1, self._size) if number not in found]
                shown = ", ".join(f"rank {self._ranks[number]} on {self._hosts[number]}" for number in missing)
                raise HostsError(
                    f"after {self._request.start_timeout:g} s these had not reached the task of rank 0 at "
                    f"{self._leader['address']} port {self._leader['port']}: {shown}; can executors connect to each "
                    "other's ports? nics= chooses the network"
                )
            connection = accepted[0]
            self._stack.callback(connection.hang_up)
            connection.host = self._hosts[connection.node]
            found[connection.node] = connection
        for connection in found.values():
            connection.send(FrameKind.PLACE)
        return found

    def _start_agent(self) -> FrameConnection:
        agent = start_local_agent()
        self._stack.callback(agent.close)
        return agent

    def _start_rank(self, agent: FrameConnection) -> None:
        path = json.dumps([entry for entry in sys.path if entry]).encode()
        agent.send_task(LENGTH.pack(len(path)) + path + self._request.task)
        agent.send(FrameKind.START, 0, start_message([self._plan()], self._environ, os.getcwd()))

    def _plan(self) -> RankPlan:
        request, leader = self._request, self._leader
        names = tuple(dict.fromkeys(self._hosts))
        counts = tuple(self._hosts.count(name) for name in names)
        placement = Placement(names, counts, names.index(self._hosts[self._number]))
        command = (request.executable or sys.executable, str(RUN_TASK))
        settings = {config.SETTINGS["network_interface"].variable: request.network_interface}
        spec = JobSpec(
            self._size,
            command,
            settings={name: value for name, value in settings.items() if value},
            start_timeout=request.start_timeout,
            network_interface=request.network_interface,
            verbose=request.verbose,
        )
        identity = JobIdentity(
            leader["job"],
            leader["ranks_key"],
            leader["address"],
            leader["rendezvous_port"],
            (leader["address"], leader["master_port"]),
        )
        plans, said = plan_ranks(spec, command, placement, detect_host(), identity, self._environ)
        if request.verbose:
            self._output.say(*(f"horovodlike: rank {self._rank}: {line}" for line in said))
        return next(replace(plan, cpus=None) for plan in plans if plan.rank == self._rank)


def ranks_of(hosts: list[str]) -> list[int]:
    """Return the rank of each partition: hosts in the order of their lowest partitions, a host's ranks in a row."""
    order = sorted(range(len(hosts)), key=lambda number: (hosts.index(hosts[number]), number))
    return [order.index(number) for number in range(len(hosts))]


def _environment(given: Mapping[str, str], gpus: tuple[str, ...]) -> dict[str, str]:
    """Return the environment of a rank: the executor's, without Spark's secrets, and the given variables."""
    own = {name: value for name, value in os.environ.items() if not _OF_SPARK.fullmatch(name)}
    return {**own, **({VISIBLE: ",".join(gpus)} if gpus else {}), **given}


def _outcome_row(outcome: Outcome, lost: bool = False) -> Row:
    failure = outcome.failure
    told = {
        "exit_code": outcome.exit_code,
        "trouble": outcome.trouble,
        "lost": lost,
        "failure": failure
        and {**asdict(failure), "last_lines": [line.decode("latin-1") for line in failure.last_lines]},
    }
    return -1, FrameKind.OUTCOME, 0, json.dumps(told).encode()


def _batches(rows: Iterable[Row]) -> Iterator[pyarrow.RecordBatch]:
    """Put rows into batches of a few MiB."""
    held: list[Row] = []
    size = 0
    for row in rows:
        held.append(row)
        size += len(row[3])
        if size >= _PIECE or len(held) >= _BATCH_ROWS:
            yield _batch(held)
            held, size = [], 0
    if held:
        yield _batch(held)


def _batch(rows: list[Row]) -> pyarrow.RecordBatch:
    import pyarrow

    columns = [*zip(*rows, strict=True)]
    types = (pyarrow.int32(), pyarrow.int32(), pyarrow.int64(), pyarrow.binary())
    arrays = [pyarrow.array(column, kind) for column, kind in zip(columns, types, strict=True)]
    return pyarrow.RecordBatch.from_arrays(arrays, names=["rank", "kind", "at", "piece"])
