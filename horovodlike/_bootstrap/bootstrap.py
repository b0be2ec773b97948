"""The steps of ``init()`` before the engine starts: the ranks find each other, authenticate and agree.

:func:`establish` takes these steps. The parts:

* :mod:`horovodlike._bootstrap.environment`: the rank of this process;
* :class:`RendezvousServer`: the server, which ``hvdrun`` runs, or else rank 0 in its own process;
* :class:`Rendezvous`: a rank's connection to the server; :mod:`horovodlike._bootstrap.discovery` finds the server;
* :mod:`horovodlike._net.secure_channel`: the authenticated messages between ranks and server;
* :mod:`horovodlike._bootstrap.topology`: which ranks share a host;
* :mod:`horovodlike._bootstrap.shared_memory`: the shared memory of the ranks of a host;
* :mod:`horovodlike._bootstrap.wakeup_pipes` and :mod:`horovodlike._bootstrap.mesh`: with several hosts, the pipes that
  wake the ranks of a host, and the connections to ranks of other hosts.
"""

import contextlib
import hashlib
import json
import os
import secrets
import sys
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from horovodlike._bootstrap.discovery import Meeting, join_rendezvous
from horovodlike._bootstrap.environment import RankInfo, find_rank_info
from horovodlike._bootstrap.job_key import take_key
from horovodlike._bootstrap.rendezvous_client import Rendezvous
from horovodlike._bootstrap.rendezvous_server import RendezvousServer
from horovodlike._bootstrap.rendezvous_state import name_ranks
from horovodlike._bootstrap.shared_memory import open_segment
from horovodlike._bootstrap.topology import HostFacts, HostTable
from horovodlike._engine.native import ffi, lib
from horovodlike._net.secure_channel import KEY_BYTES, JobKey
from horovodlike.config import SETTINGS, Config
from horovodlike.errors import ConfigError, RendezvousError

if TYPE_CHECKING:
    from horovodlike._bootstrap.mesh import MeshConnection
    from horovodlike._bootstrap.wakeup_pipes import WakeupPipes

__all__ = ["JobContext", "Rendezvous", "RendezvousServer", "establish"]


@dataclass
class JobContext:
    """The result of :func:`establish`: everything the engine needs to start.

    Close it with :meth:`close`, or use it as a context manager: an exception in the ``with`` block is sent to the ranks
    that wait in :meth:`confirm`. It is not needed any more once the engines of all ranks run.

    Attributes:
        place: The rank, local rank and so on of this process.
        table: The hosts of the job, or None in a job of one rank.
        pids: The process ids of this host's ranks, by local rank.
        processors: The number of processors that this host's ranks may use, all together.
        segment_fd: The descriptor of the zeroed shared memory of this host's ranks, or -1 if this host has one rank.
        connections: The connections to ranks of other hosts.
        wakeup_pipes: The pipes that wake the ranks of this host, if the job has several hosts.
        rendezvous: The connection to the other ranks, or None in a job of one rank.
        address: The address at which ranks of other hosts reach this one; a loopback address in a job on one host.
        object_key: The key that authenticates the objects that these ranks send each other in this generation; None
            in a job of one rank.
    """

    place: RankInfo
    pids: list[int]
    table: HostTable | None = None
    processors: int = 1
    segment_fd: int = -1
    connections: "list[MeshConnection]" = field(default_factory=list)
    wakeup_pipes: "WakeupPipes | None" = None
    rendezvous: Rendezvous | None = None
    address: str = "127.0.0.1"
    object_key: JobKey | None = field(default=None, repr=False)
    _server: RendezvousServer | None = field(default=None, repr=False)

    def confirm(self) -> None:
        """Wait until all ranks have called this; each one calls it when its engine runs.

        Raises:
            RendezvousError: A rank failed before it called this; the message says which one and why.
        """
        if self.rendezvous is not None:
            self.rendezvous.barrier("confirm")

    @property
    def hosts(self) -> list[int]:
        """The number of each rank's host, by rank; hosts are numbered in the order of their lowest ranks."""
        return [0] * self.place.size if self.table is None else self.table.hosts

    @property
    def host_names(self) -> list[str]:
        """The names of the hosts for messages, by host number."""
        return [""] if self.table is None else self.table.names

    def close_descriptors(self) -> None:
        """Close the descriptors; called when the engine runs: it has duplicated or mapped them."""
        if self.segment_fd >= 0:
            os.close(self.segment_fd)
            self.segment_fd = -1
        for connection in self.connections:
            connection.socket.close()
        self.connections = []
        if self.wakeup_pipes is not None:
            self.wakeup_pipes.close()
            self.wakeup_pipes = None

    def close(self) -> None:
        """Leave the job: close every descriptor, and the server if this process runs it. May be called again."""
        self.close_descriptors()
        if self.rendezvous is not None:
            self.rendezvous.close()
            self.rendezvous = None
        if self._server is not None:
            self._server.close()
            self._server = None

    def __enter__(self) -> "JobContext":
        """Return the context itself, which is open from the start."""
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Close the context; if an exception ended the block, tell the other ranks."""
        if error is not None and self.rendezvous is not None:
            self.rendezvous.abort(f"{type(error).__name__}: {error}")
        self.close()


def establish(
    config: Config,
    segment_bytes: Callable[[RankInfo], int],
    environ: MutableMapping[str, str] | None = None,
    key: JobKey | None = None,
    meeting: Meeting | None = None,
) -> JobContext:
    """Find the other ranks of the job and set up the resources that this host's ranks share.

    Collective: every rank calls it, any number of times, and closes each context before the next call. A job of one
    rank uses neither the network nor a file. The job's key is removed from the environment, so that child processes do
    not inherit it, and kept for the next call.

    Args:
        config: The settings; those that must be equal on all ranks are compared.
        segment_bytes: Returns the bytes of shared memory that this host's ranks need, given this process's rank info.
        environ: The environment; ``os.environ`` if None.
        key: The key that authenticates these ranks, if it is not the key in the environment.
        meeting: The rank info and the discovery to use instead of those that the environment gives.

    Returns:
        The context; its shared memory is zeroed.

    Raises:
        RendezvousError: The ranks could not find, trust or agree with each other; the message names the ranks.
        ConfigError: Environment variables contradict each other or are malformed.
    """
    source = os.environ if environ is None else environ
    key = key or take_key(source)
    place = find_rank_info(source) if meeting is None else meeting.place
    if place.size == 1:
        if place.launcher == "none" and meeting is None and config.log_level not in ("error", "fatal"):
            _warn_if_alone(source)
        return JobContext(place, [os.getpid()], processors=len(os.sched_getaffinity(0)))
    context = JobContext(place, [])
    try:
        with join_rendezvous(place, key, config, source, meeting.discovery if meeting else None) as joined:
            rendezvous = context.rendezvous = joined.rendezvous
            context._server = joined.server
            reports = _begin_generation(rendezvous, place, config)
        context.object_key = rendezvous.derive_key(b"objects", bytes.fromhex(reports[0]["salt"]))
        _share_memory(context, rendezvous, reports, config, segment_bytes)
        assert context.table is not None
        if len(context.table.ranks) > 1:
            _connect_hosts(context, rendezvous, reports, config)
    except BaseException as error:
        context.__exit__(type(error), error, None)
        raise
    return context


def _warn_if_alone(environ: Mapping[str, str]) -> None:
    """Say so if the platform may have started this process on several nodes, which would all train by themselves."""
    from horovodlike._bootstrap.place import Facts
    from horovodlike._bootstrap.places import detect_place

    with contextlib.suppress(ConfigError):
        node = detect_place(Facts(environ))
        if node is not None and node.is_among_others:
            count = "an unknown number of" if node.nnodes is None else node.nnodes
            print(
                f"horovodlike warning: this process is a job of its own, although it is on one of {count} nodes "
                f"({node}). Start it with hvdrun, which makes one job of them",
                file=sys.stderr,
            )


def _begin_generation(rendezvous: Rendezvous, place: RankInfo, config: Config) -> list[Any]:
    """Begin a generation: all-gather the facts about each rank. The facts are short, since there may be many ranks."""
    reports = rendezvous.begin(
        {
            "version": ffi.string(lib.hvl_version()).decode(),
            "pid": os.getpid(),
            "settings": hashlib.sha256(json.dumps(_shared_settings(config)).encode()).hexdigest()[:16],
            "processors": f"{sum(1 << processor for processor in os.sched_getaffinity(0)):x}",
            "host": HostFacts.collect(place, chosen=bool(config.hostid)).to_json(),
            "ends": [rendezvous.local_address, rendezvous.server_address],
            "salt": secrets.token_hex(KEY_BYTES) if place.rank == 0 else "",
        }
    )
    _compare("the version of horovodlike", "Install the same one", [each["version"] for each in reports])
    if len({each["settings"] for each in reports}) > 1:
        settings = rendezvous.exchange("settings", _shared_settings(config))
        for index, name in enumerate(_SHARED):
            values = [str(each[index]) for each in settings]
            _compare(SETTINGS[name].variable, "Give it the same value", values)
    return reports


_SHARED = [name for name, row in SETTINGS.items() if row.same_on_all_ranks]


def _shared_settings(config: Config) -> list[Any]:
    return [getattr(config, name) for name in _SHARED]


def _compare(what: str, remedy: str, values: list[str]) -> None:
    """Raise an error if the values of the ranks differ; every rank raises the same one."""
    ranks_of: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks_of.setdefault(value, []).append(rank)
    if len(ranks_of) > 1:
        found = ", ".join(f"{value} on {name_ranks(ranks)}" for value, ranks in ranks_of.items())
        raise RendezvousError(f"{what} differs between the ranks: {found}. {remedy} on all of them")


def _share_memory(
    context: JobContext,
    rendezvous: Rendezvous,
    reports: list[dict[str, Any]],
    config: Config,
    segment_bytes: Callable[[RankInfo], int],
) -> None:
    """Find the other ranks of this rank's host, and share memory with them."""
    place = context.place
    expected = HostTable.of([HostFacts(**report["host"]) for report in reports])
    segment = open_segment(rendezvous, place.rank, expected, lambda table: segment_bytes(table.place(place)))
    table = segment.table
    warns = place.rank == 0 and config.log_level not in ("error", "fatal")
    if warns and (segment.problems or table.surprises()):
        reasons = "; ".join([*table.surprises(), *(f"memory is not shared ({each})" for each in segment.problems)])
        print(
            f"horovodlike warning: {reasons}. They communicate through the network, as ranks of different hosts do, "
            "which is slower",
            file=sys.stderr,
        )
    context.table, context.segment_fd, context.place = table, segment.fd, table.place(place)
    beside = table.ranks_beside(place.rank)
    context.pids = [reports[rank]["pid"] for rank in beside]
    usable = 0
    for rank in beside:
        usable |= int(reports[rank]["processors"], 16)
    context.processors = usable.bit_count()


def _connect_hosts(context: JobContext, rendezvous: Rendezvous, reports: list[dict[str, Any]], config: Config) -> None:
    """Connect this rank to the ranks of other hosts. The imports are here because jobs on one host do not need them."""
    from horovodlike._bootstrap.mesh import connect_mesh
    from horovodlike._bootstrap.wakeup_pipes import open_wakeup_pipes
    from horovodlike._net.interfaces import own_address

    rank, table = context.place.rank, context.table
    assert table is not None
    context.wakeup_pipes = open_wakeup_pipes(rendezvous, rank, table.ranks_beside(rank), context.pids)
    ends = [(str(own), str(server)) for own, server in (report["ends"] for report in reports)]
    context.address = own_address(rank, ends, config.network_interface)
    context.connections = connect_mesh(rendezvous, table, config, context.address)
