"""A rank's connection to the rendezvous server, with one operation: the all-gather of a JSON value."""

import contextlib
import json
import socket
import time
from typing import Any

from horovodlike._bootstrap.environment import RankInfo
from horovodlike._bootstrap.rendezvous_server import LONGEST_TIMEOUT, SERVERS
from horovodlike._bootstrap.rendezvous_state import JOIN
from horovodlike._net.connect import dial
from horovodlike._net.secure_channel import (
    FRAME_LIMIT,
    HANDSHAKE_TIMEOUT,
    AuthenticationError,
    ClientChannel,
    Identity,
    JobKey,
    VersionError,
    job_digest,
)
from horovodlike._net.secure_server import encode
from horovodlike.errors import RendezvousError

_SERVER_GRACE = 5.0
"""Seconds that a client waits beyond the server's deadline, so that it receives the server's reason for a failure."""


class Rendezvous:
    """A rank's connection to the rendezvous server. For one thread at a time.

    Attributes:
        rank: This rank.
        size: The number of ranks.
        generation: How many generations have begun at this server.
        local_address: The address of this end of the connection.
        server_address: The address at which this rank reaches the server.
    """

    def __init__(
        self,
        host: str,
        port: int,
        key: bytes | JobKey,
        place: RankInfo,
        start_timeout: float = 30.0,
        owner: str = "its process",
        attempts: int = 3,
    ) -> None:
        """Connect to the server.

        Args:
            host: The server's address, or several to be tried, separated by commas.
            port: The server's port.
            key: The job's key.
            place: This process's rank, the job's size and name.
            start_timeout: Seconds that every operation waits for the other ranks. An attempt to connect waits as
                long for the server, but :data:`HANDSHAKE_TIMEOUT` seconds at most.
            owner: The process that runs the server, for messages.
            attempts: How often to try when the server closes the connection in the handshake or is slow. If no process
                listens, there is no second attempt.

        Raises:
            RendezvousError: The server cannot be reached, does not hold the key or refuses this rank.
        """
        self.rank = place.rank
        self.size = place.size
        self.generation = 0
        self._timeout = min(start_timeout, LONGEST_TIMEOUT)
        self._where = f"the rendezvous server at {host}:{port}"
        self._owner = owner
        self._channel: ClientChannel | None = None
        self._key = key if isinstance(key, JobKey) else JobKey(key)
        identity = Identity(place.rank, place.size, job_digest(place.job))
        for attempt in range(attempts):
            try:
                self._connect(host, port, identity)
                return
            except (AuthenticationError, UnreachableError) as error:
                if attempt + 1 == attempts or isinstance(error.__cause__, ConnectionRefusedError):
                    raise
                time.sleep(0.01)

    def _connect(self, host: str, port: int, identity: Identity) -> None:
        problem: RendezvousError | None = None
        try:
            with contextlib.closing(dial(host, port, min(self._timeout, HANDSHAKE_TIMEOUT))) as answers:
                for connected in answers:
                    try:
                        self._introduce(connected, identity)
                        return
                    except (AuthenticationError, VersionError, UnreachableError) as error:
                        problem = error  # the next address may lead to the right server
        except OSError as error:
            raise problem or self._unreachable(error) from error
        assert problem is not None
        raise problem

    def _unreachable(self, error: OSError) -> "UnreachableError":
        return UnreachableError(
            f"rank {self.rank} cannot reach {self._where}: {error.strerror or error}. Does {self._owner} still run?"
        )

    def _introduce(self, connected: socket.socket, identity: Identity) -> None:
        deadline = time.monotonic() + min(self._timeout, HANDSHAKE_TIMEOUT)
        try:
            channel = ClientChannel(connected, self._key, identity, deadline)
        except VersionError as error:
            raise VersionError(f"rank {self.rank} cannot use {self._where}: {error}") from None
        except OSError as error:
            raise self._unreachable(error) from error
        with contextlib.ExitStack() as stack:
            stack.callback(channel.close)
            try:
                answer = json.loads(channel.receive(deadline))
            except TimeoutError as error:
                raise UnreachableError(
                    f"{self._where} did not answer rank {self.rank} in time; is {self._owner} stopped?"
                ) from error
            except AuthenticationError as error:
                raise AuthenticationError(
                    f"authentication failed between rank {self.rank} and {self._where} ({error}): they do not hold the "
                    "same key. All ranks of a job need the HOROVODLIKE_SECRET_KEY that its launcher made; was this "
                    "process started in the environment of another job?"
                ) from None
            if "refused" in answer:
                raise RendezvousError(f"{self._where} refused this process: {answer['refused']}")
            stack.pop_all()
        self.generation = int(answer["generation"])
        self.local_address: str = channel.socket.getsockname()[0]
        self.server_address: str = channel.socket.getpeername()[0]
        self._channel = channel

    def derive_key(self, *parts: bytes) -> JobKey:
        """Return a key that only the ranks of this job can derive, for the purpose that the parts name."""
        return self._key.derive(b"horovodlike derived", *parts)

    def begin(self, payload: Any = None) -> list[Any]:  # noqa: ANN401 - any JSON value
        """Start a generation together with all ranks, and all-gather a value in the same exchange.

        Topics of later exchanges belong to this generation, so that ``init()`` may run any number of times.

        Raises:
            RendezvousError: As for :meth:`exchange`.
        """
        gathered = self._gather(JOIN, {"generation": self.generation, "payload": payload})
        self.generation = 1 + max(each["generation"] for each in gathered)
        return [each["payload"] for each in gathered]

    def exchange(self, topic: str, payload: Any, patience: float = 0.0) -> list[Any]:  # noqa: ANN401 - any JSON value
        """All-gather a JSON value; returns when every rank has called this with the same topic.

        Args:
            topic: The name of this all-gather; all ranks must use the same topics in the same order.
            payload: The value; as JSON it may take about :data:`FRAME_LIMIT` bytes divided by the number of ranks.
            patience: Seconds beyond ``start_timeout`` that other ranks may take until they call this.

        Returns:
            The values by rank.

        Raises:
            RendezvousError: A rank did not call this in time, exited, gave up or used another topic; the message names
                the rank.
            ValueError: The value is too large.
        """
        return self._gather(f"{self.generation}/{topic}", payload, patience)

    def barrier(self, topic: str) -> None:
        """Wait for all ranks; raises as :meth:`exchange`."""
        self.exchange(topic, None)

    def publish(self, address: Any) -> None:  # noqa: ANN401 - any JSON value
        """Publish the address of this process: a server of parameters, which has connected as a rank after the last.

        Raises:
            RendezvousError: The rendezvous server is lost or does not answer.
        """
        self._ask(encode({"do": "publish", "payload": address}), SERVERS, self._timeout)

    def find_servers(self) -> list[Any]:
        """Return the address that each parameter server has published; wait until all of them have.

        Raises:
            RendezvousError: A server has not published its address in time, or the rendezvous server is lost.
        """
        found: list[Any] = self._ask(encode({"do": "find"}), SERVERS, self._timeout)
        return found

    def abort(self, reason: str) -> None:
        """Give up this generation: every exchange of it fails at once on the other ranks, with this reason."""
        if self._channel is not None:
            message = {"do": "abort", "group": str(self.generation), "reason": reason[:2000]}
            deadline = time.monotonic() + _SERVER_GRACE
            try:
                self._channel.send(encode(message), deadline)
                while "aborted" not in json.loads(self._channel.receive(deadline)):
                    pass
            except (OSError, RendezvousError):
                self._hang_up()

    def close(self) -> None:
        """Tell the server that this rank leaves; it may connect again later. Does nothing if already closed."""
        if self._channel is not None:
            # If the server has exited, no other rank waits for this message.
            with contextlib.suppress(OSError, RendezvousError):
                self._channel.send(encode({"do": "leave"}), time.monotonic() + _SERVER_GRACE)
            self._hang_up()

    def __enter__(self) -> "Rendezvous":
        """Return the connection itself, which is open from the start."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the connection."""
        self.close()

    def _gather(self, topic: str, payload: Any, patience: float = 0.0) -> list[Any]:  # noqa: ANN401
        if self._channel is None:
            raise RendezvousError("this rank has left the rendezvous")
        timeout = min(self._timeout + patience, LONGEST_TIMEOUT)
        message = {"do": "arrive", "topic": topic, "payload": payload, "timeout": timeout}
        encoded = encode(message)
        most = (FRAME_LIMIT - 4096) // self.size
        if len(encoded) > most:
            raise ValueError(f"a value of {len(encoded)} bytes is over the limit of {most} bytes for {self.size} ranks")
        result: list[Any] = self._ask(encoded, topic, timeout + _SERVER_GRACE)
        return result

    def _ask(self, encoded: bytes, topic: str, timeout: float) -> Any:  # noqa: ANN401
        """Send a message, and return the result of the answer that has this topic."""
        if self._channel is None:
            raise RendezvousError("this rank has left the rendezvous")
        deadline = time.monotonic() + timeout
        try:
            with contextlib.suppress(ConnectionError):  # messages sent before the end can still be received
                self._channel.send(encoded, deadline)
            while True:
                answer = json.loads(self._channel.receive(deadline))
                if answer.get("topic") == topic:
                    break
                if "closed" in answer:
                    raise ConnectionResetError(answer["closed"] or "it was closed")
        except TimeoutError:
            self._hang_up()
            raise RendezvousError(
                f"{self._where} did not answer rank {self.rank} for {timeout:g} s; is {self._owner} stopped?"
            ) from None
        except (OSError, RendezvousError) as error:
            self._hang_up()
            raise RendezvousError(
                f"rank {self.rank} lost {self._where}, which {self._owner} ran and which has ended: {error}"
            ) from None
        except BaseException:
            self._hang_up()  # an interrupted exchange leaves the connection in an unknown state
            raise
        if "error" in answer:
            raise RendezvousError(f"rank {self.rank} could not go on with {topic!r}: {answer['error']}")
        return answer["result"]

    def _hang_up(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None


class UnreachableError(RendezvousError):
    """No process listens at the server's address, or the process there does not answer."""
