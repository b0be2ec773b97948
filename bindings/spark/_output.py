"""The output of the ranks on its way to the caller: at once to the driver, where it listens, or at the end of the job.

The driver of classic Spark listens for the tasks of a job, with a key of its own. A task connects when its rank writes
something. It sends one piece at a time, and waits until the driver has taken it; output that the driver has not taken
becomes rows of the task's result. Spark Connect has no address that executors could reach: there all output becomes
rows.
"""

from __future__ import annotations

import functools
import json
import os
import selectors
import struct
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TextIO

from horovodlike._net.secure_channel import JobKey
from horovodlike.launcher.agent.protocol import Frame, FrameKind, InvalidFrameError
from horovodlike.launcher.errors import HostsError, listed
from horovodlike.launcher.supervisor import Wakeup
from horovodlike.launcher.supervisor.node_connection import NodeConnection, NodeListener, connect_node
from horovodlike.launcher.supervisor.output import RankOutput, Screen
from horovodlike.launcher.supervisor.writer import Writer

Row = tuple[int, FrameKind, int, bytes]
"""The rank, -1 for the launcher's own lines; the stream; when it was written, in nanoseconds; and the bytes."""

MOST_OUTPUT = 4 * 1024 * 1024
"""The most bytes of a rank's output that wait for the end of the job: the last ones."""
_MOST_OF_ALL = 256 * 1024 * 1024
"""The most bytes of all ranks together: a quarter of the default of ``spark.driver.maxResultSize``."""
_CONNECT_S = 10.0
_STUCK_S = 30.0
"""How long the driver may take for a piece before its task continues without it."""
_LAST_S = 5.0
_AT = struct.Struct(">q")


class TaskOutput(RankOutput):
    """The output of a task's rank: to the executor's log, and to the caller.

    Belongs to one thread, except for methods that say that they run in the writer's thread.
    """

    def __init__(self, writer: Writer, size: int, *, log: bool, wanted: bool, secret: str | None) -> None:
        """Take the targets.

        Args:
            writer: Writes to the log and sends to the driver, in its own thread.
            size: The number of ranks.
            log: Whether the executor has a log of its own.
            wanted: Whether the caller wants output.
            secret: The driver's :attr:`CallerOutput.secret`.
        """
        screen = Screen.of(sys.stderr if log else None, {})
        super().__init__({FrameKind.STDOUT: screen, FrameKind.STDERR: screen}, writer)
        self._size, self._log, self._wanted = size, log, wanted
        # Used in the writer's thread:
        self._secret = secret
        self._driver: NodeConnection | None = None
        self._kept: deque[Row] = deque()
        self._bytes = 0
        self._left_out: dict[int, int] = {}

    def add(self, rank: int, stream: FrameKind, data: bytes) -> None:
        """Take bytes that a rank has written."""
        super().add(rank, stream, data)
        self._pass_on(rank, stream, data)

    def say(self, *lines: str | bytes) -> None:
        """Write lines of the supervisor."""
        super().say(*lines)
        data = b"".join((line.encode(errors="replace") if isinstance(line, str) else line) + b"\n" for line in lines)
        self._pass_on(-1, FrameKind.STDERR, data)

    def rows(self) -> Iterator[Row]:
        """Yield the pieces that the driver has not taken, oldest first."""
        self.drain(lambda: False)
        for rank, number in self._left_out.items():
            where = "are only in its executor's log" if self._log else "were left out"
            note = f"horovodlike: {number} bytes of rank {rank}'s output {where}\n"
            yield -1, FrameKind.STDERR, 0, note.encode()
        yield from self._kept

    def close(self) -> None:
        """Close the connection to the driver. The writer must have been closed."""
        if self._driver is not None:
            self._driver.hang_up()
            self._driver = None

    def _pass_on(self, rank: int, stream: FrameKind, data: bytes) -> None:
        if self._wanted:
            self._writer.put(functools.partial(self._deliver, rank, stream, time.time_ns()), data)

    def _deliver(self, rank: int, stream: FrameKind, at: int, data: bytes) -> None:
        """Send a piece to the driver, or keep it for the end. Runs in the writer's thread."""
        if self._secret is not None:
            try:
                self._send(stream, rank, _AT.pack(at) + data)
            except (HostsError, OSError, ValueError) as error:
                self._secret = None
                print(f"horovodlike: the rank's output waits for the end of the job: {error}", file=sys.stderr)
                self.close()
            else:
                return
        self._kept.append((rank, stream, at, data))
        self._bytes += len(data)
        while self._bytes > min(MOST_OUTPUT, _MOST_OF_ALL // self._size) and len(self._kept) > 1:
            owner, _, _, dropped = self._kept.popleft()
            self._bytes -= len(dropped)
            self._left_out[owner] = self._left_out.get(owner, 0) + len(dropped)

    def _send(self, stream: FrameKind, rank: int, payload: bytes) -> None:
        """Send a piece to the driver; return when it is taken. Runs in the writer's thread."""
        if self._driver is None:
            where = json.loads(str(self._secret))
            key, deadline = JobKey(bytes.fromhex(where["key"])), time.monotonic() + _CONNECT_S
            self._driver = connect_node(key, 0, 0, where["host"], where["port"], deadline)
            self._driver.send(FrameKind.JOIN)
            self._driver.await_frame(deadline, FrameKind.PLACE)
        self._driver.send(stream, rank, payload)
        self._driver.await_frame(time.monotonic() + _STUCK_S, FrameKind.ALIVE)


class CallerOutput(RankOutput):
    """The output of all ranks on its way to the caller's streams. Belongs to one thread, but for :meth:`wake`.

    Attributes:
        secret: The place where it listens, with the key for it; None if it does not listen.
    """

    def __init__(
        self, stdout: TextIO, stderr: TextIO, size: int, address: tuple[str, str] | None, *, timestamps: bool = False
    ) -> None:
        """Listen for the tasks, if they can reach this process.

        Args:
            stdout: Receives the ranks' standard output.
            stderr: Receives the ranks' standard error, and the launcher's own lines.
            size: The number of ranks.
            address: The address to listen on, and the one that the executors know; None if there is none.
            timestamps: Each line begins with the time at which it was written.
        """
        self._wakeup = Wakeup()
        writer = Writer(self._wakeup.set)
        super().__init__(Screen.pair(stdout, stderr, os.environ), writer, timestamps=timestamps, clock=lambda: self._at)
        self._size = size
        self._at = 0.0  # when the piece that is being printed was written
        self._last: dict[NodeConnection, tuple[int, FrameKind, int]] = {}  # the last piece from each task
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wakeup, selectors.EVENT_READ, self._wakeup.clear)
        self._connections: set[NodeConnection] = set()
        self._listener: NodeListener | None = None
        self.secret: str | None = None
        if address is not None:
            self._listen(*address)

    def _listen(self, bind: str, host: str) -> None:
        key = JobKey.random()
        try:
            self._listener = NodeListener(key, self._size, [bind], 0, named=True)
        except HostsError:
            self.say(f"horovodlike: output comes at the end of the job: spark.driver.bindAddress={bind} is not here")
            return
        self._selector.register(self._listener, selectors.EVENT_READ, self._join)
        self._where = f"{host} port {self._listener.port}"
        self.secret = json.dumps({"key": key.hex(), "host": host, "port": self._listener.port})

    def wake(self) -> None:
        """Make :meth:`serve` return; may be called from any thread."""
        self._wakeup.set()

    def serve(self, seconds: float) -> bool:
        """Take the pieces that have arrived from the tasks; wait for them until something happens, or for some time.

        Returns:
            Whether something has happened.
        """
        for connection in self._connections:
            connection.watch(self._selector, not self.full, functools.partial(self._receive, connection))
        ready = self._selector.select(seconds)
        for key, _ in ready:
            key.data()
        self._join()  # it also drops strangers that are late
        return bool(ready)

    def take(self, rows: Sequence[Row]) -> None:
        """Take the output that came with the results because a task could not send it before."""
        taken = set(self._last.values())
        late = sorted({row[0] for row in rows if row[0] >= 0})
        if late and self._listener is not None:
            self.say(
                f"horovodlike: output of {listed('rank', late)} follows only now, since it could not be sent to the "
                f"driver at {self._where}, or was not taken for {_STUCK_S:g} s; the executors' logs say more"
            )
        for row in rows:
            if row[:3] not in taken:
                self._print(*row)

    def close(self, *, hurried: bool = False) -> None:
        """Stop listening, and return when all output is written; ``hurried``: after some seconds in any case."""
        until = time.monotonic() + _LAST_S
        while self._connections and time.monotonic() < until and self.serve(0.0):
            self.drain(lambda: time.monotonic() >= until)
        for rank in range(self._size):
            self.finish(rank)
        self.drain(lambda: hurried and time.monotonic() >= until)
        if self.trouble is not None:
            self.say(f"horovodlike: {self.trouble}; the rest of the ranks' output is missing")
        for connection in self._connections:
            connection.unwatch(self._selector)
            connection.hang_up()
        if self._listener is not None:
            self._listener.close()
        self._writer.close(lambda: hurried and time.monotonic() >= until)
        self._selector.close()
        self._wakeup.close()

    def _join(self) -> None:
        if self._listener is not None:
            for connection, _, _ in self._listener.attend():
                connection.send(FrameKind.PLACE)
                self._connections.add(connection)

    def _receive(self, connection: NodeConnection) -> None:
        try:
            frames = connection.receive()
            for frame in frames or ():
                self._take_frame(connection, frame)
        except (OSError, ValueError):
            frames = None  # the task keeps the pieces that were not taken
        if frames is None:
            connection.unwatch(self._selector)
            connection.hang_up()
            self._connections.discard(connection)

    def _take_frame(self, connection: NodeConnection, frame: Frame) -> None:
        kind, rank, payload = frame
        if kind not in (FrameKind.STDOUT, FrameKind.STDERR) or not -1 <= rank < self._size or len(payload) < _AT.size:
            raise InvalidFrameError(f"{kind.name} of {len(payload)} bytes for {rank} is no output of a rank")
        (at,) = _AT.unpack_from(payload)
        self._print(rank, kind, at, payload[_AT.size :])
        self._last[connection] = rank, kind, at
        connection.send(FrameKind.ALIVE)

    def _print(self, rank: int, kind: FrameKind, at: int, piece: bytes) -> None:
        self._at = at / 1e9
        if rank < 0:
            self.say(piece.removesuffix(b"\n"))
        else:
            self.add(rank, kind, piece)
