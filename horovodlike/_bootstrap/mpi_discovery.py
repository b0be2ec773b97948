"""Discovery of ranks that MPI started on several hosts: rank 0 broadcasts its endpoint.

Only this broadcast, and a gather of the hosts' addresses before it, go through MPI, on a duplicate of
``MPI.COMM_WORLD``: they cannot be confused with the script's own messages. This module neither initialises nor
finalizes MPI; mpi4py does, unless the script has.
"""

import json
import sys
import time
from collections.abc import Mapping
from typing import Any

from horovodlike._bootstrap.environment import RankInfo
from horovodlike._bootstrap.file_discovery import Endpoint
from horovodlike._net.interfaces import choose_address, local_addresses, shared_addresses
from horovodlike._net.secure_channel import JobKey
from horovodlike.config import Config
from horovodlike.errors import RendezvousError

_MESSAGE_BYTES = 1024
_LONGEST_PAUSE = 0.02

_duplicate: Any = None
"""The duplicate of ``MPI.COMM_WORLD``; kept for the next ``init()``."""
_unfinished: list[tuple[Any, ...]] = []
"""Requests that were abandoned, with the memory that MPI may still read and write."""


def find_running(place: RankInfo, config: Config, environ: Mapping[str, str]) -> "MpiDiscovery | str":
    """Call :func:`find` if the script has imported mpi4py's ``MPI`` already: then MPI certainly works."""
    return find(place, config, environ) if "mpi4py.MPI" in sys.modules else ""


def find(place: RankInfo, config: Config, environ: Mapping[str, str]) -> "MpiDiscovery | str":
    """Find MPI, if it started this process. Imports mpi4py, which initialises MPI.

    Returns:
        The discovery, or the reason why there is none; an empty text if nothing indicates that MPI started this job.
    """
    # Slurm prepares ranks for MPI only if asked to (srun --mpi); else initialising MPI may end the process.
    by_slurm = place.launcher == "Slurm" and ("PMI_RANK" in environ or "PMIX_RANK" in environ)
    if place.launcher not in ("Open MPI", "MPICH") and not by_slurm and "mpi4py.MPI" not in sys.modules:
        return ""
    if _unfinished:
        return "MPI cannot be used again after an init() in which not all ranks came; start new processes"
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # mpi4py may find no MPI library to load
        return f"mpi4py cannot be imported ({' '.join(str(error).split())})"
    if not MPI.Is_initialized() or MPI.Is_finalized():
        return "MPI is not initialised"
    world = MPI.COMM_WORLD
    if (world.Get_rank(), world.Get_size()) != (place.rank, place.size):
        return (
            f"in mpi4py's MPI.COMM_WORLD this process is rank {world.Get_rank()} of {world.Get_size()}, not rank "
            f"{place.rank} of {place.size}: mpi4py was built for another MPI than the one that started it"
        )
    return MpiDiscovery(world, place, config)


class MpiDiscovery:
    """Discovery by collectives: rank 0 calls :meth:`choose_endpoint` and :meth:`publish`, the others :meth:`read`."""

    where = "through MPI"

    def __init__(self, world: Any, place: RankInfo, config: Config) -> None:  # noqa: ANN401 - mpi4py's communicator
        """Use the communicator of all ranks."""
        self._world = world
        self._found: Endpoint | None = None
        self._place = place
        self._config = config
        self._deadline = time.monotonic() + config.start_timeout

    def choose_endpoint(self) -> Endpoint:
        """Return an endpoint with a new key, any free port, and the addresses that other hosts are likely to reach."""
        interfaces = local_addresses()
        mine = [str(each.address) for each in interfaces if each.is_reachable]
        by_rank = self._gather(mine)
        assert by_rank is not None
        if self._config.network_interface.strip():
            hosts = [choose_address(self._config.network_interface, interfaces)]
        else:
            hosts = shared_addresses(interfaces, [other for other in by_rank if other != mine])
        if not hosts:
            raise RendezvousError("the host of rank 0 has no address that other hosts could reach")
        return Endpoint(0, JobKey.random(), ",".join(hosts[:16]))

    def publish(self, endpoint: Endpoint) -> None:
        """Broadcast the endpoint."""
        self._broadcast([endpoint.port, endpoint.key.hex(), endpoint.hosts])

    def unpublish(self) -> None:
        """Do nothing: a broadcast leaves nothing behind."""

    def read(self) -> Endpoint | None:
        """Receive rank 0's broadcast at the first call; return the same endpoint at later ones."""
        if self._found is None:
            self._gather([str(each.address) for each in local_addresses() if each.is_reachable])
            port, key, hosts = self._broadcast(None)
            self._found = Endpoint(int(port), JobKey(bytes.fromhex(key)), str(hosts))
        return self._found

    def _gather(self, addresses: list[str]) -> list[list[str]] | None:
        """Gather the addresses of all ranks on rank 0; return None on the other ranks."""
        comm = self._own()
        own = _pack(addresses[:16])
        received = bytearray(_MESSAGE_BYTES * self._place.size) if self._place.rank == 0 else None
        self._wait(comm.Igather(own, received, root=0), own, received)
        if received is None:
            return None
        return [
            json.loads(bytes(received[start : start + _MESSAGE_BYTES]))
            for start in range(0, len(received), _MESSAGE_BYTES)
        ]

    def _broadcast(self, content: list[Any] | None) -> list[Any]:
        message = bytearray(_MESSAGE_BYTES) if content is None else _pack(content)
        self._wait(self._own().Ibcast(message, root=0), message)
        result: list[Any] = json.loads(bytes(message))
        return result

    def _own(self) -> Any:  # noqa: ANN401
        """Return a duplicate of the communicator. Collective the first time."""
        global _duplicate
        if _duplicate is None:
            made, request = self._world.Idup()
            self._wait(request, made)
            _duplicate = made
        return _duplicate

    def _wait(self, request: Any, *used: Any) -> None:  # noqa: ANN401
        """Wait for a request, until the start timeout at most: a rank may have exited, or may never call ``init()``.

        Args:
            request: MPI's request.
            used: The objects whose memory must live as long as the request.
        """
        pause = 0.0
        while not request.Test():
            if time.monotonic() > self._deadline:
                _unfinished.append((request, *used))
                raise RendezvousError(
                    f"after {self._config.start_timeout:g} s not all {self._place.size} ranks had come to MPI's "
                    "collectives in init(); see whether they run and what they print. If they only need longer, raise "
                    "--start-timeout (HOROVODLIKE_START_TIMEOUT)"
                )
            time.sleep(pause)
            pause = min(pause + 0.0005, _LONGEST_PAUSE)


def _pack(content: list[Any]) -> bytearray:
    text = json.dumps(content).encode()
    assert len(text) <= _MESSAGE_BYTES
    return bytearray(text.ljust(_MESSAGE_BYTES))
