"""The authenticated channel of the rendezvous: challenge, hello, and frames that each carry a MAC.

Both sides hold the job's 256-bit key. All numbers are big-endian; ``MAC(key; a, b ...)`` is HMAC-SHA256 of the parts
one after the other, every part but the last one having a fixed length.

1. The server sends a *challenge*: magic, protocol version, its nonce.
2. The client answers with a *hello*: body = its nonce, rank, size, digest of the job's name; then
   ``MAC(key; "hello", version, "client", server nonce, body)``. The server reads exactly that many bytes, and looks at
   none of them before the MAC is verified.
3. Each direction has its own session key, ``MAC(key; "session", version, direction, server nonce, body)``. The server's
   first frame is the proof that it holds the key too, because the key of that frame depends on the client's nonce.
4. A *frame* is: length of the payload (4 bytes), payload, ``MAC(session key; sequence number, direction, payload)``. A
   frame that is replayed, dropped, reordered, reflected or changed fails.

Everything here is pure, except the client's end.
"""

import hashlib
import hmac
import os
import secrets
import socket
import struct
import time
import weakref
from dataclasses import dataclass
from typing import Protocol

from horovodlike.errors import RendezvousError

PROTOCOL_VERSION = 1
FRAME_LIMIT = 1 << 22
"""The longest payload of a frame, in bytes."""

MAC_BYTES = 32
NONCE_BYTES = 32
KEY_BYTES = 32

_MAGIC = b"HVLR"
_CHALLENGE = struct.Struct(">4sH32s")
_HELLO = struct.Struct(">32sII32s")
_LENGTH = struct.Struct(">I")
_SEQUENCE = struct.Struct(">Q")
CHALLENGE_BYTES = _CHALLENGE.size
HELLO_BYTES = _HELLO.size + MAC_BYTES

TO_SERVER = b">"
TO_CLIENT = b"<"
HANDSHAKE_TIMEOUT = 5.0
"""Seconds that a connection may take to authenticate itself."""


class AuthenticationError(RendezvousError):
    """The other side does not hold this job's key."""


class FrameError(RendezvousError):
    """A frame is too long, or its MAC is wrong."""


class VersionError(RendezvousError):
    """The other side speaks another version of the protocol, or another protocol."""


class JobKey:
    """The secret of a job. It is never shown: not in ``repr``, not in a traceback that prints local variables."""

    __slots__ = ("_key",)

    def __init__(self, key: bytes) -> None:
        """Keep the 32 bytes of the key."""
        if len(key) != KEY_BYTES:
            raise ValueError(f"the job's key must have {KEY_BYTES} bytes; it has {len(key)}")
        self._key = bytes(key)

    @classmethod
    def random(cls) -> "JobKey":
        """Return a new key."""
        return cls(secrets.token_bytes(KEY_BYTES))

    def hex(self) -> str:
        """Return the key in hexadecimal digits, to hand it to another rank."""
        return self._key.hex()

    def reveal(self) -> bytes:
        """Return the key, to hand it to the engine."""
        return self._key

    def mac(self, *parts: bytes) -> bytes:
        """Return the HMAC-SHA256 of the parts, one after the other."""
        return hmac.digest(self._key, b"".join(parts), "sha256")

    def derive(self, *parts: bytes) -> "JobKey":
        """Return a key derived from this one, for the purpose that the parts name."""
        return JobKey(self.mac(*parts))

    def __repr__(self) -> str:
        """Hide the key."""
        return "JobKey(hidden)"

    def __reduce__(self) -> str:
        """Raise an error: a key is neither pickled nor copied."""
        raise TypeError("a job's key cannot be pickled")


@dataclass(frozen=True)
class Identity:
    """The identity that a client claims.

    Attributes:
        rank: Its rank.
        size: The size of its job.
        job: SHA-256 of the job's name.
    """

    rank: int
    size: int
    job: bytes


def job_digest(job: str) -> bytes:
    """Return the fixed-length form of a job's name."""
    return hashlib.sha256(b"horovodlike job\0" + job.encode(errors="surrogateescape")).digest()


class Sealer:
    """The maker of the frames of one direction."""

    def __init__(self, key: JobKey, direction: bytes) -> None:
        """Start with sequence number 0."""
        self._key = key
        self._direction = direction
        self._sequence = 0

    def seal(self, payload: bytes) -> bytes:
        """Return the next frame."""
        if len(payload) > FRAME_LIMIT:
            raise FrameError(f"a message of {len(payload)} bytes is over the limit of {FRAME_LIMIT} bytes")
        mac = self._key.mac(_SEQUENCE.pack(self._sequence), self._direction, payload)
        self._sequence += 1
        return _LENGTH.pack(len(payload)) + payload + mac


class Opener:
    """The receiver of the byte stream of one direction: cuts it into payloads. After an error it stays unusable."""

    def __init__(self, key: JobKey, direction: bytes) -> None:
        """Start with sequence number 0."""
        self._key = key
        self._direction = direction
        self._sequence = 0
        self._buffer = bytearray()
        self._broken = False

    def feed(self, data: bytes) -> list[bytes]:
        """Process the next bytes of the stream.

        Returns:
            The payloads that are complete now, each verified.

        Raises:
            FrameError: A frame is too long or its MAC is wrong. Payloads before it in ``data`` are lost with it.
        """
        if self._broken:
            raise FrameError("the stream is broken")
        self._buffer += data
        payloads = []
        try:
            while (payload := self._next()) is not None:
                payloads.append(payload)
        except FrameError:
            self._broken = True
            self._buffer.clear()
            raise
        return payloads

    def _next(self) -> bytes | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > FRAME_LIMIT:
            raise FrameError(f"a frame of {length} bytes is over the limit of {FRAME_LIMIT} bytes")
        end = _LENGTH.size + length
        if len(self._buffer) < end + MAC_BYTES:
            return None
        payload = bytes(self._buffer[_LENGTH.size : end])
        expected = self._key.mac(_SEQUENCE.pack(self._sequence), self._direction, payload)
        if not hmac.compare_digest(expected, bytes(self._buffer[end : end + MAC_BYTES])):
            raise FrameError("the MAC of a frame is wrong")
        del self._buffer[: end + MAC_BYTES]
        self._sequence += 1
        return payload


def _session(key: JobKey, nonce: bytes, body: bytes, direction: bytes) -> JobKey:
    return key.derive(b"horovodlike session", _SEQUENCE.pack(PROTOCOL_VERSION), direction, nonce, body)


def _hello_mac(key: JobKey, nonce: bytes, body: bytes) -> bytes:
    return key.mac(b"horovodlike hello", _SEQUENCE.pack(PROTOCOL_VERSION), TO_SERVER, nonce, body)


def make_challenge() -> bytes:
    """Return the server's first bytes, with a new nonce."""
    return _CHALLENGE.pack(_MAGIC, PROTOCOL_VERSION, secrets.token_bytes(NONCE_BYTES))


def answer_challenge(key: JobKey, identity: Identity, challenge: bytes) -> tuple[bytes, Sealer, Opener]:
    """Answer a challenge: the client's part of the handshake.

    Returns:
        The hello to send, and the two directions of the session.

    Raises:
        VersionError: The challenge is of another protocol, or of another version of this one.
    """
    magic, version, server_nonce = _CHALLENGE.unpack(challenge)
    if magic != _MAGIC:
        raise VersionError("what listens there is not a horovodlike rendezvous")
    if version != PROTOCOL_VERSION:
        raise VersionError(
            f"it speaks version {version} of the protocol and this rank version {PROTOCOL_VERSION}: "
            "install the same horovodlike for all ranks and for hvdrun"
        )
    body = _HELLO.pack(secrets.token_bytes(NONCE_BYTES), identity.rank, identity.size, identity.job)
    hello = body + _hello_mac(key, server_nonce, body)
    to_server, to_client = (_session(key, server_nonce, body, direction) for direction in (TO_SERVER, TO_CLIENT))
    return hello, Sealer(to_server, TO_SERVER), Opener(to_client, TO_CLIENT)


def accept_hello(key: JobKey, challenge: bytes, hello: bytes) -> tuple[Identity, Sealer, Opener]:
    """Verify a hello: the server's part of the handshake.

    Args:
        key: The job's key.
        challenge: The challenge that was sent to the client.
        hello: The client's :data:`HELLO_BYTES` bytes.

    Returns:
        The client's identity, and the two directions of the session.

    Raises:
        AuthenticationError: The client does not hold the key.
    """
    _, _, nonce = _CHALLENGE.unpack(challenge)
    body, mac = hello[: _HELLO.size], hello[_HELLO.size :]
    if not hmac.compare_digest(_hello_mac(key, nonce, body), mac):
        raise AuthenticationError("the client does not hold the job's key")
    _, rank, size, job = _HELLO.unpack(body)
    to_server, to_client = (_session(key, nonce, body, direction) for direction in (TO_SERVER, TO_CLIENT))
    return Identity(rank, size, job), Sealer(to_client, TO_CLIENT), Opener(to_server, TO_SERVER)


class _Closable(Protocol):
    def close(self) -> object: ...


_to_close: "weakref.WeakSet[_Closable]" = weakref.WeakSet()


def close_in_child(connections: _Closable) -> None:
    """Have connections closed in a forked child.

    If the child kept them open, the peers would not notice when the parent dies, and the child could send for it.
    """
    _to_close.add(connections)


def _close_in_child() -> None:
    for connections in _to_close:
        connections.close()


os.register_at_fork(after_in_child=_close_in_child)


def introduce(connected: socket.socket, key: JobKey, identity: Identity, deadline: float) -> tuple[Sealer, Opener]:
    """Do the client's part of the handshake. The server's first frame then proves that it holds the key, too.

    Raises:
        VersionError: The server speaks another protocol, or another version of this one.
        OSError: The connection is lost, or the server did not answer in time (``TimeoutError``).
    """
    challenge = b""
    while len(challenge) < CHALLENGE_BYTES:
        challenge += _receive_some(connected, CHALLENGE_BYTES - len(challenge), deadline)
    hello, sealer, opener = answer_challenge(key, identity, challenge)
    connected.settimeout(_left(deadline))
    connected.sendall(hello)
    return sealer, opener


class ClientChannel:
    """The client's end of a channel: a blocking socket on which every call has a deadline (``time.monotonic()``)."""

    def __init__(self, connected: socket.socket, key: JobKey, identity: Identity, deadline: float) -> None:
        """Authenticate this side; the first :meth:`receive` verifies the server. Takes over the socket.

        Raises:
            VersionError: The server speaks another protocol, or another version of this one.
            OSError: The connection is lost, or the server did not answer in time (``TimeoutError``).
        """
        self._payloads: list[bytes] = []
        self._proven = False
        self.socket = connected
        close_in_child(self)
        try:
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sealer, self._opener = introduce(connected, key, identity, deadline)
        except BaseException:
            self.socket.close()
            raise

    def send(self, payload: bytes, deadline: float) -> None:
        """Send one frame.

        Raises:
            OSError: The connection is lost, or the server did not read it in time.
        """
        frame = self._sealer.seal(payload)
        self.socket.settimeout(_left(deadline))
        self.socket.sendall(frame)

    def receive(self, deadline: float) -> bytes:
        """Wait for the next payload.

        Raises:
            AuthenticationError: The first frame is wrong, or the connection ended before it: one side lacks the key.
            FrameError: A later frame is wrong.
            OSError: The connection is lost (``ConnectionError``) or the time is over (``TimeoutError``).
        """
        try:
            while not self._payloads:
                self._payloads += self._opener.feed(_receive_some(self.socket, 1 << 16, deadline))
        except (FrameError, ConnectionError) as error:
            if not self._proven:
                raise AuthenticationError(str(error)) from None
            raise
        self._proven = True
        return self._payloads.pop(0)

    def close(self) -> None:
        """Close the connection; do nothing if it is closed."""
        self.socket.close()


def _receive_some(connected: socket.socket, most: int, deadline: float) -> bytes:
    connected.settimeout(_left(deadline))
    data = connected.recv(most)
    if not data:
        raise ConnectionResetError("the server closed the connection")
    return data


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left
