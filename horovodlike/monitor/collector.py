"""The server to which the ranks of a job send their reports. Reports are JSON, and are checked before they are used.

A report is an object. The fields that may be missing have not changed since the last report of the connection.

``sent``
    The time by the monotonic clock of the rank's host. No other clock is used: those that are set would need care.
``idle``
    For how many seconds the rank has completed nothing.
``rank``
    In the first report only: ``rank``, ``size``, ``generation``, ``pid``, ``local_rank``, ``host``, ``worker``,
    and the ``boot`` id of the kernel: hosts with the same name have different clocks.
``counters``, ``process``
    Numbers by name: those that ``metrics()`` returns, the seconds in which the rank waited and communicated, and the
    share of the training that is done; memory, and the processor time that the rank received, with what the kernel says
    about it.
``connections``
    For some pairs of addresses of the rank's host and another one: both, the bytes sent, and the seconds that it took.
``late``
    From rank 0: rank, how often it was late, and the seconds, of those ranks where that has changed.
``collectives``
    Some of the collectives since the last report: number, kind, name, bytes, and when it was enqueued,
    by the same clock.
``stack``
    The stacks of the rank's Python threads, or null.
``end``
    True in the last report.

Rank 0 receives the verdicts on slow ranks when they change, as a list of objects, for its ``on_metrics()``. Any rank
may receive the requests of an attached ``hvdrun``, and answers them between its reports
(``horovodlike._engine.profile``).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from horovodlike._net.secure_channel import Identity, JobKey, job_digest
from horovodlike._net.secure_server import Connection, ProtocolError, SecureServer
from horovodlike.monitor.board import TRANSPORTS, Board

_MOST_COLLECTIVES = 64
_MOST_VERDICTS = 16
_MOST_CONNECTIONS = 16
_MOST_RANKS = 65536
_LONGEST_NAME = 256
_LONGEST_STACK = 16384
_LIMIT = 2**63  # of numbers: sums and products of a few stay finite
_NUMBERS = {
    "counters": (
        *("bytes", "requests", "executed", "batches", "negotiated_in_full", "negotiation_seconds", "execution_seconds"),
        *("peer_wait_seconds", "shared_memory_bytes", "waiting_seconds", "communicating_seconds", "blocked_seconds"),
        *("steps", "step_seconds", "samples", "progress", "in_flight", "failed_writes"),
        *(f"bytes_by_{name}" for name in TRANSPORTS),
    ),
    "process": (
        *("resident_bytes", "cpu_seconds", "run_delay_seconds", "steal_seconds", "frequency_hertz"),
        *("gpu_bytes", "gpu_reserved_bytes"),
    ),
}


class Collector:
    """The connections of the ranks. Belongs to one thread, which waits for :meth:`fileno` and calls :meth:`attend`."""

    def __init__(self, key: JobKey, board: Board, expected: int) -> None:
        """Start without a listening socket.

        Args:
            key: The key that ranks must have.
            board: Gets the reports.
            expected: How many ranks the job may have, for a limit of connections.
        """
        self._board = board
        self._about: dict[Connection, dict[str, Any]] = {}
        self._sent_verdicts: dict[Connection, list[tuple[Any, ...]]] = {}  # their ranks and kinds
        self.on_answer: Callable[[Connection, Any], None] = lambda connection, answer: None
        """Called with a rank's answer to a request, and with None when its connection ends."""
        self.server = SecureServer(key, self, who="rank", expected=expected)

    def ranks(self) -> tuple[dict[int, Connection], int]:
        """Return the connections of the ranks that report now, and the size of the job: 0 before the first report."""
        newest = max((about["generation"] for about in self._about.values()), default=0)
        current = {each: about for each, about in self._about.items() if about["generation"] == newest}
        size = next((about["size"] for about in current.values()), 0)
        return {about["rank"]: connection for connection, about in current.items()}, size

    def describe(self, connection: Connection) -> dict[str, Any] | None:
        """Return what a rank has said of itself; None if its connection has ended."""
        return self._about.get(connection)

    def on_connect(self, connection: Connection, identity: Identity) -> str | None:
        """See :class:`horovodlike._net.secure_server.ConnectionHandler`."""
        if identity.job != job_digest("monitor"):
            return "it belongs to another job, although it has the key of this one"
        self.server.send(connection, {"welcome": identity.rank})
        return None

    def on_message(self, connection: Connection, payload: bytes) -> None:
        """See :class:`horovodlike._net.secure_server.ConnectionHandler`."""
        try:
            about = self._about.get(connection)
            message = json.loads(payload)
            if about is not None and "answer" in message:
                self.on_answer(connection, message["answer"])
                return
            if about is None:
                about = _read_about(message["rank"], connection.rank)
                if not self._board.take_hello(about):
                    raise ProtocolError("its generation is over")
                self._about[connection] = about
            self._board.take_report(connection.rank, about, read_report(message))
            if connection.rank == 0:
                self._send_verdicts(connection)
        except ProtocolError:
            raise
        except Exception as error:  # whatever is wrong with a report ends its connection, and nothing else
            raise ProtocolError(f"it sent a report that makes no sense ({type(error).__name__})") from None

    def _send_verdicts(self, connection: Connection) -> None:
        verdicts = [
            {**each, "ranks": each["ranks"][:_MOST_VERDICTS]} for each in self._board.verdicts()[:_MOST_VERDICTS]
        ]
        known = [(*each["ranks"], each["kind"]) for each in verdicts]
        if known != self._sent_verdicts.get(connection, []):
            self._sent_verdicts[connection] = known
            self.server.send(connection, {"slow": verdicts})

    def on_disconnect(self, connection: Connection, reason: str) -> None:
        """See :class:`horovodlike._net.secure_server.ConnectionHandler`."""
        self._sent_verdicts.pop(connection, None)
        about = self._about.pop(connection, None)
        if about is not None:
            self._board.lose(connection.rank, about)
            self.on_answer(connection, None)


def _read_about(found: Any, rank: int) -> dict[str, Any]:
    about: dict[str, Any] = {
        name: to_integer(found[name]) for name in ("rank", "size", "generation", "pid", "local_rank", "worker")
    }
    if about["rank"] != rank or not 0 <= rank < about["size"] <= _MOST_RANKS:
        raise ValueError("rank")
    return {**about, **{name: to_text(found[name], _LONGEST_NAME) for name in ("host", "boot")}}


def read_report(message: Any) -> dict[str, Any]:
    """Check a report, and complete it.

    Raises:
        ValueError, TypeError, KeyError: It is not a report.
    """
    report: dict[str, Any] = {name: to_number(message[name]) for name in ("sent", "idle")}
    for part, names in _NUMBERS.items():
        found = message.get(part, {})
        report[part] = {name: to_number(found[name]) for name in names if name in found}
    report["late"] = {
        to_integer(rank): (to_integer(times), to_number(seconds)) for rank, times, seconds in message.get("late", [])
    }
    report["collectives"] = [
        [
            to_integer(number),
            to_text(kind, _LONGEST_NAME),
            to_text(name, _LONGEST_NAME),
            to_integer(size),
            to_number(enqueued),
        ]
        for number, kind, name, size, enqueued in message.get("collectives", [])[:_MOST_COLLECTIVES]
    ]
    report["connections"] = {
        (to_text(here, _LONGEST_NAME), to_text(there, _LONGEST_NAME)): (to_number(sent), to_number(seconds))
        for here, there, sent, seconds in message.get("connections", [])[:_MOST_CONNECTIONS]
    }
    if "stack" in message:
        report["stack"] = None if message["stack"] is None else to_text(message["stack"], _LONGEST_STACK)
    return {**report, "end": message.get("end") is True}


def _checked(convert: Callable[[Any], Any], value: Any, *types: type) -> Any:
    if isinstance(value, bool) or not isinstance(value, types):
        raise TypeError(type(value).__name__)
    return convert(value)


def to_integer(value: Any) -> int:
    """Return an integer of a message; raise ValueError or TypeError for any other value."""
    number: int = _checked(int, value, int)
    if not 0 <= number < _LIMIT:
        raise ValueError("out of range")
    return number


def to_number(value: Any) -> float:
    """Return a number of a message; raise ValueError or TypeError for any other value."""
    number: float = _checked(lambda given: given, value, int, float)
    if not 0 <= number < _LIMIT:
        raise ValueError("out of range")
    return number


def to_text(value: Any, longest: int) -> str:
    """Return a text of a message, shortened; raise TypeError for any other value."""
    text: str = _checked(str, value, str)
    return text[:longest].encode(errors="replace").decode()  # JSON can have halves of characters, which UTF-8 cannot
