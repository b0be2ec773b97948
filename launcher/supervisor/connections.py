"""The connections to the agents of a job: who is listened to, who is greeted, and who has been silent for too long."""

import functools
import selectors
import time
from collections.abc import Iterable
from typing import Protocol

from horovodlike.launcher.agent.protocol import Frame, Kind, encode_seconds
from horovodlike.launcher.supervisor.connection import Connection
from horovodlike.launcher.supervisor.output import RankOutput

__all__ = ["FrameHandler", "AgentConnections"]

_PATIENCE = 2 / 3
"""Of the time that a host may be silent: the launcher should know what is wrong before the ranks do."""


class FrameHandler(Protocol):
    """Whoever acts upon what the agents say."""

    def on_frame(self, frame: Frame, link: Connection) -> None:
        """An agent has said something. Raises ValueError if it makes no sense."""

    def on_nonsense(self, link: Connection, error: Exception) -> None:
        """An agent cannot be understood; its connection is about to be closed."""

    def on_silence(self, link: Connection, seconds: float) -> None:
        """A host has been silent for too long; its connection is about to be broken off."""

    def on_end(self, link: Connection, status: int) -> None:
        """The connection to a host has ended, with what :meth:`Connection.close` returns."""


class AgentConnections:
    """The connections of a job. Belongs to one thread."""

    def __init__(
        self, links: Iterable[Connection], audience: FrameHandler, output: RankOutput, network_timeout: float
    ) -> None:
        """Takes connections over which agents can be spoken with.

        Args:
            links: The connections.
            audience: Acts upon what the agents say.
            output: Nobody is listened to while it is full.
            network_timeout: How long another host may be silent, in seconds.
        """
        self._links = list(links)
        self._audience = audience
        self._output = output
        self._network_timeout = network_timeout
        self._finished: list[Connection] = []  # whose ends have come
        self._listening = True
        self._greet_at = time.monotonic()

    def __len__(self) -> int:
        """How many there are."""
        return len(self._links)

    def add(self, link: Connection) -> None:
        """Takes another connection over."""
        link.heard_at = time.monotonic()
        self._links.append(link)
        self._greet_at = min(self._greet_at, link.heard_at)

    def send(self, kind: Kind, number: int = 0, payload: bytes = b"") -> None:
        """Sends a frame to all."""
        for link in self._links:
            link.send(kind, number, payload)

    def forgive_silence(self) -> None:
        """Until now nobody was asked whether he lives, or nobody has listened."""
        for link in self._links:
            link.heard_at = time.monotonic()

    def watch(self, selector: selectors.BaseSelector) -> None:
        """Greets those whose time it is, and brings what the selector waits for up to date.

        Takes nothing more from the agents while the screen is behind.
        """
        self._greet()
        listening = not self._output.full
        if listening and not self._listening:
            self.forgive_silence()
        self._listening = listening
        for link in self._links:
            link.watch(selector, listening, functools.partial(self._receive, link))

    def next_deadline(self) -> float | None:
        """When :meth:`watch` has to be called at the latest."""
        return self._greet_at if any(link.host is not None for link in self._links) else None

    def conclude(self, selector: selectors.BaseSelector) -> None:
        """Closes the connections that have ended."""
        finished, self._finished = self._finished, []
        for link in finished:
            link.unwatch(selector)
            self._links.remove(link)
            self._audience.on_end(link, link.close())

    def _greet(self) -> None:
        """Lets other hosts know that the launcher lives, and breaks off with those that do not answer."""
        now = time.monotonic()
        if now < self._greet_at:
            return
        patience = _PATIENCE * self._network_timeout
        self._greet_at = now + patience / 5
        for link in self._links:
            if link.host is not None and self._listening and now - link.heard_at > patience:
                self._audience.on_silence(link, now - link.heard_at)
                link.kill()
            elif link.host is not None:
                link.send(Kind.ALIVE, 0, encode_seconds(self._network_timeout))

    def _receive(self, link: Connection) -> None:
        try:
            frames = link.receive()
            for frame in frames or ():
                self._audience.on_frame(frame, link)
        except (ValueError, OSError) as error:
            self._audience.on_nonsense(link, error)
            frames = None
        if frames is None or link.over:
            self._finished.append(link)
