"""The connections between ranks of different hosts, made and authenticated before the engine receives them.

Every rank listens on one address, and sends it to the others through the rendezvous, where it cannot be forged. Of two
ranks the higher one connects. A new connection must authenticate within a few seconds; until then its buffer holds one
hello and no more. When the mesh is complete, no rank listens any more.
"""

import json
import secrets
import socket
from dataclasses import dataclass
from typing import Any

from horovodlike._bootstrap.mesh_builder import Builder
from horovodlike._bootstrap.mesh_handshake import ConnectionId, Keys
from horovodlike._bootstrap.rendezvous_client import Rendezvous
from horovodlike._bootstrap.topology import HostTable
from horovodlike._engine.native import lib
from horovodlike._net.listen import listen
from horovodlike._net.secure_channel import FRAME_LIMIT, KEY_BYTES
from horovodlike._net.socket_options import ensure_descriptors, set_congestion_control, set_keepalive
from horovodlike.config import Config
from horovodlike.errors import RendezvousError

CONTROL, DATA, MESSAGES = int(lib.HVL_CONTROL), int(lib.HVL_DATA), int(lib.HVL_MESSAGES)

_REPORT_BYTES = FRAME_LIMIT * 3 // 4  # the size of the reports of all ranks together
_SHOWN_PAIRS = 8
_UNSENT_BYTES = 256 << 10


@dataclass
class MeshConnection:
    """A connection to a rank of another host, over which both sides have authenticated themselves.

    Attributes:
        socket: The socket, non-blocking; nothing has been sent on it after the handshake.
        rank: The other rank.
        use: ``CONTROL``, ``DATA`` or ``MESSAGES``.
        keys: The keys of the MACs with which the engine sends and receives.
    """

    socket: socket.socket
    rank: int
    use: int
    keys: Keys


def plan_connections(rank: int, table: HostTable, streams: int, fan_out: int) -> list[ConnectionId]:
    """Return the ids of all connections of a rank. Two ranks have their common connections in the same order.

    Args:
        rank: The rank.
        table: The hosts.
        streams: The number of data connections between two ranks of different hosts.
        fan_out: The most children that a host has in the tree of hosts.
    """

    def connection_id(use: int, other: int, number: int = 0) -> ConnectionId:
        return ConnectionId(use, min(rank, other), max(rank, other), number)

    beside = table.ranks_beside(rank)
    host = table.ranks.index(beside)
    remote = [other for other in range(len(table.facts)) if other not in beside]
    connection_ids = [connection_id(DATA, other, number) for other in remote for number in range(streams)]
    connection_ids += [connection_id(MESSAGES, other) for other in remote]
    if rank == beside[0]:
        parent = [] if host == 0 else [(host - 1) // fan_out]
        children = range(host * fan_out + 1, min((host + 1) * fan_out + 1, len(table.ranks)))
        connection_ids += [connection_id(CONTROL, table.ranks[other][0]) for other in [*parent, *children]]
    return connection_ids


def connect_mesh(rendezvous: Rendezvous, table: HostTable, config: Config, address: str) -> list[MeshConnection]:
    """Connect this rank to the ranks of other hosts. Collective.

    Args:
        rendezvous: The connection to all ranks.
        table: The hosts of the job, at least two.
        config: The settings.
        address: The address at which this rank listens for ranks of other hosts.

    Returns:
        The connections in the order of :func:`plan_connections`; the caller closes their sockets.

    Raises:
        RendezvousError: Ranks could not connect; the message, the same on all ranks, lists them and the reasons.
        ConfigError: ``tcp_congestion`` does not fit this host.
    """
    rank = rendezvous.rank
    connection_ids = plan_connections(rank, table, config.tcp_streams, config.fan_out)
    # Twice as many: the engine duplicates each descriptor before the original is closed.
    ensure_descriptors(2 * len(connection_ids), f"{len(connection_ids)} connections to ranks of other hosts")
    [listener] = listen(f"rank {rank}", [address], [0])
    with listener:
        mine = {"address": address, "port": listener.getsockname()[1]}
        if rank == 0:
            mine["salt"] = secrets.token_hex(KEY_BYTES)
        offers = rendezvous.exchange("mesh.addresses", mine)
        key = rendezvous.derive_key(b"mesh", bytes.fromhex(offers[0]["salt"]))
        places = [(str(offer["address"]), int(offer["port"])) for offer in offers]
        builder = Builder(rank, connection_ids, places, key, listener, config.start_timeout)
        try:
            builder.run()
        except BaseException:
            builder.close()
            raise
    try:
        _compare(rendezvous, table, builder.problems, config)
        for connection_id in connection_ids:
            set_options(builder.done[connection_id][0], connection_id.use, config)
    except BaseException:
        builder.close()
        raise
    return [
        MeshConnection(
            builder.done[connection_id][0], connection_id.other(rank), connection_id.use, builder.done[connection_id][1]
        )
        for connection_id in connection_ids
    ]


def set_options(connected: socket.socket, use: int, config: Config) -> None:
    """Set the socket options: small messages are sent at once, and the loss of the other host closes the connection."""
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    set_keepalive(connected, *_keepalive(config.network_timeout))
    # TCP_USER_TIMEOUT also ends a connection to a process that is stopped and receives nothing. On connections for
    # data and messages, where that may be normal, the engine watches for lost hosts itself (transport/tcp/stream.h).
    if use == CONTROL:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * config.network_timeout))
    else:
        set_congestion_control(connected, config.tcp_congestion)
    if use == MESSAGES:  # data that waits in the kernel delays the small messages behind it
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)


def _keepalive(timeout: float) -> tuple[int, int, int]:
    """Return arguments of :func:`set_keepalive` with which a lost host is noticed within ``timeout`` seconds."""
    idle = max(1, int(timeout / 3))
    interval = max(1, int(timeout / 9))
    return idle, interval, max(1, int((timeout - idle) / interval))


def _compare(rendezvous: Rendezvous, table: HostTable, problems: dict[ConnectionId, str], config: Config) -> None:
    """All-gather which connections failed; raise the same error on every rank if any did."""
    reports = rendezvous.exchange(
        "mesh.connected", _report(problems, _REPORT_BYTES // rendezvous.size), patience=config.start_timeout
    )
    reasons: dict[tuple[int, int], str] = {}
    hidden = 0
    for rank, report in enumerate(reports):
        hidden += report["more"]
        for low, high, why in report["problems"]:
            if rank == high:  # the rank that connects knows more about the reason than the one that waits for it
                reasons[low, high] = why
            else:
                reasons.setdefault((low, high), why)
    if not reasons and not hidden:
        return
    hosts, names = table.hosts, table.names
    shown = [
        f"rank {high} ({names[hosts[high]]}) to rank {low} ({names[hosts[low]]}): {why}"
        for (low, high), why in sorted(reasons.items())[:_SHOWN_PAIRS]
    ]
    if len(reasons) > _SHOWN_PAIRS or hidden:
        shown.append("and more")
    raise RendezvousError(
        f"ranks of different hosts could not connect: {'; '.join(shown)}. See that the hosts reach each other there: a "
        "firewall must let the ports of net.ipv4.ip_local_port_range through. Choose another network with "
        "--network-interface (HOROVODLIKE_NETWORK_INTERFACE)"
    )


def _report(problems: dict[ConnectionId, str], most: int) -> dict[str, Any]:
    """Return the problems by pair of ranks, as many as fit into ``most`` bytes of JSON."""
    pairs = {
        (connection_id.low, connection_id.high): why for connection_id, why in sorted(problems.items(), reverse=True)
    }
    report: dict[str, Any] = {"more": len(pairs), "problems": []}
    for (low, high), why in sorted(pairs.items()):
        problem = [low, high, why[:200]]
        if len(json.dumps(report)) + len(json.dumps(problem)) + 64 > most:
            break
        report["problems"].append(problem)
        report["more"] -= 1
    return report
