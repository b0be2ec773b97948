"""The nodes of an elastic job: an actor on each calls in, and a thread watches which nodes come, go and have room."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray._private.state import state as cluster_state
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from horovodlike.launcher.elastic.call_in import CallIn
from horovodlike.launcher.elastic.called_hosts import CalledHosts, Caller
from horovodlike.launcher.errors import HostsError
from horovodlike.ray.adapter import first_line
from horovodlike.ray.strategy import Demand, Reservation, Resources, offered, reserve, room_for
from horovodlike.ray.worker import WorkerFacts

__all__ = ["Callers", "JobHosts", "NodeCaller", "NodeOptions"]

_logger = logging.getLogger(__name__)
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_LOOK_SECONDS = 0.5
_SETTLED_SECONDS = 2.0
"""For how long a node must have had the same room before a part of it is used: Ray's numbers lag behind."""
_BACKOFF_SECONDS = 5.0
_LONGEST_BACKOFF_SECONDS = 60.0
_CLOSE_SECONDS = 2.0


class JobHosts(CalledHosts):
    """The hosts of one job that call in; another thread may end the job, and reads what its workers log."""

    def __init__(self, address: str) -> None:
        """Listen.

        Args:
            address: The address of this node.
        """
        super().__init__([address])
        self.address = address
        self.values: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.has_joined = False
        self._is_cancelled = False

    def cancel(self) -> None:
        """End the job soon, from any thread; its ``run()`` raises a RuntimeError."""
        self._is_cancelled = True

    def attend(self) -> list[Caller]:
        """See :meth:`CalledHosts.attend`."""
        if self._is_cancelled:
            raise RuntimeError("shutdown() has ended the job")
        joined = super().attend()
        self.has_joined |= bool(joined)
        return joined

    def on_log(self, data: bytes) -> None:
        """See :meth:`CalledHosts.on_log`."""
        self.values.put(data)


@dataclass(frozen=True)
class NodeOptions:
    """The arguments of a :class:`NodeCaller`.

    Attributes:
        key: The key of the job, in hexadecimal digits.
        address: The address of its driver.
        port: The port of its driver.
        start_timeout: How long to wait for the driver, in seconds.
        variables: Environment variables of the workers, besides those of the Ray node.
    """

    key: str = field(repr=False)
    address: str
    port: int
    start_timeout: float
    variables: Mapping[str, str]


class NodeCaller:
    """An actor that has the resources of the job's workers on one node, and starts them as the driver says."""

    def __init__(self) -> None:
        """Do nothing yet."""
        self._lock = threading.Lock()  # of the two
        self._caller: CallIn | None = None
        self._leaves = False

    def call_in(self, options: NodeOptions, slots: int) -> tuple[int, str]:
        """Offer slots to the job until it is over, or this node has left it.

        Returns:
            The exit code of the job, or 143 if this node has left it, and why.

        Raises:
            HostsError: The job cannot be reached, or refuses this node.
        """
        facts = WorkerFacts.collect()
        gpus = {_VISIBLE: ",".join(facts.gpus)} if facts.gpus else {}
        caller = CallIn(
            options.key,
            facts.node,
            options.address,
            options.port,
            slots,
            environ={**os.environ, **gpus, **options.variables},
            prints=True,
            start_timeout=options.start_timeout,
        )
        with self._lock:
            self._caller = caller
            if self._leaves:
                caller.leave()
        return caller.run(), caller.reason

    def leave(self) -> None:
        """Have this node leave the job at the next commit."""
        with self._lock:
            self._leaves = True
            if self._caller is not None:
                self._caller.leave()


@dataclass
class _Caller:
    """A :class:`NodeCaller`, as the driver's process sees it."""

    handle: ActorHandle[NodeCaller]
    node: str
    slots: int
    started: Any  # a reference that is ready when the actor runs; None once it is
    since: float
    leaves: bool = False


class Callers:
    """The actors of one job on the nodes of the cluster. All but :meth:`stop` belongs to one thread at a time."""

    def __init__(
        self,
        demand: Demand,
        most: int | None,
        hosts: JobHosts,
        options: NodeOptions,
        placement_timeout: float,
        discovery: Any = None,
    ) -> None:
        """Prepare; :meth:`watch` starts them.

        Args:
            demand: The fewest workers, and the resources of each.
            most: The most workers; None for as many as there is room for.
            hosts: The hosts of the job.
            options: The arguments of each actor.
            placement_timeout: How long Ray may take to start an actor, in seconds.
            discovery: An object with ``find_available_hosts_and_slots()``, which returns the most workers of each
                address of a node; None for all nodes.
        """
        self._demand = demand
        self._most = most
        self._hosts = hosts
        self._options = options
        self._placement_timeout = placement_timeout
        self._discovery = discovery
        self._callers: dict[Any, _Caller] = {}  # by the reference to the result of call_in()
        self._seen: dict[str, tuple[int, float]] = {}  # by node: its room for workers, and since when
        self._refusals: dict[str, tuple[int, float]] = {}  # by node: how many, and until when it is not asked again
        self._asked: Reservation | None = None  # tells an autoscaler that nodes are missing
        self._short_since: float | None = None
        self._stop = threading.Event()

    def stop(self) -> None:
        """Have :meth:`watch` return; callable from any thread."""
        self._stop.set()

    def watch(self) -> None:
        """Start actors where there is room, and end those whose nodes leave, until :meth:`stop` is called.

        Raises:
            HostsError: No node can take part.
        """
        said = ""
        while True:
            try:
                self._look(time.monotonic())
                said = ""
            except HostsError:
                raise
            except Exception as error:  # such as a head node that restarts: the job continues with its nodes
                if not ray.is_initialized():
                    raise
                if str(error) != said:
                    _logger.warning("the nodes of the cluster cannot be found out: %s", error)
                said = str(error)
            if self._stop.wait(_LOOK_SECONDS):
                return

    def close(self) -> None:
        """End all actors. They have ended their workers, unless the job was cancelled."""
        if not ray.is_initialized():
            return  # all has ended with the connection
        if self._asked is not None:
            self._asked.release()
        if self._callers:
            ray.wait(list(self._callers), num_returns=len(self._callers), timeout=_CLOSE_SECONDS)
        for caller in self._callers.values():
            ray.kill(caller.handle)

    def _look(self, now: float) -> None:
        self._collect(now)
        nodes = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
        limits = None if self._discovery is None else self._discovery.find_available_hosts_and_slots()
        unwanted = set(cluster_state.get_draining_nodes())
        if limits is not None:
            unwanted |= {name for name, node in nodes.items() if not limits.get(node["NodeManagerAddress"])}
        for caller in self._callers.values():
            if caller.node in unwanted and not caller.leaves:
                caller.leaves = True
                caller.handle.leave.remote()
        taken = {caller.node for caller in self._callers.values()}
        free = available_resources_per_node()
        for name in list(self._seen.keys() - nodes.keys()):
            del self._seen[name]
        for name, node in nodes.items():
            if name in unwanted or name in taken:
                continue
            slots = self._room(name, free.get(name, {}), node["Resources"], now)
            if limits is not None:
                slots = min(slots, int(limits[node["NodeManagerAddress"]]))
            if self._refusals.get(name, (0, 0.0))[1] <= now:
                self._start(name, slots, now)
        self._ask_for_nodes(now)

    def _collect(self, now: float) -> None:
        """Remove the actors that have ended, and those that Ray has not started in time."""
        ended = ray.wait(list(self._callers), num_returns=len(self._callers), timeout=0)[0] if self._callers else []
        for call in ended:
            caller = self._callers.pop(call)
            refusal = ""
            try:
                code, reason = ray.get(call)
                refusal = reason if code and not caller.leaves else ""
            except Exception as error:  # it could not call in, or it is lost, perhaps with its node
                refusal = first_line(error)
            ray.kill(caller.handle)
            if refusal:
                self._note_refusal(caller.node, refusal, now)
        for call, caller in list(self._callers.items()):
            if caller.started is not None and ray.wait([caller.started], timeout=0)[0]:
                caller.started = None
            elif caller.started is not None and now - caller.since > self._placement_timeout:
                del self._callers[call]
                ray.kill(caller.handle)
                _logger.warning("an actor did not start on node %s in time; see Ray's logs", caller.node)

    def _note_refusal(self, node: str, reason: str, now: float) -> None:
        if not self._hosts.has_joined and not self._callers:
            raise HostsError(f"no node of the cluster can take part; {node}: {reason}")
        count = self._refusals.get(node, (0, 0.0))[0]
        seconds = min(_BACKOFF_SECONDS * 2.0**count, _LONGEST_BACKOFF_SECONDS)
        self._refusals[node] = count + 1, now + seconds
        _logger.warning("node %s has left the job, and is not used for %g s: %s", node, seconds, reason)

    def _room(self, node: str, free: Resources, total: Resources, now: float) -> int:
        """Return how many workers a node can take, 0 as long as Ray's numbers may lag behind."""
        per_worker = self._demand.per_worker
        slots = room_for(per_worker, [free])
        before, since = self._seen.get(node, (0, now))
        since = since if slots == before else now
        self._seen[node] = slots, since
        is_sure = slots == room_for(per_worker, [total]) or now - since >= _SETTLED_SECONDS
        return slots if is_sure else 0

    def _start(self, node: str, slots: int, now: float) -> None:
        if self._most is not None:
            slots = min(slots, self._most - self._slots())
        if slots < 1:
            return
        resources = {name: number * slots for name, number in self._demand.per_worker.items()}
        actor = ray.remote(num_cpus=resources.get("CPU", 0), num_gpus=resources.get("GPU", 0))(NodeCaller)
        here = NodeAffinitySchedulingStrategy(node, soft=False)
        handle = actor.options(scheduling_strategy=here, max_concurrency=2).remote()  # one thread for leave()
        call = handle.call_in.remote(self._options, slots)
        self._callers[call] = _Caller(handle, node, slots, handle.__ray_ready__.remote(), now)

    def _slots(self) -> int:
        return sum(caller.slots for caller in self._callers.values() if not caller.leaves)

    def _ask_for_nodes(self, now: float) -> None:
        """While there are fewer slots than the job needs, have a placement group wait for them: autoscalers see it."""
        missing = self._demand.workers - self._slots()
        self._short_since = None if missing <= 0 else self._short_since or now
        if self._asked is not None and (missing <= 0 or self._asked.group.wait(0)):
            self._asked.release()
            self._asked, self._short_since = None, now
        elif self._asked is None and missing > 0 and now - (self._short_since or now) > _SETTLED_SECONDS:
            wanted = Demand(missing, self._demand.per_worker, use_current=False)
            _logger.warning("waiting for resources: %s asked for, %s", wanted, offered())
            self._asked = reserve(wanted)
