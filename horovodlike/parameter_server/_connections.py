"""Connections between clients and servers of parameters: made and authenticated here, and handed over to the core.

A server accepts clients at any time, in a thread of its own. The handshake is the secure channel's. Then both
ends send one message each, in JSON:

* the server: where it runs, a salt, the update rules that the user has added there;
* the client: its name, a salt, and if it runs on the same host, shared memory that it has made.

A process that is its own server recognises its salt: the core needs no connection then. Else the server answers whether
it could open that memory, and both ends hand the socket over to the core. The MACs of the core have keys of their own,
derived from the channel's key and both salts.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from horovodlike import config as config_module
from horovodlike._bootstrap.environment import RankInfo
from horovodlike._bootstrap.mesh import MESSAGES, set_options
from horovodlike._bootstrap.shared_memory import TOKEN_BYTES, make_memfd, open_and_verify, write_token
from horovodlike._bootstrap.topology import HostFacts
from horovodlike._engine import parameters
from horovodlike._engine.parameters import Peer
from horovodlike._net.connect import dial
from horovodlike._net.listen import listen
from horovodlike._net.secure_channel import (
    HANDSHAKE_TIMEOUT,
    AuthenticationError,
    ClientChannel,
    Identity,
    JobKey,
    VersionError,
    job_digest,
)
from horovodlike._net.secure_server import Connection, ProtocolError, SecureServer, encode
from horovodlike._net.server_thread import ServerThread
from horovodlike._net.socket_options import ensure_descriptors
from horovodlike.config import Config
from horovodlike.errors import HorovodInternalError, RendezvousError

_SALT_BYTES = 32
_NAME_LENGTH = 200
_JOB = job_digest("parameter servers")
_TO_SERVER, _TO_CLIENT = b">", b"<"
_own_salts: set[str] = set()  # salts that the server in this process has sent, until their clients have answered


class Address(NamedTuple):
    """The place at which a server listens, and its name in messages."""

    host: str
    port: int
    name: str


@dataclass(frozen=True)
class Connected:
    """A server to which this process has connected.

    Attributes:
        number: Its number in the core of this process.
        rules: The update rules that the user has added there.
    """

    number: int
    rules: frozenset[str]


def facts_of(rank_info: RankInfo, settings: Config) -> HostFacts:
    """Return where this process runs, to find out whether the other end can share memory with it."""
    return HostFacts.collect(rank_info, chosen=bool(settings.hostid))


class Listener:
    """Accepts clients, and hands them over to the core, which serves them. Callable from any thread."""

    def __init__(
        self,
        key: JobKey,
        host: str,
        name: str,
        facts: HostFacts,
        settings: Config,
        rules: Callable[[], Mapping[str, Any]],
    ) -> None:
        """Listen, and start the thread.

        Args:
            key: The key that clients must hold.
            host: The address to listen on.
            name: The name of this server in messages.
            facts: The host of this process.
            settings: All settings.
            rules: Returns the update rules that the user has added.

        Raises:
            RendezvousError: It cannot listen.
        """
        self._key, self._facts, self._settings, self._rules = key, facts, settings, rules
        [listening] = listen(name, [host], [0])
        self.address = Address(host, listening.getsockname()[1], name)
        self._salts: dict[Connection, bytes] = {}
        self._server = SecureServer(key, self, who="client")
        self._server.listen([listening])
        self._thread = ServerThread(self._server, "horovodlike-parameters")

    def close(self) -> None:
        """Accept no more clients, and end the thread; clients that were handed over are not affected."""
        self._thread.close()
        _own_salts.difference_update(salt.hex() for salt in self._salts.values())

    def on_connect(self, connection: Connection, identity: Identity) -> str | None:
        """Implement :class:`horovodlike._net.secure_server.ConnectionHandler`."""
        if identity.job != _JOB:
            return "a server of parameters listens here"
        try:
            ensure_descriptors(8, "the connections of a server of parameters")
        except RendezvousError as error:
            return str(error)
        salt = self._salts[connection] = secrets.token_bytes(_SALT_BYTES)
        _own_salts.add(salt.hex())
        hello = {"host": self._facts.identity, "pid": os.getpid(), "salt": salt.hex(), "rules": sorted(self._rules())}
        self._server.send(connection, {**hello, "seal": self._settings.seal_data})
        return None

    def on_message(self, connection: Connection, payload: bytes) -> None:
        """Implement :class:`horovodlike._net.secure_server.ConnectionHandler`: hand the client over."""
        try:
            message = json.loads(payload)
            name, pid, memory = str(message["name"])[:_NAME_LENGTH], int(message["pid"]), message["memory"]
            salts = bytes.fromhex(message["salt"]) + self._forget(connection)
            is_own = message["own"] is True
            if len(salts) != 2 * _SALT_BYTES or not 0 <= pid < 1 << 31:
                raise ValueError("salt, pid")
        except Exception as error:  # invalid input from a peer ends its own connection, and no other
            raise ProtocolError(f"it sent an invalid message ({type(error).__name__})") from None
        with contextlib.ExitStack() as stack:
            memory_fd, problem = -1, ""
            if memory is not None:
                try:
                    memory_fd = _open(memory)
                    stack.callback(os.close, memory_fd)
                except Exception as error:
                    problem = str(error)
            # The core receives another descriptor. The client sends nothing before it has this answer.
            handed = stack.enter_context(connection.socket.dup())
            self._server.send(connection, {"memory": memory_fd >= 0, "problem": problem})
            self._server.drop(connection)
            keys = _keys(self._key, salts, _TO_CLIENT, _TO_SERVER)
            try:
                if not is_own:
                    set_options(handed, MESSAGES, self._settings)
                    parameters.add_client(Peer(handed.fileno(), name, keys, self._settings.seal_data, memory_fd, pid))
            except (OSError, HorovodInternalError, ValueError) as error:  # the client finds its connection closed
                self._warn(f"{name} cannot be served: {error}")

    def on_disconnect(self, connection: Connection, reason: str) -> None:
        """Implement :class:`horovodlike._net.secure_server.ConnectionHandler`."""
        self._forget(connection)
        self._warn(reason)

    def _forget(self, connection: Connection) -> bytes:
        salt = self._salts.pop(connection, b"")
        _own_salts.discard(salt.hex())
        return salt

    def _warn(self, text: str) -> None:
        if self._settings.log_level not in ("error", "fatal"):
            print(f"horovodlike warning: {self.address.name}: {text}", file=sys.stderr)


def _open(memory: Mapping[str, Any]) -> int:
    """Open the memory that a client offers, and clear it."""
    token = bytes.fromhex(memory["token"])
    if len(token) != TOKEN_BYTES:
        raise ValueError("the token is too short")
    descriptor = open_and_verify(str(memory["path"]), parameters.segment_bytes(), token, 0, is_sealed=True)
    os.pwrite(descriptor, bytes(TOKEN_BYTES), 0)
    return descriptor


def _keys(key: JobKey, salts: bytes, send: bytes, receive: bytes) -> tuple[bytes, bytes]:
    made = (key.derive(b"horovodlike parameters", direction, salts).reveal() for direction in (send, receive))
    return next(made), next(made)


@dataclass(frozen=True)
class Client:
    """This process as a client.

    Attributes:
        name: Its name, for the messages of servers.
        facts: Its host.
        settings: All settings.
    """

    name: str
    facts: HostFacts
    settings: Config

    def connect(self, address: Address, key: JobKey) -> Connected:
        """Connect to a server, and hand the connection over to the core.

        Args:
            address: The address at which the server listens.
            key: The key that it must hold.

        Raises:
            RendezvousError: The server cannot be reached or does not hold the key; the message names it.
        """
        ensure_descriptors(8, "a connection to a server of parameters")
        where = f"{address.name} at {address.host}:{address.port}"
        patience = max(self.settings.start_timeout, HANDSHAKE_TIMEOUT)
        deadline = time.monotonic() + patience
        try:
            with contextlib.closing(dial(address.host, address.port, patience)) as answers:
                connected = next(answers)
            channel = ClientChannel(connected, key, Identity(0, 1, _JOB), deadline)
            with contextlib.closing(channel):
                return self._introduce(channel, address.name, key, deadline)
        except (AuthenticationError, VersionError) as error:
            raise RendezvousError(f"{where} cannot be used: {error}") from None
        except OSError as error:
            raise RendezvousError(
                f"{where} cannot be reached ({error.strerror or error}); does it still run?"
            ) from error

    def _introduce(self, channel: ClientChannel, server: str, key: JobKey, deadline: float) -> Connected:
        hello = json.loads(channel.receive(deadline))
        if "refused" in hello:
            raise RendezvousError(f"{server} has rejected this client: {hello['refused']}")
        salt = secrets.token_bytes(_SALT_BYTES)
        is_own = hello["salt"] in _own_salts
        with _memory(not is_own and tuple(hello["host"]) == self.facts.identity) as (memory_fd, offer):
            pid = os.getpid() if memory_fd >= 0 else 0
            introduction = {"name": self.name, "salt": salt.hex(), "pid": pid, "memory": offer, "own": is_own}
            channel.send(encode(introduction), deadline)
            answer = json.loads(channel.receive(deadline))
            if memory_fd >= 0 and not answer["memory"] and self.settings.log_level not in ("error", "fatal"):
                why = answer["problem"]
                print(f"horovodlike warning: memory is not shared with {server}: {why}", file=sys.stderr)
            keys = _keys(key, salt + bytes.fromhex(hello["salt"]), _TO_SERVER, _TO_CLIENT)
            set_options(channel.socket, MESSAGES, self.settings)
            shared = (memory_fd, int(hello["pid"])) if answer["memory"] else (-1, 0)
            peer = Peer(channel.socket.fileno(), server, keys, bool(hello["seal"]), *shared, is_own)
            return Connected(parameters.add_server(peer), frozenset(map(str, hello["rules"])))


@contextlib.contextmanager
def _memory(is_same_host: bool) -> Iterator[tuple[int, dict[str, str] | None]]:
    """Make shared memory for a connection; yield its descriptor, and how the server finds it: -1 and None without."""
    memory_fd, offer = -1, None
    if is_same_host:
        with contextlib.suppress(OSError, AttributeError, RendezvousError):  # then the bytes go through the socket
            memory_fd = make_memfd(parameters.segment_bytes())
            offer = {"path": f"/proc/{os.getpid()}/fd/{memory_fd}", "token": write_token(memory_fd).hex()}
    try:
        yield memory_fd, offer
    finally:
        if memory_fd >= 0:
            os.close(memory_fd)


def load_settings() -> Config:
    """Return all settings of this process."""
    return config_module.load(os.environ)
