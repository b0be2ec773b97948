"""The server of ``hvdrun --attach``: profiles of a running job, and the stacks of its ranks.

It listens on a Unix socket in the abstract namespace, whose name follows from the process id: it needs no file, so none
is ever left. The kernel says who connects; only the same user is answered. A client sends one line of JSON, and gets
lines of JSON:

``say``
    What is being done.
``error``
    Why there is no result; the last line.
``stacks``
    A list of ranks with their text, or why there is none; the last line.
``rank``
    The description of a rank's profile: the content of its file ``rankN.json``.
``file``
    The name of a file; after the line come so many ``bytes`` with the next part of its content.
``done``
    The profile is complete; the last line.

A session ends with the connection of its client. All ranks record the same steps: each *arms* its profiler and says
which step it is at; then all are told the step at whose end they begin, far enough ahead. If that comes too late for a
rank, nothing is recorded, and they try again with more time.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import os
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any

from horovodlike._bootstrap.rendezvous_state import name_ranks
from horovodlike._engine.profilers import CHUNK_BYTES, MOST_BYTES, MOST_MARKS
from horovodlike._net.secure_channel import close_in_child
from horovodlike._net.secure_server import Connection
from horovodlike.monitor.board import Board
from horovodlike.monitor.collector import Collector

__all__ = ["MOST_SECONDS", "MOST_STEPS", "Attachments", "address_of", "listen", "user_of"]

MOST_STEPS = 1000
MOST_SECONDS = 300
LINE_BYTES = 1 << 20
"""The longest request of a client."""
_CREDENTIALS = struct.Struct("3i")  # struct ucred: the ids of process, user and group
_REQUEST_S = 5.0
_JOIN_S = 5.0  # for ranks that have just called init(), or connect again
_LOOK_S = 0.1
_AHEAD_S = 3.0  # between the message and the first step
_AHEAD_STEPS = 2
_ATTEMPTS = 3
_STACKS_S = 5.0
_SILENT_S = 30.0  # a rank that has not reported for this long fails the session
_EXPORT_S = 300.0  # likewise, while it may be writing a long trace
_ANSWER_S = 30.0  # for what a rank answers at once
_CLIENT_S = 30.0  # a client reads within this time
_CLOCK_S = 1.0  # clocks that differ by less record the same seconds
_LONGEST_TEXT = 16384


def address_of(pid: int) -> str:
    """Return the address of the socket of a process."""
    # Containers may share the network, and so these names, while each has a process with this id.
    return f"\0horovodlike-attach-{os.stat(f'/proc/{pid}/ns/pid').st_ino}-{pid}"


def user_of(connected: socket.socket) -> int:
    """Return the id of the user whose process is at the other end of a Unix socket."""
    _, user, _ = _CREDENTIALS.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(user)


def listen() -> socket.socket:
    """Return the listening socket of this process.

    Raises:
        OSError: This process has one already, or another has taken its name.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(address_of(os.getpid()))
        listener.listen()
    except BaseException:
        listener.close()
        raise
    close_in_child(listener)
    return listener


class _SessionError(Exception):
    """The session has failed; the text is for the client."""


class Attachments:
    """The clients of one job, one after the other. Belongs to the thread of an event loop."""

    def __init__(self, collector: Collector, board: Board) -> None:
        """Take the connections of the ranks, and the state of the job."""
        self._collector = collector
        self._board = board
        self._numbers = itertools.count(1)
        self._is_taken = False
        self._session: _Session | None = None
        collector.on_answer = self._take

    def _take(self, connection: Connection, answer: Any) -> None:
        if self._session is not None:
            self._session.take(connection, answer)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer a client, and close its connection."""
        try:
            if user_of(writer.get_extra_info("socket")) != os.geteuid():
                return
            request = json.loads(await asyncio.wait_for(reader.readline(), _REQUEST_S))
            work = asyncio.ensure_future(self._answer(request, writer))
            gone = asyncio.ensure_future(reader.read(1))
            try:
                await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
            finally:
                gone.cancel()  # also keeps asyncio from reporting how the connection has ended
                work.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await work
        except asyncio.CancelledError:
            _send(writer, {"error": "the job has ended"})
        except Exception:
            pass  # a client that is gone, or none
        finally:
            writer.close()

    async def _answer(self, request: Any, writer: asyncio.StreamWriter) -> None:
        if self._is_taken:
            busy = _SessionError("another hvdrun is attached to this job: try again when it has ended")
            _send(writer, {"error": str(busy)})
            return
        self._is_taken = True
        try:
            wanted, connections = await self._choose(request.get("ranks"))
            if request.get("do") == "stacks":
                await self._stacks(wanted, connections, writer)
                return
            if missing := [rank for rank in wanted if rank not in connections]:
                raise _SessionError(
                    f"no report to the monitor comes from {name_ranks(missing)}: leave that out with --ranks, or wait"
                )
            await self._profile(connections, _check_amount(request), writer)
        except _SessionError as failure:
            _send(writer, {"error": str(failure)})
        except Exception as error:  # whatever it is, the job goes on
            _send(writer, {"error": f"the monitor has failed: {error!r}"})
        finally:
            self._is_taken = False
            if self._session is not None:
                self._session.ask({"do": "cancel"})
            self._session = None

    async def _choose(self, ranks: Any) -> tuple[list[int], dict[int, Connection]]:
        """Return the ranks that are wanted, without a list all, and the connections of those that report.

        Wait for those that connect just now.
        """
        deadline = time.monotonic() + _JOIN_S
        while True:
            found, size = self._collector.ranks()
            wanted = list(range(size)) if ranks is None else sorted({*map(int, ranks)})
            if size and (unknown := [rank for rank in wanted if not 0 <= rank < size]):
                raise _SessionError(f"--ranks: the job has no {name_ranks(unknown)}: it has ranks 0 to {size - 1}")
            connections = {rank: found[rank] for rank in wanted if rank in found}
            if (size and len(connections) == len(wanted)) or time.monotonic() > deadline:
                break
            await asyncio.sleep(_LOOK_S)
        if not size:
            raise _SessionError("no rank reports to the monitor yet: wait until hvd.init() has returned, and try again")
        return wanted, connections

    def _open(self, connections: Mapping[int, Connection]) -> _Session:
        if self._session is not None:
            self._session.ask({"do": "cancel"})
        self._session = _Session(next(self._numbers), connections, self._collector, self._board)
        return self._session

    async def _stacks(
        self, wanted: list[int], connections: Mapping[int, Connection], writer: asyncio.StreamWriter
    ) -> None:
        session = self._open(connections)
        session.ask({"do": "stacks"})
        found: dict[int, str] = {}
        with contextlib.suppress(asyncio.TimeoutError, TimeoutError):
            await asyncio.wait_for(session.gather_stacks(found), _STACKS_S)
        silent = f"it has not answered within {_STACKS_S:.0f} s"
        reasons = {rank: silent if rank in connections else "it does not report to the monitor" for rank in wanted}
        _send(writer, {"stacks": [[rank, found.get(rank, f"    {reasons[rank]}")] for rank in wanted]})
        await _drain(writer)

    async def _profile(
        self, connections: Mapping[int, Connection], amount: dict[str, float], writer: asyncio.StreamWriter
    ) -> None:
        session, first = await self._begin(connections, amount, writer)
        recorded: dict[int, dict[str, Any]] = {}
        # A rank whose steps do not come says so.
        within_s = amount["seconds"] + _AHEAD_S * 2**_ATTEMPTS + _EXPORT_S if "seconds" in amount else math.inf
        await session.gather("recorded", recorded, silent_s=_EXPORT_S, within_s=within_s)
        if "steps" in amount:
            check_steps(recorded, first, int(amount["steps"]))
        _, size = self._collector.ranks()
        for rank, about in recorded.items():
            for name, length in about["sizes"].items():
                await session.fetch(rank, name, length, writer)
            described = self._collector.describe(connections[rank])
            if described is None:
                raise _SessionError(f"rank {rank} has left the job while its profile was read")
            first, marks = about["first_step"], about["marks"]
            count = 0 if first is None else len(marks) - 1
            _send(
                writer,
                {
                    "rank": {
                        **{"rank": rank, "size": size, "host": described["host"], "pid": described["pid"]},
                        **{"framework": about["framework"], "first_step": first, "steps": count},
                        **{"marks": marks, "note": about["note"]},
                        "files": [f"rank{rank}.{name}" for name in about["sizes"]],
                    }
                },
            )
        _send(writer, {"done": True})
        await _drain(writer)

    async def _begin(
        self, connections: Mapping[int, Connection], amount: dict[str, float], writer: asyncio.StreamWriter
    ) -> tuple[_Session, int]:
        """Have the ranks record the same steps, or seconds; return the session that does, and when they begin."""
        for attempt in range(_ATTEMPTS):
            session = self._open(connections)
            _send(writer, {"say": f"{name_ranks(connections)}: preparing the profiler"})
            session.ask({"do": "arm", **amount})
            armed: dict[int, dict[str, float]] = {}
            await session.gather("armed", armed)
            ahead = _AHEAD_S * 2**attempt
            if "steps" in amount:
                first = choose_first_step(list(armed.values()), ahead)
                text = f"the ranks will record steps {first + 1} to {first + amount['steps']:.0f}"
            else:
                check_clocks(armed)
                first = math.ceil(time.time() + ahead)
                text = f"the ranks will record for {amount['seconds']:g} s"
            session.ask({"do": "begin", "first": first})
            begun: dict[int, bool] = {}
            await session.gather("begun", begun, within_s=_ANSWER_S)
            late = [rank for rank, is_in_time in begun.items() if not is_in_time]
            if not late:
                _send(writer, {"say": text})
                return session, first
            _send(writer, {"say": f"{name_ranks(late)}: the first step was over already; again, with more time"})
        raise _SessionError(f"{name_ranks(late)}: the first step was over each time: try again, or with --seconds")


def choose_first_step(armed: list[dict[str, float]], ahead: float) -> int:
    """Return the step at whose end all ranks can begin.

    Args:
        armed: For each rank, the last ``step`` and the ``seconds`` that a step takes.
        ahead: How far ahead of the last step it must be, in seconds.
    """
    seconds = max(1e-4, min(each["seconds"] for each in armed))
    return int(max(each["step"] for each in armed)) + math.ceil(ahead / seconds) + _AHEAD_STEPS


def check_clocks(armed: Mapping[int, Mapping[str, float]]) -> None:
    """Check that ranks that begin at the same time by their clocks begin together.

    Raises:
        _SessionError: The clock of a rank differs from that of this host.
    """
    for rank, each in armed.items():
        if abs(each["clock"]) > _CLOCK_S:
            raise _SessionError(
                f"rank {rank}: its clock differs by {each['clock']:+.1f} s from that of this host: "
                "set the clocks, or profile with --steps"
            )


def check_steps(recorded: Mapping[int, Mapping[str, Any]], first: int, amount: int) -> None:
    """Check that all ranks have recorded the steps after ``first``, so many.

    Raises:
        _SessionError: A rank has recorded others.
    """
    for rank, about in recorded.items():
        if about["first_step"] != first + 1 or len(about["marks"]) != amount + 1:
            raise _SessionError(f"rank {rank} has recorded other steps than it was told: mark each step once")


def _check_amount(request: Any) -> dict[str, float]:
    """Return the ``steps`` or the ``seconds`` of a request."""
    for name, kind, most in (("steps", int, MOST_STEPS), ("seconds", (int, float), MOST_SECONDS)):
        amount = request.get(name)
        if isinstance(amount, kind) and not isinstance(amount, bool) and 0 < amount <= most:
            return {name: amount}
    raise _SessionError(f"give --steps, from 1 to {MOST_STEPS}, or --seconds, up to {MOST_SECONDS}")


class _Session:
    """The requests to some ranks under one number, and their answers."""

    def __init__(self, number: int, connections: Mapping[int, Connection], collector: Collector, board: Board) -> None:
        self._number = number
        self._connections = connections
        self._ranks = {connection: rank for rank, connection in connections.items()}
        self._collector = collector
        self._board = board
        self._answers: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()
        # A rank sends an answer to each request, and one or two by itself; and the end of each connection is one.
        self._most = 16 + 4 * len(connections)
        self._sender: int | None = None  # the rank that has been asked for a part of a file

    def ask(self, request: Mapping[str, Any], rank: int | None = None) -> None:
        """Send a request to all ranks of the session, or to one."""
        for connection in self._ranks if rank is None else [self._connections[rank]]:
            if not connection.closed:
                self._collector.server.send(connection, {"ask": {"id": self._number, **request}})

    def take(self, connection: Connection, answer: Any) -> None:
        """Take what a rank has sent; None: its connection has ended.

        Raises:
            ValueError, TypeError, KeyError: It is no answer, or was not asked for.
        """
        rank = self._ranks.get(connection)
        if rank is None:
            return
        if answer is None:
            self._answers.put_nowait((rank, {"failed": "it has left the job, or its connection is lost"}))
        elif isinstance(answer, bytes):
            if int.from_bytes(answer[1:9], "big") == self._number:
                if rank != self._sender or len(answer) > 9 + CHUNK_BYTES:
                    raise ValueError("not a part that it was asked for")
                self._sender = None
                self._answers.put_nowait((rank, answer[9:]))
        elif answer["id"] == self._number:
            if self._answers.qsize() >= self._most:
                raise ValueError("too many answers")
            self._answers.put_nowait((rank, read_answer(answer)))

    async def _next(self, left: Mapping[int, Connection], silent_s: float, within_s: float) -> tuple[int, Any]:
        deadline = time.monotonic() + within_s
        while True:
            with contextlib.suppress(asyncio.TimeoutError, TimeoutError):
                rank, answer = await asyncio.wait_for(self._answers.get(), 1.0)
                if isinstance(answer, dict) and "failed" in answer:
                    raise _SessionError(f"rank {rank}: {answer['failed']}")
                return rank, answer
            if silent := [each for each in left if self._board.age(each) > silent_s]:
                raise _SessionError(
                    f"{name_ranks(silent)}: silent for {silent_s:.0f} s: its process is stopped, or holds the GIL"
                )
            if time.monotonic() > deadline:
                raise _SessionError(f"{name_ranks(left)}: no answer within {within_s:.0f} s, although it reports")

    async def gather(
        self, kind: str, found: dict[int, Any], *, silent_s: float = _SILENT_S, within_s: float = math.inf
    ) -> None:
        """Wait until each rank has given one kind of answer, and put them into ``found``.

        Args:
            kind: The kind.
            found: The answers by rank.
            silent_s: For how long a rank may not report.
            within_s: How long it may take, from one answer to the next.

        Raises:
            _SessionError: A rank has failed, has left, is silent, or has not answered.
        """
        while left := {rank: each for rank, each in self._connections.items() if rank not in found}:
            rank, answer = await self._next(left, silent_s, within_s)
            if isinstance(answer, dict) and kind in answer:
                found[rank] = answer[kind]

    async def gather_stacks(self, found: dict[int, str]) -> None:
        """Wait until each rank has sent its stacks, or cannot; put them, or the reason, into ``found``."""
        while len(found) < len(self._connections):
            rank, answer = await self._answers.get()
            found[rank] = answer["stacks"] if "stacks" in answer else f"    {answer.get('failed')}"

    async def fetch(self, rank: int, name: str, size: int, writer: asyncio.StreamWriter) -> None:
        """Pass on a file of a rank to the client, as fast as the client reads it."""
        offset = 0
        while offset < size:
            self._sender = rank
            self.ask({"do": "fetch", "file": name, "offset": offset}, rank)
            sender, part = await self._next({rank: self._connections[rank]}, _SILENT_S, _ANSWER_S)
            if sender != rank or not isinstance(part, bytes) or not 0 < len(part) <= size - offset:
                raise _SessionError(f"rank {sender} has sent something else than the next part of {name}")
            _send(writer, {"file": f"rank{rank}.{name}", "bytes": len(part)})
            writer.write(part)
            await _drain(writer)
            offset += len(part)


def read_answer(answer: Any) -> dict[str, Any]:
    """Check an answer of a rank, which has just come: its time becomes the difference to this ``clock``.

    Raises:
        ValueError, TypeError, KeyError: It is none.
    """
    if "armed" in answer:
        step, seconds, now = (_number(answer["armed"][name]) for name in ("step", "seconds", "time"))
        return {"armed": {"step": step, "seconds": seconds, "clock": now - time.time()}}
    if "begun" in answer:
        return {"begun": answer["begun"] is True}
    if "recorded" in answer:
        found = answer["recorded"]
        sizes = {name: int(_number(found["sizes"][name])) for name in ("trace.json", "timeline.json")}
        first, marks = found["first_step"], [_number(mark) for mark in found["marks"]]
        if sum(sizes.values()) > MOST_BYTES or len(marks) > MOST_MARKS:
            raise ValueError("too much")
        return {
            "recorded": {
                **{"sizes": sizes, "first_step": None if first is None else int(_number(first)), "marks": marks},
                **{name: _text(found[name]) for name in ("framework", "note")},
            }
        }
    [kind] = {"stacks", "failed"} & answer.keys()
    return {kind: _text(answer[kind])}


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(type(value).__name__)
    if not 0 <= value < 2**63:
        raise ValueError("out of range")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(type(value).__name__)
    return value[:_LONGEST_TEXT].encode(errors="replace").decode()


def _send(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    writer.write(json.dumps(message).encode() + b"\n")


async def _drain(writer: asyncio.StreamWriter) -> None:
    """Wait until a client has read, but for what fits into buffers.

    Raises:
        _SessionError: It does not.
    """
    try:
        await asyncio.wait_for(writer.drain(), _CLIENT_S)
    except (asyncio.TimeoutError, TimeoutError):
        raise _SessionError(f"this client has not read for {_CLIENT_S:.0f} s: was it stopped?") from None
