"""The protocol between the launcher and the agent of a host.

A frame is a header (kind, length of the payload, a number) and a payload. The connection is a pair of pipes that only
the two ends hold, or an ssh session: it needs no further authentication. Text travels as JSON in which each character
stands for one byte, so that paths and variables in any encoding arrive unchanged.
"""

import enum
import json
import math
import struct
from typing import Any, NamedTuple

HEADER = struct.Struct(">BIi")
MAX_PAYLOAD = 64 * 1024 * 1024
PIECE = 1024 * 1024
"""The most bytes that one read takes, and that one frame carries of the task."""
MAGIC = b"\0horovodlike agent\0"
"""The bytes that the agent of another host sends before its first frame: a login shell may have printed text before."""

_SECONDS = struct.Struct(">d")
_EXIT = struct.Struct(">qi")


class FrameKind(enum.IntEnum):
    """The kinds of frames; the number in the header is the rank unless said otherwise."""

    # From the launcher to the agent.
    TASK = 1
    """A piece of the task, the file that every rank can read; comes before START."""
    START = 2
    """The ranks to start, as :func:`encode_text` of a dictionary. May come several times. The agent of an elastic job
    continues while no rank runs."""
    SIGNAL = 3
    """Send the signal (the number) to the ranks, and SIGKILL to the whole tree after the seconds in the payload."""
    END = 4
    """Send SIGTERM to the whole tree of processes, and SIGKILL after the seconds in the payload."""
    KILL = 5
    """Send SIGKILL to the whole tree."""
    DESCRIBE = 6
    """Ask for DESCRIPTION; the payload is an :func:`encode_text` of the job's needs on the host."""
    SIGNAL_RANK = 7
    """Send one rank a signal; the payload is the signal's number."""
    # From the first node's launcher to another node's.
    PLACE = 8
    """The node's ranks and the address of the rendezvous server, as :func:`encode_text` of a dictionary. In elastic
    jobs: the node's name; the frames for its agent follow."""
    OUTCOME = 9
    """The job is over with this exit code (the number); the payload says why."""
    # From the agent to the launcher.
    STARTED = 16
    """A rank runs; the payload is its process id."""
    STDOUT = 17
    STDERR = 18
    RESULT = 19
    """The payload of STDOUT, STDERR and RESULT: bytes that the rank has written there."""
    EXITED = 20
    """A rank has ended, and all that it wrote has been sent; the payload is made by :func:`encode_exit`."""
    GONE = 23
    """After EXITED, with an equal payload: the rank's process group, which may outlive a rank that is a wrapper, is
    empty. Not sent in elastic jobs."""
    FAILED = 21
    """The agent could not do its work; the payload gives the reason."""
    DESCRIPTION = 22
    """After MAGIC: the description of the host and of its problems, as :func:`encode_text` of a dictionary."""
    STOPPED = 29
    CONTINUED = 30
    """A rank of an elastic job was stopped by a signal (STOPPED), or continues after that (CONTINUED)."""
    # From another node's launcher to the first node's, besides the frames of its agent.
    JOIN = 24
    """The node takes part; the payload is an :func:`encode_text` of its version, host name and number of ranks."""
    LAST_LINES = 25
    """Before EXITED: the last bytes that the rank has written to standard error."""
    CLEAN = 26
    """No process of the node's ranks is left; the number is the status of its agent."""
    LEAVING = 27
    """The node leaves an elastic job: its workers have received SIGTERM, and it takes no new ones."""
    # Both ways.
    ALIVE = 32
    """From the launcher: the receiver, an agent or the launcher of another node, ends its ranks if this does not come
    again within the seconds in the payload. It answers with an equal frame."""


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
        """Read frames from the start, or after the first ``magic`` if it is not empty; ignore the bytes before."""
        self._magic = magic
        self._pending = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """Take the bytes that have arrived, and return the frames that are complete."""
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
    """Encode as JSON; each character of a string in ``value`` must stand for one byte (see :func:`from_native`)."""
    return json.dumps(value).encode("ascii")


def decode_text(payload: bytes) -> Any:
    """Decode the result of :func:`encode_text`."""
    return json.loads(payload)


def from_native(text: bytes) -> str:
    """Decode bytes of the operating system (a path, a variable) to a string for :func:`encode_text`."""
    return text.decode("latin-1")


def to_native(text: str) -> bytes:
    """Turn the result of :func:`from_native` back into bytes."""
    return text.encode("latin-1")


def encode_seconds(seconds: float) -> bytes:
    """Encode the payload of SIGNAL, END and ALIVE."""
    return _SECONDS.pack(seconds)


def decode_seconds(payload: bytes) -> float:
    """Decode the result of :func:`encode_seconds`.

    Raises:
        InvalidFrameError: The payload is no duration.
    """
    seconds: float = _unpack(_SECONDS, payload)[0]
    if not 0 <= seconds < math.inf:
        raise InvalidFrameError(f"{seconds} is no duration")
    return seconds


def encode_exit(pid: int, status: int) -> bytes:
    """Encode the payload of EXITED: process id, and the exit code or minus the signal."""
    return _EXIT.pack(pid, status)


def decode_exit(payload: bytes) -> tuple[int, int]:
    """Decode the result of :func:`encode_exit`.

    Raises:
        InvalidFrameError: The payload has the wrong length.
    """
    pid, status = _unpack(_EXIT, payload)
    return pid, status


def _unpack(form: struct.Struct, payload: bytes) -> tuple[Any, ...]:
    if len(payload) != form.size:
        raise InvalidFrameError(f"a payload has {len(payload)} bytes instead of {form.size}")
    return form.unpack(payload)
