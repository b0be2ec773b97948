"""The relay between a node's agent and the launcher of node 0: output stays on the node, node 0 ends the job."""

import functools
import selectors
import time
from collections.abc import Callable, Iterable

from horovodlike.launcher.agent.protocol import (
    Frame,
    FrameKind,
    InvalidFrameError,
    decode_seconds,
    encode_seconds,
)
from horovodlike.launcher.supervisor import Supervisor, Wakeup
from horovodlike.launcher.supervisor.connection import FrameConnection
from horovodlike.launcher.supervisor.job import AGENT_FAILED, GRACE_S
from horovodlike.launcher.supervisor.node_connection import NodeConnection
from horovodlike.launcher.supervisor.output import RankOutput

_LONGEST_WAIT = 3600.0


class Relay(Supervisor):
    """The launcher of a node other than node 0, while its ranks run."""

    def __init__(
        self, agent: FrameConnection, uplink: NodeConnection, output: RankOutput, wakeup: Wakeup, patience: float
    ) -> None:
        """Prepare the relay; :meth:`run` runs it.

        Args:
            agent: The agent of this node, to which START has been sent.
            uplink: The connection to the launcher of node 0.
            output: Takes the output of the ranks.
            wakeup: Wakes :meth:`run` after a signal or a change by another thread.
            patience: How long node 0 may be silent before its first ALIVE, which sets the limit, in seconds.
        """
        super().__init__(output, wakeup)
        self._agent = agent
        self._uplink = uplink
        self._signalled = 0
        self._open: dict[FrameConnection, Callable[[Frame], object]] = {agent: self._on_agent, uplink: self._on_uplink}
        self._finished: set[FrameConnection] = set()
        self._lost_at = time.monotonic() + patience  # when node 0 counts as lost unless a heartbeat comes
        self._exit_code = AGENT_FAILED
        self._complained = False
        self.why: str | None = None  # the reason why the job has failed, in node 0's words

    @property
    def abandoned(self) -> bool:
        """True if the user has demanded an immediate end, by a second signal."""
        return self._signalled + len(self._signals) > 1

    def run(self, early: Iterable[Frame]) -> int:
        """Run until the job is over and no process of this node's ranks is left; return the exit code.

        Args:
            early: The frames that node 0 has sent already.
        """
        for frame in early:
            self._on_uplink(frame)
        self._loop()
        self._output.drain(lambda: self.abandoned)
        if self._output.trouble is not None and self._exit_code == 0:
            self._output.say(f"hvdrun: {self._output.trouble}")
            self._exit_code = AGENT_FAILED
        return self._exit_code

    def _watch(self, selector: selectors.BaseSelector) -> bool:
        if not self._close_finished(selector):
            return False
        for connection in self._open:
            stuck = self._output.full or self._uplink.congested
            listening = connection is self._uplink or self.abandoned or not stuck
            connection.watch(selector, listening, functools.partial(self._receive, connection))
        return True

    def _react(self, selector: selectors.BaseSelector) -> None:
        self._handle_signals()
        self._check_output()
        if self._uplink in self._open and time.monotonic() >= self._lost_at:
            self._lose("node 0 has been silent for too long; is it up, and reachable?")

    def _close_finished(self, selector: selectors.BaseSelector) -> bool:
        """Drop the connections that have ended, and close the agent's; return whether any is left."""
        for connection in self._finished & self._open.keys():
            connection.unwatch(selector)
            del self._open[connection]
            if connection is self._agent:
                self._uplink.send(FrameKind.CLEAN, connection.close())
        return bool(self._open)

    def _timeout(self) -> float | None:
        left = self._lost_at - time.monotonic()
        return min(max(0.0, left), _LONGEST_WAIT) if self._uplink in self._open else None

    def _receive(self, connection: FrameConnection) -> None:
        try:
            frames = connection.receive()
            for frame in frames or ():
                self._open[connection](frame)
        except (InvalidFrameError, OSError) as error:
            self._output.say(f"hvdrun: {connection.who} cannot be understood: {error}")
            frames = None
        if frames is None and connection is self._uplink and connection not in self._finished:
            self._lose("node 0 has gone")
        elif frames is None:
            self._finished.add(connection)

    def _on_agent(self, frame: Frame) -> None:
        if frame.kind in (FrameKind.STDOUT, FrameKind.STDERR):
            self._output.add(frame.number, frame.kind, frame.payload)
            return
        if frame.kind is FrameKind.EXITED:
            self._output.finish(frame.number)
            self._uplink.send(FrameKind.LAST_LINES, frame.number, self._output.tail(frame.number))
        self._uplink.send(*frame)

    def _on_uplink(self, frame: Frame) -> None:
        if frame.kind in (FrameKind.SIGNAL, FrameKind.END, FrameKind.KILL):
            self._agent.send(*frame)
        elif frame.kind is FrameKind.ALIVE:
            self._lost_at = time.monotonic() + decode_seconds(frame.payload)
            self._uplink.send(*frame)
        elif frame.kind is FrameKind.OUTCOME:
            self._exit_code = frame.number
            if frame.payload:
                self.why = frame.payload.decode(errors="replace").removeprefix("hvdrun: ")
                self._output.say(frame.payload)
            self._finished.add(self._uplink)
            if self._agent in self._open:  # node 0 has given up the job, or this node
                self._agent.send(FrameKind.END, 0, encode_seconds(GRACE_S))

    def _lose(self, why: str) -> None:
        self._finished.add(self._uplink)
        self._output.say(f"hvdrun: {why}; the ranks of this node are ended")
        self._uplink.send(FrameKind.FAILED, 0, why.encode())  # before the ranks' exits, in case node 0 still reads it
        self._agent.send(FrameKind.END, 0, encode_seconds(GRACE_S))

    def _check_output(self) -> None:
        if self._output.trouble is not None and not self._complained:
            self._complained = True
            self._uplink.send(FrameKind.FAILED, 0, self._output.trouble.encode())  # node 0 makes all nodes print it

    def _handle_signals(self) -> None:
        while self._signals:
            signum = self._signals.popleft()
            self._signalled += 1
            self._uplink.send(FrameKind.SIGNAL, signum)
            if self._uplink not in self._open or self._signalled > 1:
                self._agent.send(FrameKind.KILL)
