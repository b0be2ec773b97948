"""The rendezvous of a process group's ranks through the group's store, of any kind.

Each rank writes facts about itself. Rank 0 reads them, decides how the ranks meet, and writes the plan, which contains
the error if they cannot. Then rank 0 writes the endpoint of its rendezvous server with a random key, and all further
communication is authenticated. A process that can read the store can read the key: see docs/users/security.md.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store

from horovodlike._bootstrap.discovery import Meeting
from horovodlike._bootstrap.environment import RankInfo
from horovodlike._bootstrap.file_discovery import Endpoint
from horovodlike._bootstrap.rendezvous_state import name_ranks
from horovodlike._bootstrap.topology import HostFacts
from horovodlike._net.interfaces import choose_address, local_addresses
from horovodlike._net.secure_channel import JobKey
from horovodlike.config import Config
from horovodlike.errors import ConfigError, RendezvousError

_READ_SECONDS = 0.2
_TIME_OF_RANK_0 = timedelta(seconds=5)  # extra time, in which rank 0 reports the missing ranks


@dataclass(frozen=True)
class RankFacts:
    """The facts that a rank sends to rank 0.

    Attributes:
        host: Equal for ranks that may share a host.
        engine: Rank and size in the job of the engine that runs in this process already; None if no engine runs.
        launched: Rank and size that `hvdrun` has given this process; None if it has not, or the size is 1.
    """

    host: list[str]
    engine: list[int] | None
    launched: list[int] | None


@dataclass(frozen=True)
class Plan:
    """The decision of rank 0.

    Attributes:
        error: Why the ranks cannot meet; empty if they can.
        how: The way to meet. `running`: the running engine; `launcher`: hvdrun; `store`: the store; empty: an error.
        job: A name for the job.
        places: For each rank, its local rank, local size, cross rank and cross size.
    """

    error: str = ""
    how: str = ""
    job: str = ""
    places: Sequence[Sequence[int]] = ()


def facts_of_this_process(settings: Config, node: str | None, engine: RankInfo | None, launched: RankInfo) -> RankFacts:
    """Return the facts about this rank; `node` is the value of `HOROVODLIKE_HOSTID`."""
    host = HostFacts.collect(RankInfo(node_id=node), chosen=bool(settings.hostid)).identity
    is_hvdrun = launched.launcher == "hvdrun" and launched.size > 1
    return RankFacts(
        list(host),
        None if engine is None else [engine.rank, engine.size],
        [launched.rank, launched.size] if is_hvdrun else None,
    )


def agree(store: Store, rank: int, size: int, facts: RankFacts, timeout: timedelta) -> Plan:
    """Exchange the facts and return the plan, which is the same on all ranks.

    Raises:
        RendezvousError: Some ranks did not arrive in time, or the plan contains an error.
    """
    store.set(f"facts/{rank}", json.dumps(asdict(facts)))
    if rank == 0:
        try:
            plan = decide([RankFacts(**json.loads(each)) for each in _all_facts(store, size, timeout)])
        except RendezvousError as error:
            plan = Plan(error=str(error))
        store.set("plan", json.dumps(asdict(plan)))
    else:
        try:
            store.wait(["plan"], timeout + _TIME_OF_RANK_0)
        except RuntimeError as error:
            raise RendezvousError(
                f"after {timeout.total_seconds():g} s rank 0 of the process group had not told rank {rank} how to meet "
                f"({error}); see whether it has called init_process_group, and what it prints"
            ) from None
        plan = Plan(**json.loads(store.get("plan")))
    if plan.error:
        raise RendezvousError(plan.error)
    return plan


def _all_facts(store: Store, size: int, timeout: timedelta) -> list[bytes]:
    keys = [f"facts/{rank}" for rank in range(size)]
    try:
        store.wait(keys, timeout)
    except RuntimeError:
        missing = [rank for rank, key in enumerate(keys) if not _is_set(store, key)]
        raise RendezvousError(
            f"after {timeout.total_seconds():g} s {name_ranks(missing)} of {size} had not called init_process_group; "
            "see whether they run and what they print"
        ) from None
    return [store.get(key) for key in keys]


def _is_set(store: Store, key: str) -> bool:
    try:
        store.wait([key], timedelta(milliseconds=10))
    except RuntimeError:
        return False
    return True


def decide(facts: Sequence[RankFacts]) -> Plan:
    """Decide how ranks meet, from the facts about each. A pure function, except for the random name of the job."""
    size = len(facts)
    running = [rank for rank, each in enumerate(facts) if each.engine is not None]
    if running:
        others = [rank for rank in range(size) if rank not in running]
        if others:
            return Plan(
                error=f"{name_ranks(running)} of the process group had called hvd.init() before "
                f"init_process_group, and {name_ranks(others)} had not: call it on all ranks, or on none"
            )
        for rank, each in enumerate(facts):
            if each.engine != [rank, size]:
                assert each.engine is not None
                return Plan(
                    error=f"init_process_group says that this is rank {rank} of {size}, but hvd.init() has made it "
                    f"rank {each.engine[0]} of {each.engine[1]}: use the same number of ranks in the same order, or "
                    "call hvd.shutdown() before init_process_group"
                )
        return Plan(how="running")
    if all(each.launched == [rank, size] for rank, each in enumerate(facts)):
        return Plan(how="launcher")
    return Plan(how="store", job=secrets.token_hex(8), places=_places([tuple(each.host) for each in facts]))


def _places(hosts: Sequence[tuple[str, ...]]) -> list[list[int]]:
    groups: dict[tuple[str, ...], list[int]] = {}
    for rank, host in enumerate(hosts):
        groups.setdefault(host, []).append(rank)
    places = []
    for rank, host in enumerate(hosts):
        local_rank = groups[host].index(rank)
        across = [each for each, ranks in groups.items() if len(ranks) > local_rank]
        places.append([local_rank, len(groups[host]), across.index(host), len(across)])
    return places


def meeting(store: Store, rank: int, size: int, plan: Plan, settings: Config, node: str | None) -> Meeting:
    """Return the place of this rank, and the discovery of rank 0 by the store."""
    local_rank, local_size, cross_rank, cross_size = plan.places[rank]
    place = RankInfo(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        cross_rank=cross_rank,
        cross_size=cross_size,
        launcher="torch.distributed",
        job=plan.job,
        node_id=node,
        is_homogeneous=len({local for _, local, *_ in plan.places}) == 1,
    )
    return Meeting(place, StoreDiscovery(store, is_one_host=local_size == size, settings=settings))


class StoreDiscovery:
    """The discovery of rank 0's endpoint by a store."""

    where = "in the store of the process group"

    def __init__(self, store: Store, is_one_host: bool, settings: Config) -> None:
        """Keep the arguments, and do not access the store."""
        self._store, self._is_one_host, self._settings = store, is_one_host, settings

    def choose_endpoint(self) -> Endpoint:
        """Return a new key, any port, and the addresses at which the other ranks may reach this host.

        Raises:
            ConfigError: HOROVODLIKE_NETWORK_INTERFACE names no network of this host, or this host has no address that
                others can reach.
        """
        if self._is_one_host:
            return Endpoint(0, JobKey.random())
        interfaces = local_addresses()
        if self._settings.network_interface.strip():
            return Endpoint(0, JobKey.random(), choose_address(self._settings.network_interface, interfaces))
        hosts = [str(each.address) for each in interfaces if each.is_reachable]
        if not hosts:
            raise ConfigError("this host has no address at which ranks of other hosts could reach rank 0")
        return Endpoint(0, JobKey.random(), ",".join(hosts))

    def publish(self, endpoint: Endpoint) -> None:
        """Write the endpoint."""
        content: dict[str, Any] = {"port": endpoint.port, "key": endpoint.key.hex(), "hosts": endpoint.hosts}
        self._store.set("endpoint", json.dumps(content))

    def unpublish(self) -> None:
        """Overwrite the endpoint, since its server no longer listens; not every store can delete a key."""
        self._store.set("endpoint", "")

    def read(self) -> Endpoint | None:
        """Return the endpoint, or None if there is none yet."""
        try:
            self._store.wait(["endpoint"], timedelta(seconds=_READ_SECONDS))
        except RuntimeError:  # the class depends on the store and on the release of torch
            return None
        text = self._store.get("endpoint")
        if not text:
            return None
        content = json.loads(text)
        return Endpoint(int(content["port"]), JobKey(bytes.fromhex(content["key"])), str(content["hosts"]))
