"""The handshake by which two ranks authenticate a connection of the mesh. Pure.

Both ranks have the mesh's key, derived for this mesh alone. Numbers are big-endian. The lower rank accepts:

1. It sends a *challenge*: magic, version, its nonce.
2. The higher rank answers with a *hello*: body = its nonce, both ranks, the use and the number of the connection; then
   ``MAC(key; "hello", challenge, body)``. The body is not used before the MAC is verified.
3. The lower rank answers with a *proof*: ``MAC(key; "proof", challenge, body)``.

After that the connection carries the engine's frames. The key of the MACs of a direction is
``MAC(key; "frames", direction, challenge, body)``, so it depends on both nonces.
"""

import hmac
import secrets
import struct
from dataclasses import dataclass

from horovodlike._net.secure_channel import MAC_BYTES, NONCE_BYTES, AuthenticationError, JobKey, VersionError

VERSION = 1
_MAGIC = b"HVLM"
_CHALLENGE = struct.Struct(f">4sH{NONCE_BYTES}s")
_BODY = struct.Struct(f">{NONCE_BYTES}sIIII")
CHALLENGE_BYTES = _CHALLENGE.size
HELLO_BYTES = _BODY.size + MAC_BYTES
PROOF_BYTES = MAC_BYTES

_UP, _DOWN = b"^", b"v"  # to the lower rank, to the higher rank


@dataclass(frozen=True, order=True)
class ConnectionId:
    """One connection of the mesh.

    Attributes:
        use: ``HVL_CONTROL``, ``HVL_DATA`` or ``HVL_MESSAGES`` of the C API.
        low: The rank that accepts it.
        high: The rank that connects.
        number: Distinguishes connections of the same use and ranks.
    """

    use: int
    low: int
    high: int
    number: int = 0

    def other(self, rank: int) -> int:
        """Return the rank at the other end."""
        return self.low if rank == self.high else self.high


@dataclass(frozen=True)
class Keys:
    """The MAC keys of both directions, from the view of one end. ``repr`` shows neither key."""

    send: JobKey
    receive: JobKey


def make_challenge() -> bytes:
    """Return the challenge, which the accepting rank sends first."""
    return _CHALLENGE.pack(_MAGIC, VERSION, secrets.token_bytes(NONCE_BYTES))


def answer_challenge(key: JobKey, connection_id: ConnectionId, challenge: bytes) -> tuple[bytes, bytes, Keys]:
    """Answer a challenge: the part of the rank that connects.

    Returns:
        The hello to send, the proof to expect, and the keys of this end.

    Raises:
        VersionError: The challenge is of another protocol, or of another version of this one.
    """
    magic, version, _ = _CHALLENGE.unpack(challenge)
    if magic != _MAGIC:
        raise VersionError("what listens there is no rank")
    if version != VERSION:
        raise VersionError(f"it speaks version {version} of the protocol and this rank version {VERSION}")
    body = _BODY.pack(
        secrets.token_bytes(NONCE_BYTES), connection_id.low, connection_id.high, connection_id.use, connection_id.number
    )
    return (
        body + _mac(key, b"hello", challenge, body),
        _mac(key, b"proof", challenge, body),
        _keys(key, challenge, body, _UP, _DOWN),
    )


def accept_hello(key: JobKey, challenge: bytes, hello: bytes) -> tuple[ConnectionId, bytes, Keys]:
    """Verify a hello: the part of the rank that accepts.

    Returns:
        The id of the connection, the proof to send, and the keys of this end.

    Raises:
        AuthenticationError: The other side does not hold the key.
    """
    body, mac = hello[: _BODY.size], hello[_BODY.size :]
    if not hmac.compare_digest(_mac(key, b"hello", challenge, body), mac):
        raise AuthenticationError("the other side does not hold the key of the mesh")
    _, low, high, use, number = _BODY.unpack(body)
    return (
        ConnectionId(use, low, high, number),
        _mac(key, b"proof", challenge, body),
        _keys(key, challenge, body, _DOWN, _UP),
    )


def is_proof(expected: bytes, given: bytes) -> bool:
    """Return whether a proof is right: then the rank that accepted the connection has the key."""
    return hmac.compare_digest(expected, given)


def _mac(key: JobKey, purpose: bytes, challenge: bytes, body: bytes) -> bytes:
    return key.mac(b"horovodlike mesh " + purpose, challenge, body)


def _keys(key: JobKey, challenge: bytes, body: bytes, send: bytes, receive: bytes) -> Keys:
    return Keys(*(key.derive(b"horovodlike mesh frames", direction, challenge, body) for direction in (send, receive)))
