"""The registry through which the processes of a tf.data service find each other, though they are of several jobs.

It is a server of names and values: a client sets a value, or asks for one and waits until it is set. Rank 0 of the
processes that compute runs it; the file that `TfDataServiceConfig.write` writes has its addresses and its key.
Connections are authenticated like connections to a job's rendezvous.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from horovodlike import config
from horovodlike._net.connect import dial
from horovodlike._net.interfaces import Interface, choose_address, local_addresses
from horovodlike._net.listen import listen
from horovodlike._net.secure_channel import (
    HANDSHAKE_TIMEOUT,
    ClientChannel,
    Identity,
    JobKey,
    job_digest,
)
from horovodlike._net.secure_server import Connection, ProtocolError, SecureServer, encode
from horovodlike._net.server_thread import ServerThread
from horovodlike.errors import RendezvousError

__all__ = ["ComputeClient", "ComputeService"]

_JOB = job_digest("tf.data service")
_ASK_AGAIN_SECONDS = 60.0  # an idle connection is not kept for long: a router in between may forget it
_ATTEMPTS = 16  # a port that is free on one address may be in use on another
_SHUTDOWN = "shutdown"


def _listening() -> list[Interface]:
    wanted = config.load(os.environ).network_interface
    chosen = choose_address(wanted, local_addresses()) if wanted else ""
    usable = [each for each in local_addresses() if not each.address.is_link_local]
    return [each for each in usable if not chosen or each.address.is_loopback or str(each.address) == chosen]


class ComputeService:
    """The registry of one tf.data service, and the thread that serves it.

    Attributes:
        key: The key that its clients need.
    """

    def __init__(self) -> None:
        """Listen on a free port.

        Raises:
            RendezvousError: It cannot listen.
            ConfigError: `HOROVODLIKE_NETWORK_INTERFACE` names no network of this host.
        """
        self.key = secrets.token_bytes(32)
        self._values: dict[str, Any] = {}
        self._waiting: list[tuple[Connection, str]] = []
        self._interfaces = _listening()
        hosts = [str(each.address) for each in self._interfaces]
        listeners = listen("the registry of the tf.data service", hosts, [0] * _ATTEMPTS)
        self._port = listeners[0].getsockname()[1]
        self._server = SecureServer(JobKey(self.key), self, who="process")
        self._server.listen(listeners)
        self._thread = ServerThread(self._server, "horovodlike-tf-data")

    def addresses(self) -> dict[str, list[tuple[str, int]]]:
        """Return the addresses and the port at which it listens, by the names of the interfaces."""
        found: dict[str, list[tuple[str, int]]] = {}
        for each in self._interfaces:
            found.setdefault(each.name, []).append((str(each.address), self._port))
        return found

    def close(self) -> None:
        """End the thread, and close all connections."""
        self._thread.close()

    def on_connect(self, connection: Connection, identity: Identity) -> str | None:
        """Implement :class:`horovodlike._net.secure_server.ConnectionHandler`."""
        return None if identity.job == _JOB else "the registry of a tf.data service listens here"

    def on_message(self, connection: Connection, payload: bytes) -> None:
        """Implement :class:`horovodlike._net.secure_server.ConnectionHandler`: note a value, or ask for one."""
        try:
            message = json.loads(payload)
            name, value = str(message["name"]), message.get("value")
            if not (value is None or value is True or (isinstance(value, str) and value.isascii())):
                raise TypeError(type(value).__name__)
        except Exception as error:  # invalid input from a client ends its own connection, and no other
            raise ProtocolError(f"it sent an invalid message ({type(error).__name__})") from None
        if value is not None:
            self._values[name] = value
            self._server.send(connection, None)
        else:
            self._waiting.append((connection, name))
        for asking in [each for each in self._waiting if each[1] in self._values]:
            self._waiting.remove(asking)
            self._server.send(asking[0], self._values[asking[1]])

    def on_disconnect(self, connection: Connection, reason: str) -> None:
        """Implement :class:`horovodlike._net.secure_server.ConnectionHandler`."""
        self._waiting = [each for each in self._waiting if each[0] is not connection]


class ComputeClient:
    """A client of the registry. Any thread."""

    def __init__(
        self, addresses: Mapping[str, Sequence[tuple[str, int]]], key: bytes, workers_per_dispatcher: int = 1
    ) -> None:
        """Do not connect yet: each call has a connection of its own.

        Args:
            addresses: Addresses of the registry with its port, by interface.
            key: Its key.
            workers_per_dispatcher: How many workers each dispatcher has.
        """
        flat = [each for of_interface in addresses.values() for each in of_interface]
        remote_first = sorted(flat, key=lambda each: each[0] in ("127.0.0.1", "::1"))
        self._hosts, self._port = ",".join(host for host, _ in remote_first), flat[0][1]
        self._key = JobKey(key)
        self._workers = workers_per_dispatcher

    def register_dispatcher(self, dispatcher_id: int, dispatcher_address: str) -> None:
        """Give the address of a dispatcher.

        Raises:
            RendezvousError: The registry cannot be reached, or has another key.
        """
        self._set(f"dispatcher {dispatcher_id}", dispatcher_address)

    def wait_for_dispatcher_registration(self, dispatcher_id: int, timeout: float) -> str:
        """Return the address of a dispatcher, once it is known.

        Raises:
            TimeoutError: It was not known within ``timeout`` seconds.
            RendezvousError: The registry cannot be reached, or has another key.
        """
        name = f"dispatcher {dispatcher_id}"
        return str(self._wait(name, timeout, f"{name} to register"))

    def register_worker_for_dispatcher(self, dispatcher_id: int, worker_id: int) -> None:
        """Announce that a worker of a dispatcher is ready.

        Args:
            dispatcher_id: The number of the dispatcher.
            worker_id: The number of the worker among the workers of all dispatchers.

        Raises:
            RendezvousError: The registry cannot be reached, or has another key.
        """
        self._set(f"worker {worker_id} of dispatcher {dispatcher_id}", True)

    def wait_for_dispatcher_worker_registration(self, dispatcher_id: int, timeout: float) -> None:
        """Wait for all workers of a dispatcher.

        Raises:
            TimeoutError: They were not ready within ``timeout`` seconds.
            RendezvousError: The registry cannot be reached, or has another key.
        """
        end = time.monotonic() + timeout
        first = dispatcher_id * self._workers
        for worker in range(first, first + self._workers):
            name = f"worker {worker} of dispatcher {dispatcher_id}"
            self._wait(name, max(0.001, end - time.monotonic()), f"{name} to start")

    def shutdown(self) -> None:
        """Have all dispatchers and workers end.

        Raises:
            RendezvousError: The registry cannot be reached, or has another key.
        """
        self._set(_SHUTDOWN, True)

    def wait_for_shutdown(self) -> None:
        """Wait until :meth:`shutdown` is called in any process.

        Raises:
            RendezvousError: The registry cannot be reached, or has another key.
        """
        while True:
            with contextlib.suppress(TimeoutError):
                self._ask({"name": _SHUTDOWN}, _ASK_AGAIN_SECONDS)
                return

    def own_address(self) -> str:
        """Return the address of this host by which it reaches the registry; others reach this process by it.

        Raises:
            RendezvousError: The registry cannot be reached, or has another key.
        """
        with contextlib.closing(self._connect()) as channel:
            return str(channel.socket.getsockname()[0])

    def _wait(self, name: str, timeout: float, activity: str) -> Any:
        try:
            return self._ask({"name": name}, timeout)
        except TimeoutError:
            raise TimeoutError(
                f"Timed out waiting for {activity} within {timeout:g} s: look at the output of the processes that "
                "compute and of those that train, or give a longer timeout"
            ) from None

    def _set(self, name: str, value: str | bool) -> None:
        try:
            self._ask({"name": name, "value": value}, HANDSHAKE_TIMEOUT)
        except TimeoutError as error:
            raise self._unreachable(error) from error

    def _ask(self, message: dict[str, Any], timeout: float) -> Any:
        """Return the answer; a TimeoutError: there was none within these seconds."""
        with contextlib.closing(self._connect()) as channel:
            deadline = time.monotonic() + timeout
            try:
                channel.send(encode(message), deadline)
                return json.loads(channel.receive(deadline))
            except TimeoutError:
                raise
            except (OSError, RendezvousError) as error:
                raise self._unreachable(error) from error

    def _connect(self) -> ClientChannel:
        problem: Exception | None = None
        try:
            with contextlib.closing(dial(self._hosts, self._port, HANDSHAKE_TIMEOUT)) as answers:
                for connected in answers:
                    deadline = time.monotonic() + HANDSHAKE_TIMEOUT
                    try:
                        return ClientChannel(connected, self._key, Identity(0, 0, _JOB), deadline)
                    except (RendezvousError, OSError) as error:
                        problem = error  # the next address may lead to the registry
        except OSError as error:
            problem = problem or error
        raise self._unreachable(problem) from problem

    def _unreachable(self, problem: Exception | None) -> RendezvousError:
        return RendezvousError(
            f"the registry of the tf.data service at {self._hosts}, port {self._port}, cannot be reached: {problem}. "
            "Do the processes of compute_worker still run, and is the file with their addresses theirs?"
        )
