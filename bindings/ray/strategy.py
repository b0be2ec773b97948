"""The placement group of a job, and the order of its bundles."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import (
    PlacementGroup,
    get_current_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from horovodlike.launcher.errors import counted

__all__ = ["Demand", "Reservation", "order_by_node", "reserve"]

_logger = logging.getLogger(__name__)
_REMEDY = "RayExecutor.create_settings(placement_group_timeout_s=...)"
Resources = Mapping[str, float]


@dataclass(frozen=True)
class Demand:
    """The resources that a job asks Ray for.

    Attributes:
        workers: The number of workers.
        per_worker: The resources of one worker.
        hosts: The number of nodes, each with the same number of workers; None: any nodes, as few as possible.
        use_current: Whether to use the placement group of the calling task or actor, if it has one.
    """

    workers: int
    per_worker: Resources
    hosts: int | None = None
    use_current: bool = True

    @property
    def bundles(self) -> list[dict[str, float]]:
        """The bundles to reserve: one for each node, or one for each worker."""
        share = self.workers // self.hosts if self.hosts else 1
        return [{name: number * share for name, number in self.per_worker.items()}] * (self.hosts or self.workers)

    @property
    def strategy(self) -> str:
        """Ray's name for how the bundles are placed."""
        return "STRICT_SPREAD" if self.hosts else "PACK"

    def __str__(self) -> str:
        number, bundle = len(self.bundles), self.bundles[0]
        where = "each on a node of its own" if self.hosts else "on as few nodes as possible"
        return f"{number} x {_shown(bundle)}, {where} ({self.strategy})"


@dataclass
class Reservation:
    """The placement group in which a job's workers run.

    Attributes:
        demand: The resources requested.
        group: The placement group.
        is_own: Whether the group was made for this job, and ends with it.
        bundles: For each worker the index of its bundle, after :meth:`wait`; -1: any bundle that has room.
        is_released: Whether :meth:`release` was called, which another thread may do.
    """

    demand: Demand
    group: PlacementGroup
    is_own: bool
    bundles: Sequence[int] = field(default_factory=list)
    is_released: bool = False

    def wait(self, deadline: float, remedy: str = _REMEDY) -> None:
        """Wait until the resources are reserved.

        Args:
            deadline: The time on the monotonic clock until which to wait.
            remedy: How to wait longer, for the message.

        Raises:
            TimeoutError: They were not available; the message lists the requested and the existing resources.
            RuntimeError: They have been released meanwhile.
        """
        demand, group = self.demand, self.group
        if not self.is_own:
            self.bundles = [-1] * demand.workers
            return
        waits = False
        while not self._is_placed():
            if not waits:
                _logger.warning("waiting for resources: %s asked for, %s", demand, offered())
                waits = True
            if time.monotonic() >= deadline:
                raise TimeoutError(
                    "Placement group creation timed out. Make sure your cluster either has enough resources or use an "
                    f"autoscaling cluster. Asked for: {demand}; {offered()}. {remedy} makes start() wait longer"
                )
        nodes = placement_group_table(group).get("bundles_to_node_id", {})
        order = order_by_node([nodes.get(index, "") for index in range(len(demand.bundles))])
        share = demand.workers // len(order)
        self.bundles = [index for index in order for _ in range(share)]

    def _is_placed(self) -> bool:
        try:
            is_placed: bool = self.group.wait(1)  # in whole seconds; an interrupt has its effect in between
        except Exception:  # Ray does not know a group that was removed
            if not self.is_released:
                raise
            is_placed = False
        if self.is_released:
            raise RuntimeError("shutdown() has ended the start")
        return is_placed

    def release(self) -> None:
        """Remove the placement group, if it was made for this job; Ray ends its actors. May be called again."""
        self.is_released = True
        if self.is_own:
            with contextlib.suppress(Exception):  # as in kill()
                remove_placement_group(self.group)


def kill(actor: ActorHandle) -> None:
    """End an actor. That it, or the connection to Ray, is lost does not replace an error or an interrupt."""
    with contextlib.suppress(Exception):
        ray.kill(actor)


def reserve(demand: Demand) -> Reservation:
    """Ask for the resources, without waiting for them.

    Raises:
        ValueError: The current placement group is too small.
    """
    current = get_current_placement_group() if demand.use_current and demand.hosts is None else None
    if current is None:
        return Reservation(demand, placement_group(demand.bundles, strategy=demand.strategy), is_own=True)
    room = room_for(demand.per_worker, current.bundle_specs)
    if room < demand.workers:
        raise ValueError(
            f"the current placement group has room for {counted(room, 'worker')} of {_shown(demand.per_worker)}, but "
            f"num_workers is {demand.workers}: make it larger, or give RayExecutor(use_current_placement_group=False)"
        )
    return Reservation(demand, current, is_own=False)


def room_for(per_worker: Resources, bundles: Sequence[Resources]) -> int:
    """Return how many workers bundles could hold if nothing else ran in them."""
    needs = {name: number for name, number in per_worker.items() if number}
    return sum(int(min(bundle.get(name, 0) // number for name, number in needs.items())) for bundle in bundles)


def order_by_node(nodes: Sequence[str]) -> list[int]:
    """Return the positions such that those with the same node are neighbours; nodes keep the order of their first."""
    first = {node: position for position, node in reversed(list(enumerate(nodes)))}
    return sorted(range(len(nodes)), key=lambda position: (first[nodes[position]], position))


def offered() -> str:
    """Describe the resources of the cluster, for messages."""
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    nodes = Counter(_shown(each) for each in alive)
    listed = ", ".join(f"{number} x {each}" for each, number in sorted(nodes.items()))
    return f"the cluster has {len(alive)} nodes ({listed}), of which {_shown(ray.available_resources())} is free"


def _shown(resources: Resources) -> str:
    numbers = {name: resources.get(name, 0) for name in ("CPU", "GPU")}
    return "{" + ", ".join(f"{name}: {number:g}" for name, number in numbers.items() if number or name == "CPU") + "}"
