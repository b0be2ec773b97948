"""The server of ``hvdrun --attach``: profiles of a running job, and the stacks of its ranks.

It listens on a Unix socket in the abstract namespace, whose name follows from the process id: it needs no file, so none
is ever left. The kernel says who connects; only the same user is answered. A client sends one line of JSON, and
receives lines of JSON:

``say``
    What is being done.
``error``
    Why there is no result; the last line.
``stacks``
    A list of ranks with their text, or why there is none; the last line.
``rank``
    The description of a rank's profile: the content of its file ``rankN.json``.
``file``
    The name of a file, with the next ``part`` of its content, in base64.
``done``
    The profile is complete; the last line.

A session ends with the connection of its client. All ranks record the same steps, since each is told the number of the
first one, which is some seconds ahead by the reports of all. If a rank receives that too late, the session fails.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import math
import os
import socket
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from horovodlike._bootstrap.rendezvous_state import name_ranks
from horovodlike._engine.profilers import CHUNK_BYTES, MOST_BYTES, MOST_MARKS
from horovodlike._net.secure_channel import close_in_child
from horovodlike._net.secure_server import Connection
from horovodlike.monitor.board import Board
from horovodlike.monitor.collector import Collector, to_integer, to_number, to_text

__all__ = ["MOST_SECONDS", "MOST_STEPS", "Attachments", "address_of", "listen", "user_of"]

MOST_STEPS = 1000
MOST_SECONDS = 300
LINE_BYTES = 1 << 20
"""The longest request of a client."""
_CREDENTIALS = struct.Struct("3i")  # struct ucred: the ids of process, user and group
_REQUEST_S = 5.0
_JOIN_S = 5.0  # for ranks that have just called init(), or connect again
_STEPS_S = 10.0  # for ranks that have marked no step yet
_LOOK_S = 0.1
_AHEAD_S = 3.0  # from the last reports to the first step; a request reaches a rank within a second
_AHEAD_STEPS = 2
_STACKS_S = 5.0
_SILENT_S = 30.0  # a rank that has not reported for this long fails the session
_CLIENT_S = 30.0  # a client reads within this time
_LONGEST_TEXT = 16384
_Answer = dict[str, Any]


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
        self._asked: dict[tuple[Connection, int], asyncio.Future[_Answer]] = {}
        self._is_taken = False
        collector.on_answer = self._take

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
            elif missing := [rank for rank in wanted if rank not in connections]:
                raise _SessionError(
                    f"no report to the monitor comes from {name_ranks(missing)}: leave that out with --ranks, or wait"
                )
            else:
                await self._profile(connections, request, writer)
        except _SessionError as failure:
            _send(writer, {"error": str(failure)})
        except Exception as error:  # whatever it is, the job continues
            _send(writer, {"error": f"the monitor has failed: {error!r}"})
        finally:
            self._is_taken = False
            self._asked.clear()

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

    async def _stacks(
        self, wanted: list[int], connections: Mapping[int, Connection], writer: asyncio.StreamWriter
    ) -> None:
        asked = {rank: self._ask(connection, {"do": "stacks"}) for rank, connection in connections.items()}
        if asked:
            await asyncio.wait(asked.values(), timeout=_STACKS_S)
        found = []
        for rank in wanted:
            if rank not in asked:
                text = "    it does not report to the monitor"
            elif not asked[rank].done():
                text = f"    it has not answered within {_STACKS_S:.0f} s"
            else:
                answer = asked[rank].result()
                text = answer.get("stacks") or f"    {answer.get('failed')}"
            found.append([rank, text])
        _send(writer, {"stacks": found})
        await _drain(writer)

    async def _profile(
        self, connections: Mapping[int, Connection], request: Mapping[str, Any], writer: asyncio.StreamWriter
    ) -> None:
        name, amount = _read_amount(request)
        if name == "steps":
            first = choose_first_step(await self._paces(connections), _AHEAD_S)
            asked: dict[str, Any] = {"do": "profile", "first": first, "steps": amount}
            text = f"the ranks will record steps {first + 1} to {first + amount:.0f}"
        else:
            asked = {"do": "profile", "ahead": _AHEAD_S, "seconds": amount}
            text = f"the ranks will record for {amount:g} s"
        _, size = self._collector.ranks()
        hosts = {rank: self._collector.describe(each) for rank, each in connections.items()}
        _send(writer, {"say": text})
        try:
            for rank, found in (await self._ask_all(connections, asked)).items():
                about = found["recorded"]
                for file, length in about.pop("sizes").items():
                    await self._copy(rank, connections[rank], file, length, writer)
                host = hosts[rank]
                assert host is not None  # else the rank would not have answered
                steps = 0 if about["first_step"] is None else len(about["marks"]) - 1
                head = {"rank": rank, "size": size, "host": host["host"], "pid": host["pid"], "steps": steps}
                _send(writer, {"rank": head | about})
        finally:
            for connection in connections.values():
                self._ask(connection, {"do": "cancel"})
        _send(writer, {"done": True})
        await _drain(writer)

    async def _paces(self, ranks: Iterable[int]) -> list[tuple[int, float]]:
        """Return the last step of each rank, and how long one takes. Wait for ranks that have just begun to train."""
        deadline = time.monotonic() + _STEPS_S
        while True:
            found = {rank: self._board.pace(rank) for rank in ranks}
            without = [rank for rank, pace in found.items() if pace is None]
            if not without:
                return [pace for pace in found.values() if pace is not None]
            if time.monotonic() > deadline:
                raise _SessionError(
                    f"{name_ranks(without)}: it has marked no step within {_STEPS_S:.0f} s: call horovodlike.step() "
                    "once in each step, or profile for some time with --seconds"
                )
            await asyncio.sleep(_LOOK_S)

    async def _copy(
        self, rank: int, connection: Connection, name: str, size: int, writer: asyncio.StreamWriter
    ) -> None:
        """Pass on a file of a rank to the client, as fast as the client reads it."""
        offset = 0
        while offset < size:
            request = {"do": "read", "file": name, "offset": offset}
            part = (await self._ask_all({rank: connection}, request))[rank]["part"]
            _send(writer, {"file": f"rank{rank}.{name}", "part": base64.b64encode(part).decode()})
            await _drain(writer)
            offset += len(part)

    # Requests to ranks.

    def _ask(self, connection: Connection, request: Mapping[str, Any]) -> asyncio.Future[_Answer]:
        """Send a request to a rank; return its answer, which may have come to nothing (``failed``)."""
        number = next(self._numbers)
        answer = self._asked[connection, number] = asyncio.get_running_loop().create_future()
        if connection.closed:
            self._take(connection, None)
        else:
            self._collector.server.send(connection, {"ask": {"id": number, **request}})
        return answer

    async def _ask_all(self, connections: Mapping[int, Connection], request: Mapping[str, Any]) -> dict[int, _Answer]:
        """Send a request to ranks, and wait until each has answered.

        Raises:
            _SessionError: A rank has failed, has left, or is silent.
        """
        waiting = {self._ask(connection, request): rank for rank, connection in connections.items()}
        answers = {}
        while waiting:
            done, _ = await asyncio.wait(waiting, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                rank = waiting.pop(each)
                answers[rank] = each.result()
                if "failed" in answers[rank]:
                    raise _SessionError(f"rank {rank}: {answers[rank]['failed']}")
            if silent := [rank for rank in waiting.values() if self._board.age(rank) > _SILENT_S]:
                raise _SessionError(
                    f"{name_ranks(silent)}: silent for {_SILENT_S:.0f} s: its process is stopped, or holds the GIL"
                )
        return dict(sorted(answers.items()))

    def _take(self, connection: Connection, answer: Any) -> None:
        """Take what a rank has sent; None: its connection has ended.

        Raises:
            ValueError, TypeError, KeyError: It is no answer.
        """
        if answer is None:
            read, keys = {"failed": "it has left the job, or its connection is lost"}, [*self._asked]
            keys = [key for key in keys if key[0] is connection]
        else:
            read, keys = read_answer(answer), [(connection, answer["id"])]
        for key in keys:
            if (asked := self._asked.pop(key, None)) is not None and not asked.done():
                asked.set_result(read)


def choose_first_step(paces: Sequence[tuple[int, float]], ahead: float) -> int:
    """Return the step at whose end all ranks can begin.

    Args:
        paces: For each rank, the number of its last step, and the seconds that a step takes.
        ahead: How far ahead of the last step it must be, in seconds.
    """
    last, seconds = max(count for count, _ in paces), min(seconds for _, seconds in paces)
    return last + math.ceil(ahead / max(1e-4, seconds)) + _AHEAD_STEPS


def _read_amount(request: Mapping[str, Any]) -> tuple[str, float]:
    """Return what to record: ``steps`` or ``seconds``, and how many."""
    for name, kind, most in (("steps", int, MOST_STEPS), ("seconds", (int, float), MOST_SECONDS)):
        amount = request.get(name)
        if isinstance(amount, kind) and not isinstance(amount, bool) and 0 < amount <= most:
            return name, amount
    raise _SessionError(f"give --steps, from 1 to {MOST_STEPS}, or --seconds, up to {MOST_SECONDS}")


def read_answer(answer: Any) -> _Answer:
    """Check an answer of a rank.

    Raises:
        ValueError, TypeError, KeyError: It is none.
    """
    if "recorded" in answer:
        found = answer["recorded"]
        sizes = {name: to_integer(found["sizes"][name]) for name in ("trace.json", "timeline.json")}
        first, marks = found["first_step"], [to_number(mark) for mark in found["marks"]]
        if sum(sizes.values()) > MOST_BYTES or len(marks) > MOST_MARKS:
            raise ValueError("too much")
        return {
            "recorded": {
                **{"sizes": sizes, "first_step": None if first is None else to_integer(first), "marks": marks},
                **{name: to_text(found[name], _LONGEST_TEXT) for name in ("framework", "note")},
            }
        }
    if "part" in answer:
        part = base64.b64decode(answer["part"], validate=True)
        if not 0 < len(part) <= CHUNK_BYTES:
            raise ValueError("no part of a file")
        return {"part": part}
    [kind] = {"stacks", "failed"} & answer.keys()
    return {kind: to_text(answer[kind], _LONGEST_TEXT)}


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
