"""The nodes of an elastic job: a thread watches which come, go and have room, and has an actor on each call in."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray._private.state import state as cluster_state
from ray.actor import ActorHandle
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from horovodlike.launcher.elastic.called_hosts import CalledHosts, Caller
from horovodlike.launcher.errors import HostsError
from horovodlike.ray.failures import first_line
from horovodlike.ray.node_caller import NodeCaller, NodeOptions
from horovodlike.ray.node_choice import Node, Snapshot, Taken, seconds_to_leave
from horovodlike.ray.strategy import Demand, Reservation, Resources, kill, offered, reserve, room_for

__all__ = ["Callers", "JobHosts"]

_logger = logging.getLogger(__name__)
_LOOK_SECONDS = 0.5
_SETTLED_SECONDS = 2.0
"""The time for which a node must have had the same room before a part of it is used: Ray's numbers lag behind."""
_ASK_SECONDS = 3 * _SETTLED_SECONDS
"""How long workers must be missing before a placement group asks for nodes; it may take room that is still settling."""
_BACKOFF_SECONDS = 5.0
_LONGEST_BACKOFF_SECONDS = 60.0
_CLOSE_SECONDS = 2.0


class JobHosts(CalledHosts):
    """The hosts of one job that call in; another thread may end the job, and reads its workers' logged values."""

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
        self.note_end()

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


@dataclass
class _Caller:
    """A :class:`NodeCaller`, as the driver's process sees it."""

    handle: ActorHandle[NodeCaller]
    name: str  # in the job
    node: str
    slots: int
    started: Any  # a reference that is ready when the actor runs; None once it is
    since: float
    leaves: bool = False


@dataclass
class _Trouble:
    """The trouble with a node whose actor has ended before the job."""

    count: int = 0
    until: float = 0.0  # it receives no workers before
    refusal: str = ""  # why it cannot take part; empty if its actor was only lost


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
        self._limits: dict[str, int] | None = None  # the discovery's last answer
        self._callers: dict[Any, _Caller] = {}  # by the reference to the result of call_in()
        self._seen: dict[str, tuple[int, float]] = {}  # by node: its room for workers, and since when
        self._troubles: dict[str, _Trouble] = {}  # by node
        self._asked: Reservation | None = None  # tells an autoscaler that nodes are missing
        self._short_since: float | None = None
        self._said: dict[str, str] = {}  # by the missing resource: the last warning
        self._stop = threading.Event()

    def stop(self) -> None:
        """Have :meth:`watch` return; callable from any thread."""
        self._stop.set()

    def watch(self) -> None:
        """Start actors where there is room, and end those whose nodes leave, until :meth:`stop` is called.

        Raises:
            HostsError: No node can take part, or the discovery cannot say which nodes may be used.
        """
        what = "the nodes of the cluster cannot be found out"
        while True:
            try:
                if not self._hosts.is_over:
                    self._look(time.monotonic())
                self._said.pop(what, None)
            except HostsError:
                raise
            except Exception as error:  # such as a head node that restarts: the job continues with its nodes
                if not ray.is_initialized():
                    raise
                self._warn(what, error)
            if self._stop.wait(_LOOK_SECONDS):
                return

    def close(self) -> None:
        """End all actors. They have ended their workers, unless the job was cancelled."""
        if not ray.is_initialized():
            return  # all has ended with the connection
        with ExitStack() as stack:  # one error, or an interrupt, does not keep the rest from its end
            for caller in self._callers.values():
                stack.callback(kill, caller.handle)
            if self._asked is not None:
                stack.callback(self._asked.release)
            if self._callers:
                ray.wait(list(self._callers), num_returns=len(self._callers), timeout=_CLOSE_SECONDS)

    def _look(self, now: float) -> None:
        calls = list(self._callers)
        ended = ray.wait(calls, num_returns=len(calls), timeout=0)[0] if calls else []
        if self._hosts.is_over:  # then they have ended because of that
            return
        for call in ended:
            self._take_end(call, now)
        self._end_late(now)
        draining: Mapping[str, int] = cluster_state.get_draining_nodes()
        snapshot = self._snapshot(draining, now)
        for node in snapshot.leaving():
            self._leave(node, seconds_to_leave(draining.get(node, 0), time.time()))
        refused = {name: each.refusal for name, each in self._troubles.items() if each.refusal}
        if not self._hosts.has_joined and snapshot.is_hopeless(refused):
            why = "; ".join(f"{node}: {refusal}" for node, refusal in refused.items())
            raise HostsError(f"no node of the cluster can take part; {why}")
        starts = snapshot.starts()
        for node, slots in starts.items():
            self._start(node, slots, now)
        self._ask_for_nodes(self._demand.workers - snapshot.slots - sum(starts.values()), now)

    # The state of the cluster.

    def _snapshot(self, draining: Mapping[str, int], now: float) -> Snapshot:
        self._ask_discovery()
        alive = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
        free = available_resources_per_node()
        for name in self._seen.keys() - alive.keys():
            del self._seen[name]
        nodes = [
            Node(
                name,
                node["NodeManagerAddress"],
                *self._room(name, free.get(name, {}), node["Resources"], now),
                name in draining,
            )
            for name, node in alive.items()
        ]
        taken = [Taken(each.node, each.slots, each.leaves) for each in self._callers.values()]
        resting = {name for name, trouble in self._troubles.items() if now < trouble.until}
        return Snapshot(nodes, taken, self._demand.workers, self._most, self._limits, resting)

    def _room(self, node: str, free: Resources, total: Resources, now: float) -> tuple[int, bool]:
        """Return how many more workers a node can take, and whether that is sure: Ray's numbers lag behind."""
        slots = room_for(self._demand.per_worker, [free])
        here = [each for each in self._callers.values() if each.node == node]
        before, since = self._seen.get(node, (0, now))
        since = since if slots == before and all(each.started is None for each in here) else now
        self._seen[node] = slots, since
        is_whole = not here and slots == room_for(self._demand.per_worker, [total])
        return slots, is_whole or now - since >= _SETTLED_SECONDS

    def _ask_discovery(self) -> None:
        """Note how many workers the user's discovery allows on each address."""
        if self._discovery is None:
            return
        what = f"the discovery {type(self._discovery).__name__} cannot say which nodes may be used"
        try:
            found = self._discovery.find_available_hosts_and_slots()
            self._limits = {str(address): int(slots) for address, slots in found.items()}
            self._said.pop(what, None)
        except Exception as error:  # any exception of the user's code
            if self._limits is None:
                raise HostsError(f"{what}: {first_line(error)}") from error
            self._warn(what, error)

    def _warn(self, what: str, error: Exception) -> None:
        """Warn, unless that was said last time."""
        if self._said.get(what) != str(error):
            _logger.warning("%s; they stay as they are: %s", what, first_line(error))
        self._said[what] = str(error)

    # Actors that end.

    def _take_end(self, call: Any, now: float) -> None:
        """Remove an actor that has ended; if something is wrong with its node, leave that alone for a while."""
        caller = self._callers.pop(call)
        is_lost = False
        try:
            code, reason = ray.get(call)
            is_well = not code or caller.leaves
        except Exception as error:  # it could not call in, or it is lost, perhaps with its node
            reason, is_well = first_line(error), caller.leaves
            is_lost = isinstance(error, RayActorError) and caller.started is None
        ray.kill(caller.handle)
        if is_well:
            return
        count = self._troubles.get(caller.node, _Trouble()).count
        seconds = min(_BACKOFF_SECONDS * 2.0**count, _LONGEST_BACKOFF_SECONDS)
        self._troubles[caller.node] = _Trouble(count + 1, now + seconds, "" if is_lost else reason)
        what = "node %s does not take part, and is not asked again for %g s: %s"
        _logger.warning(what, caller.node, seconds, reason)

    def _end_late(self, now: float) -> None:
        """End the actors that Ray has not started in time."""
        for call, caller in list(self._callers.items()):
            if caller.started is not None and ray.wait([caller.started], timeout=0)[0]:
                caller.started = None
            elif caller.started is not None and now - caller.since > self._placement_timeout:
                del self._callers[call]
                ray.kill(caller.handle)
                _logger.warning("an actor did not start on node %s in time; see Ray's logs", caller.node)

    def _leave(self, node: str, seconds: float) -> None:
        for caller in self._callers.values():
            if caller.node == node and not caller.leaves:
                caller.leaves = True
                caller.handle.leave.remote(seconds)

    # Actors and nodes that come.

    def _start(self, node: str, slots: int, now: float) -> None:
        names = {each.name for each in self._callers.values()}
        name = next(each for each in _names(node) if each not in names)
        resources = {resource: number * slots for resource, number in self._demand.per_worker.items()}
        actor = ray.remote(num_cpus=resources.get("CPU", 0), num_gpus=resources.get("GPU", 0))(NodeCaller)
        here = NodeAffinitySchedulingStrategy(node, soft=False)
        handle = actor.options(scheduling_strategy=here, max_concurrency=2).remote()  # one thread for leave()
        call = handle.call_in.remote(self._options, name, slots)
        self._callers[call] = _Caller(handle, name, node, slots, handle.__ray_ready__.remote(), now)

    def _ask_for_nodes(self, missing: int, now: float) -> None:
        """While there are fewer slots than the job needs, have a placement group wait for them: autoscalers see it."""
        self._short_since = None if missing <= 0 else self._short_since or now
        if self._asked is not None and (missing != self._asked.demand.workers or self._asked.group.wait(0)):
            self._asked.release()
            self._asked, self._short_since = None, now
        elif self._asked is None and missing > 0 and now - (self._short_since or now) > _ASK_SECONDS:
            wanted = Demand(missing, self._demand.per_worker, use_current=False)
            if self._said.get("resources") != str(wanted):
                _logger.warning("waiting for resources: %s asked for, %s", wanted, offered())
            self._said["resources"] = str(wanted)
            self._asked = reserve(wanted)


def _names(node: str) -> Iterator[str]:
    """Yield the names in the job of the actors on a node: its id for the first one."""
    yield node
    yield from (f"{node}#{number}" for number in itertools.count(2))
