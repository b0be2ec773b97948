"""The protocol between the launcher and the agent of a host.

A frame is a header (kind, length of the payload, a number) and a payload. The connection is a pair of pipes that only
the two ends hold, or an ssh session: it is authenticated by what it is. Text travels as JSON in which each character
stands for one byte, so that paths and variables in any encoding arrive as they left.
"""

import enum
import json
import math
import struct
from typing import Any, NamedTuple

HEADER = struct.Struct(">BIi")
MAX_PAYLOAD = 64 * 1024 * 1024
PIECE = 1024 * 1024
"""Larger things are sent in pieces of this size."""
MAGIC = b"\0horovodlike agent\0"
"""The bytes that the agent of another host sends before its first frame: a login shell may have written some too."""

_SECONDS = struct.Struct(">d")
_EXIT = struct.Struct(">qi")


class FrameKind(enum.IntEnum):
    """The kinds of frames; the number in the header is the rank unless said otherwise."""

    # From the launcher to the agent.
    TASK = 1
    """A piece of the file that every rank can read; before START."""
    START = 2
    """The ranks to start, as :func:`encode_text` of a dictionary; it may come again. If the job is elastic, the agent
    stays while no rank runs."""
    SIGNAL = 3
    """Pass the signal (the number) on to the ranks, and kill everything after the seconds in the payload."""
    END = 4
    """SIGTERM to the whole tree, and SIGKILL after the seconds in the payload."""
    KILL = 5
    """SIGKILL to the whole tree."""
    DESCRIBE = 6
    """Asks for DESCRIPTION; the payload is an :func:`encode_text` of what the job needs there."""
    SIGNAL_RANK = 7
    """Send one rank a signal; the payload is the signal's number."""
    # From the launcher of the first node to that of another one.
    PLACE = 8
    """The ranks of the node and their rendezvous, as :func:`encode_text` of a dictionary."""
    OUTCOME = 9
    """The job is over with this exit code (the number); the payload says why."""
    # From the agent to the launcher.
    STARTED = 16
    """A rank runs; the payload is its process id."""
    STDOUT = 17
    STDERR = 18
    RESULT = 19
    """Bytes that the rank has written."""
    EXITED = 20
    """A rank has ended, and all that it wrote has been sent; the payload is made by :func:`encode_exit`."""
    GONE = 23
    """After EXITED, with the same payload: nothing is left of the rank's process group, which a wrapper may have left
    behind. Not of jobs that are elastic."""
    FAILED = 21
    """The agent could not do its work; the payload says why."""
    DESCRIPTION = 22
    """After MAGIC: what the host has and what it lacks, as :func:`encode_text` of a dictionary."""
    STOPPED = 29
    CONTINUED = 30
    """A rank of a job that is elastic was stopped by a signal, or continues."""
    # From the launcher of a node to that of the first one, besides what its agent says.
    JOIN = 24
    """The node takes part; the payload is an :func:`encode_text` of how."""
    LAST_LINES = 25
    """Before EXITED: what a rank that failed has written last to standard error."""
    CLEAN = 26
    """Nothing is left of the node's ranks; the number is the status of its agent."""
    # Both ways.
    ALIVE = 32
    """To an agent: end if this does not come again within the seconds in the payload. It answers with the same."""


class Frame(NamedTuple):
    """One frame."""

    kind: FrameKind
    number: int
    payload: bytes


class InvalidFrameError(ValueError):
    """The bytes that arrived are no frame: the two ends do not speak the same protocol."""


def encode(kind: FrameKind, number: int = 0, payload: bytes = b"") -> bytes:
    """Encode one frame."""
    if len(payload) > MAX_PAYLOAD:
        raise InvalidFrameError(f"a frame of {len(payload)} bytes is over the limit of {MAX_PAYLOAD}")
    return HEADER.pack(kind, len(payload), number) + payload


class FrameReader:
    """Cuts a stream of bytes into frames."""

    def __init__(self, magic: bytes = b"") -> None:
        """Start at once, or after the first ``magic`` in the stream: what comes before it does not count."""
        self._magic = magic
        self._pending = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """Take what has arrived, and return the frames that are complete."""
        self._pending += data
        if self._magic:
            before, found, after = self._pending.partition(self._magic)
            if not found:
                del self._pending[: max(0, len(before) - len(self._magic))]
                return []
            self._magic, self._pending = b"", after
        frames = []
        start = 0
        while len(self._pending) - start >= HEADER.size:
            kind, length, number = HEADER.unpack_from(self._pending, start)
            if length > MAX_PAYLOAD:
                raise InvalidFrameError(f"a frame of {length} bytes is over the limit of {MAX_PAYLOAD}")
            end = start + HEADER.size + length
            if len(self._pending) < end:
                break
            try:
                frames.append(Frame(FrameKind(kind), number, bytes(self._pending[start + HEADER.size : end])))
            except ValueError as error:
                raise InvalidFrameError(str(error)) from None
            start = end
        del self._pending[:start]
        return frames


def encode_text(value: Any) -> bytes:
    """JSON; every string in ``value`` must hold one byte per character (see :func:`from_native`)."""
    return json.dumps(value).encode("ascii")


def decode_text(payload: bytes) -> Any:
    """Decode what :func:`encode_text` has returned."""
    return json.loads(payload)


def from_native(text: bytes) -> str:
    """Decode bytes of the operating system (a path, a variable) to a string for :func:`encode_text`."""
    return text.decode("latin-1")


def to_native(text: str) -> bytes:
    """Decode what :func:`from_native` has returned."""
    return text.encode("latin-1")


def encode_seconds(seconds: float) -> bytes:
    """Encode the payload of SIGNAL, END and ALIVE."""
    return _SECONDS.pack(seconds)


def decode_seconds(payload: bytes) -> float:
    """Decode what :func:`encode_seconds` has returned.

    Raises:
        InvalidFrameError: That is no duration.
    """
    seconds: float = _unpack(_SECONDS, payload)[0]
    if not 0 <= seconds < math.inf:
        raise InvalidFrameError(f"{seconds} is no duration")
    return seconds


def encode_exit(pid: int, status: int) -> bytes:
    """Encode the payload of EXITED: process id, and the exit code or minus the signal."""
    return _EXIT.pack(pid, status)


def decode_exit(payload: bytes) -> tuple[int, int]:
    """Decode what :func:`encode_exit` has returned.

    Raises:
        InvalidFrameError: It has another length.
    """
    pid, status = _unpack(_EXIT, payload)
    return pid, status


def _unpack(form: struct.Struct, payload: bytes) -> tuple[Any, ...]:
    if len(payload) != form.size:
        raise InvalidFrameError(f"a payload has {len(payload)} bytes instead of {form.size}")
    return form.unpack(payload)
