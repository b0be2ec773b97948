"""Discovery of ranks that Slurm started on several hosts, without MPI: a server on rank 0's host sends credentials.

The job's name determines the port. A process that connects to it receives a credential of MUNGE, the service by which
Slurm itself authenticates; only processes of the same user in this cluster can decode it. The credential contains the
address of the rendezvous server and the job's key, which rank 0 sends in no other way. Ranks ignore a credential
that another user has made.
"""

import contextlib
import ipaddress
import json
import os
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Mapping

from horovodlike._bootstrap.environment import RankInfo
from horovodlike._bootstrap.file_discovery import Endpoint
from horovodlike._bootstrap.hostlist import expand_hosts
from horovodlike._net.connect import dial, resolve
from horovodlike._net.interfaces import local_addresses
from horovodlike._net.listen import listen
from horovodlike._net.secure_channel import JobKey, job_digest
from horovodlike.config import Config
from horovodlike.errors import RendezvousError

_LOWEST_PORT, _PORTS = 10240, 20000  # below the kernel's ephemeral ports
_CANDIDATES = 4
_CREDENTIAL_LIMIT = 8192
_RENEWAL_SECONDS = 60.0  # well before a credential expires
_READ_SECONDS = 2.0
_COMMAND_SECONDS = 10.0
_REPLAYED = 17  # the status of unmunge if another rank of this host has opened the credential before


def find(place: RankInfo, config: Config, environ: Mapping[str, str]) -> "SlurmDiscovery | str":
    """Find MUNGE, if Slurm started this process.

    Returns:
        The discovery, or the reason why there is none; an empty text if Slurm did not start this process.
    """
    if place.launcher != "Slurm":
        return ""
    missing = [program for program in ("munge", "unmunge") if shutil.which(program) is None]
    if missing:
        return f"there is no program {' and no program '.join(missing)}, with which Slurm authenticates"
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or ""
    try:
        return SlurmDiscovery(place, expand_hosts(nodes)[0])
    except ValueError as error:
        return f"SLURM_STEP_NODELIST: {error}"


class SlurmDiscovery:
    """Discovery by the credentials that a server on rank 0's host sends."""

    def __init__(self, place: RankInfo, host: str) -> None:
        """Choose the ports, but do not open them.

        Args:
            place: The rank info of this process.
            host: The node of rank 0: the first of the step's nodes.
        """
        self._job = job_digest(place.job)
        self._host = host
        first = int.from_bytes(self._job[:4], "big") % _PORTS
        self._ports = [_LOWEST_PORT + (first + 7 * attempt) % _PORTS for attempt in range(_CANDIDATES)]
        self.where = f"at port {' or '.join(map(str, self._ports))} of {host}"
        self._credential_server: _CredentialServer | None = None

    def choose_endpoint(self) -> Endpoint:
        """Return an endpoint with a new key, any free port, and the addresses of this node that the other nodes know.

        Raises:
            RendezvousError: The name of rank 0's node resolves to none of this host's addresses.
        """
        known = find_addresses(self._host)
        here = {str(each.address) for each in local_addresses()}
        mine = [address for address in known if address in here]
        if not mine:
            raise RendezvousError(
                f"rank 0 runs on {socket.gethostname()}, which has no address of {self._host} "
                f"({', '.join(known)}), the first node of the step, where the other ranks look for it. Start the job "
                "with hvdrun, or with srun --mpi=pmix and mpi4py"
            )
        return Endpoint(0, JobKey.random(), ",".join(mine))

    def publish(self, endpoint: Endpoint) -> None:
        """Begin to send credentials.

        Raises:
            RendezvousError: MUNGE does not work, or no port is free.
        """
        content = [self._job.hex(), endpoint.port, endpoint.key.hex(), endpoint.hosts]
        self._credential_server = _CredentialServer(
            json.dumps(content).encode(), endpoint.hosts.split(","), self._ports
        )

    def unpublish(self) -> None:
        """Close the port."""
        if self._credential_server is not None:
            self._credential_server.close()
            self._credential_server = None

    def read(self) -> Endpoint | None:
        """Try every port; return the endpoint of the first credential of this job, or None."""
        for address in find_addresses(self._host):
            for port in self._ports:
                found = self._open(_ask(address, port))
                if found is not None:
                    return found
        return None

    def _open(self, credential: bytes) -> Endpoint | None:
        content = open_credential(credential)
        if content is None:
            return None
        try:
            job, port, key, hosts = json.loads(content)
            if bytes.fromhex(job) != self._job:
                return None
            return Endpoint(int(port), JobKey(bytes.fromhex(key)), str(hosts))
        except (ValueError, TypeError):
            return None


class _CredentialServer:
    """Threads that send a credential over each connection that they accept, and receive nothing."""

    def __init__(self, content: bytes, hosts: list[str], ports: list[int]) -> None:
        self._content = content
        self._credential = make_credential(content)
        self._made = time.monotonic()
        self._listeners = listen("rank 0", hosts, ports)
        self._threads = [
            threading.Thread(target=self._serve, args=(listener,), name="horovodlike-slurm", daemon=True)
            for listener in self._listeners
        ]
        self._lock = threading.Lock()
        self._closing = threading.Event()
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._closing.set()
        for listener in self._listeners:
            listener.shutdown(socket.SHUT_RDWR)  # ends accept()
        for thread in self._threads:
            thread.join()
        for listener in self._listeners:
            listener.close()

    def _serve(self, listener: socket.socket) -> None:
        while True:
            try:
                accepted, _ = listener.accept()
            except OSError:  # the listener is closing, or there is no free descriptor
                if self._closing.wait(0.05):
                    return
                continue
            with accepted, contextlib.suppress(OSError):
                accepted.setblocking(False)  # a credential fits into the kernel's buffer
                accepted.send(self._current())

    def _current(self) -> bytes:
        with self._lock:
            if time.monotonic() - self._made > _RENEWAL_SECONDS:
                with contextlib.suppress(RendezvousError):  # the old credential is still valid for a while
                    self._credential = make_credential(self._content)
                self._made = time.monotonic()
            return self._credential


def _ask(address: str, port: int) -> bytes:
    """Return the bytes that the server at a port sends; no bytes if there is no answer."""
    with contextlib.suppress(OSError), contextlib.closing(dial(address, port, _READ_SECONDS)) as answers:
        for connected in answers:
            with connected:
                return _receive(connected)
    return b""


def _receive(connected: socket.socket) -> bytes:
    deadline = time.monotonic() + _READ_SECONDS
    data = b""
    while len(data) <= _CREDENTIAL_LIMIT:
        connected.settimeout(max(0.001, deadline - time.monotonic()))
        piece = connected.recv(_CREDENTIAL_LIMIT)
        if not piece:
            break
        data += piece
    return data


def make_credential(content: bytes) -> bytes:
    """Make a credential that only this user can open.

    Raises:
        RendezvousError: MUNGE does not work.
    """
    command = ["munge", f"--restrict-uid={os.geteuid()}"]
    try:
        done = subprocess.run(command, input=content, capture_output=True, timeout=_COMMAND_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RendezvousError(f"munge cannot be run: {error}") from error
    if done.returncode != 0:
        raise RendezvousError(f"munge failed: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout.strip()


def open_credential(credential: bytes) -> bytes | None:
    """Return the content of a credential, or None if no process of this user made it.

    Raises:
        RendezvousError: MUNGE does not work.
    """
    if len(credential) > _CREDENTIAL_LIMIT or not credential.startswith(b"MUNGE:"):
        return None
    command = ["unmunge", "--numeric"]
    try:
        done = subprocess.run(command, input=credential, capture_output=True, timeout=_COMMAND_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RendezvousError(f"unmunge cannot be run: {error}") from error
    head, separator, content = done.stdout.partition(b"\n\n")
    fields = dict(line.split(b":", 1) for line in head.splitlines() if b":" in line)
    if done.returncode not in (0, _REPLAYED) or not separator:
        return None
    if fields.get(b"UID", b"").strip() != str(os.geteuid()).encode():
        return None
    return content


def find_addresses(host: str) -> list[str]:
    """Return the addresses at which the other nodes of a cluster reach a node.

    On the node itself, its name often resolves to loopback addresses only; then Slurm (``scontrol``) gives the address.

    Raises:
        RendezvousError: The node has no such address.
    """
    usable = _resolve_outside(host) or _resolve_outside(_node_address(host))
    if usable:
        return usable
    raise RendezvousError(f"{host}, the first node of the step, cannot be resolved on {socket.gethostname()}")


def _resolve_outside(name: str) -> list[str]:
    """Return the addresses of a name, without loopback addresses."""
    with contextlib.suppress(OSError):
        found = {str(address[0]) for _, address in resolve(name)}
        return sorted(address for address in found if not ipaddress.ip_address(address).is_loopback)
    return []


def _node_address(host: str) -> str:
    command = ["scontrol", "--oneliner", "show", "node", host]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=False)
        match = re.search(r"\bNodeAddr=(\S+)", done.stdout)
        if match:
            return match[1]
    return host
