"""The driver's end of the connections to its workers. Messages are JSON; both ends hold the job's key.

From a worker to the driver:

``{"do": "ready", "commits": n, "why": w, "reason": text}``
    It asks for a rank. ``n`` is the number of its commits, including checks for changes of the hosts. ``w`` is
    ``start``, ``broken`` (its generation broke), ``changed`` (it received that) or ``failed`` (``init()`` failed).
``{"do": "leaving"}``
    It was told to leave (SIGTERM), the other members know, and it will exit with code 0.
``{"do": "finished"}``
    Its training function has returned.
``{"do": "training"}``
    It trains again after "finished".
``{"do": "committed"}``, ``{"do": "shutdown"}``
    It has made its first commit; its script has called ``shutdown()`` itself, so that it may exit with code 0.
``{"do": "log", "value": base64}``
    A pickled value for the process that has started the job.

From the driver to a worker:

``{"place": {"generation": g, "variables": {...}}}``
    The answer to "ready" when generation ``g`` is formed: the environment variables that give the worker its rank.
``{"changed": {"number": n, "added": bool, "removed": bool}}``
    At any time: send "ready" again at the next commit. Each change has a greater number than the one before.
``{"removed": reason}``
    The answer to "ready" if it is no member any more.
``{"stop": reason}``
    At any time: the job ends.
"""

import base64
import json
import time
from collections.abc import Callable, Collection
from typing import Any

from horovodlike._net.listen import listen
from horovodlike._net.secure_channel import Identity, JobKey, job_digest
from horovodlike._net.secure_server import Connection, ProtocolError, SecureServer
from horovodlike.launcher.elastic.events import Adrift, Event, Finished, Leaving, Noted, Ready, Training

_EVENTS: dict[str, Callable[[int], Event]] = {"leaving": Leaving, "finished": Finished, "training": Training}
_REASONS = ("start", "broken", "changed", "failed")
_LOOPBACK = "127.0.0.1"
_LONGEST_TEXT = 2000
_FLUSH_S = 1.0


class WorkerServer:
    """The server for workers. Belongs to one thread, which waits for :meth:`fileno` and then calls :meth:`attend`."""

    def __init__(
        self,
        key: JobKey,
        job_id: str,
        expected: Callable[[], Collection[int]],
        tell: Callable[[Event], None],
        on_log: Callable[[bytes], None] = lambda _: None,
    ) -> None:
        """Listen on the loopback address.

        Args:
            key: The job's key.
            job_id: The job's name.
            expected: Returns the numbers of the workers that live.
            tell: Called with each event, in :meth:`attend`.
            on_log: Called with each value that a worker logs, in :meth:`attend`.

        Raises:
            RendezvousError: The server cannot listen.
        """
        self._job = job_digest(f"elastic/{job_id}")
        self._expected = expected
        self._tell = tell
        self._on_log = on_log
        self._connections: dict[int, Connection] = {}
        self._door = SecureServer(key, self, who="worker")
        self._addresses = {_LOOPBACK}
        [listener] = listen("the elastic driver", [_LOOPBACK], [0])
        self.port: int = listener.getsockname()[1]
        self._door.listen([listener])

    def fileno(self) -> int:
        """Return a descriptor that is readable when :meth:`attend` has something to do."""
        return self._door.fileno()

    def next_deadline(self) -> float | None:
        """Return when :meth:`attend` will have something to do even if no message arrives."""
        return self._door.next_deadline()

    def attend(self, exited: int | None = None) -> None:
        """Handle arrived messages; wait only for the last words of a worker that has exited, a second at most."""
        self._door.attend()
        deadline = time.monotonic() + _FLUSH_S
        while exited in self._connections and time.monotonic() < deadline:
            self._door.attend(_FLUSH_S)

    def listen_on(self, addresses: Collection[str]) -> None:
        """Listen on further addresses, at the same port.

        Raises:
            RendezvousError: The server cannot listen on one of them.
        """
        new = [address for address in addresses if address not in self._addresses]
        if new:
            self._door.listen(listen("the elastic driver", new, [self.port]))
            self._addresses.update(new)

    def say(self, worker: int, message: dict[str, Any]) -> None:
        """Send a worker a message; do nothing if the worker has no connection."""
        connection = self._connections.get(worker)
        if connection is not None:
            self._door.send(connection, message)

    def say_to_all(self, message: dict[str, Any]) -> None:
        """Send all connected workers a message."""
        for worker in list(self._connections):
            self.say(worker, message)

    def close(self) -> None:
        """Send the messages that wait, for about a second at most, and close all connections."""
        deadline = time.monotonic() + _FLUSH_S
        for connection in self._connections.values():
            self._door.flush(connection, deadline)
        self._door.close()

    # Called by the secure server.

    def on_connect(self, connection: Connection, identity: Identity) -> str | None:
        """See :class:`horovodlike._net.secure_server.ConnectionHandler`."""
        worker = identity.rank
        if identity.job != self._job or identity.size != 0:
            return "it belongs to another job, or is no worker, although it has the key of this one"
        if worker in self._connections:
            self._door.look_at(self._connections[worker])  # it may just have hung up
        if worker in self._connections:
            return f"worker {worker} is connected already; HOROVODLIKE_WORKER must not be inherited by other processes"
        if worker not in self._expected():
            return f"there is no worker {worker}, or none any more"
        self._connections[worker] = connection
        return None

    def on_message(self, connection: Connection, payload: bytes) -> None:
        """See :class:`horovodlike._net.secure_server.ConnectionHandler`."""
        worker = connection.rank
        try:
            message = json.loads(payload)
            verb = message["do"]
            if verb == "ready":
                why, text = str(message["why"]), str(message.get("reason") or "")[:_LONGEST_TEXT]
                if why not in _REASONS or not isinstance(message["commits"], int):
                    raise ValueError(why)
                event: Event = Ready(worker, why, text, message["commits"])
            elif verb in ("committed", "shutdown"):
                event = Noted(worker, verb)
            elif verb == "log":
                self._on_log(base64.b64decode(message["value"], validate=True))
                return
            else:
                event = _EVENTS[verb](worker)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ProtocolError(f"it sent a message that makes no sense ({type(error).__name__})") from None
        self._tell(event)

    def on_disconnect(self, connection: Connection, reason: str) -> None:
        """See :class:`horovodlike._net.secure_server.ConnectionHandler`."""
        del self._connections[connection.rank]
        self._tell(Adrift(connection.rank))
