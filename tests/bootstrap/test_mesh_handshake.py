"""The handshake by which two ranks of the mesh authenticate each other."""

import pytest

from horovodlike._bootstrap.mesh_handshake import (
    CHALLENGE_BYTES,
    HELLO_BYTES,
    PROOF_BYTES,
    ConnectionId,
    accept_hello,
    answer_challenge,
    is_proof,
    make_challenge,
)
from horovodlike._net.secure_channel import AuthenticationError, JobKey, VersionError

KEY = JobKey(bytes(range(32)))
WIRE = ConnectionId(use=1, low=2, high=5, number=3)


def flip(data: bytes, position: int) -> bytes:
    return data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]


def test_both_sides_agree() -> None:
    challenge = make_challenge()
    hello, expected, of_high = answer_challenge(KEY, WIRE, challenge)
    connection_id, proof, of_low = accept_hello(KEY, challenge, hello)
    assert (connection_id, len(challenge), len(hello), len(proof)) == (WIRE, CHALLENGE_BYTES, HELLO_BYTES, PROOF_BYTES)
    assert is_proof(expected, proof)
    assert of_high.send.hex() == of_low.receive.hex()
    assert of_high.receive.hex() == of_low.send.hex()
    assert len({of_high.send.hex(), of_high.receive.hex(), proof.hex(), KEY.hex()}) == 4
    assert (connection_id.other(2), connection_id.other(5)) == (5, 2)


def test_every_connection_has_keys_of_its_own() -> None:
    found = set()
    for _ in range(4):
        keys = answer_challenge(KEY, WIRE, make_challenge())[2]
        found |= {keys.send.hex(), keys.receive.hex()}
    assert len(found) == 8
    assert not any(key in repr(keys) for key in found)


def test_any_changed_bit_of_a_hello() -> None:
    challenge = make_challenge()
    hello = answer_challenge(KEY, WIRE, challenge)[0]
    for position in range(HELLO_BYTES):
        with pytest.raises(AuthenticationError):
            accept_hello(KEY, challenge, flip(hello, position))


def test_a_hello_for_another_challenge_or_with_another_key() -> None:
    challenge = make_challenge()
    hello = answer_challenge(KEY, WIRE, challenge)[0]
    for key, nonce in ((KEY, make_challenge()), (KEY.derive(b"x"), challenge)):
        with pytest.raises(AuthenticationError):
            accept_hello(key, nonce, hello)


def test_a_proof_without_the_key_or_for_another_hello() -> None:
    challenge = make_challenge()
    _, expected, _ = answer_challenge(KEY, WIRE, challenge)
    other_hello = answer_challenge(KEY, WIRE, challenge)[0]
    assert not is_proof(expected, accept_hello(KEY, challenge, other_hello)[1])
    assert not any(is_proof(expected, flip(expected, position)) for position in range(PROOF_BYTES))


def test_a_challenge_of_something_else() -> None:
    challenge = make_challenge()
    with pytest.raises(VersionError, match="no rank"):
        answer_challenge(KEY, WIRE, b"SSH-" + challenge[4:])
    with pytest.raises(VersionError, match="version 2 of the protocol and this rank version 1"):
        answer_challenge(KEY, WIRE, challenge[:4] + b"\0\2" + challenge[6:])
