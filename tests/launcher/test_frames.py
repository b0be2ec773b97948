import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovodlike.launcher.agent.protocol import (
    HEADER,
    MAGIC,
    MAX_PAYLOAD,
    Frame,
    FrameKind,
    FrameReader,
    InvalidFrameError,
    decode_exit,
    decode_seconds,
    decode_text,
    encode,
    encode_exit,
    encode_seconds,
    encode_text,
    from_native,
    to_native,
)

FRAMES = st.builds(Frame, st.sampled_from(FrameKind), st.integers(-(2**31), 2**31 - 1), st.binary(max_size=300))


@given(st.lists(FRAMES, max_size=8), st.integers(1, 64))
def test_frames_survive_any_cutting(frames: list[Frame], piece: int) -> None:
    stream = b"".join(encode(*frame) for frame in frames)
    reader = FrameReader()
    arrived = [frame for start in range(0, len(stream), piece) for frame in reader.feed(stream[start : start + piece])]
    assert arrived == frames


def test_an_oversized_frame_is_refused_before_it_has_arrived() -> None:
    with pytest.raises(InvalidFrameError, match=str(MAX_PAYLOAD + 1)):
        FrameReader().feed(HEADER.pack(FrameKind.STDOUT, MAX_PAYLOAD + 1, 0))
    with pytest.raises(InvalidFrameError, match="limit"):
        encode(FrameKind.TASK, 0, bytes(MAX_PAYLOAD + 1))


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(InvalidFrameError, match="99"):
        FrameReader().feed(HEADER.pack(99, 0, 0))


@given(st.binary())
def test_names_of_any_encoding_arrive_as_they_left(name: bytes) -> None:
    assert to_native(decode_text(encode_text({"name": from_native(name)}))["name"]) == name


def test_payloads() -> None:
    assert decode_seconds(encode_seconds(5.25)) == 5.25
    assert decode_exit(encode_exit(4194304, -9)) == (4194304, -9)


def test_what_comes_before_the_magic_does_not_count() -> None:
    reader = FrameReader(MAGIC)
    data = b"Welcome" + MAGIC[:5] + b"\n" * 99 + MAGIC + encode(FrameKind.END, 7, b"x")
    found = [frame for byte in data for frame in reader.feed(bytes([byte]))]
    assert found == [Frame(FrameKind.END, 7, b"x")]
    assert FrameReader(MAGIC).feed(data) == found
