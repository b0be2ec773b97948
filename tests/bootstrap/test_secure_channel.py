"""The authenticated channel without a socket."""

import copy
import pickle
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horovodlike._net.secure_channel import (
    CHALLENGE_BYTES,
    FRAME_LIMIT,
    HELLO_BYTES,
    MAC_BYTES,
    TO_CLIENT,
    TO_SERVER,
    AuthenticationError,
    FrameError,
    Identity,
    JobKey,
    Opener,
    Sealer,
    VersionError,
    accept_hello,
    answer_challenge,
    job_digest,
    make_challenge,
)

KEY = JobKey(bytes(range(32)))
OTHER_KEY = JobKey(bytes(range(1, 33)))
IDENTITY = Identity(3, 5, job_digest("job"))
CHALLENGE = make_challenge()


def pair(direction: bytes = TO_SERVER) -> tuple[Sealer, Opener]:
    return Sealer(KEY, direction), Opener(KEY, direction)


def test_both_sides_prove_the_key_and_agree_who_the_client_is() -> None:
    challenge = make_challenge()
    assert challenge != CHALLENGE and len(challenge) == CHALLENGE_BYTES
    hello, client_sealer, client_opener = answer_challenge(KEY, IDENTITY, challenge)
    assert len(hello) == HELLO_BYTES <= 512
    identity, server_sealer, server_opener = accept_hello(KEY, challenge, hello)
    assert identity == IDENTITY
    assert server_opener.feed(client_sealer.seal(b"up")) == [b"up"]
    assert client_opener.feed(server_sealer.seal(b"down")) == [b"down"]


def test_hello_with_another_key() -> None:
    hello, _, _ = answer_challenge(OTHER_KEY, IDENTITY, CHALLENGE)
    with pytest.raises(AuthenticationError):
        accept_hello(KEY, CHALLENGE, hello)


def test_hello_replayed_to_another_connection() -> None:
    hello, _, _ = answer_challenge(KEY, IDENTITY, CHALLENGE)
    with pytest.raises(AuthenticationError):
        accept_hello(KEY, make_challenge(), hello)


def test_server_without_the_key_is_found_out_by_its_first_frame() -> None:
    _, _, client_opener = answer_challenge(KEY, IDENTITY, CHALLENGE)
    theirs, _, _ = answer_challenge(OTHER_KEY, IDENTITY, CHALLENGE)
    _, impostor, _ = accept_hello(OTHER_KEY, CHALLENGE, theirs)
    with pytest.raises(FrameError):
        client_opener.feed(impostor.seal(b"welcome"))


def test_every_bit_of_the_hello_counts() -> None:
    hello, _, _ = answer_challenge(KEY, IDENTITY, CHALLENGE)
    for position in range(len(hello) * 8):
        changed = bytearray(hello)
        changed[position // 8] ^= 1 << position % 8
        with pytest.raises(AuthenticationError):
            accept_hello(KEY, CHALLENGE, bytes(changed))


@pytest.mark.parametrize("length", [0, 1, HELLO_BYTES - 1, HELLO_BYTES + 1])
def test_hello_of_another_length(length: int) -> None:
    hello, _, _ = answer_challenge(KEY, IDENTITY, CHALLENGE)
    with pytest.raises(AuthenticationError):
        accept_hello(KEY, CHALLENGE, (hello + b"x")[:length])


def test_a_stranger_and_another_version() -> None:
    with pytest.raises(VersionError, match="not a horovodlike rendezvous"):
        answer_challenge(KEY, IDENTITY, b"HTTP/1.1 400 Bad Request\r\n".ljust(CHALLENGE_BYTES))
    with pytest.raises(VersionError, match="version 9 .* same horovodlike"):
        answer_challenge(KEY, IDENTITY, struct.pack(">4sH32s", b"HVLR", 9, bytes(32)))


def test_every_bit_of_a_frame_counts() -> None:
    frame = Sealer(KEY, TO_SERVER).seal(b"payload")
    for position in range(len(frame) * 8):
        changed = bytearray(frame)
        changed[position // 8] ^= 1 << position % 8
        opener = Opener(KEY, TO_SERVER)
        try:
            assert opener.feed(bytes(changed)) == []  # a longer length waits for bytes that never come
        except FrameError:
            continue
        assert position < 32
        with pytest.raises(FrameError):
            opener.feed(bytes(FRAME_LIMIT + MAC_BYTES))


def test_replayed_dropped_swapped_and_reflected_frames() -> None:
    sealer, opener = pair()
    first, second = sealer.seal(b"1"), sealer.seal(b"2")
    assert opener.feed(first) == [b"1"]
    with pytest.raises(FrameError):
        opener.feed(first)
    with pytest.raises(FrameError, match="broken"):
        opener.feed(second)
    with pytest.raises(FrameError):
        Opener(KEY, TO_SERVER).feed(second)
    with pytest.raises(FrameError):
        Opener(KEY, TO_CLIENT).feed(first)


def test_an_oversized_frame_is_refused_by_its_length_alone() -> None:
    for length in (FRAME_LIMIT + 1, 0x7FFFFFFF, 0xFFFFFFFF):
        with pytest.raises(FrameError, match="over the limit"):
            Opener(KEY, TO_SERVER).feed(struct.pack(">I", length))
    sealer, opener = pair()
    with pytest.raises(FrameError, match="over the limit"):
        sealer.seal(bytes(FRAME_LIMIT + 1))
    assert opener.feed(sealer.seal(bytes(FRAME_LIMIT))) == [bytes(FRAME_LIMIT)]


def test_truncated_frames_give_nothing() -> None:
    frame = Sealer(KEY, TO_SERVER).seal(b"payload")
    for length in range(len(frame)):
        assert Opener(KEY, TO_SERVER).feed(frame[:length]) == []


@given(st.lists(st.binary(max_size=300), max_size=8), st.lists(st.integers(1, 400), max_size=40))
@settings(max_examples=80, deadline=None)
def test_any_cut_of_the_stream_gives_the_same_payloads(payloads: list[bytes], cuts: list[int]) -> None:
    sealer, opener = pair()
    stream = b"".join(sealer.seal(payload) for payload in payloads)
    received = []
    for cut in cuts:
        received += opener.feed(stream[:cut])
        stream = stream[cut:]
    received += opener.feed(stream)
    assert received == payloads


@given(st.lists(st.binary(max_size=200), max_size=20))
@settings(max_examples=200, deadline=None)
def test_garbage_never_becomes_a_payload(pieces: list[bytes]) -> None:
    opener = Opener(KEY, TO_SERVER)
    for piece in pieces:
        try:
            assert opener.feed(piece) == []
        except FrameError:
            break


@given(st.binary(max_size=100), st.data())
@settings(max_examples=150, deadline=None)
def test_a_changed_stream_gives_a_prefix_of_the_payloads(payload: bytes, data: st.DataObject) -> None:
    sealer, opener = pair()
    stream = bytearray(sealer.seal(b"first") + sealer.seal(payload))
    position = data.draw(st.integers(0, len(stream) - 1))
    stream[position] ^= data.draw(st.integers(1, 255))
    try:
        received = opener.feed(bytes(stream))
    except FrameError:
        received = []
    assert received in ([], [b"first"])


def test_the_key_shows_itself_nowhere() -> None:
    key = JobKey.random()
    for text in (repr(key), str(key), f"{key}", repr({"key": key})):
        assert key.hex() not in text
        assert "hidden" in text
    with pytest.raises(TypeError):
        pickle.dumps(key)
    with pytest.raises(TypeError):
        copy.deepcopy(key)
    with pytest.raises(ValueError, match="32 bytes; it has 5"):
        JobKey(b"short")
