"""The launcher's ends of the connections to the agents of a job."""

import contextlib
import functools
import math
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import IO, Protocol

from horovodlike.launcher.agent import START_AGENT
from horovodlike.launcher.agent.protocol import MAGIC, PIECE, Frame, FrameKind, FrameReader, encode, encode_seconds
from horovodlike.launcher.supervisor.failure_attribution import signal_name
from horovodlike.launcher.supervisor.output import RankOutput

_WORDS_BYTES = 8 * 1024
_CLOSE_S = 20.0
"""How long a host may take to end all processes once its connection is cut, before it is given up."""
_LEAVE_S = 5.0
"""How long to wait for ssh to exit after the agent has ended: meanwhile no other connection is served."""


class FrameConnection:
    """A connection over which frames travel. Not thread-safe.

    Attributes:
        host: The name of the host at the other end, or None if it is this machine.
        heard_at: The time of the last arrival, as ``time.monotonic()``.
        arrivals: How often something has arrived.
        over: The other end has reported that none of its processes is left.
    """

    def __init__(self, host: str | None, magic: bytes = b"") -> None:
        """Start with empty buffers.

        Args:
            host: The name of the host at the other end.
            magic: The bytes that precede the first frame.
        """
        self.host = host
        self.heard_at = time.monotonic()
        self.arrivals = 0
        self.over = False
        self._reader = FrameReader(magic)
        self._unsent = bytearray()

    def send(self, kind: FrameKind, number: int = 0, payload: bytes = b"") -> None:
        """Send as much of one frame as possible without waiting; :meth:`flush` sends the rest.

        If the agent has ended, :meth:`receive` reports it, not this method.
        """
        self._unsent += encode(kind, number, payload)
        self.flush()

    def send_task(self, task: bytes) -> None:
        """Send the file that every rank can read."""
        for start in range(0, len(task), PIECE):
            self.send(FrameKind.TASK, 0, task[start : start + PIECE])

    def flush(self) -> None:
        """Send as many of the unsent bytes as possible without waiting."""
        try:
            while self._unsent:
                del self._unsent[: self._write(self._unsent)]
        except BlockingIOError:
            pass
        except (OSError, ValueError):
            self._unsent.clear()

    def receive(self) -> list[Frame] | None:
        """Return the frames that have arrived, possibly none, or None at the end: the host is clean then, or lost.

        Raises:
            InvalidFrameError: The bytes that arrived are no frame.
            OSError: The connection is broken.
        """
        try:
            data = self._read()
        except BlockingIOError:
            return []
        self.heard_at = time.monotonic()
        if data is None:
            return None
        self.arrivals += 1
        return self._reader.feed(data)

    def watch(self, selector: selectors.BaseSelector, listening: bool, on_readable: Callable[[], object]) -> None:
        """Update the events for which a selector waits.

        Args:
            selector: Each key's ``data`` is a function to call when the key is ready.
            listening: True to wait for frames of the other end.
            on_readable: Called when :meth:`receive` has something to return.
        """
        raise NotImplementedError

    def unwatch(self, selector: selectors.BaseSelector) -> None:
        """Remove the connection from a selector; to be called before :meth:`close`."""
        raise NotImplementedError

    def kill(self) -> None:
        """Break off the connection, without waiting."""
        raise NotImplementedError

    def cut(self) -> None:
        """Begin the work of :meth:`close` that takes time; do not wait."""

    @property
    def last_words(self) -> list[str]:
        """The last lines that the other end has written beside frames."""
        return []

    def close(self) -> int:
        """Cut the connection and wait until the processes at the other end have ended.

        Returns:
            An exit code, or minus a signal; not 0 if the other end did not end in order.
        """
        raise NotImplementedError

    @property
    def who(self) -> str:
        """The name of the other end in messages."""
        raise NotImplementedError

    def explain_end(self, status: int) -> str:
        """Describe how the other end has ended, for messages; the status is the result of :meth:`close`."""
        raise NotImplementedError

    def _read(self) -> bytes | None:
        """Return the bytes that have arrived, or None at the end."""
        raise NotImplementedError

    def _write(self, data: bytearray) -> int:
        raise NotImplementedError


class AgentConnection(FrameConnection):
    """A connection to an agent by the pipes of a child process: the agent itself, or a client of ssh."""

    def __init__(self, process: "subprocess.Popen[bytes]", host: str | None = None) -> None:
        """Take over a process whose pipes are unbuffered."""
        super().__init__(host, b"" if host is None else MAGIC)
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._stdin, self._stdout, self._stderr = process.stdin, process.stdout, process.stderr
        self._words = b""
        self._speaking = True
        self._heard = False
        self._give_up = math.inf  # when to stop waiting for its end
        for pipe in (self._stdin, self._stdout, self._stderr):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)

    @property
    def pid(self) -> int:
        """The process id of the agent or, if that is on another host, of the client of ssh."""
        return self._process.pid

    @property
    def who(self) -> str:
        """The agent with its process id, or with its host."""
        return f"the agent (pid {self.pid})" if self.host is None else f"the agent on {self.host}"

    @property
    def last_words(self) -> list[str]:
        """The last lines that ssh, or the agent through it, has written to standard error."""
        lines = self._words.decode(errors="replace").splitlines()
        return [line.strip() for line in lines if line.strip()][-5:]

    def explain_end(self, status: int) -> str:
        """See :meth:`FrameConnection.explain_end`."""
        how = signal_name(-status) if status < 0 else f"code {status}"
        said = f" ({'; '.join(self.last_words)})" if self.last_words else ""
        return f"{self.who} ended with {how}{said}"

    def watch(self, selector: selectors.BaseSelector, listening: bool, on_readable: Callable[[], object]) -> None:
        """See :meth:`FrameConnection.watch`."""
        watch_descriptor(selector, self._stdout.fileno(), selectors.EVENT_READ if listening else 0, on_readable)
        watch_descriptor(selector, self._stdin.fileno(), selectors.EVENT_WRITE if self._unsent else 0, self.flush)
        if self._stderr is not None:
            watch_descriptor(
                selector, self._stderr.fileno(), selectors.EVENT_READ if self._speaking else 0, self._hear_words
            )

    def unwatch(self, selector: selectors.BaseSelector) -> None:
        """See :meth:`FrameConnection.unwatch`."""
        for pipe in filter(None, (self._stdin, self._stdout, self._stderr)):
            watch_descriptor(selector, pipe.fileno(), 0, self.flush)

    def _hear_words(self) -> bool:
        """Read from standard error without waiting; return False at its end."""
        assert self._stderr is not None
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._stderr.fileno(), _WORDS_BYTES)
            self._words = (self._words + data)[-_WORDS_BYTES:]
            self._speaking = bool(data)
        return self._speaking

    def kill(self) -> None:
        """Kill the process: the agent's own, or the client of ssh."""
        self._process.kill()

    def cut(self) -> None:
        """Cut the connection, so that the agent ends all processes; do not wait for this.

        The agent's time limit starts now: if several connections are cut before any is closed, their limits overlap.
        """
        self._expect_end(_CLOSE_S)
        if self.host is not None and not self._heard:  # ssh is still connecting: nothing has been started there
            self.kill()
        with contextlib.suppress(OSError):
            self._stdin.close()

    def close(self) -> int:
        """See :meth:`FrameConnection.close`; return the agent's exit code or signal, or ssh's."""
        self.cut()
        give_up = None if self.host is None else self._give_up
        # Read to the end of the output: it comes when both the guard and the agent proper have exited.
        if not self._stdout.closed:
            self._wait_readable(self._stdout, give_up, lambda: bool(os.read(self._stdout.fileno(), PIECE)))
            self._stdout.close()
        if self._stderr is not None and not self._stderr.closed:
            self._wait_readable(self._stderr, give_up, self._hear_words)
            self._stderr.close()
        try:
            return self._process.wait(None if give_up is None else max(0.0, give_up - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def _wait_readable(self, pipe: IO[bytes], give_up: float | None, take: Callable[[], bool]) -> None:
        """Call ``take`` when the pipe is readable until it returns False; kill the process at ``give_up``."""
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            while selector.select(None if give_up is None else max(0.0, give_up - time.monotonic())):
                if not take():
                    return
        self._process.kill()

    def _expect_end(self, seconds: float) -> None:
        self._give_up = min(self._give_up, time.monotonic() + seconds)

    def _read(self) -> bytes | None:
        data = os.read(self._stdout.fileno(), PIECE)
        self._heard = True
        if not data:
            self._expect_end(_LEAVE_S)
        return data or None

    def _write(self, data: bytearray) -> int:
        return os.write(self._stdin.fileno(), data)


def watch_descriptor(
    selector: selectors.BaseSelector, descriptor: int, events: int, function: Callable[[], object]
) -> None:
    """Register a descriptor with a selector for some events, or for none."""
    known = selector.get_map().get(descriptor)
    if known is None and events:
        selector.register(descriptor, events, function)
    elif known is not None and not events:
        selector.unregister(descriptor)
    elif known is not None and known.events != events:
        selector.modify(descriptor, events, function)


def start_local_agent() -> AgentConnection:
    """Start the agent of this host, in a session of its own: a Ctrl-C on the terminal does not reach it."""
    process = subprocess.Popen(
        # -X utf8 does not change the ranks' names and variables, which travel as bytes.
        [sys.executable, "-I", "-S", "-X", "utf8", START_AGENT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,
    )
    return AgentConnection(process)


def start_remote_agent(command: Sequence[str], host: str) -> AgentConnection:
    """Start the agent of another host.

    Args:
        command: A client of ssh, or a tool of a scheduler, with the command that it executes there.
        host: The host's name.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,
    )
    return AgentConnection(process, host)


_PATIENCE = 2 / 3
"""The fraction of the network timeout after which a silent host is given up: earlier than by the ranks."""


class FrameHandler(Protocol):
    """The receiver of the agents' frames."""

    def on_frame(self, frame: Frame, connection: FrameConnection) -> None:
        """Handle a frame of an agent. Raise ValueError if it makes no sense."""

    def on_nonsense(self, connection: FrameConnection, error: Exception) -> None:
        """Handle an invalid frame, other invalid bytes, or a broken connection; it is about to be closed."""

    def on_silence(self, connection: FrameConnection, seconds: float) -> None:
        """Handle a host that has been silent for too long; its connection is about to be cut."""

    def on_end(self, connection: FrameConnection, status: int) -> None:
        """Handle the end of the connection to a host; the status is the result of :meth:`FrameConnection.close`."""


class AgentConnections:
    """The connections of a job. Belongs to one thread."""

    def __init__(
        self, connections: Iterable[FrameConnection], handler: FrameHandler, output: RankOutput, network_timeout: float
    ) -> None:
        """Take over connections to agents that are ready.

        Args:
            connections: The connections.
            handler: Handles the frames of the agents, and the ends of the connections.
            output: Nothing is read from the agents while it is full.
            network_timeout: How long another host may be silent, in seconds.
        """
        self._connections = list(connections)
        self._handler = handler
        self._output = output
        self._network_timeout = network_timeout
        self._finished: list[FrameConnection] = []  # connections that have ended, to be closed
        self._listening = True
        self._greet_at = time.monotonic()

    def __len__(self) -> int:
        """Return the number of connections."""
        return len(self._connections)

    def add(self, connection: FrameConnection) -> None:
        """Take over another connection."""
        connection.heard_at = time.monotonic()
        self._connections.append(connection)
        self._greet_at = min(self._greet_at, connection.heard_at)

    def send(self, kind: FrameKind, number: int = 0, payload: bytes = b"") -> None:
        """Send a frame over all connections."""
        for connection in self._connections:
            connection.send(kind, number, payload)

    def forgive_silence(self) -> None:
        """Measure the silence of all hosts from now on: until now no heartbeat was sent, or no answer was read."""
        for connection in self._connections:
            connection.heard_at = time.monotonic()

    def watch(self, selector: selectors.BaseSelector, abandoned: bool) -> None:
        """Send the heartbeats that are due, and update the events for which the selector waits.

        While too much output waits for the screen, nothing is read from the agents, unless the user has demanded an
        immediate end (``abandoned``).
        """
        self._greet()
        listening = abandoned or not self._output.full
        if listening and not self._listening:
            self.forgive_silence()
        self._listening = listening
        for connection in self._connections:
            connection.watch(selector, listening, functools.partial(self._receive, connection))

    def next_deadline(self) -> float | None:
        """Return the time at which :meth:`watch` has to be called at the latest, or None."""
        return self._greet_at if any(connection.host is not None for connection in self._connections) else None

    def conclude(self, selector: selectors.BaseSelector) -> None:
        """Close the connections that have ended."""
        finished, self._finished = self._finished, []
        for connection in finished:
            connection.unwatch(selector)
            self._connections.remove(connection)
            self._handler.on_end(connection, connection.close())

    def _greet(self) -> None:
        """Send other hosts a heartbeat, and kill the connections to those that do not answer."""
        now = time.monotonic()
        late = now - self._greet_at
        if late < 0:
            return
        patience = _PATIENCE * self._network_timeout
        self._greet_at = now + patience / 5
        for connection in self._connections:
            # While this process did not run, it sent no heartbeat that the host could have answered.
            connection.heard_at = min(now, connection.heard_at + late)
            if connection.host is not None and self._listening and now - connection.heard_at > patience:
                self._handler.on_silence(connection, now - connection.heard_at)
                connection.kill()
            elif connection.host is not None:
                connection.send(FrameKind.ALIVE, 0, encode_seconds(self._network_timeout))

    def _receive(self, connection: FrameConnection) -> None:
        try:
            frames = connection.receive()
            for frame in frames or ():
                self._handler.on_frame(frame, connection)
        except (ValueError, OSError) as error:
            self._handler.on_nonsense(connection, error)
            frames = None
        if frames is None or connection.over:
            self._finished.append(connection)
