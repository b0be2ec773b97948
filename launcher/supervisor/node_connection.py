"""The connections between the launchers of several nodes, where each node's launcher was started by itself.

The launcher of node 0 listens until all others have connected. Both ends prove that they hold the job's key, by the
handshake of :mod:`horovodlike._net.secure_channel`. Frames of that channel then carry the frames of
:mod:`horovodlike.launcher.agent.protocol`.
"""

import contextlib
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from horovodlike._net.connect import dial
from horovodlike._net.listen import listen
from horovodlike._net.pending import PendingConnection, PendingConnections
from horovodlike._net.secure_channel import (
    HANDSHAKE_TIMEOUT,
    HELLO_BYTES,
    AuthenticationError,
    FrameError,
    Identity,
    JobKey,
    Opener,
    Sealer,
    VersionError,
    accept_hello,
    introduce,
    job_digest,
    make_challenge,
)
from horovodlike.errors import RendezvousError
from horovodlike.launcher.agent.protocol import Frame, FrameKind, InvalidFrameError, encode_seconds
from horovodlike.launcher.errors import HostsError
from horovodlike.launcher.supervisor.connection import FrameConnection, watch_descriptor
from horovodlike.launcher.supervisor.waiting import Waiting

_JOB = job_digest("the launchers of a job's nodes")
_PIECE = 64 * 1024
_MOST_STRANGERS = 128
_LONGEST_WAIT = 60.0
_MOST_DENIALS = 5
"""The failed handshakes after which a node gives up; node 0 also hangs up while too many connections are pending."""
_MOST_DENIED = 8
"""How many addresses of callers without the key are kept, to name them."""
_JOIN_S = 10.0
"""How long a launcher that has proved the key may take to send JOIN."""
_FLUSH_S = 5.0
_RETRY_S = 0.2
_LOOK_UP_AGAIN_S = 5.0
"""How long one address is tried; then the name of node 0, which may have moved, is resolved again."""
_PAUSE_S = 0.05
_MOST_UNSENT = 1024 * 1024


class NodeConnection(FrameConnection):
    """A connection between the launchers of two nodes.

    Attributes:
        node: The number of the node at the other end.
        num_proc: How many ranks that node has, once that is known.
        status: The status of that node's agent, once :attr:`over` is set.
    """

    def __init__(self, connected: socket.socket, sealer: Sealer, opener: Opener, node: int, host: str = "") -> None:
        """Take over an authenticated connection.

        Args:
            connected: The socket.
            sealer: Encodes the frames of the secure channel.
            opener: Verifies and decodes them.
            node: The number of the node at the other end.
            host: The name of that node's host.
        """
        super().__init__(host or f"node {node}")
        self.node = node
        self.num_proc = 0
        self.status = 0
        self._socket = connected
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sealer, self._opener = sealer, opener
        self._sealed = bytearray()

    @property
    def who(self) -> str:
        """The other launcher."""
        return f"hvdrun on {self.host}"

    @property
    def addresses(self) -> tuple[str, str] | None:
        """The address of this host and of the other one in this connection; None if it has ended."""
        try:
            return str(self._socket.getsockname()[0]), str(self._socket.getpeername()[0])
        except OSError:
            return None

    @property
    def congested(self) -> bool:
        """Back-pressure: whether too much is unsent to read more from the source of these frames."""
        return len(self._unsent) + len(self._sealed) > _MOST_UNSENT

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self._socket.fileno()

    def flush(self) -> None:
        """Send as many of the unsent bytes as possible without waiting."""
        try:
            while True:
                while self._sealed:
                    del self._sealed[: self._socket.send(self._sealed)]
                if not self._unsent:
                    return
                self._sealed += self._sealer.seal(bytes(self._unsent[:_PIECE]))
                del self._unsent[:_PIECE]
        except BlockingIOError:
            pass
        except OSError:  # the other end has gone: receive() will report it
            self._unsent.clear()
            self._sealed.clear()

    def watch(self, selector: selectors.BaseSelector, listening: bool, on_readable: Callable[[], object]) -> None:
        """See :meth:`FrameConnection.watch`."""
        pending = bool(self._unsent or self._sealed)

        def serve() -> None:
            self.flush()
            on_readable()

        events = (selectors.EVENT_READ if listening else 0) | (selectors.EVENT_WRITE if pending else 0)
        watch_descriptor(selector, self.fileno(), events, serve)

    def unwatch(self, selector: selectors.BaseSelector) -> None:
        """See :meth:`FrameConnection.unwatch`."""
        watch_descriptor(selector, self.fileno(), 0, self.flush)

    def receive(self) -> list[Frame] | None:
        """See :meth:`FrameConnection.receive`; a CLEAN frame sets :attr:`over` and :attr:`status`."""
        frames = super().receive()
        for frame in frames or ():
            if frame.kind is FrameKind.CLEAN:
                self.over, self.status = True, frame.number
        return frames

    def await_frame(self, deadline: float, *kinds: FrameKind) -> list[Frame]:
        """Wait for a frame of one of the kinds; return it and the frames after it, and drop those before.

        Raises:
            InvalidFrameError: The bytes that arrived are no frame.
            OSError: The connection has ended (``ConnectionError``), or the time is over (``TimeoutError``).
        """
        while (left := deadline - time.monotonic()) > 0:
            with selectors.DefaultSelector() as selector:
                self.watch(selector, True, lambda: None)
                for key, _ in selector.select(min(left, _LONGEST_WAIT)):
                    key.data()
            frames = self.receive()
            if frames is None:
                raise ConnectionResetError("it hung up")
            for index, frame in enumerate(frames):
                if frame.kind in kinds:
                    return frames[index:]
        raise TimeoutError("timed out")

    def kill(self) -> None:
        """Shut the socket down, so that :meth:`receive` reports the end."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> int:
        """Leave the connection open for :meth:`dismiss`; return the status that the other launcher has sent."""
        return self.status

    def explain_end(self, status: int) -> str:
        """See :meth:`FrameConnection.explain_end`."""
        return f"the agent on {self.host} ended with status {status}" if self.over else f"{self.who} has gone"

    def dismiss(self, exit_code: int, why: bytes) -> None:
        """Tell the other launcher how the job has ended, and hang up."""
        self.send(FrameKind.OUTCOME, exit_code, why)
        self.hang_up()

    def hang_up(self) -> None:
        """Send the unsent bytes, for a few seconds at most, and close the connection."""
        with contextlib.suppress(OSError):
            self._socket.settimeout(_FLUSH_S)
            self.flush()
            self._socket.sendall(self._sealed)
        self._socket.close()

    def _read(self) -> bytes | None:
        try:
            data = self._socket.recv(_PIECE)
        except ConnectionError:  # the other end was killed while something was unread there
            return None
        try:
            payloads = self._opener.feed(data)
        except FrameError as error:
            raise InvalidFrameError(str(error)) from None
        return b"".join(payloads) if data else None


@dataclass(eq=False)
class _Joining:
    """A launcher that holds the key and has not sent its JOIN yet."""

    connection: NodeConnection
    count: int  # its --nnodes
    deadline: float


Joined = tuple[NodeConnection, int, Frame]
"""The connection to a launcher, the number of nodes that it was given (0 if it has a name), and its JOIN."""


class NodeListener:
    """The listener to which the launchers of the other nodes connect. Used as a context manager.

    Attributes:
        port: The port on which it listens.
    """

    def __init__(self, key: JobKey, nnodes: int, addresses: Sequence[str], port: int, *, named: bool = False) -> None:
        """Listen.

        Args:
            key: The key that all nodes hold.
            nnodes: The number of nodes; 0 if none has a number.
            addresses: The addresses to listen on.
            port: The port; 0 for any free one.
            named: Whether nodes may have a name in place of a number.

        Raises:
            HostsError: It cannot listen.
        """
        self._key = key
        self._numbered, self._named = nnodes > 0, named
        self._selector = selectors.EpollSelector()
        most = _MOST_STRANGERS + nnodes
        self._strangers = PendingConnections(self._selector, make_challenge, HELLO_BYTES, most, HANDSHAKE_TIMEOUT)
        self._joining: dict[_Joining, None] = {}
        self._denied: list[str] = []  # the addresses of some callers without the key
        self._listeners: list[socket.socket] = []
        try:
            self._listeners = listen("node 0", addresses, [port])
        except RendezvousError as error:
            self.close()
            raise HostsError(f"{error}; choose another --rendezvous") from None
        for listener in self._listeners:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ, listener)
        self.port: int = self._listeners[0].getsockname()[1]

    def __enter__(self) -> "NodeListener":
        """Return the listener, which listens already."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop listening."""
        self.close()

    def close(self) -> None:
        """Stop listening; close the connections that have not joined."""
        for listener in self._listeners:
            listener.close()
        for joining in list(self._joining):
            self._drop(joining)
        self._strangers.close()
        self._selector.close()

    @property
    def denials(self) -> str:
        """The callers that were refused because they do not hold the key, as the end of a message; else empty."""
        who = ", ".join(self._denied)
        return f"; a caller at {who} was refused, as it has another key (--secret-key-file)" if who else ""

    def fileno(self) -> int:
        """Return a descriptor that is readable when :meth:`attend` has something to do."""
        return self._selector.fileno()

    def next_deadline(self) -> float | None:
        """Return when :meth:`attend` will have something to do even if nothing arrives."""
        return min(
            filter(None, (self._strangers.next_deadline(), *(one.deadline for one in self._joining))), default=None
        )

    def attend(self) -> list[Joined]:
        """Handle arrived connections and frames, without waiting; return the launchers that have joined."""
        found = []
        while (joined := self._serve(0.0)) is not None:
            found.append(joined)
        return found

    def accept(self, deadline: float) -> Joined | None:
        """Wait for the next launcher that proves the key and sends JOIN; a slow one does not delay others.

        Args:
            deadline: The time to give up, as ``time.monotonic()``.

        Returns:
            The connection, the number of nodes that the other launcher was given, and its JOIN; None when time is up.
        """
        while (now := time.monotonic()) < deadline:
            until = min(deadline, self.next_deadline() or deadline)
            joined = self._serve(min(max(0.0, until - now), _LONGEST_WAIT))
            if joined is not None:
                return joined
        return None

    def _serve(self, seconds: float) -> Joined | None:
        """Wait for something to arrive, and handle it; return the first launcher that has joined."""
        now = time.monotonic()
        for key, _ in self._selector.select(seconds):
            if isinstance(key.data, _Joining):
                if (frame := self._read_join(key.data)) is not None:
                    return key.data.connection, key.data.count, frame
            elif not isinstance(key.data, PendingConnection):
                self._accept(key.data)
            elif key.data in self._strangers and (hello := self._strangers.read(key.data)) is not None:
                self._authenticate(key.data, hello)
        # Only after the reads: a message that came in time may have waited in its socket.
        self._strangers.drop_late(now)
        for joining in [each for each in self._joining if each.deadline <= now]:
            self._drop(joining)
        return None

    def _accept(self, listener: socket.socket) -> None:
        try:
            self._strangers.accept(listener)
        except OSError:  # there is no free descriptor: at least don't spin
            time.sleep(_PAUSE_S)

    def _authenticate(self, stranger: PendingConnection, hello: bytes) -> None:
        try:
            identity, sealer, opener = accept_hello(self._key, stranger.challenge, hello)
        except AuthenticationError:
            with contextlib.suppress(OSError):  # it has hung up
                caller = str(stranger.socket.getpeername()[0])
                if caller not in self._denied and len(self._denied) < _MOST_DENIED:
                    self._denied.append(caller)
            self._strangers.drop(stranger)
            return
        has_number = self._numbered and 0 < identity.rank < identity.size
        has_name = self._named and identity.rank == identity.size == 0
        if identity.job != _JOB or not (has_number or has_name):  # it is no launcher of another node
            self._strangers.drop(stranger)
            return
        connection = NodeConnection(self._strangers.release(stranger), sealer, opener, identity.rank)
        joining = _Joining(connection, identity.size, time.monotonic() + _JOIN_S)
        self._joining[joining] = None
        self._selector.register(connection, selectors.EVENT_READ, joining)
        connection.send(FrameKind.ALIVE, 0, encode_seconds(HANDSHAKE_TIMEOUT))  # proves that this end holds the key too

    def _read_join(self, joining: _Joining) -> Frame | None:
        """Return a launcher's JOIN and stop watching it; return None if JOIN has not come, or the launcher has gone."""
        try:
            frames = joining.connection.receive()
        except BlockingIOError:
            return None
        except (OSError, InvalidFrameError):
            frames = None
        if frames is None:
            self._drop(joining)
            return None
        joined = next((frame for frame in frames if frame.kind is FrameKind.JOIN), None)
        if joined is not None:
            self._selector.unregister(joining.connection)
            del self._joining[joining]
        return joined

    def _drop(self, joining: _Joining) -> None:
        self._selector.unregister(joining.connection)
        del self._joining[joining]
        joining.connection.kill()
        joining.connection.hang_up()


def connect_node(
    key: JobKey,
    node: int,
    nnodes: int,
    host: str,
    port: int,
    deadline: float,
    cancelled: Callable[[], bool] = lambda: False,
) -> NodeConnection:
    """Connect to the launcher of node 0; try again until it answers.

    Args:
        key: The key that all nodes hold.
        node: The number of this node; 0 if it has a name.
        nnodes: The number of nodes; 0 if they have names.
        host: A name or address of node 0.
        port: The port that it listens on.
        deadline: The time to give up, as ``time.monotonic()``.
        cancelled: Returns whether to give up now.

    Raises:
        HostsError: Node 0 does not answer in time, does not accept the key, or has another version.
    """
    where, same, runs = f"node 0 at {host} port {port}", "--nnodes and the same key (--secret-key-file)", "hvdrun"
    if not nnodes:
        where, same, runs = f"the job at {host} port {port}", "key", "it"
    problem = "timed out"
    denials = 0
    waiting = Waiting()
    while (left := deadline - time.monotonic()) > 0 and not cancelled():
        pause = _RETRY_S
        try:
            for connected in dial(host, port, min(left, _LOOK_UP_AGAIN_S)):
                waiting.end(f"{where} has answered")
                return _introduce(connected, key, Identity(node, nnodes, _JOB), deadline)
        except VersionError as error:
            raise HostsError(f"{where}: {error}") from None
        except AuthenticationError as error:
            problem = str(error)
            denials += 1
            pause *= 2 ** (denials - 1)  # an old address of node 0 may belong to another job for some seconds
            if denials == _MOST_DENIALS:
                raise HostsError(f"{where} {problem}: give all nodes the same {same}") from None
        except OSError as error:
            problem = error.strerror or str(error)
        waiting.note(f"waiting: {where} {problem if denials else f'cannot be reached yet ({problem})'}")
        time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
    with_number = ", with --node-rank 0" if nnodes else " still"
    raise HostsError(f"{where} cannot be reached ({problem}): does {runs} run there{with_number}?")


def _introduce(connected: socket.socket, key: JobKey, identity: Identity, deadline: float) -> NodeConnection:
    """Return when both ends have proved that they hold the key; node 0 sends nothing more before JOIN."""
    until = min(deadline, time.monotonic() + HANDSHAKE_TIMEOUT)
    try:
        sealer, opener = introduce(connected, key, identity, until)
        connection = NodeConnection(connected, sealer, opener, 0)
        try:
            connection.await_frame(until, FrameKind.ALIVE)
        except (ConnectionError, InvalidFrameError):
            raise AuthenticationError("hung up on this node") from None
    except BaseException:
        connected.close()
        raise
    return connection
