"""The connections that copies need: of a server to the one with its copies, and of clients to servers that are back.

The core does the rest: it makes the copies, sends changes on, and has clients go to the copy.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence

from horovodlike._engine import parameters
from horovodlike._net.secure_channel import JobKey
from horovodlike.errors import HorovodInternalError, RendezvousError
from horovodlike.parameter_server._connections import Address, Client, Connected, ServerRing

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 0.5  # seconds, between the attempts to find a server
_PATIENCE = 3.0  # seconds, with one server


class _Searching:
    """A thread that looks for servers until it is closed."""

    def __init__(self, client: Client, key: JobKey, name: str) -> None:
        self._client, self._key = client, key
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        raise NotImplementedError

    def interrupt(self) -> None:
        """End a wait of the thread that the event does not end."""

    def close(self) -> None:
        """End the thread; a connection that is being made may take some seconds."""
        self._stop.set()
        self.interrupt()
        self._thread.join()

    @property
    def has_ended(self) -> bool:
        """True if the thread has ended."""
        return not self._thread.is_alive()


class CopyKeeper(_Searching):
    """Keeps copies of this server's shards at the next server that can be reached, until the shards are removed."""

    def __init__(self, ring: ServerRing, client: Client, key: JobKey) -> None:
        """Start the thread.

        Args:
            ring: The servers.
            client: This process, as the others see it.
            key: The key that they must hold.
        """
        others = len(ring.servers)
        self._ring, self._number = ring.id, 0
        self._next = [ring.servers[(ring.own + step) % others] for step in range(1, others)]
        super().__init__(client, key, "horovodlike-copies")

    def _run(self) -> None:
        pause = _FIRST_PAUSE
        while not self._stop.is_set():
            for address in self._next:
                if self._keep(address):
                    pause = _FIRST_PAUSE
                    break
                if self._stop.is_set():
                    return
            self._stop.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _keep(self, address: Address) -> bool:
        """Have a server keep the copies as long as it can; return whether it did."""
        try:
            connected = self._client.connect(address, self._key, patience=_PATIENCE)
        except RendezvousError:
            return False
        self._number = connected.number
        try:
            if not self._stop.is_set():
                parameters.wait([parameters.replicate(self._ring, connected.number)], None)
                self._stop.set()  # the arrays have been removed
        except (HorovodInternalError, ValueError):
            pass  # the server is lost, which the core has logged
        finally:
            self.interrupt()
        return True

    def interrupt(self) -> None:
        """End the copies."""
        parameters.remove_server(self._number)


class Reconnections(_Searching):
    """Connects a client again to servers that it has lost and that are back, at the same address."""

    def __init__(
        self, rings: Sequence[ServerRing], connected: Sequence[Connected], client: Client, key: JobKey
    ) -> None:
        """Start the thread.

        Args:
            rings: The ring, as each of the servers gets it.
            connected: The connections to them.
            client: This process.
            key: The key that they must hold.
        """
        self._rings, self._connected = list(rings), list(connected)
        super().__init__(client, key, "horovodlike-reconnections")

    def _run(self) -> None:
        watched: dict[int, int] = {}  # by index of the server: a handle that is complete when the connection has ended
        all_of_them = set(range(len(self._connected)))
        pause = _FIRST_PAUSE
        try:
            for index, each in enumerate(self._connected):
                watched[index] = parameters.watch(each.number)
            while not self._stop.wait(pause):
                pause = min(2 * pause, _LONGEST_PAUSE)
                for index in [each for each, handle in watched.items() if parameters.are_complete([handle])]:
                    with contextlib.suppress(HorovodInternalError, ValueError):
                        parameters.wait([watched.pop(index)], None)
                    pause = _FIRST_PAUSE
                for index in all_of_them - watched.keys():
                    if self._reconnect(index):
                        watched[index] = parameters.watch(self._connected[index].number)
                if len(watched) == len(self._connected):
                    pause = _FIRST_PAUSE
        except (HorovodInternalError, ValueError):
            pass  # the core of this process has ended
        parameters.abandon(list(watched.values()))

    def _reconnect(self, index: int) -> bool:
        ring = self._rings[index]
        if self._stop.is_set():
            return False
        try:
            self._client.connect(
                ring.servers[ring.own], self._key, ring, replaces=self._connected[index], patience=_PATIENCE
            )
        except RendezvousError:
            return False
        return True
