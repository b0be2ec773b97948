"""The start of a job among workers that Ray has started: their ranks, their server, their environment variables."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

from horovodlike._bootstrap.environment import (
    JOB_ID,
    NODE_ID,
    RENDEZVOUS_ADDRESS,
    RENDEZVOUS_OWNER,
    RENDEZVOUS_PORT,
    SECRET_KEY,
    RankInfo,
)
from horovodlike._bootstrap.rendezvous_server import RendezvousServer
from horovodlike._bootstrap.topology import HostFacts, HostTable
from horovodlike._net.secure_channel import KEY_BYTES
from horovodlike.config import SETTINGS
from horovodlike.launcher.planning.plan import place_variables

__all__ = ["WorkerJob", "places_of"]


def places_of(nodes: Sequence[str]) -> list[RankInfo]:
    """Return the rank info of each worker. A pure function.

    Args:
        nodes: The id of each worker's node, by rank.
    """
    table = HostTable.of([HostFacts(node, True, node, "", "", "", 0, 1) for node in nodes])
    return [table.place(RankInfo(rank=rank, size=len(nodes), node_id=node)) for rank, node in enumerate(nodes)]


@dataclass(frozen=True)
class WorkerJob:
    """A job among workers: its server, which runs in this process, and the variables of each rank.

    Attributes:
        server: The server; the ranks may call ``init()`` any number of times until it is closed.
        variables: By rank, the environment variables to set before the rank calls ``init()``; they have the job's key.
    """

    server: RendezvousServer
    variables: Sequence[dict[str, str]] = field(repr=False)

    @classmethod
    def open(
        cls,
        nodes: Sequence[str],
        owner: str,
        start_timeout: float | None = None,
        network_interface: str | None = None,
    ) -> WorkerJob:
        """Make a key, start the server in this process, and plan the variables.

        Args:
            nodes: The id of each worker's node, by rank.
            owner: The name of the server's owner, for messages.
            start_timeout: How long ``init()`` waits for all ranks, in seconds; None for the setting.
            network_interface: The network between the ranks; None for the setting.

        Raises:
            RendezvousError: The server cannot listen.
        """
        import ray

        places = places_of(nodes)
        is_local = set(nodes) == {ray.get_runtime_context().get_node_id()}
        address = "127.0.0.1" if is_local else ray.util.get_node_ip_address()
        key, job = secrets.token_bytes(KEY_BYTES), f"ray/{secrets.token_hex(8)}"
        server = RendezvousServer(key, len(nodes), address, job)
        server.start()
        common = {
            RENDEZVOUS_ADDRESS: address,
            RENDEZVOUS_PORT: str(server.port),
            RENDEZVOUS_OWNER: owner,
            SECRET_KEY: key.hex(),
            JOB_ID: job,
        }
        if start_timeout is not None:
            common[SETTINGS["start_timeout"].variable] = f"{start_timeout:.12g}"
        if network_interface is not None:
            common[SETTINGS["network_interface"].variable] = network_interface
        return cls(server, [common | _variables(place) for place in places])

    def close(self) -> None:
        """Close the server. May be called again."""
        self.server.close()


def _variables(place: RankInfo) -> dict[str, str]:
    assert place.node_id is not None
    variables = place_variables(
        rank=place.rank,
        size=place.size,
        local_rank=place.local_rank,
        local_size=place.local_size,
        cross_rank=place.cross_rank,
        cross_size=place.cross_size,
    )
    return variables | {"HOROVOD_HOSTNAME": place.node_id, NODE_ID: place.node_id}
