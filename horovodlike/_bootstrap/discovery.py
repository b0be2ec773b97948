"""The connection of a rank to the rendezvous server, which the launcher runs, or rank 0 if no launcher does.

Rank 0 publishes the address of its server and the job's key by a means that all ranks of the job can use:

* ranks of one host: a file that belongs to the user (:mod:`horovodlike._bootstrap.file_discovery`);
* an address, a port and a key that the user has given to all ranks;
* MPI, if it started the ranks (:mod:`horovodlike._bootstrap.mpi_discovery`);
* MUNGE, Slurm's authentication service (:mod:`horovodlike._bootstrap.slurm_discovery`).
"""

import contextlib
import ipaddress
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from horovodlike._bootstrap.environment import (
    RENDEZVOUS_ADDRESS,
    RENDEZVOUS_OWNER,
    RENDEZVOUS_PORT,
    SECRET_KEY,
    SECRET_KEY_FILE,
    RankInfo,
)
from horovodlike._bootstrap.file_discovery import Discovery, Endpoint, FileDiscovery
from horovodlike._bootstrap.rendezvous_client import Rendezvous, UnreachableError
from horovodlike._bootstrap.rendezvous_server import RendezvousServer
from horovodlike._net import connect
from horovodlike._net.secure_channel import AuthenticationError, JobKey, VersionError
from horovodlike.config import Config
from horovodlike.errors import ConfigError, RendezvousError

_LOOPBACK = "127.0.0.1"


@dataclass
class JoinedRendezvous:
    """This rank's connection to the server, and the server if it is in this process."""

    rendezvous: Rendezvous
    server: RendezvousServer | None = None


@dataclass(frozen=True)
class Meeting:
    """The rank and the discovery of this process, if another library has started and numbered the ranks.

    Attributes:
        place: The rank info of this process.
        discovery: The means by which rank 0 publishes its endpoint.
    """

    place: RankInfo
    discovery: Discovery


@contextlib.contextmanager
def join_rendezvous(
    place: RankInfo,
    key: JobKey | None,
    config: Config,
    environ: Mapping[str, str],
    discovery: Discovery | None = None,
) -> Iterator[JoinedRendezvous]:
    """Connect to the server. All ranks must connect before the ``with`` block ends: then the endpoint is removed.

    Args:
        place: This process's rank, size and so on, in a job of several ranks.
        key: The key that all ranks were given, or None.
        config: The settings.
        environ: The environment.
        discovery: The means by which rank 0 publishes its endpoint; None: the environment determines it.

    Yields:
        The connection and the server; the caller closes them.

    Raises:
        RendezvousError: The server cannot be found or reached.
        ConfigError: Environment variables contradict each other or are malformed.
    """
    if discovery is not None:
        pass
    elif environ.get(RENDEZVOUS_PORT):
        given = _GivenAddress(environ, key, place)
        # With --mpi, hvdrun has mpirun start the ranks, but still runs the server itself; so do other libraries.
        owner = environ.get(RENDEZVOUS_OWNER) or ("hvdrun" if place.launcher == "hvdrun" else "")
        if owner:
            yield JoinedRendezvous(_connect(given.read(), place, config, attempts=3, owner=owner))
            return
        discovery = given
    elif place.local_size == place.size:
        discovery = FileDiscovery(place.job, environ)
    else:
        discovery = _discovery_across_hosts(place, config, environ)
    if place.rank == 0:
        with _serve(discovery, place, config) as joined:
            yield joined
    else:
        yield JoinedRendezvous(_discover(discovery, place, config))


def _require_key(key: JobKey | None, place: RankInfo, owner: str) -> JobKey:
    if key is not None:
        return key
    if place.launcher == "hvdrun":
        raise RendezvousError(
            f"{SECRET_KEY} is not set although {RENDEZVOUS_PORT} is: only the processes that {owner} starts itself can "
            "be ranks, and this one seems to have been started by a rank. Unset HOROVODLIKE_RANK, HOROVODLIKE_SIZE, "
            "HOROVOD_RANK, HOROVOD_SIZE and RANK in its environment to make it a job of its own"
        )
    raise RendezvousError(
        f"{RENDEZVOUS_PORT} is set, but there is no key with which the ranks could trust each other: give all of them "
        f"the same {SECRET_KEY} (64 hexadecimal digits), or {SECRET_KEY_FILE}, a file of mode 0600 that holds it"
    )


def _discovery_across_hosts(place: RankInfo, config: Config, environ: Mapping[str, str]) -> Discovery:
    """Return a discovery that works across hosts with this launcher. Jobs on one host do not need these imports."""
    from horovodlike._bootstrap import mpi_discovery, slurm_discovery

    reasons: dict[str, None] = {}
    for find in (mpi_discovery.find_running, slurm_discovery.find, mpi_discovery.find):
        found = find(place, config, environ)
        if not isinstance(found, str):
            return found
        if found:
            reasons[found] = None
    raise RendezvousError(
        f"{place.launcher} started {place.size} ranks, {place.local_size} of them on this host, and nothing tells "
        f"rank {place.rank} how to find the others{''.join(f'; {reason}' for reason in reasons)}. Start the job with "
        f"hvdrun, or give all ranks {RENDEZVOUS_ADDRESS} (an address of rank 0's host), {RENDEZVOUS_PORT} (a free port "
        f"there) and {SECRET_KEY_FILE} (a file of mode 0600 with 64 hexadecimal digits, the same on all hosts)"
    )


@contextlib.contextmanager
def _serve(discovery: Discovery, place: RankInfo, config: Config) -> Iterator[JoinedRendezvous]:
    """Run the server on rank 0 and publish its endpoint until all ranks have connected."""
    endpoint = discovery.choose_endpoint()
    # `once`: a rank that calls init() again must not connect to the server of its previous init().
    server = RendezvousServer(endpoint.key, place.size, endpoint.hosts, place.job, endpoint.port, once=True)
    try:
        server.start()
    except RendezvousError as problem:
        if not endpoint.port:
            raise
        try:  # a launcher that this package does not know may run a server at this address
            rendezvous = _connect(endpoint, place, config, attempts=1)
        except RendezvousError:
            raise problem from None
        yield JoinedRendezvous(rendezvous)
        return
    try:
        endpoint = Endpoint(server.port, endpoint.key, endpoint.hosts)
        discovery.publish(endpoint)
        joined = JoinedRendezvous(_connect(endpoint, place, config, attempts=3), server)
    except BaseException:
        discovery.unpublish()
        server.close()
        raise
    try:
        yield joined
    finally:
        discovery.unpublish()


def _discover(discovery: Discovery, place: RankInfo, config: Config) -> Rendezvous:
    """Connect to rank 0's server. Retry until the start timeout: the endpoint may still be a crashed job's."""
    deadline = time.monotonic() + config.start_timeout
    pause = 0.002
    found = "there was nothing"
    while True:
        try:
            endpoint = discovery.read()
            if endpoint is not None:
                return _connect(endpoint, place, config, attempts=1)
        except (UnreachableError, AuthenticationError, VersionError) as error:
            found = f"what was there did not lead to it: {error}"
        if time.monotonic() + pause > deadline:
            raise RendezvousError(
                f"after {config.start_timeout:g} s rank 0 of {place.size} had not told rank {place.rank} where it "
                f"listens, {discovery.where} ({found}); see whether rank 0 runs and what it prints. If it only needs "
                "longer, raise --start-timeout (HOROVODLIKE_START_TIMEOUT)"
            )
        time.sleep(pause)
        pause = min(pause * 1.5, 0.1)


def _connect(endpoint: Endpoint, place: RankInfo, config: Config, attempts: int, owner: str = "rank 0") -> Rendezvous:
    timeout = config.start_timeout
    return Rendezvous(endpoint.hosts, endpoint.port, endpoint.key, place, timeout, owner=owner, attempts=attempts)


class _GivenAddress:
    """The discovery of jobs whose environment gives all ranks the address of the server."""

    def __init__(self, environ: Mapping[str, str], key: JobKey | None, place: RankInfo) -> None:
        text = environ[RENDEZVOUS_PORT]
        if not (text.isascii() and text.isdigit() and 0 < int(text) < 65536):
            raise ConfigError(f"{RENDEZVOUS_PORT}={text!r} is not a port")
        owner = environ.get(RENDEZVOUS_OWNER) or "hvdrun"
        self._given = Endpoint(int(text), _require_key(key, place, owner), environ.get(RENDEZVOUS_ADDRESS) or _LOOPBACK)
        self._place = place
        self.where = f"at {self._given.hosts}:{self._given.port}"

    def choose_endpoint(self) -> Endpoint:
        """Return an endpoint with the given addresses that this host has.

        Raises:
            RendezvousError: The host has none of them, or only loopback addresses, which other hosts cannot reach.
        """
        from horovodlike._net.interfaces import listening_addresses

        names = filter(None, (each.strip() for each in self._given.hosts.split(",")))
        found = [address for name in names for address in listening_addresses(name, resolve(name))]
        mine = [ipaddress.ip_address(each) for each in dict.fromkeys(found)]
        what = f"{RENDEZVOUS_ADDRESS}={self._given.hosts!r}"
        if not mine:
            raise RendezvousError(
                f"{what} is no address of host {socket.gethostname()}, where rank 0 runs, and where it listens for the "
                "others; set it to one"
            )
        if self._place.local_size < self._place.size and all(each.is_loopback for each in mine):
            raise RendezvousError(
                f"{what} stands for {mine[0]} on host {socket.gethostname()}, where rank 0 runs, and other hosts "
                "cannot reach that; set it to an address that they can reach"
            )
        return replace(self._given, hosts=",".join(str(each) for each in mine))

    def publish(self, endpoint: Endpoint) -> None:
        """Do nothing: all ranks were given the address."""

    def unpublish(self) -> None:
        """Do nothing: there is nothing to remove."""

    def read(self) -> Endpoint:
        """Return the endpoint that the environment gives."""
        return self._given


def resolve(hosts: str) -> list[str]:
    """Return the IP addresses of hosts.

    Args:
        hosts: Names or addresses, separated by commas.

    Raises:
        RendezvousError: A name cannot be resolved on this host.
    """
    found: dict[str, None] = {}
    for host in filter(None, (part.strip() for part in hosts.split(","))):
        try:
            found.update(dict.fromkeys(str(address[0]) for _, address in connect.resolve(host)))
        except OSError as error:
            raise RendezvousError(f"{host} cannot be resolved on {socket.gethostname()}: {error.strerror}") from error
    return list(found)
